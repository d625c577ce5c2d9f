# SPDX-License-Identifier: Apache-2.0
"""This node: its devices, addresses, cgroups, mounts and settings."""
