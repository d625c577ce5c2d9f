#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The steps of the two stages of deploy/Dockerfile; run in the folder of the sources.
#   deploy/image/stage.sh packages build|run   installs the Debian packages to build, or only those of the agent
#   deploy/image/stage.sh build                builds BPF objects for any kernel, and the agent in /opt/pyebpf-proxy,
#                                              for the architecture TARGETARCH, which may differ from this machine's
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

# platforms: pip's options for wheels of TARGETARCH, up to the glibc of this system, which is that of the image.
platforms() {
    local machine minor
    case "${TARGETARCH:-$(dpkg --print-architecture)}" in
    amd64) machine=x86_64 ;;
    arm64) machine=aarch64 ;;
    *) echo "TARGETARCH=$TARGETARCH: amd64 or arm64" >&2; exit 1 ;;
    esac
    printf -- '--platform manylinux2014_%s ' "$machine"
    minor=$(getconf GNU_LIBC_VERSION)
    for minor in $(seq 17 "${minor##*.}"); do
        printf -- '--platform manylinux_2_%s_%s ' "$minor" "$machine"
    done
}

build() {
    local builder=/tmp/builder foreign site
    foreign=$(platforms)
    # Two builds of the same sources give the same bytes: no dates of files in the wheel, and none in compiled modules.
    export SOURCE_DATE_EPOCH=315532800 PYTHONHASHSEED=0
    make -s objects
    python3 -m venv "$builder"
    local pip=("$builder/bin/python" -m pip --quiet --no-input --disable-pip-version-check)
    python3 deploy/image/locked.py requirements.lock setuptools >"$builder/build.lock"
    "${pip[@]}" install --require-hashes -r "$builder/build.lock"
    "${pip[@]}" wheel --no-deps --no-build-isolation --no-index --wheel-dir "$builder" .
    # Debian's packages stay visible: libnftables' binding exists only there.
    python3 -m venv --system-site-packages --without-pip "$target"
    site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    pip+=(--python "$target/bin/python")
    # The lock also has packages of the tests. pip selects those that the agent needs; they are installed by hash.
    sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' requirements.lock >"$builder/constraints"
    # shellcheck disable=SC2086  # each option is a word
    "${pip[@]}" install --dry-run --target "$builder/unused" --only-binary=:all: $foreign --report "$builder/report.json" \
        --constraint "$builder/constraints" "$builder"/pyebpf_proxy-*.whl
    python3 deploy/image/locked.py requirements.lock --report "$builder/report.json" >"$builder/run.lock"
    # Wheels of a named platform can be installed only into a folder. Their scripts are not needed.
    # shellcheck disable=SC2086
    "${pip[@]}" install --target "$site" --no-deps --no-compile --only-binary=:all: $foreign --require-hashes -r "$builder/run.lock"
    rm -rf "$site/bin"
    "${pip[@]}" install --no-deps --no-index --no-compile "$builder"/pyebpf_proxy-*.whl
    "$target/bin/python" -m compileall -q --invalidation-mode unchecked-hash "$site"
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
