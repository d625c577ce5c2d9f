#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -e

if [ -d /run/systemd/system ]; then
    systemctl --system daemon-reload || true
fi
if [ "$1" = purge ]; then
    # This also removes the manifests, which are configuration.
    rm -rf /etc/pyebpf-proxy
    rm -f /etc/systemd/system/multi-user.target.wants/pyebpf-proxy.service
fi
