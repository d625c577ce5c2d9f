#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds what nodes need: build/vagrant/node, which is copied to a node, where provision.sh runs in it; and for
# Vagrant's nodes, the box and the kernel. Returns quickly if everything exists.
#   vagrant/prepare.sh            builds all
#   vagrant/prepare.sh node       builds only the folder
#   vagrant/prepare.sh site WHEEL FOLDER   builds FOLDER like the folder site/, from another wheel
set -euo pipefail
cd "$(dirname "$0")/.."

stage=build/vagrant/node

fail() { printf 'prepare.sh: %s\n' "$*" >&2; exit 2; }

python=.venv/bin/python
needed=build/vagrant/needed # the agent's dependencies, installed, and kept for the next run

pip() { "$python" -m pip --quiet --no-input --disable-pip-version-check "$@"; }

# Installs the agent's dependencies. pip selects them from requirements.lock; $1: a wheel of the agent.
dependencies() {
    local mark
    mark=$({ sha256sum <requirements.lock; sed -n '/^dependencies/,/^]/p' pyproject.toml; "$python" -V; } | sha256sum)
    [ "$(cat "$needed/mark" 2>/dev/null)" != "$mark" ] || return 0
    echo "prepare.sh: what the agent needs"
    scratch=$(mktemp -d build/vagrant/scratch.XXXXXX)
    trap 'rm -rf "$scratch"' EXIT
    sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' requirements.lock >"$scratch/constraints"
    pip install --dry-run --ignore-installed --report "$scratch/report.json" --constraint "$scratch/constraints" "$1" ||
        fail "pip cannot tell what the agent needs; is there a way to the package index?"
    python3 deploy/image/locked.py requirements.lock --report "$scratch/report.json" >"$scratch/run.lock"
    pip install --no-deps --ignore-installed --require-hashes --target "$scratch/needed/site" -r "$scratch/run.lock" ||
        fail "pip could not fetch what the agent needs"
    echo "$mark" >"$scratch/needed/mark"
    rm -rf "$needed"
    mv "$scratch/needed" "$needed"
}

# Installs the agent of a wheel with all dependencies, compiled, so that a node only copies it. $1: wheel; $2: folder
site() {
    rm -rf "$2"
    cp -a "$needed/site" "$2"
    pip install --no-deps --no-index --ignore-installed --upgrade --target "$2" "$1" || fail "$1 cannot be installed"
    { cat "$needed/mark"; sha256sum <"$1"; } | sha256sum | cut -c 1-12 >"$2/mark"
    "$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' >"$2/python"
}

node() {
    local version wheel
    make -s --no-print-directory wheel >/dev/null
    version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
    wheel=dist/pyebpf_proxy-$version-py3-none-any.whl
    dependencies "$wheel"
    rm -rf "$stage"
    mkdir -p "$stage/manifests"
    site "$wheel" "$stage/site"
    cp vagrant/provision.sh vagrant/pods.py vagrant/node-packages.txt vagrant/pyebpf-proxy.service examples/config.yaml "$stage/"
    cp examples/manifests/*.yaml vagrant/manifests/*.yaml "$stage/manifests/"
}

mkdir -p build/vagrant
exec 8>build/.vagrant-lock # Vagrant runs this script once for each node
flock 8
case "${1:-}" in
"") node ;;
node) node && exit ;;
site) site "$2" "$3" && exit ;;
*) fail "usage: vagrant/prepare.sh [node | site WHEEL FOLDER]" ;;
esac
if [ -z "${LAB_BOX:-}" ]; then
    vagrant/build-box
    if [ -n "${LAB_KERNEL:-}" ]; then
        box=$(vagrant/build-box --path)
        "$python" -m tests.vagrant.kernel "$LAB_KERNEL" "${box%.box}.initrd" "${box%.box}-$LAB_KERNEL"
    fi
fi
