# SPDX-License-Identifier: Apache-2.0
"""The decision table in Python: what must happen to a packet (spec/service-semantics §5–§9). The functions are pure.

This module decides about one packet from the node's maps, and names the rules that apply. ``explain`` compares the
result with a dry run of the programs. Tests use another model, ``lab.rules``: it knows Services and pods, but no maps,
so it also finds errors in the maps and in this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import Any, Literal, NamedTuple

import msgspec

from pyebpf_proxy.common.bpf_constants import DETECT_CIDR, DETECT_DEVICE, ON_ALL_LOOPBACK, ON_LOCALHOST
from pyebpf_proxy.see.diff import KINDS
from pyebpf_proxy.see.services import name_text
from pyebpf_proxy.see.state import Backend, Service, State
from pyebpf_proxy.services.addresses import contains, format_address, format_address_port, format_prefix
from pyebpf_proxy.services.model import FrontendKind, Protocol

Verdict = Literal["served", "refused", "dropped", "left"]


class Packet(NamedTuple):
    """The first packet of a flow. ``device``: the ingress device; 0 if a process of this node sends the packet."""

    source: bytes
    source_port: int
    destination: bytes
    destination_port: int
    protocol: Protocol
    device: int


class World(NamedTuple):
    """The node's state. ``own``: addresses of this node, and whether each serves NodePorts."""

    settings: Mapping[str, Any]
    own: Mapping[bytes, bool]
    pod_devices: frozenset[int]
    sockets: bool


class Decision(msgspec.Struct):
    """The result. ``reason``: the programs' counter, "" if served or left to the kernel. ``steps``: applied rules.
    ``local``: only endpoints of this node are eligible.
    """

    verdict: Verdict = "left"
    reason: str = ""
    steps: list[str] = []
    service: Service | None = None
    kind: str = ""
    eligible: list[Backend] = []
    not_eligible: list[tuple[Backend, str]] = []
    masquerade: bool = False
    local: bool = False

    def say(self, text: str) -> None:
        """Add a rule that applied."""
        self.steps.append(text)


def decide(packet: Packet, world: World, state: State) -> Decision:
    """What must happen to the packet if its flow is new."""
    found = Decision()
    frontend = _find(packet, world, state, found)
    if frontend is None:
        return found
    service, kind, served = frontend
    found.service, found.kind = service, KINDS[kind]
    found.say(f"{_destination(packet)} is a {KINDS[kind]} of {name_text(service.name)}")
    if not packet.device and not world.sockets:
        found.say("the socket programs are not attached (socketLB: off): nftables handles what this node sends")
    if _is_local_cache(packet, world, kind):
        found.say(
            "it is also an address of this node (NodeLocal DNSCache): sockets of this node reach what listens there"
        )
        return found
    if not served:
        return _unserved(packet, world, service, found)
    nft = bool(world.settings["nft_mode"])
    if nft and not _source_allowed(packet, service, kind, state, found):
        return found
    if not service.any_endpoints:
        return _no_endpoints(packet, world, kind, found)
    if not nft and not _source_allowed(packet, service, kind, state, found):
        return found
    _select(packet, world, service, kind, state, found)
    return found


def _is_local_cache(packet: Packet, world: World, kind: FrontendKind) -> bool:
    """Whether the socket programs leave the packet to a local server, such as NodeLocal DNSCache."""
    by_socket = not packet.device and world.sockets and packet.protocol is not Protocol.SCTP
    return by_socket and kind is FrontendKind.CLUSTER_IP and packet.destination in world.own


def _destination(packet: Packet) -> str:
    return f"{format_address_port(packet.destination, packet.destination_port)}/{packet.protocol.name}"


def _find(packet: Packet, world: World, state: State, found: Decision) -> tuple[Service, FrontendKind, bool] | None:
    address, port, protocol = packet.destination, packet.destination_port, int(packet.protocol)
    if address == bytes(4) and not packet.device:
        address = bytes([127, 0, 0, 1])
        found.say("the kernel takes 0.0.0.0 for 127.0.0.1")
    # NodePorts are stored with the unspecified address, which is no destination of theirs.
    entry = state.frontends.get((address, port, protocol)) if any(address) else None
    served = True
    loopback = len(address) == 4 and address[0] == 127
    if loopback and packet.device and world.settings["localhost_node_ports"]:
        found.verdict, found.reason = "dropped", "drop_loopback_destination"
        found.say("from outside to 127.0.0.0/8: dropped")
        return None
    if entry is None and (address in world.own or loopback):
        entry = state.frontends.get((bytes(len(address)), port, protocol))
        served = _serves_node_ports_on_loopback(packet, address, world) if loopback else world.own.get(address, False)
    if entry is None:
        found.say(f"{_destination(packet)} is not a frontend of any service: the packet is not changed")
        found.say(_frontends_at_address(packet, world, state))
        found.steps = [step for step in found.steps if step]
        return None
    service = state.services.get(entry[0])
    if service is None:
        found.say(f"{_destination(packet)} is a frontend of service {entry[0]}, which is not active")
        return None
    return service, entry[1], served


def _serves_node_ports_on_loopback(packet: Packet, address: bytes, world: World) -> bool:
    if packet.protocol is Protocol.SCTP and world.settings["scheduler"]:
        return False  # mode ipvs: nftables would have to translate it, which needs route_localnet
    where = world.settings["localhost_node_ports"]
    if where == ON_ALL_LOOPBACK or (where == ON_LOCALHOST and address == bytes([127, 0, 0, 1])):
        return True
    # Only the socket programs look other addresses up; nftables does not know which are on a device.
    by_socket = world.sockets and packet.protocol is not Protocol.SCTP
    return bool(where) and by_socket and address in world.own


def _frontends_at_address(packet: Packet, world: World, state: State) -> str:
    """Frontends at the same address, for a hint: the usual mistakes are a wrong port or protocol."""
    serves_node_ports = world.own.get(packet.destination, False)
    there = [
        f"{port}/{Protocol(protocol).name} ({name_text(state.services[number].name)})"
        for (address, port, protocol), (number, _) in sorted(state.frontends.items())
        if number in state.services
        and (packet.destination == address if any(address) else serves_node_ports)
        and len(address) == len(packet.destination)
    ]
    if not there:
        return ""
    more = f" and {len(there) - 8} more" if len(there) > 8 else ""
    return f"frontends at {format_address(packet.destination)}: {', '.join(there[:8])}{more}"


def _unserved(packet: Packet, world: World, service: Service, found: Decision) -> Decision:
    found.say(f"{format_address(packet.destination)} is an address of this node that does not serve NodePorts")
    if world.settings["nft_mode"]:
        found.say("mode nftables: not a frontend, the packet is not changed")
    elif not service.any_endpoints:
        _refuse(packet, found, "no usable endpoint: refused at every address of the node (mode iptables)")
    elif service.external_local and not service.local:
        _drop(
            packet,
            found,
            "drop_no_local_endpoints",
            "externalTrafficPolicy Local, no local endpoint: dropped (mode iptables)",
        )
    else:
        found.say("the packet is not changed")
    return found


def _refuse(packet: Packet, found: Decision, text: str) -> None:
    found.verdict, found.reason = "refused", "reject_no_endpoints" + ("" if packet.device else "_socket")
    found.say(text)


def _drop(packet: Packet, found: Decision, reason: str, text: str) -> None:
    found.verdict, found.reason = "dropped", reason + ("" if packet.device else "_socket")
    found.say(text)


def _source_allowed(packet: Packet, service: Service, kind: FrontendKind, state: State, found: Decision) -> bool:
    if kind is not FrontendKind.LOAD_BALANCER or not service.has_ranges:
        return True
    source = format_address(packet.source)
    for each in service.ranges:
        if contains(each, packet.source):
            found.say(f"{source} is in {format_prefix(each)} of loadBalancerSourceRanges: allowed")
            return True
    own = state.frontends.get((packet.source, packet.destination_port, int(packet.protocol)))
    if service.vip_source_allowed and own == (service.id, FrontendKind.LOAD_BALANCER):
        found.say(f"{source} is a load balancer IP of the same Service, and the node is in a source range: allowed")
        return True
    ranges = ", ".join(map(format_prefix, sorted(service.ranges)))
    _drop(packet, found, "drop_source_range", f"{source} is not in loadBalancerSourceRanges ({ranges}): dropped")
    return False


def _no_endpoints(packet: Packet, world: World, kind: FrontendKind, found: Decision) -> Decision:
    outside = kind in (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)
    if not packet.device and outside and not world.settings["nft_mode"] and packet.destination not in world.own:
        found.say("no usable endpoint; packets from this node to this address are not changed (mode iptables)")
        return found
    _refuse(packet, found, "no usable endpoint on any node: refused (port unreachable)")
    return found


def _is_pod(packet: Packet, world: World, found: Decision) -> bool:
    family = 4 if len(packet.source) == 4 else 6
    how = world.settings[f"detector{family}"]
    source = format_address(packet.source)
    if how == DETECT_DEVICE:
        pod = packet.device in world.pod_devices
        found.say(
            f"{source} {'enters' if pod else 'does not enter'} by a pod's device: {'a' if pod else 'not a'} local pod"
        )
        return pod
    if how != DETECT_CIDR:
        found.say("detectLocalMode detects no local pods: not a local pod")
        return False
    address = ip_address(world.settings[f"pod_cidr{family}"])
    length = sum(byte.bit_count() for byte in world.settings[f"pod_mask{family}"])
    network = ip_network((address, length))
    pod = ip_address(packet.source) in network
    found.say(f"{source} is {'in' if pod else 'not in'} {network}: {'a' if pod else 'not a'} local pod")
    return pod


def _select(packet: Packet, world: World, service: Service, kind: FrontendKind, state: State, found: Decision) -> None:
    """Apply the row of the table in spec/service-semantics §5 that matches."""
    pod = _is_pod(packet, world, found)
    detector = bool(world.settings["detector4" if len(packet.source) == 4 else "detector6"])
    own = not packet.device or packet.source in world.own or (len(packet.source) == 4 and packet.source[0] == 127)
    if kind is FrontendKind.CLUSTER_IP:
        local = service.internal_local
        found.masquerade = bool(world.settings["masquerade_all"]) or (detector and not pod)
        why = "masqueradeAll" if world.settings["masquerade_all"] else "the source is not a local pod"
        found.say(
            f"internalTrafficPolicy {'Local: endpoints of this node only' if local else 'Cluster: all endpoints'}"
        )
        found.say(f"masqueraded: {why}" if found.masquerade else "not masqueraded")
    elif not service.external_local:
        local, found.masquerade = False, True
        found.say("externalTrafficPolicy Cluster: all endpoints, masqueraded")
    elif pod:
        local = False
        found.say("externalTrafficPolicy Local, from a local pod: all endpoints, not masqueraded")
    elif own:
        local, found.masquerade = False, True
        found.say("externalTrafficPolicy Local, from this node: all endpoints, masqueraded")
    else:
        local = True
        found.say("externalTrafficPolicy Local, from outside: endpoints of this node only, not masqueraded")
    found.local = local
    chosen = service.local if local else service.cluster
    found.eligible = [state.backends[number] for number in chosen if number in state.backends]
    why_not = "not on this node" if local else "only for traffic policy Local"
    found.not_eligible = [(b, why_not) for b in state.endpoints(service) if b.id not in chosen]
    if found.eligible:
        found.verdict = "served"
        return
    if local:
        _drop(packet, found, "drop_no_local_endpoints", "no local endpoint: dropped")
    else:
        _refuse(packet, found, "no endpoint: refused (port unreachable)")
