#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Turns a Debian host into a node: installs the agent that is next to this script as a systemd service. If run again,
# it upgrades: it installs the new version next to the old one, and restarts the agent. Needs root.
#   provision.sh         writes /etc/pyebpf-proxy/config.yaml and /etc/default/pyebpf-proxy only if they are missing
#   provision.sh --lab   the same for a node of the lab: also writes configuration, manifests and pods of the lab
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

base=/opt/pyebpf-proxy
etc=/etc/pyebpf-proxy
kept=2 # versions to keep: the running one and the previous one
deadline=600 # seconds until the agent has written everything; emulated nodes are slow

say() { printf 'provision.sh: %s\n' "$*"; }
fail() { printf 'provision.sh: %s\n' "$*" >&2; exit 1; }

packages() {
    local wanted missing
    wanted=$(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$here/node-packages.txt")
    # shellcheck disable=SC2086  # one word for each package is intended
    missing=$(comm -23 <(sort -u <<<"$wanted") \
        <(dpkg-query -W -f '${db:Status-Status} ${Package}\n' $wanted 2>/dev/null | sed -n 's/^installed //p' | sort -u))
    [ -n "$missing" ] || return 0
    say "installing $(paste -sd ' ' <<<"$missing")"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    { apt-get -q update && apt-get -q -y install --no-install-recommends $missing; } >/var/log/provision-apt.log 2>&1 ||
        fail "apt-get: $(tail -n 1 /var/log/provision-apt.log)"
}

# Installs into a folder that is named by the hash of its contents. The file "complete" marks a complete installation.
install_release() {
    local mark release python
    mark=$(cat "$here/site/mark")
    python=python$(cat "$here/site/python")
    command -v "$python" >/dev/null ||
        fail "$python is missing, of which site/ is made, and this host has $(python3 -V): make site/ on a host like this one"
    release=$base/releases/$mark
    if ! [ -e "$release/complete" ]; then
        say "installing into $release"
        rm -rf "$release"
        # Debian's packages stay visible: libnftables' binding exists only there.
        "$python" -m venv --system-site-packages --without-pip "$release"
        # Keep modification times: compiled files are valid only with them.
        cp -a "$here/site/." "$release/lib/$python/site-packages/"
        chown -R root:root "$release"
        printf '#!/bin/sh\nexec %s/bin/python -P -m pyebpf_proxy "$@"\n' "$release" >"$release/bin/pyebpf-proxy"
        chmod 755 "$release/bin/pyebpf-proxy"
        "$release/bin/pyebpf-proxy" --version >/dev/null || fail "what is in site/ does not run here"
        touch "$release/complete"
    fi
    if [ "$(readlink "$base/current" 2>/dev/null)" != "releases/$mark" ]; then
        ln -sfn "releases/$mark" "$base/new"
        mv -T "$base/new" "$base/current"
        changed=yes
    fi
    touch "$release"
    # Keep versions that still run: the lab's pods use the version with which they were started.
    local old
    find "$base/releases" -mindepth 1 -maxdepth 1 -type d -printf '%T@ %p\n' | sort -rn | cut -d ' ' -f 2 |
        tail -n +$((kept + 1)) | while read -r old; do
        grep -qs "$old/" /proc/[0-9]*/cmdline || rm -rf "$old"
    done
}

# place FILE TARGET: installs FILE as TARGET if they differ.
place() {
    cmp -s "$1" "$2" && return 0
    install -D -m 644 "$1" "$2"
    changed=yes
}

configure() {
    if [ -n "$lab" ]; then
        place "$here/config.yaml" "$etc/config.yaml"
        printf 'OPTIONS=--manifests %s/manifests\n' "$etc" >"$here/options"
        place "$here/options" /etc/default/pyebpf-proxy
        mkdir -p "$etc/manifests"
        # Manifests that are gone are deleted. The agent applies changes without a restart.
        rsync -a --delete "$here/manifests/" "$etc/manifests/"
    elif ! [ -e "$etc/config.yaml" ]; then
        install -D -m 644 "$here/config.yaml" "$etc/config.yaml"
        mkdir -p "$etc/manifests"
        printf '# Where objects come from; empty: from the API server that %s names in\n%s\nOPTIONS=--manifests %s/manifests\n' \
            "$etc/config.yaml" "# clientConnection.kubeconfig." "$etc" >/etc/default/pyebpf-proxy
        say "$etc/config.yaml has clusterCIDR $(sed -n 's/^clusterCIDR: //p' "$etc/config.yaml"): set yours"
    fi
    # The node must forward packets of its pods. Like kube-proxy, the agent does not set this.
    printf 'net.ipv4.ip_forward = 1\nnet.ipv6.conf.all.forwarding = 1\n' >"$here/sysctl"
    if ! cmp -s "$here/sysctl" /etc/sysctl.d/90-pyebpf-proxy.conf; then
        install -m 644 "$here/sysctl" /etc/sysctl.d/90-pyebpf-proxy.conf
        sysctl -q -p /etc/sysctl.d/90-pyebpf-proxy.conf
    fi
    place "$here/pyebpf-proxy.service" /etc/systemd/system/pyebpf-proxy.service
    ln -sfn "$base/current/bin/pyebpf-proxy" /usr/local/bin/pyebpf-proxy
}

# Starts the pods, unless they run: an upgrade of the agent must not restart them.
pods() {
    systemctl -q is-active lab-pods && return 0
    cat >/etc/systemd/system/lab-pods.service <<UNIT
[Unit]
Description=The lab's pods and routes on this node
After=network-online.target

[Service]
Type=notify
ExecStart=$(readlink -f "$base/current")/bin/python $here/pods.py
TimeoutStartSec=300

[Install]
WantedBy=multi-user.target
UNIT
    systemctl daemon-reload
    systemctl -q enable --now lab-pods || fail "the pods do not start: $(journalctl -q -u lab-pods -n 1 -o cat)"
}

# Prints a line for each family that has been written since $1. Before the agent listens, no program is started: on an
# emulated node, it would slow down the agent.
written() {
    (exec 3<>/dev/tcp/127.0.0.1/10249) 2>/dev/null || return 0
    curl -sf --noproxy '*' http://127.0.0.1:10249/metrics |
        awk -v since="$1" '/^kubeproxy_sync_proxy_rules_last_timestamp_seconds/ && $2 >= since'
}

# Prints the agent's last log line that contains $1; lines of systemd are ignored.
last_words() { journalctl -q -u pyebpf-proxy -o cat _COMM=python _COMM=pyebpf-proxy -n 50 | grep -e "$1" | tail -n 1; }

# Waits until the agent that was started at $1 (seconds since 1970) has written everything.
wait_synced() {
    local end=$((SECONDS + deadline)) looked=$SECONDS lines
    until mapfile -t lines < <(written "$1") && [ "${#lines[@]}" -ge 2 ]; do
        if [ "$SECONDS" -ge $((looked + 5)) ]; then
            looked=$SECONDS
            [ "$(systemctl show --property NRestarts --value pyebpf-proxy)" = 0 ] ||
                fail "the agent does not start: $(last_words error)"
        fi
        [ "$SECONDS" -lt "$end" ] || fail "the agent has written nothing for $deadline s: $(last_words .)"
        sleep 1
    done
}

lab=
changed=
case "$*" in
"") ;;
--lab) lab=yes ;;
*) fail "usage: provision.sh [--lab]" ;;
esac
[ "$(id -u)" -eq 0 ] || fail "root is needed"
command -v dpkg-query >/dev/null || fail "this is not Debian (no dpkg): docs/deploy.md has other ways"
[ -d /run/systemd/system ] || fail "systemd does not run here: start the agent in your own way (docs/control-plane.md)"
[ -r /sys/kernel/btf/vmlinux ] || fail "this kernel has no BTF (/sys/kernel/btf/vmlinux): run one with CONFIG_DEBUG_INFO_BTF=y"
[ -r "$here/site/mark" ] || fail "$here/site is missing: vagrant/prepare.sh node makes this folder"
packages
install_release
configure
[ -z "$lab" ] || pods
began=$(date +%s)
if [ -n "$changed" ] || ! systemctl -q is-active pyebpf-proxy; then
    systemctl daemon-reload
    systemctl -q enable pyebpf-proxy
    systemctl restart pyebpf-proxy
    wait_synced "$began"
fi
say "$(pyebpf-proxy --version | head -n 1) runs on $(uname -r)"
