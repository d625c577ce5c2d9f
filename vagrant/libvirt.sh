#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs a separate libvirtd in its own namespaces, on machines where none runs (without systemd). When the namespaces
# end, the kernel removes its networks, devices, mounts and processes, including the virtual machines.
#   vagrant/libvirt.sh with CMD…   start it, run CMD in its namespaces, and end it with CMD, or if this script is killed
#   vagrant/libvirt.sh start       start it in the background
#   vagrant/libvirt.sh run CMD…    run CMD in the namespaces of the one in the background
#   vagrant/libvirt.sh stop        end that one and its machines, and delete their disks
# LAB_DRIVER=qemu hides /dev/kvm: libvirt would try to use it, and a KVM that does not work costs minutes.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
folder=${LAB_STATE:-$here/../build/vagrant/libvirt}

fail() { printf 'libvirt.sh: %s\n' "$*" >&2; exit 2; }

programs() {
    [ "$(id -u)" -eq 0 ] || fail "root is needed for namespaces"
    local need
    for need in libvirtd:libvirt-daemon-system virtlogd:libvirt-daemon-system qemu-system-x86_64:qemu-system-x86 \
        dnsmasq:dnsmasq-base iptables:iptables unshare:util-linux ip:iproute2; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${need%:*}" >/dev/null ||
            fail "${need%:*} is missing: apt-get install ${need#*:}"
    done
    [ -c /dev/net/tun ] || fail "/dev/net/tun is missing: machines need it for their networks"
}

# The first process of the namespaces. When it ends, all their processes end.
inside() {
    local name
    mount --make-rprivate /
    mount -t sysfs sysfs /sys # shows the devices of this network namespace, and no cgroups, so libvirt creates none
    for name in /etc/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do
        mkdir -p "$folder$name" "$name"
    done
    cp -a /etc/libvirt/. "$folder/etc/libvirt/"
    cp -a /var/lib/libvirt/. "$folder/var/lib/libvirt/"
    # The lab must not start the domains and networks of the machine's own libvirt.
    rm -rf "$folder"/etc/libvirt/qemu/*.xml "$folder"/etc/libvirt/qemu/networks "$folder"/etc/libvirt/qemu/autostart
    printf '\nnamespaces = []\ncgroup_controllers = []\nsecurity_driver = "none"\n' >>"$folder/etc/libvirt/qemu.conf"
    for name in /etc/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do
        mount --bind "$folder$name" "$name"
    done
    mkdir -p /run/libvirt
    mount -t tmpfs tmpfs /run/libvirt
    if [ "${LAB_DRIVER:-}" = qemu ] && [ -e /dev/kvm ]; then
        touch "$folder/no-kvm"
        mount --bind "$folder/no-kvm" /dev/kvm
    fi
    ip link set lo up
    export PATH=$PATH:/usr/sbin:/sbin
    virtlogd --pid-file /run/libvirt/virtlogd.pid >>"$folder/virtlogd.log" 2>&1 &
    libvirtd --pid-file /run/libvirt/libvirtd.pid >>"$folder/libvirtd.log" 2>&1 &
    local daemon=$!
    until [ -S /run/libvirt/libvirt-sock ] && virsh -q -c qemu:///system uri >/dev/null 2>&1; do
        kill -0 "$daemon" 2>/dev/null || fail "libvirtd does not start: $(tail -n 1 "$folder/libvirtd.log")"
        sleep 0.2
    done
    touch "$folder/ready"
    cd "$here"
    # The first process of a PID namespace receives only signals for which it has a handler: pass SIGTERM to CMD.
    "$@" &
    local command=$!
    trap 'kill -TERM "$command" 2>/dev/null' TERM
    local status=0
    wait "$command" || status=$?
    while kill -0 "$command" 2>/dev/null; do
        status=0
        wait "$command" || status=$?
    done
    exit "$status"
}

# The lock shows whether it runs. A PID alone does not: it may belong to another process by now.
running() {
    [ -e "$folder/lock" ] && ! flock -n "$folder/lock" true
}

enter() {
    programs
    mkdir -p "$folder"
    exec 8>"$folder/lock"
    flock -n 8 || fail "one runs already in $folder: vagrant/libvirt.sh stop"
    rm -f "$folder/ready"
    # If this script is killed, the kernel kills unshare, and with it all processes inside.
    setpriv --pdeathsig KILL -- unshare --mount --net --pid --fork --kill-child --mount-proc "$0" --inside "$@" <&0 &
    local child=$! status=0
    # Background processes of a shell ignore Ctrl-C, so send them SIGTERM.
    trap 'pkill -TERM -P "$child"' INT TERM HUP
    echo "$child" >"$folder/pid"
    while :; do
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2>/dev/null || break
    done
    exit "$status"
}

case "${1:-}" in
--inside)
    shift
    inside "$@"
    ;;
with)
    shift
    [ $# -gt 0 ] || fail "usage: $0 with CMD…"
    enter "$@"
    ;;
start)
    if running; then exit 0; fi
    programs
    mkdir -p "$folder"
    rm -f "$folder/ready"
    setsid "$0" with sleep infinity </dev/null >"$folder/start.log" 2>&1 &
    starter=$!
    until [ -e "$folder/ready" ]; do
        kill -0 "$starter" 2>/dev/null || fail "$(tail -n 1 "$folder/start.log")"
        sleep 0.2
    done
    ;;
run)
    shift
    running || fail "none runs: vagrant/libvirt.sh start"
    first=$(pgrep -P "$(cat "$folder/pid")")
    exec nsenter --target "$first" --mount --net --pid --wd="$PWD" -- "$@"
    ;;
stop)
    if running; then
        kill -KILL "$(cat "$folder/pid")"
        flock "$folder/lock" true
    fi
    rm -rf --one-file-system "$folder"
    ;;
*) fail "usage: $0 with CMD… | start | run CMD… | stop" ;;
esac
