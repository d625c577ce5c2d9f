#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Regenerates requirements.lock: exact versions with hashes of all dependencies in pyproject.toml and the build backend;
# docs/requirements.lock: those of the documentation's site; deploy/image/requirements.lock: those of make sbom; and
# tests/fuzz/requirements.lock: that of make fuzz. Run it to upgrade; the result is committed. Needs the package index.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# A venv without Debian's packages: otherwise, packages that are installed locally would be missing from the lock.
/usr/bin/python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet pip-tools

# lock FILE USER ARGUMENT...: writes the locked versions for USER into FILE; the arguments are those of pip-compile.
lock() {
    "$scratch/venv/bin/pip-compile" --quiet --generate-hashes --allow-unsafe --strip-extras --upgrade \
        --no-emit-index-url --no-emit-find-links --no-annotate --no-header --output-file "$scratch/lock" "${@:3}"
    {
        echo "# Exact versions with hashes$2, written by tools/lock.sh. Do not edit by hand."
        cat "$scratch/lock"
    } >"$1"
    rm "$scratch/lock"
}

printf 'setuptools\nwheel\n' >"$scratch/build.in"
lock requirements.lock "" --extra dev pyproject.toml "$scratch/build.in"
echo mkdocs-material >"$scratch/docs.in"
lock docs/requirements.lock " for make docs" "$scratch/docs.in"
printf 'cyclonedx-bom\ndebsbom\n' >"$scratch/sbom.in"
lock deploy/image/requirements.lock " for make sbom" "$scratch/sbom.in"
echo atheris >"$scratch/fuzz.in"
lock tests/fuzz/requirements.lock " for make fuzz" "$scratch/fuzz.in"
