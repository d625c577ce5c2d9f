#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The parts of `make setup`, `make docs`, `make sbom` and `make fuzz` that fetch something. Each returns quickly if
# everything is installed.
#   tools/setup.sh packages [LIST]   Debian packages named in tools/debian-packages.txt, or LIST; only those missing
#   tools/setup.sh venv       .venv from Debian's python3, with the versions of requirements.lock
#   tools/setup.sh docs       build/docs-venv, with the versions of docs/requirements.lock
#   tools/setup.sh sbom       build/sbom-venv, with the versions of deploy/image/requirements.lock
set -euo pipefail
cd "$(dirname "$0")/.."

list=${2:-tools/debian-packages.txt}
python=/usr/bin/python3

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Retry once: the most frequent failure is a single failed request to a mirror.
twice() {
    "$@" && return 0
    say "failed, retrying once: $*"
    sleep 5
    "$@"
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then env "$@"; else sudo env "$@"; fi
}

apt() {
    as_root DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 -o APT::Color=0 "$@"
}

packages() {
    local wanted missing
    wanted=$(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$list")
    command -v dpkg-query >/dev/null ||
        fail "this is not Debian (no dpkg): install what $list names in your system's way, then run make build"
    # shellcheck disable=SC2086  # one word for each package is intended
    missing=$(comm -23 <(sort -u <<<"$wanted") \
        <(dpkg-query -W -f '${db:Status-Status} ${Package}\n' $wanted 2>/dev/null | sed -n 's/^installed //p' | sort -u))
    [ -n "$missing" ] || return 0
    missing=$(tr '\n' ' ' <<<"$missing")
    if [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null; then
        fail "Debian packages are missing and there is neither root nor sudo; as root: apt-get install $missing"
    fi
    say "installing Debian packages: $missing"
    twice apt update
    # shellcheck disable=SC2086
    twice apt install --no-install-recommends $missing || fail "apt-get could not install: $missing"
}

# install FOLDER LOCK: installs the versions of LOCK into the virtual environment in FOLDER.
install() {
    say "installing the versions of $2 into $1"
    twice "$1/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --no-warn-script-location \
        --require-hashes -r "$2" || fail "pip could not install $2; is the package index reachable?"
}

venv() {
    local stamp=.venv/setup-stamp wanted
    [ -x "$python" ] || fail "$python is missing: apt-get install python3"
    # Everything on which the environment depends, including its location, because a venv cannot be moved.
    wanted=$({ pwd; "$python" -V; sha256sum requirements.lock; grep -v '^#' pyproject.toml | sed '/^\[tool\.\(mypy\|ruff\|pytest\)/,$d'; } | sha256sum)
    if [ -x .venv/bin/pyebpf-proxy ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "python3-venv is missing: apt-get install python3-venv"
    if ! [ -x .venv/bin/python ] || ! .venv/bin/python -c \
        'import sys; sys.exit(sys.prefix != sys.argv[1] or sys.version != sys.argv[2])' \
        "$PWD/.venv" "$("$python" -c 'import sys; print(sys.version)')"; then
        say "creating the virtual environment .venv"
        # Debian's packages stay visible: the libnftables binding exists only there.
        "$python" -m venv --clear --system-site-packages .venv
    fi
    install .venv requirements.lock
    # An editable install with a plain .pth file: type checkers support it, and nothing needs to be built.
    .venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check --no-deps --no-build-isolation \
        --no-index --config-settings editable_mode=compat --editable . ||
        fail "the package itself could not be installed into .venv"
    rm -rf ./*.egg-info
    printf '%s\n' "$wanted" >"$stamp"
}

# extra NAME LOCK: creates build/NAME-venv with the versions of LOCK.
extra() {
    local folder=build/$1-venv wanted
    wanted=$({ pwd; "$python" -V; sha256sum "$2"; } | sha256sum)
    [ "$(cat "$folder/setup-stamp" 2>/dev/null)" = "$wanted" ] && return 0
    "$python" -m venv --clear "$folder"
    install "$folder" "$2"
    printf '%s\n' "$wanted" >"$folder/setup-stamp"
}

mkdir -p build
# Concurrent `make` runs in one checkout take turns.
exec 9>build/.setup-lock
command -v flock >/dev/null && flock 9
case "${1:-}" in
packages) packages ;;
venv) venv ;;
docs) extra docs docs/requirements.lock ;;
sbom) extra sbom deploy/image/requirements.lock ;;
fuzz) extra fuzz tests/fuzz/requirements.lock ;;
*) fail "usage: tools/setup.sh packages|venv|docs|sbom|fuzz" ;;
esac
