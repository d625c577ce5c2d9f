# SPDX-License-Identifier: Apache-2.0
"""Upgrades and rollbacks between the working tree and builds of former commits, under load."""
