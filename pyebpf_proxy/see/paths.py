# SPDX-License-Identifier: Apache-2.0
"""The path that the next new flow of a client to an endpoint takes, and why, as open_young() of bpf/young.h decides.

A dry run must not create an entry, so it has no fast path. This module reads the maps that the program would read.
"""

from __future__ import annotations

import struct
import time
from typing import Literal, NamedTuple

from pyebpf_proxy.common.bpf_constants import LEAST_CONNECTIONS
from pyebpf_proxy.see import fast_path
from pyebpf_proxy.see.decide import Packet
from pyebpf_proxy.see.local import State
from pyebpf_proxy.see.maps import U32, Pinned
from pyebpf_proxy.see.programs import Programs, device_name
from pyebpf_proxy.see.reasons import SLOW
from pyebpf_proxy.see.state import Backend
from pyebpf_proxy.services.model import Protocol

_U64 = (1 << 64) - 1
_PERMIT = ("until", "back_until", "generation", "out", "back", "snat")


class Path(NamedTuple):
    """The path, and why. ``reason``: the programs' counter, "" if none. ``snat``: the masquerade address, or b""."""

    path: Literal["fast", "netfilter", "socket"]
    reason: str = ""
    why: str = ""
    snat: bytes = b""


class Paths:
    """The paths of one packet. ``agent_state``: what the agent answers."""

    def __init__(self, maps: Pinned, attached: Programs, sockets: bool, packet: Packet, agent_state: State) -> None:
        self._maps = maps
        self._settings = attached.settings or {}
        self._sockets = sockets
        self._packet = packet
        self._agent_state = agent_state["datapath"]
        self._refusals = agent_state["refusals"]
        self._state = fast_path.read_state(maps) if self._settings.get("fast_path") else None
        self._program = next((d.program.name for d in attached.devices if d.ifindex == packet.device and d.program), "")
        #: The path if it does not depend on the endpoint.
        self._all = self._of_packet()

    def to(self, backend: Backend, masquerade: bool, egress: int) -> Path:
        """The path to an endpoint. ``egress``: the egress interface of the route to it; 0 if there is none."""
        if self._all is not None:
            return self._all
        for device in (self._packet.device, egress):
            if closed := self._closed_device(device):
                return closed
        return self._permitted(backend, masquerade)

    def _of_packet(self) -> Path | None:
        packet, state = self._packet, self._state
        family = 4 if len(packet.source) == 4 else 6
        if not packet.device:
            return self._own()
        if state is None:
            why = self._refusals.get("fast path", "")
            return Path("netfilter", "", "the fast path is off" + (f": {why}" if why else ""))
        if self._program == "tc_l3":
            return Path("netfilter", "", "packets of this device have no Ethernet header")
        if packet.protocol is Protocol.SCTP:
            return Path("netfilter", "slow_no_permit", "SCTP never takes the fast path")
        if not state.alive:
            return _slow("stack_no_agent")
        if reason := state.closed[family]:
            known = self._agent_state.get("closed", {}).get(str(family))
            text = known["text"] if known is not None and known["reason"] == reason else ""
            return _slow(reason, f"the fast path is closed for IPv{family}: {text or SLOW.get(reason, reason)}")
        if state.draining:
            return _slow("stack_draining")
        if self._settings["scheduler"] >= LEAST_CONNECTIONS:
            return _slow("slow_no_permit", "the scheduler uses connection counts, which conntrack keeps")
        if self._quota():
            return _slow("slow_quota")
        return None

    def _own(self) -> Path:
        if self._packet.protocol is not Protocol.SCTP and self._sockets:
            return Path("socket", "", "the socket programs translate its address when it connects or sends")
        what = "SCTP" if self._packet.protocol is Protocol.SCTP else "socketLB: off"
        return Path("netfilter", "", f"{what}: nftables translates packets of this node")

    def _quota(self) -> bool:
        found = self._maps.map("young_counts").lookup(U32.pack(self._packet.device))
        return found is not None and U32.unpack(found)[0] >= self._settings["flow_quota"]

    def _closed_device(self, device: int) -> Path | None:
        """The result for a device to which the fast path does not redirect, or that is not in the map ``devices``."""
        if not device:
            return None
        found = self._maps.map("devices").lookup(U32.pack(device))
        layout = self._maps.packer("node_device", "redirect")
        if found is not None and layout.unpack(found)[0]:
            return None
        limit = self._agent_state.get("devices", {}).get(str(device), {}).get("limit", "")
        return _slow("stack_device", f"{device_name(device)} is closed" + (f": {limit}" if limit else ""))

    def _permitted(self, backend: Backend, masquerade: bool) -> Path:
        packet, maps, state = self._packet, self._maps, self._state
        assert state is not None
        names = ("device", "port", "protocol", "ipv6", "client", "endpoint", "frontend")
        key = maps.packer("permit_key", *names).pack(
            packet.device,
            backend.port,
            int(packet.protocol),
            len(packet.source) == 16,
            packet.source.ljust(16, b"\0"),
            backend.address.ljust(16, b"\0"),
            frontend_hash(packet.destination, packet.destination_port, *self._seeds) | masquerade,
        )
        value = maps.map("permits").lookup(key)
        if value is None:
            return _slow("slow_no_permit", "no permit yet: the second new flow within a second creates one")
        until, back_until, generation, out, back, snat = maps.packer("permit", *_PERMIT).unpack(value)
        link = maps.packer("link", "device", "redirect")
        for each in (out, back):
            device, redirect = link.unpack(each)
            if device and not redirect:
                return _slow("stack_device", f"{device_name(device)} is closed")
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        if generation != state.permit_generation:
            return _slow("slow_no_permit", "its permit is invalid: rules or devices have changed since")
        if now >= until:
            return _slow("slow_no_permit", f"its permit expired {(now - until) / 1e9:.1f} s ago")
        if now >= back_until:
            return _slow("slow_no_permit", "its permit does not cover replies: none was seen recently")
        if masquerade and not self._settings["snat_port_min"]:
            return _slow("slow_no_port")
        left = (min(until, back_until) - now) / 1e9
        snat = snat[: len(packet.source)] if masquerade else b""
        return Path("fast", "", f"the permit of this pair is valid for {left:.1f} s", snat)

    @property
    def _seeds(self) -> tuple[int, int]:
        # Programs of an earlier version have none.
        return self._settings.get("permit_seed", 1), self._settings.get("permit_seed6", 0)


def frontend_hash(address: bytes, port: int, seed: int = 1, seed6: int = 0) -> int:
    """What the key of a permit has of a frontend (``permit_key_of`` of bpf/permit.h)."""
    first, second = struct.unpack("=QQ", address.ljust(16, b"\0"))
    mixed: int = first ^ port << 40 ^ second << 7 & _U64 ^ second >> 57
    client = (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15 & _U64
    hashed: int = (client * seed + second * seed6 & _U64) >> 32 & ~1
    return hashed


def _slow(reason: str, why: str = "") -> Path:
    return Path("netfilter", reason, why or SLOW[reason])
