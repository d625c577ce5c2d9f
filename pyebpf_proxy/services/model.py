# SPDX-License-Identifier: Apache-2.0
"""The desired state of the data plane: frontends, endpoints and policies of each service port.

They are pure values: ``services.planner`` computes them from Kubernetes objects, and ``datapath`` converts them to map
entries.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from pyebpf_proxy.common import bpf_constants


class IPFamily(enum.IntEnum):
    """IP family of a service port; every value in a plan belongs to exactly one family."""

    IPV4 = 4
    IPV6 = 6


class Protocol(enum.IntEnum):
    """Transport protocol, by its IANA number (as ``enum protocol`` in bpf/maps.h)."""

    TCP = 6
    UDP = 17
    SCTP = 132


class FrontendKind(enum.IntEnum):
    """How a frontend is reached (``enum frontend_kind`` in bpf/service_maps.h)."""

    CLUSTER_IP = bpf_constants.CLUSTER_IP
    EXTERNAL_IP = bpf_constants.EXTERNAL_IP
    LOAD_BALANCER = bpf_constants.LOAD_BALANCER
    NODE_PORT = bpf_constants.NODE_PORT


class ServicePortName(NamedTuple):
    """Identity of a service port in one family (spec/service-semantics §1.1)."""

    namespace: str
    name: str
    port: str
    protocol: Protocol
    family: IPFamily

    def __str__(self) -> str:
        port = f":{self.port}" if self.port else ""
        return f"{self.namespace}/{self.name}{port}/{self.protocol.name}/{self.family.name}"


class Frontend(NamedTuple):
    """An address of a service port. It is packed, in network order; all zero for a NodePort."""

    kind: FrontendKind
    address: bytes
    port: int


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """One usable endpoint. The address is packed, in network order; the port is a number.

    A struct takes half the memory of a tuple, and there may be a hundred thousand of them.
    """

    address: bytes
    port: int
    local: bool


class SourceRange(NamedTuple):
    """One loadBalancerSourceRanges entry: packed network address (host bits zero) and prefix length."""

    address: bytes
    prefix_length: int


class ServicePort(msgspec.Struct, frozen=True, gc=False):
    """Everything the data plane needs for one service port in one family.

    ``cluster`` and ``local`` are the lists of spec/service-semantics §3, in the order of the text ``ip:port``.
    ``serving`` has every serving endpoint, ready or not, for UDP only: flows to other endpoints are stale (§10).
    ``source_ranges`` is empty if sources are not restricted (§7). ``vip_source_allowed``: the node's address is in one
    of these ranges, so the service's own VIPs are also allowed as sources.
    """

    name: ServicePortName
    frontends: tuple[Frontend, ...]
    cluster: tuple[Endpoint, ...] = ()
    local: tuple[Endpoint, ...] = ()
    serving: tuple[Endpoint, ...] = ()
    any_endpoints: bool = False
    internal_local: bool = False
    external_local: bool = False
    affinity_seconds: int = 0
    source_ranges: tuple[SourceRange, ...] = ()
    vip_source_allowed: bool = False


def with_removals(
    delta: Mapping[ServicePortName, ServicePort | None], known: Iterable[ServicePortName]
) -> dict[ServicePortName, ServicePort | None]:
    """The changes of ``delta``, after which no other of the known service ports is left: those are removed."""
    return {**delta, **dict.fromkeys(name for name in known if name not in delta)}
