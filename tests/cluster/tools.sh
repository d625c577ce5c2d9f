#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Takes promtool out of Debian's package prometheus, into the cache folder: installing the package would start a server.
#   PYEBPF_PROXY_CACHE   the folder; default /var/cache/pyebpf-proxy
set -euo pipefail
folder=${PYEBPF_PROXY_CACHE:-/var/cache/pyebpf-proxy}/bin
if [ -x "$folder/promtool" ]; then
    exit
fi
echo "fetching promtool"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
apt-get -q download prometheus ||
    { echo "promtool cannot be fetched: is prometheus in the package lists (apt-get update)?" >&2; exit 1; }
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool
mkdir -p "$folder"
mv usr/bin/promtool "$folder/promtool"
