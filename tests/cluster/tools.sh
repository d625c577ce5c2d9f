#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks promtool and prometheus from Debian's package into the cache folder: installing it would start a server.
#   PYEBPF_PROXY_CACHE   the folder; default /var/cache/pyebpf-proxy
set -euo pipefail
folder=${PYEBPF_PROXY_CACHE:-/var/cache/pyebpf-proxy}/bin
if [ -x "$folder/promtool" ] && [ -x "$folder/prometheus" ]; then
    exit
fi
echo "fetching prometheus"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
apt-get -q download prometheus ||
    { echo "prometheus cannot be fetched: is prometheus in the package lists (apt-get update)?" >&2; exit 1; }
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool ./usr/bin/prometheus
mkdir -p "$folder"
mv usr/bin/promtool usr/bin/prometheus "$folder"
