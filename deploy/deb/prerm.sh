#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -e
# The service creates this folder at its first start after a boot (RuntimeDirectory).
mark=/run/pyebpf-proxy-unit

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
        # shellcheck source=/dev/null
        [ ! -r /etc/default/pyebpf-proxy ] || . /etc/default/pyebpf-proxy
        # shellcheck disable=SC2086  # one word for each option is intended
        /usr/sbin/pyebpf-proxy --config=/etc/pyebpf-proxy/config.yaml $OPTIONS --cleanup --keep-kube-proxy-rules ||
            echo "pyebpf-proxy: not everything could be removed from the kernel; a reboot removes the rest" >&2
        rm -rf "$mark"
    fi
    ;;
esac
