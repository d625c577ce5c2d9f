#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Writes seccomp.json and apparmor.profile: containerd's default profiles, by containerd's own code. Run it where
# /etc/apparmor.d is empty, so that the AppArmor profile includes no file. Needs Go 1.26 or newer.
set -euo pipefail
cd "$(dirname "$0")"
GOOS=linux GOARCH=amd64 go run . >"seccomp.json.$$"
GOOS=linux GOARCH=amd64 go run . apparmor >"apparmor.profile.$$"
mv "apparmor.profile.$$" apparmor.profile
mv "seccomp.json.$$" seccomp.json
