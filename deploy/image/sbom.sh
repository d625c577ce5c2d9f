#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Lists the contents of the image that root.py has created in a folder, as CycloneDX; `make sbom` calls it.
#   deploy/image/sbom.sh FOLDER   writes FOLDER/debian.cdx.json and FOLDER/python.cdx.json from FOLDER/root
set -euo pipefail
folder=$1
cd "$(dirname "$0")/../.."
tools=$PWD/build/sbom-venv/bin
cd "$folder"
"$tools/debsbom" generate --sbom-type cdx --root root --distro-name pyebpf-proxy --out debian
site=$(echo root/opt/pyebpf-proxy/lib/python3*/site-packages)
"$tools/python" -m pip --disable-pip-version-check list --path "$site" --format freeze |
    "$tools/cyclonedx-py" requirements --output-reproducible --output-file python.cdx.json -
