#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds the real kube-proxy and kube-apiserver from their Go modules, into a cache folder outside the repository.
# What is there already is left alone: the first build takes 10 to 40 minutes. Needs Go 1.26 or newer.
#   PYEBPF_PROXY_CACHE   the folder; default /var/cache/pyebpf-proxy
#   tests/cluster/build.sh gates   writes pyebpf_proxy/config/gate_table.py anew instead
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

release=v1.36.3
folder=${PYEBPF_PROXY_CACHE:-/var/cache/pyebpf-proxy}/go
flags="-s -w -X k8s.io/component-base/version.gitVersion=$release"
flags+=" -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36"

build() { # build PACKAGE PROGRAM
    command -v go >/dev/null || { echo "go is missing: install Go 1.26 or newer to build kube-proxy" >&2; exit 1; }
    mkdir -p "$folder"
    # Built aside and moved, so that a build that was cut short leaves nothing that looks whole.
    (cd "$here/kubernetes" && CGO_ENABLED=0 nice go build -p 1 -o "$2.$$" -ldflags "$flags" "$1")
    mv "$2.$$" "$2"
}

if [ "${1:-}" = gates ]; then
    build ./gates "$folder/gates"
    table=$here/../../pyebpf_proxy/config/gate_table.py
    "$folder/gates" | python3 "$here/kubernetes/gates.py" "$release" >"$table.$$"
    mv "$table.$$" "$table"
    exit
fi
for program in kube-proxy kube-apiserver; do
    if [ -x "$folder/$program" ]; then
        echo "$folder/$program is there"
    else
        echo "building $folder/$program"
        build "k8s.io/kubernetes/cmd/$program" "$folder/$program"
    fi
done
