# SPDX-License-Identifier: Apache-2.0
"""``make lab-test``: requests on the machines of vagrant/, a restart and an upgrade under load (vagrant/README.md)."""
