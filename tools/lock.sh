#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Regenerates requirements.lock: exact versions with hashes of all dependencies in pyproject.toml and the build backend.
# Run it to upgrade; the result is committed. Needs the package index.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# A venv without Debian's packages, so that locally installed packages are not missing from the lock.
/usr/bin/python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet pip-tools
printf 'setuptools\nwheel\n' >"$scratch/build.in"
"$scratch/venv/bin/pip-compile" --quiet --generate-hashes --allow-unsafe --strip-extras --extra dev --upgrade \
    --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
    --output-file "$scratch/lock" pyproject.toml "$scratch/build.in"
{
    echo "# Exact versions with hashes, written by tools/lock.sh. Do not edit by hand."
    cat "$scratch/lock"
} >requirements.lock
# The same for the site of the documentation.
echo mkdocs-material >"$scratch/docs.in"
"$scratch/venv/bin/pip-compile" --quiet --generate-hashes --allow-unsafe --strip-extras --upgrade \
    --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
    --output-file "$scratch/docs.lock" "$scratch/docs.in"
{
    echo "# Exact versions with hashes for make docs, written by tools/lock.sh. Do not edit by hand."
    cat "$scratch/docs.lock"
} >docs/requirements.lock
