#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -e
# The service creates this folder at its first start after a boot (RuntimeDirectory).
mark=/run/pyebpf-proxy-unit

# The options of the unit. systemd reads the file, which is no shell script: a value with spaces needs no quotes.
options() {
    [ -r /etc/default/pyebpf-proxy ] || return 0
    sed -e ':line' -e '/\\$/{N; s/\\\n//; b line' -e '}' /etc/default/pyebpf-proxy |
        sed -n 's/^[[:space:]]*OPTIONS=//p' | tail -n 1 |
        sed -e 's/[[:space:]]*$//' -e 's/^"\(.*\)"$/\1/' -e "s/^'\(.*\)'\$/\1/"
}

case "$1" in
upgrade | failed-upgrade)
    # An agent must not import modules of another version. Traffic continues without it; postinst starts the new agent.
    if [ -d /run/systemd/system ] && systemctl --quiet is-active pyebpf-proxy.service; then
        mkdir -p "$mark"
        touch "$mark/restart"
        deb-systemd-invoke stop pyebpf-proxy.service
    fi
    ;;
remove)
    if [ -d /run/systemd/system ]; then
        deb-systemd-invoke stop pyebpf-proxy.service || true
    fi
    # Remove what the service has attached: afterwards, no program is left to do this. An agent of a DaemonSet must keep
    # what it has attached, so nothing is removed without the mark, or while another agent holds the lock.
    if [ -d "$mark" ]; then
        set -f
        # shellcheck disable=SC2046  # one word for each option is intended
        /usr/sbin/pyebpf-proxy --config=/etc/pyebpf-proxy/config.yaml $(options) --cleanup --keep-kube-proxy-rules ||
            echo "pyebpf-proxy: not everything could be removed from the kernel; a reboot removes the rest" >&2
        rm -rf "$mark"
    fi
    ;;
esac
