# SPDX-License-Identifier: Apache-2.0
"""The address plan of the lab: documentation prefixes outside, the usual Kubernetes prefixes inside.

======================  ===================  ========================
network                 IPv4                 IPv6
======================  ===================  ========================
nodes                   192.0.2.0/24         2001:db8:1::/64
outside client          198.51.100.0/24      2001:db8:2::/64
LoadBalancer VIPs       203.0.113.0/24       2001:db8:3::/64
pods of node N          10.244.N.0/24        fd00:10:244:N::/64
ClusterIPs              10.96.0.0/16         fd00:10:96::/112
======================  ===================  ========================
"""

from __future__ import annotations

from typing import NamedTuple

POD_CIDR = ("10.244.0.0/16", "fd00:10:244::/48")
SERVICE_CIDR = ("10.96.0.0/16", "fd00:10:96::/112")
VIP_CIDR = ("203.0.113.0/24", "2001:db8:3::/64")
NODE_CIDR = ("192.0.2.0/24", "2001:db8:1::/64")
CLIENT_CIDR = ("198.51.100.0/24", "2001:db8:2::/64")


class Dual(NamedTuple):
    """One address of each family."""

    v4: str
    v6: str

    def of(self, family: int) -> str:
        """The address of family 4 or 6."""
        return self.v4 if family == 4 else self.v6


CORE_TO_NODES = Dual("192.0.2.1", "2001:db8:1::1")
CORE_TO_CLIENT = Dual("198.51.100.1", "2001:db8:2::1")
CLIENT = Dual("198.51.100.2", "2001:db8:2::2")


def node_address(number: int) -> Dual:
    return Dual(f"192.0.2.{10 + number}", f"2001:db8:1::{10 + number}")


def pod_cidr(number: int) -> Dual:
    return Dual(f"10.244.{number}.0/24", f"fd00:10:244:{number}::/64")


def pod_gateway(number: int) -> Dual:
    """The node's address that its pods use as gateway."""
    return Dual(f"10.244.{number}.1", f"fd00:10:244:{number}::1")


def pod_address(number: int, pod: int) -> Dual:
    return Dual(f"10.244.{number}.{10 + pod}", f"fd00:10:244:{number}::{10 + pod}")


def cluster_ip(number: int) -> Dual:
    return Dual(f"10.96.0.{number}", f"fd00:10:96::{number}")


def vip(number: int) -> Dual:
    return Dual(f"203.0.113.{number}", f"2001:db8:3::{number}")
