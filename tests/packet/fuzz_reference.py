# SPDX-License-Identifier: Apache-2.0
"""The allowed outcomes of a packet, computed from its bytes and the Services without the programs' code.

The rules are those of docs/spec/service-semantics; the lab's rules determine endpoints and source of a new flow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Literal, NamedTuple

from pyebpf_proxy.lab.rules import Destination, SourceClass, decide

TCP, UDP, SCTP = 6, 17, 132
FIN, SYN, RST, ACK = 1, 2, 4, 16
CHECKSUM_AT = {TCP: 16, UDP: 6}
#: How many bytes of the transport header the programs read.
WHOLE = {TCP: 20, UDP: 8, SCTP: 16}
EXTENSIONS = (0, 43, 60, 51, 44)


class Ends(NamedTuple):
    """Addresses and ports of a flow's incoming packets."""

    source: bytes
    destination: bytes
    source_port: int
    destination_port: int
    protocol: int

    def turned(self) -> Ends:
        return Ends(self.destination, self.source, self.destination_port, self.source_port, self.protocol)


@dataclass(slots=True)
class Parsed:
    """A packet with ports. ``odd``: the kernel would refuse it, or the programs may ignore it."""

    ends: Ends
    starts: bool
    at: int  # offset of the transport header
    ip: int  # offset of the IP header
    length: int  # of the IP packet, from its header
    hops: int
    fragment: bool
    options: bool
    odd: bool
    deep: bool = False  # more extension headers than the programs look at


def is_loopback(address: bytes) -> bool:
    return address[:1] == b"\x7f" if len(address) == 4 else address == bytes(15) + b"\1"


def parse(frame: bytes, link: int, protocol: int) -> Parsed | None:
    """None: the packet has no readable ports, so it belongs to no Service."""
    if protocol == 0x0800:
        return _parse4(frame, link)
    return _parse6(frame, link) if protocol == 0x86DD else None


def _parse4(frame: bytes, ip: int) -> Parsed | None:
    if len(frame) < ip + 20 or frame[ip] >> 4 != 4 or frame[ip] & 15 < 5:
        return None
    bits = int.from_bytes(frame[ip + 6 : ip + 8], "big")
    header = (frame[ip] & 15) * 4
    length = int.from_bytes(frame[ip + 2 : ip + 4], "big")
    if bits & 0x1FFF:
        return None
    odd = not header + 8 <= length <= len(frame) - ip
    source, destination = frame[ip + 12 : ip + 16], frame[ip + 16 : ip + 20]
    return _transport(
        frame, frame[ip + 9], ip, ip + header, source, destination, length, frame[ip + 8], bool(bits & 0x2000),
        header > 20, odd,
    )  # fmt: skip


def _parse6(frame: bytes, ip: int) -> Parsed | None:
    if len(frame) < ip + 40 or frame[ip] >> 4 != 6:
        return None
    length = 40 + int.from_bytes(frame[ip + 4 : ip + 6], "big")
    odd = length > len(frame) - ip
    following, at, count, fragment = frame[ip + 6], ip + 40, 0, False
    while following in EXTENSIONS:
        if len(frame) < at + 8:
            return None
        if following == 44:
            if frame[at + 2] or frame[at + 3] & 0xF8:
                return None  # a later fragment
            fragment, size = True, 8
        else:
            size = (frame[at + 1] + 2) * 4 if following == 51 else (frame[at + 1] + 1) * 8
        following, at, count = frame[at], at + size, count + 1
    deep = count > 6 or at - ip > 4000
    odd |= deep or at + 8 > ip + length
    return _transport(
        frame, following, ip, at, frame[ip + 8 : ip + 24], frame[ip + 24 : ip + 40], length, frame[ip + 7], fragment,
        bool(count), odd, deep,
    )  # fmt: skip


def _transport(
    frame: bytes, protocol: int, ip: int, at: int, source: bytes, destination: bytes, length: int, hops: int,
    fragment: bool, options: bool, odd: bool, deep: bool = False,
) -> Parsed | None:  # fmt: skip
    if protocol not in WHOLE or len(frame) < at + 8:
        return None
    whole = len(frame) >= at + WHOLE[protocol]
    ports = int.from_bytes(frame[at : at + 2], "big"), int.from_bytes(frame[at + 2 : at + 4], "big")
    ends = Ends(source, destination, *ports, protocol)
    flags = frame[at + 13] if protocol == TCP and len(frame) > at + 13 else 0
    if protocol == TCP:
        starts = flags & (FIN | SYN | RST | ACK) == SYN
        odd |= whole and not (frame[at + 12] >> 4) * 4 >= 20
    else:
        starts = protocol == UDP or (len(frame) > at + 12 and frame[at + 12] == 1)
    return Parsed(ends, starts, at, ip, length, hops, fragment, options, odd or not whole, deep)


# ---- the Services ----------------------------------------------------------------------------------


@dataclass
class Service:
    """A Service as it is in the maps. ``backends``: the id for each endpoint's address."""

    number: int
    protocol: int
    target_port: int
    cluster: list[bytes]
    local: list[bytes]
    backends: dict[bytes, int]
    internal_local: bool = False
    external_local: bool = False
    any_endpoints: bool = True
    ranges: list[str] = field(default_factory=list)
    vip_source_allowed: bool = False
    vip: bytes = b""


class Verdict(NamedTuple):
    """``backends``: the allowed ones, each with its address and port, and whether it is masqueraded."""

    kind: Literal["none", "serve", "reject", "drop"]
    backends: Mapping[int, tuple[bytes, int, bool]] = {}


NONE = Verdict("none")


@dataclass
class Rules:
    """The settings and Services of the node."""

    pods: str
    detector: bool = True
    masquerade_all: bool = False
    nft_mode: bool = False
    node_addresses: dict[bytes, bool] = field(default_factory=dict)
    #: The kind of address, by protocol, address and port.
    frontends: dict[tuple[int, bytes, int], tuple[Service, Destination]] = field(default_factory=dict)
    node_ports: dict[tuple[int, int], Service] = field(default_factory=dict)

    def __post_init__(self) -> None:
        network = ip_network(self.pods)
        self._pods = int(network.network_address), int(network.netmask)
        self._allowed: dict[tuple[bytes, int], bool] = {}

    def is_node(self, address: bytes) -> bool:
        return address in self.node_addresses or (len(address) == 4 and is_loopback(address))

    def has_frontend(self, ends: Ends) -> bool:
        """Whether a Service has this address and port, even if it is not served."""
        return (ends.protocol, ends.destination, ends.destination_port) in self.frontends or (
            ends.protocol,
            ends.destination_port,
        ) in self.node_ports

    def verdict(self, ends: Ends) -> Verdict:
        """The verdict for the first packet of a flow."""
        found = self.frontends.get((ends.protocol, ends.destination, ends.destination_port))
        if found is None:
            at_port = self.node_ports.get((ends.protocol, ends.destination_port))
            if at_port is None:
                return NONE
            if not self.node_addresses.get(ends.destination):
                return self._unserved(at_port, ends.destination)
            found = at_port, "NodePort"
        service, kind = found
        refused = kind == "LoadBalancer" and bool(service.ranges) and not self._allows(service, ends)
        if refused and (self.nft_mode or service.any_endpoints):
            return Verdict("drop")
        if not service.any_endpoints:
            return Verdict("reject")
        decision = decide(
            kind,
            self._class(ends.source),
            external_local=service.external_local,
            internal_local=service.internal_local,
            masquerade_all=self.masquerade_all,
            detector=self.detector,
        )
        endpoints = service.local if decision.endpoints == "local" else service.cluster
        if not endpoints:
            return Verdict("drop" if decision.endpoints == "local" else "reject")
        return Verdict(
            "serve",
            {
                service.backends[each]: (each, service.target_port, decision.masquerade or each == ends.source)
                for each in endpoints
            },
        )

    def _unserved(self, service: Service, destination: bytes) -> Verdict:
        """A NodePort at an address that does not serve it: kube-proxy's filter table refuses it too."""
        if self.nft_mode or not (self.is_node(destination) or is_loopback(destination)):
            return NONE
        if not service.any_endpoints:
            return Verdict("reject")
        return Verdict("drop") if service.external_local and not service.local else NONE

    def _class(self, source: bytes) -> SourceClass:
        prefix, mask = self._pods
        if self.detector and int.from_bytes(source, "big") & mask == prefix:
            return "pod"
        return "node" if self.is_node(source) else "external"

    def _allows(self, service: Service, ends: Ends) -> bool:
        key = ends.source, service.number
        if key not in self._allowed:
            source = ip_address(ends.source)
            self._allowed[key] = any(source in ip_network(text) for text in service.ranges) or (
                service.vip_source_allowed and ends.source == service.vip
            )
        return self._allowed[key]


# ---- the rewrite -----------------------------------------------------------------------------------


def _sum(data: bytes) -> int:
    """One's complement sum as a remainder modulo 0xffff: another algorithm than the programs'."""
    return int.from_bytes(data, "big") % 0xFFFF


def wrong_rewrite(before: bytes, after: bytes, p: Parsed, to: Ends, macs: bytes, ports: bool = True) -> str:
    """Why this is not the rewritten packet ``before``; "": it is. ``ports``: it has ports (no later fragment)."""
    size = 4 if len(to.source) == 4 else 16
    at = p.ip + (12 if size == 4 else 8)
    wanted = bytearray(before)
    wanted[:12] = macs
    wanted[at : at + 2 * size] = to.source + to.destination
    hop = p.ip + (8 if size == 4 else 7)
    wanted[hop] -= 1
    checks = [(p.ip + 10, p.ip, p.ip + 20)] if size == 4 else []
    if ports:
        wanted[p.at : p.at + 4] = to.source_port.to_bytes(2, "big") + to.destination_port.to_bytes(2, "big")
        place = p.at + CHECKSUM_AT[to.protocol]
        without = to.protocol == UDP and before[place : place + 2] == b"\0\0"
        if len(before) < place + 2:
            return "its checksum is not there, and it was sent"
        if without and after[place : place + 2] != b"\0\0":
            return "UDP without a checksum got one"
        if not without:
            if to.protocol == UDP and after[place : place + 2] == b"\0\0":
                return "UDP's checksum became none"
            old = before[at : at + 2 * size] + before[p.at : p.at + 4] + before[place : place + 2]
            new = after[at : at + 2 * size] + after[p.at : p.at + 4] + after[place : place + 2]
            if _sum(old) != _sum(new):
                return "the transport checksum is as wrong as it was not"
            wanted[place : place + 2] = after[place : place + 2]
    for place, begin, end in checks:
        if _sum(before[begin:end]) != _sum(after[begin:end]):
            return "the header's checksum is as wrong as it was not"
        wanted[place : place + 2] = after[place : place + 2]
    if bytes(wanted) == after:
        return ""
    differing = [i for i in range(min(len(wanted), len(after))) if wanted[i] != after[i]]
    return f"bytes {differing[:8]} differ, length {len(after)} for {len(wanted)}"
