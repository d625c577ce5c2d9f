#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -e
running=/run/pyebpf-proxy-unit/restart

if [ -d /run/systemd/system ]; then
    systemctl --system daemon-reload || true
fi
case "$1" in
configure | abort-upgrade | abort-remove | abort-deconfigure)
    if [ -e "$running" ]; then
        # The old agent ran until its files were replaced (prerm). Since then, its attached programs serve traffic.
        rm -f "$running"
        # Not deb-systemd-invoke: it does not start a unit that ran without being enabled.
        systemctl --system start pyebpf-proxy.service || true
    elif [ "$1" = configure ] && [ -z "$2" ]; then
        echo "pyebpf-proxy is not started: edit /etc/pyebpf-proxy/config.yaml, then systemctl enable --now pyebpf-proxy"
    fi
    ;;
esac
