#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The steps of the two stages of deploy/Dockerfile; run in the folder of the sources.
#   deploy/image/stage.sh packages build|run   installs the Debian packages to build, or only those of the agent
#   deploy/image/stage.sh build                builds BPF objects for any kernel, and the agent in /opt/pyebpf-proxy
set -euo pipefail

list=tools/debian-packages.txt
target=/opt/pyebpf-proxy

# packages PREFIX...: installs the packages of these sections of the list, all of which must exist.
packages() {
    local section found wanted=
    for section in "$@"; do
        found=$(awk -v section="^# -- $section" '/^# --/ { on = ($0 ~ section) } on && /^[a-z0-9]/' "$list")
        [ -n "$found" ] || { echo "$list has no section '$section'" >&2; exit 1; }
        wanted+=" $found"
    done
    export DEBIAN_FRONTEND=noninteractive
    local options=()
    if [ -z "${ARCHIVE:-}" ]; then
        echo "the versions of Debian's packages are not pinned: --build-arg ARCHIVE=URL names an archive of them," \
            "ARCHIVE=mirror takes what the mirror has now (docs/deploy.md)" >&2
        exit 1
    elif [ "$ARCHIVE" != mirror ]; then
        sed -i "s#^URIs: .*/\\(debian\\(-security\\)\\?\\)/\\?\$#URIs: $ARCHIVE/\\1/$SNAPSHOT#" \
            /etc/apt/sources.list.d/debian.sources
        # The archive's indexes are of that day and have expired. Their signatures are still checked.
        options=(-o Acquire::Check-Valid-Until=false)
    fi
    apt-get -q "${options[@]}" update
    # shellcheck disable=SC2086  # one word for each package is intended
    apt-get -q -y "${options[@]}" install --no-install-recommends $wanted
    rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
}

build() {
    local builder=/tmp/builder
    make -s objects
    python3 -m venv "$builder"
    local pip=("$builder/bin/python" -m pip --quiet --no-input --disable-pip-version-check)
    python3 deploy/image/locked.py requirements.lock setuptools >"$builder/build.lock"
    "${pip[@]}" install --require-hashes -r "$builder/build.lock"
    "${pip[@]}" wheel --no-deps --no-build-isolation --no-index --wheel-dir "$builder" .
    # Debian's packages stay visible: libnftables' binding exists only there.
    python3 -m venv --system-site-packages --without-pip "$target"
    pip+=(--python "$target/bin/python")
    # The lock also has packages of the tests. pip selects those that the agent needs; they are installed by hash.
    sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' requirements.lock >"$builder/constraints"
    "${pip[@]}" install --dry-run --ignore-installed --report "$builder/report.json" \
        --constraint "$builder/constraints" "$builder"/pyebpf_proxy-*.whl
    python3 deploy/image/locked.py requirements.lock --report "$builder/report.json" >"$builder/run.lock"
    "${pip[@]}" install --ignore-installed --no-deps --require-hashes -r "$builder/run.lock"
    "${pip[@]}" install --no-deps --no-index "$builder"/pyebpf_proxy-*.whl
    "$target/bin/pyebpf-proxy" --version
}

case "${1:-}" in
packages)
    case "${2:-}" in
    build) packages "to build" ;;
    run) packages "to run: the agent" "to run: removing iptables rules" ;;
    *) echo "usage: $0 packages build|run" >&2; exit 1 ;;
    esac
    ;;
build) build ;;
*) echo "usage: $0 packages build|run | build" >&2; exit 1 ;;
esac
