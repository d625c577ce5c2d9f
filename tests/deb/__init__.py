# SPDX-License-Identifier: Apache-2.0
"""``make test-deb``: the Debian package on a machine of its own, with systemd, in a node's network namespace."""
