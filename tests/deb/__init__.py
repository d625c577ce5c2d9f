# SPDX-License-Identifier: Apache-2.0
"""``make test-deb``: the Debian package on its own machine, with systemd, in a node's network namespace."""
