# SPDX-License-Identifier: Apache-2.0
"""Packet flows, their outcomes, and the lab that they are sent through: for any proxy on one node."""
