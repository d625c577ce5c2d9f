# SPDX-License-Identifier: Apache-2.0
"""Random packets through the tc and XDP programs, each compared with an independent reference (fuzz_reference.py).

A round has random Services and permits, and packets that share its tables. A packet must stay unchanged, be handed to
netfilter for an allowed endpoint, be refused, or be sent exactly as its flow requires.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from pyebpf_proxy.datapath.loader.libbpf import Program
from pyebpf_proxy.see.paths import frontend_hash
from tests.packet.fast_node import OTHER_MACHINE, POD, Exchange
from tests.packet.fuzz_packets import NODE, Pools, make
from tests.packet.fuzz_reference import SCTP, TCP, UDP, Ends, Parsed, Rules, Service, Verdict, parse, wrong_rewrite
from tests.packet.program_node import (
    ADDRESSES,
    GO_ON,
    PRIORITY_BACKEND,
    PRIORITY_MASQUERADE,
    PRIORITY_MIDSTREAM,
    PRIORITY_REJECT,
    PROTOCOLS,
    SHOT,
    XDP_DROP,
    XDP_PASS,
    XDP_REDIRECT,
    XDP_TX,
    ProgramNode,
)

REDIRECT = 7
PACKETS_A_ROUND = 2000
TEST_RUN, BPF = 10, 280 if os.uname().machine == "aarch64" else 321
SNAT_PORTS = (20000, 20199)
FOREVER = 1 << 62
SERVED = ("cluster_ip", "external_ip", "vip")
DESTINATIONS: dict[str, Any] = {"cluster_ip": "ClusterIP", "external_ip": "ExternalIP", "vip": "LoadBalancer"}
ENDPOINTS = ("remote", "local", "pod", "pod1", "pod2", "pod3", "caller1")
CLIENTS = ("client", "blocked", "pod", "outside", "remote", "caller1", "unserved_node", "vip")
ODD = {4: ("127.0.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1"), 6: ("::1", "::", "ff02::1", "fe80::1")}
#: The settings of each world. Loading takes a second or two, so there are few.
SETTINGS: dict[str, dict[str, int]] = {
    "slow": {},
    "slow, mode nftables": {"nft_mode": 1, "masquerade_all": 1},
    "slow, no detector": {"detector4": 0, "detector6": 0, "localhost_node_ports": 1},
    "fast": {"fast_path": 1, "snat_port_min": SNAT_PORTS[0], "snat_port_max": SNAT_PORTS[1]},
    "xdp": {"xdp": 1, "snat_port_min": SNAT_PORTS[0], "snat_port_max": SNAT_PORTS[1]},
}


class WrongPacketError(AssertionError):
    """A packet with a forbidden outcome."""


class Runner:
    """BPF_PROG_TEST_RUN by the system call itself: some microseconds per packet."""

    # prog_fd, retval, data_size_in, data_size_out, data_in, data_out, repeat, duration, ctx_size_in, ctx_size_out,
    # ctx_in, ctx_out
    _ATTRIBUTES = struct.Struct("=IIIIQQIIIIQQ")

    def __init__(self, program: Program, xdp: bool = False) -> None:
        self._fd, self._xdp = program.fd, xdp
        self._out = ctypes.create_string_buffer(4096)
        self._context = ctypes.create_string_buffer(24 if xdp else 192)
        self._attributes = ctypes.create_string_buffer(128)
        self._call = ctypes.CDLL(None, use_errno=True).syscall

    def run(self, frame: bytes, device: int) -> tuple[int, bytes, int, int]:
        """The verdict, the packet, priority and mark. BlockingIOError: the kernel refuses such a packet."""
        size = len(self._context)
        ctypes.memset(self._context, 0, size)
        if self._xdp:
            struct.pack_into("=IIIIII", self._context, 0, 0, len(frame), 0, device, 0, 0)
        else:
            struct.pack_into("=I", self._context, 40, device)
        where = ctypes.addressof(self._context)
        data = ctypes.c_char_p(frame)
        address = ctypes.cast(data, ctypes.c_void_p).value
        self._ATTRIBUTES.pack_into(
            self._attributes, 0, self._fd, 0, len(frame), len(self._out), address, ctypes.addressof(self._out), 1, 0,
            size, size, where, where,
        )  # fmt: skip
        if self._call(BPF, TEST_RUN, self._attributes, 80) < 0:
            number = ctypes.get_errno()
            if number == errno.EINVAL:
                raise BlockingIOError
            raise OSError(number, os.strerror(number))
        _, verdict, _, length = struct.unpack_from("=iiII", self._attributes)
        if self._xdp:
            return verdict, self._out[:length], 0, 0
        mark = struct.unpack_from("=I", self._context, 8)[0]
        return verdict, self._out[:length], struct.unpack_from("=I", self._context, 32)[0], mark


@dataclass
class Live:
    """One direction of a young flow, as its first packet set it."""

    to: Ends
    device: int
    macs: bytes  # of the frame that leaves
    mtu: int
    backend: int
    reply: bool
    masquerade: bool
    other: Ends


@dataclass(frozen=True)
class Permit:
    out: bytes
    back: bytes
    mtu_out: int
    mtu_back: int
    snat: bytes


@dataclass
class Round:
    """Tables, and the flows that must be in them."""

    world: ProgramNode
    name: str
    seed: int
    counts: Counter[str]
    #: Of the programs; by default those of the world's name.
    settings: dict[str, int] = field(default_factory=dict)
    rules: Rules = field(init=False)
    live: dict[Ends, Live] = field(default_factory=dict)
    fragments: dict[bytes, Live] = field(default_factory=dict)
    permits: dict[tuple[Any, ...], Permit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world = self.world
        self.fast = self.name in ("fast", "xdp")
        self.layout = world.object.btf.struct("flow_key")
        self.rng = random.Random(self.seed)
        self.size = 4 if world.family == 4 else 16
        settings = self.settings or SETTINGS[self.name]
        world.load(**settings)
        self.loopback_dropped = bool(settings.get("localhost_node_ports"))
        self.rules = Rules(
            "10.244.0.0/16" if world.family == 4 else "fd00:10:244::/48",
            detector=not self.name.endswith("no detector"),
            masquerade_all=bool(settings.get("masquerade_all")),
            nft_mode=bool(settings.get("nft_mode")),
            node_addresses={
                world.packed("node"): True,
                world.packed("pod_gateway"): True,
                world.packed("unserved_node"): False,
            },
        )
        if self.fast:
            self._open_fast_path()
        self._make_services()
        if self.fast:
            self._write_permits()
        self.pools = self._pools()

    # ---- tables ------------------------------------------------------------------------------------

    def _open_fast_path(self) -> None:
        world = self.world
        world.write_fast_path_state()
        for name, device in world.devices.items():
            # Replies of young flows may come in by another uplink (learn_entrance()), but not by the device of a pod.
            redirect = POD if name == "pods" else OTHER_MACHINE
            value = world.object.btf.struct("node_device").pack(redirect=redirect, mtu=1500)
            world.object.maps["devices"].update(device.to_bytes(4, sys.byteorder), value)

    def _make_services(self) -> None:
        rng, world = self.rng, self.world
        places = [(protocol, port) for protocol in PROTOCOLS for port in (80, 81, 443)]
        self.services: list[Service] = []
        for number, (protocol, port) in enumerate(rng.sample(places, rng.randrange(2, 6)), 1):
            cluster = rng.sample(ENDPOINTS, rng.choice((0, 1, 1, 2, 4)))
            local = rng.sample(cluster, min(len(cluster), rng.choice((0, 0, 1, 2))))
            ranges = rng.sample([*RANGES[world.family]], rng.choice((0, 0, 1, 2)))
            flags = {name: int(rng.random() < 0.3) for name in ("internal_local", "external_local")}
            if rng.random() < 0.2:
                flags["any_endpoints"] = 1
            allowed = int(bool(ranges) and rng.random() < 0.5)
            seconds = rng.choice((0, 0, 10800))
            target, node_port = rng.choice((8080, 80, 5353)), 30080 + number
            world.service(
                cluster, local, protocol, port, node_port, number, target, ranges,
                affinity_seconds=seconds, vip_source_allowed=allowed, **flags,
            )  # fmt: skip
            packed = {name: world.packed(name) for name in [*cluster, *local]}
            service = Service(
                number,
                PROTOCOLS[protocol],
                target,
                [packed[name] for name in cluster],
                [packed[name] for name in local],
                {packed[name]: world.backend_ids[name, number] for name in packed},
                bool(flags["internal_local"]),
                bool(flags["external_local"]),
                bool(cluster or flags.get("any_endpoints")),
                ranges,
                bool(allowed),
                world.packed("vip"),
            )
            self.services.append(service)
            for name, kind in DESTINATIONS.items():
                self.rules.frontends[service.protocol, world.packed(name), port] = service, kind
            self.rules.node_ports[service.protocol, node_port] = service

    def _write_permits(self) -> None:
        """Write permits for some pairs, as the observer would."""
        world, rng = self.world, self.rng
        btf, of = world.object.btf, world.object.maps["permits"]
        link, permit_layout, key_layout = btf.struct("link"), btf.struct("permit"), btf.struct("permit_key")
        pods, nic = world.devices["pods"], world.devices["nic"]
        number = 0
        for service in self.services:
            if service.protocol == SCTP:
                continue
            for endpoint in service.cluster:
                for client in rng.sample(CLIENTS, 4):
                    for masquerade in (False, True):
                        number += 1
                        if number > 200 or rng.random() < 0.2:
                            continue
                        there = bytes((2, 0, 0, 0, 0x0F, number & 255)), NODE
                        back = bytes((2, 0, 0, 0, 0x0C, number & 255)), NODE
                        mtus = rng.choice((1500, 1500, 600)), rng.choice((1500, 1400))
                        snat = world.packed("node" if number & 1 else "pod_gateway")
                        fields = dict(zip(("device", "mac_to", "mac_from"), (nic, *there), strict=True))
                        out = link.pack(**fields, mtu=mtus[0], redirect=1)
                        fields = dict(zip(("device", "mac_to", "mac_from"), (pods, *back), strict=True))
                        returns = link.pack(**fields, mtu=mtus[1], redirect=1)
                        source = world.packed(client)
                        value = permit_layout.pack(
                            until=FOREVER, back_until=FOREVER, generation=1, device_back=nic, out=out, back=returns,
                            mac_in_back=NODE, snat=snat.ljust(16, b"\0"),
                        )  # fmt: skip
                        permit = Permit(b"".join(there), b"".join(back), *mtus, snat)
                        for frontend in self._frontends(service):
                            key = key_layout.pack(
                                device=pods, port=service.target_port, protocol=service.protocol,
                                ipv6=int(world.family == 6), client=source.ljust(16, b"\0"),
                                endpoint=endpoint.ljust(16, b"\0"), frontend=frontend_hash(*frontend) | masquerade,
                            )  # fmt: skip
                            of.update(key, value)
                            pair = source, frontend, endpoint, service.target_port, service.protocol, masquerade
                            self.permits[pair] = permit

    def _frontends(self, service: Service) -> list[tuple[bytes, int]]:
        found = [(address, port) for (_, address, port), (of, _) in self.rules.frontends.items() if of is service]
        node_ports = [port for (_, port), of in self.rules.node_ports.items() if of is service]
        return [*found, *((self.world.packed(name), port) for name in ("node", "pod_gateway") for port in node_ports)]

    def _pools(self) -> Pools:
        world, rng = self.world, self.rng
        names = [name for name in ADDRESSES if not name.startswith("caller")]
        everybody = [world.packed(name) for name in names] + [_packed(text) for text in ODD[world.family]]
        everybody.append(bytes(rng.randrange(256) for _ in range(self.size)))
        clients = [world.packed(name) for name in CLIENTS]
        served = [world.packed(name) for name in (*SERVED, *SERVED, "node", "node", "pod_gateway", "unserved_node")]
        endpoints = [world.packed(name) for name in ENDPOINTS]
        ports = [80, 81, 443, 8080, 5353, 0, 65535, rng.randrange(65536)]
        ports += [30080 + service.number for service in self.services] * 2
        known = [
            Ends(client, world.packed(name), 40000 + i, port, protocol)
            for i, client in enumerate(clients)
            for (protocol, address, port), _ in list(self.rules.frontends.items())
            for name in SERVED
            if address == world.packed(name)
        ]
        client_ports = [40000, 40001, 1024, 53, 20000, rng.randrange(65536)]
        return Pools(
            world.family,
            clients * 4 + everybody + endpoints,
            served * 6 + everybody + endpoints * 2,
            ports,
            client_ports,
            known,
            [],
        )

    # ---- packets -----------------------------------------------------------------------------------

    def programs(self) -> list[tuple[str, str]]:
        """The programs to run, each with its device."""
        if self.fast:
            return [("tc_ethernet", "pods")] * 5 + [("tc_ethernet", "nic")] * 5
        return [("tc_ethernet", "pods")] * 3 + [("tc_ethernet", "nic"), ("tc_bridge_port", "pods"), ("tc_l3", "nic"),
                                               ("tc_egress", "nic")]  # fmt: skip

    def one(self, program: str, device: str, frame: bytes, runners: dict[str, Runner]) -> None:
        """Run one packet. WrongPacketError: its outcome is forbidden."""
        index = self.world.devices[device]
        try:
            if self.name == "xdp" and program == "tc_ethernet":
                verdict, data, _, _ = runners["xdp"].run(frame, index)
                if verdict == XDP_PASS:
                    if data != frame:
                        raise WrongPacketError("XDP changed a packet and left it to tc")
                    self._check(program, index, frame, *runners[program].run(frame, index))
                    return
                # XDP's decision shows only in its verdict.
                names = {XDP_DROP: SHOT, XDP_TX: REDIRECT, XDP_REDIRECT: REDIRECT}
                if verdict not in names:
                    raise WrongPacketError(f"XDP's verdict is {verdict}")
                self.counts["by XDP"] += 1
                self._check(program, index, frame, names[verdict], data, 0, 0)
                return
            self._check(program, index, frame, *runners[program].run(frame, index))
        except BlockingIOError:
            self.counts["refused by the kernel's test run"] += 1

    def _check(
        self, program: str, device: int, frame: bytes, verdict: int, data: bytes, priority: int, mark: int
    ) -> None:
        if mark:
            raise WrongPacketError(f"mark {mark:#x}")
        if verdict not in (GO_ON, SHOT, REDIRECT):
            raise WrongPacketError(f"verdict {verdict}")
        if verdict == GO_ON and data != frame:
            raise WrongPacketError("the packet was changed and not sent")
        if program == "tc_egress":
            if (verdict, priority) != (GO_ON, 0):
                raise WrongPacketError(f"egress, no record: verdict {verdict}, priority {priority:#x}")
            self.counts["egress"] += 1
            return
        kind = int.from_bytes(frame[12:14], "big")
        link = _link_header(program, frame)
        p = parse(frame, link, kind)
        if self.loopback_dropped and self._is_to_loopback(frame, link, kind):
            if verdict != SHOT and (program == "tc_l3" or frame[:6] == NODE):
                raise WrongPacketError("a packet to 127.0.0.0/8 continued")
            self.counts["loopback"] += 1
            return
        if p is None or (p.deep and verdict != GO_ON and _fragment(frame, kind) in self.fragments):
            self._without_ports(frame, device, kind, verdict, data, priority)
            return
        # tc serves frames for this node and broadcast frames; XDP only those for this node.
        mine = program in ("tc_l3", "tc_bridge_port") or frame[:6] == NODE or bool(frame[0] & 1)
        live = self.live.get(p.ends) if self.fast and program != "tc_l3" else None
        if live and self._is_live(p, live, device, frame, verdict, data, priority):
            return
        self._new(p, device, frame, mine, verdict, data, priority)

    def _is_to_loopback(self, frame: bytes, link: int, kind: int) -> bool:
        return (
            kind == 0x0800
            and len(frame) >= link + 20
            and frame[link] >> 4 == 4
            and frame[link] & 15 >= 5
            and frame[link + 16] == 127
        )

    def _without_ports(self, frame: bytes, device: int, kind: int, verdict: int, data: bytes, priority: int) -> None:
        """A packet without readable ports stays unchanged, except a fragment that follows its first one."""
        if (verdict, priority) == (GO_ON, 0):
            self.counts["without ports"] += 1
            return
        key = _fragment(frame, kind)
        live = self.fragments.get(key) if key else None
        if live is None or verdict not in (REDIRECT, SHOT):
            raise WrongPacketError(f"no ports, and verdict {verdict}, priority {priority:#x}")
        if verdict == REDIRECT:
            p = Parsed(live.to, False, 0, 14, 0, 0, True, False, False)
            if live.device != device or frame[:6] != NODE:
                raise WrongPacketError("a fragment of another device was sent")
            if why := wrong_rewrite(frame, data, p, live.to, live.macs, ports=False):
                raise WrongPacketError(f"a later fragment: {why}")
        self.counts["later fragment"] += 1

    def _is_live(
        self, p: Parsed, live: Live, device: int, frame: bytes, verdict: int, data: bytes, priority: int
    ) -> bool:
        """Check a packet of a known flow. False: the flow has ended, and the packet is checked as one without a
        flow.
        """
        if live.device != device and frame[:6] == NODE and self._has_learned(p, live, frame, device):
            self.counts["replies come in elsewhere"] += 1
            live.device = device
        if live.device != device or frame[:6] != NODE:
            if verdict == REDIRECT:
                raise WrongPacketError("a packet that came in elsewhere was sent by its flow")
            if verdict == SHOT and (live.reply if p.ends.protocol == UDP else not p.starts):
                self.counts["came in elsewhere, waits"] += 1
                return True
            return verdict == GO_ON and not priority
        if verdict == REDIRECT:
            why = wrong_rewrite(frame, data, p, live.to, live.macs)
            if why and p.starts:
                return False
            if why:
                raise WrongPacketError(f"of a young flow: {why}")
            if (p.options and not p.fragment) or (not p.odd and (p.hops <= 1 or p.length > live.mtu)):
                raise WrongPacketError("sent, though only the kernel can handle it")
            if p.fragment and (key := _fragment(frame, int.from_bytes(frame[12:14], "big"))):
                self.fragments[key] = live
            self.counts["sent"] += 1
            return True
        handed = not live.reply and not live.masquerade and priority == PRIORITY_BACKEND | live.backend
        if (p.fragment or p.options or p.hops <= 1 or p.length > live.mtu) and (handed or verdict == SHOT):
            self.counts["a young flow's, for the kernel"] += 1
            return True
        if p.odd and (verdict == SHOT or (verdict, priority) == (GO_ON, 0)):
            if p.starts and verdict == SHOT and not live.reply:
                self._forget(p.ends)
                self._opened_with_cut_checksum(p, device, self.rules.verdict(p.ends))
            return True
        # The flow must have ended.
        if self._is_known(p.ends):
            raise WrongPacketError(f"a young flow's packet: verdict {verdict}, priority {priority:#x}")
        self._forget(p.ends)
        self.counts["ended"] += 1
        return False

    def _has_learned(self, p: Parsed, live: Live, frame: bytes, device: int) -> bool:
        """Whether an answer to a SYN, which came in by another device, is the first one of its flow's replies there."""
        flags = frame[p.at + 13] if len(frame) > p.at + 13 else 0
        if not live.reply or p.ends.protocol != TCP or ~flags & 0x12:
            return False
        btf, entry = self.world.object.btf, self._entry(p.ends)
        if entry is None:
            return False
        found: int = btf.struct("flow_rewrite").unpack(btf.struct("flow").unpack(entry)["rewrite"])["device_in"]
        return found == device

    def _forget(self, ends: Ends) -> None:
        gone = self.live.pop(ends, None)
        if gone:
            self.live.pop(gone.other, None)

    def _new(self, p: Parsed, device: int, frame: bytes, mine: bool, verdict: int, data: bytes, priority: int) -> None:
        """A packet whose flow is not in the table."""
        decided = self.rules.verdict(p.ends) if p.starts and mine else None
        if verdict == REDIRECT:
            self._opened(p, device, frame, data, decided)
            return
        if self.fast and verdict == SHOT and self._waits(p, decided):
            if p.odd:
                self._opened_with_cut_checksum(p, device, decided)
            self.counts["waits for a promotion"] += 1
            return
        if decided is None or decided.kind == "none":
            allowed = {(GO_ON, 0)}
            if self.fast and p.ends.protocol == TCP and not p.starts and self.rules.has_frontend(p.ends):
                allowed.add((GO_ON, PRIORITY_MIDSTREAM))
        elif decided.kind == "reject":
            allowed = {(GO_ON, PRIORITY_REJECT)}
        elif decided.kind == "drop":
            allowed = {(SHOT, 0)}
        else:
            allowed = {
                (GO_ON, (PRIORITY_MASQUERADE if masquerade else PRIORITY_BACKEND) | backend)
                for backend, (_, _, masquerade) in decided.backends.items()
            }
        if (verdict, priority) in allowed:
            self.counts[decided.kind if decided else "no first packet"] += 1
            return
        # The programs may ignore a packet that the kernel would refuse.
        if p.odd and ((verdict, priority) == (GO_ON, 0) or (self.fast and verdict == SHOT)):
            self._opened_with_cut_checksum(p, device, decided)
            self.counts["odd"] += 1
            return
        raise WrongPacketError(f"verdict {verdict}, priority {priority:#x}; allowed: {sorted(allowed)}, {p.ends}")

    def _waits(self, p: Parsed, decided: Verdict | None) -> bool:
        """Whether a young flow uses the ports that this flow would have behind netfilter."""
        places = [(p.ends.destination, p.ends.destination_port)]
        if decided:
            places += [(address, port) for address, port, _ in decided.backends.values()]
        return p.starts and any(
            Ends(address, p.ends.source, port, p.ends.source_port, p.ends.protocol) in self.live
            for address, port in places
        )

    def _opened(self, p: Parsed, device: int, frame: bytes, data: bytes, decided: Verdict | None) -> None:
        """A packet that opens a young flow: it has a permit, and no other flow uses its ports."""
        if decided is None or decided.kind != "serve":
            raise WrongPacketError(f"sent, and it opens no flow: {p.ends}")
        if p.fragment or p.options or (p.hops <= 1 and not p.odd) or device != self.world.devices["pods"]:
            raise WrongPacketError("a young flow was opened by a packet for the kernel")
        if frame[:6] != NODE:
            raise WrongPacketError("a young flow was opened by a frame for others, too")
        size = self.size
        at = p.ip + (12 if size == 4 else 8)
        ports = int.from_bytes(data[p.at : p.at + 2], "big"), int.from_bytes(data[p.at + 2 : p.at + 4], "big")
        to = Ends(data[at : at + size], data[at + size : at + 2 * size], *ports, p.ends.protocol)
        backend, permit, masquerade = self._permitted(p, to, decided)
        if why := wrong_rewrite(frame, data, p, to, permit.out):
            raise WrongPacketError(f"the first packet of a young flow: {why}")
        if p.length > permit.mtu_out and not p.odd:
            raise WrongPacketError(f"a young flow was opened by a packet of {p.length} bytes")
        self._begin(p, device, to, backend, permit, masquerade)

    def _permitted(self, p: Parsed, to: Ends, decided: Verdict) -> tuple[int, Permit, bool]:
        """The young flow's backend and permit."""
        for backend, (address, port, masquerade) in decided.backends.items():
            frontend = p.ends.destination, p.ends.destination_port
            permit = self.permits.get((p.ends.source, frontend, address, port, p.ends.protocol, masquerade))
            if permit is None or (address, port) != (to.destination, to.destination_port):
                continue
            if to.source != (permit.snat if masquerade else p.ends.source):
                raise WrongPacketError(f"source {to.source.hex()}")
            own = to.source_port == p.ends.source_port and not masquerade
            if not own and not SNAT_PORTS[0] <= to.source_port <= SNAT_PORTS[1]:
                raise WrongPacketError(f"source port {to.source_port}")
            return backend, permit, masquerade
        raise WrongPacketError(f"sent to a wrong receiver: {to}")

    def _begin(self, p: Parsed, device: int, to: Ends, backend: int, permit: Permit, masquerade: bool) -> None:
        self._forget(p.ends)
        back = to.turned()
        if (other := self.live.get(back)) and self._is_known(other.other):
            raise WrongPacketError(f"two young flows with the replies {back}")
        self._forget(back)
        self.live[p.ends] = Live(to, device, permit.out, permit.mtu_out, backend, False, masquerade, back)
        nic = self.world.devices["nic"]
        self.live[back] = Live(p.ends.turned(), nic, permit.back, permit.mtu_back, backend, True, masquerade, p.ends)
        # Create more packets of it, from both sides.
        self.pools.live += [p.ends, back]
        del self.pools.live[:-80]
        self.counts["young"] += 1

    def _opened_with_cut_checksum(self, p: Parsed, device: int, decided: Verdict | None) -> None:
        """If the checksum is cut off, the packet is dropped, but its flow is in the table."""
        if not self.fast or decided is None or decided.kind != "serve" or p.ends in self.live:
            return
        value = self._entry(p.ends)
        if value is None:
            return
        btf = self.world.object.btf
        a = btf.struct("flow_rewrite").unpack(btf.struct("flow").unpack(value)["rewrite"])
        ends = bytes(a["source"])[: self.size], bytes(a["destination"])[: self.size]
        to = Ends(*ends, a["source_port"], a["destination_port"], p.ends.protocol)
        self._begin(p, device, to, *self._permitted(p, to, decided))

    def whole(self) -> None:
        """The table holds no half flow: a reply's entry without the client's would be useless."""
        if not self.fast:
            return
        btf = self.world.object.btf
        rewrite, flow = btf.struct("flow_rewrite"), btf.struct("flow")
        entries = dict(self.world.object.maps["flows"].items())
        young: Counter[int] = Counter()
        for key, value in entries.items():
            a, mine = rewrite.unpack(flow.unpack(value)["rewrite"]), self.layout.unpack(key)
            other = self.layout.pack(
                source=a["destination"], destination=a["source"], source_port=a["destination_port"],
                destination_port=a["source_port"], protocol=mine["protocol"], ipv6=mine["ipv6"],
            )  # fmt: skip
            if other not in entries:
                raise WrongPacketError(f"half a flow: {key.hex()}, packet 0,")
            if flow.unpack(value)["young"] and not flow.unpack(value)["reply"]:
                young[a["device_in"]] += 1
        counted = {
            int.from_bytes(key, sys.byteorder): int.from_bytes(value, sys.byteorder)
            for key, value in self.world.object.maps["young_counts"].items()
        }
        if {device: number for device, number in counted.items() if number} != young:
            raise WrongPacketError(f"young flows of devices: counted {counted}, there {dict(young)}, packet 0,")
        self.counts["entries at the end of a round"] += len(entries)

    def _entry(self, ends: Ends) -> bytes | None:
        """The entry of packets with these ends: of the flow table, or of an exchange."""
        key = self.key(ends)
        if (value := self.world.object.maps["flows"].lookup(key)) is not None:
            return value
        if exchange := Exchange.of(self.world, key, ends.source, ends.source_port):
            return exchange.entry(reply=False)
        exchange = Exchange.of(self.world, key, ends.destination, ends.destination_port, reply=True)
        return None if exchange is None else exchange.entry(reply=True)

    def _is_known(self, ends: Ends) -> bool:
        return self._entry(ends) is not None

    def key(self, ends: Ends) -> bytes:
        key: bytes = self.layout.pack(
            source=ends.source.ljust(16, b"\0"), destination=ends.destination.ljust(16, b"\0"),
            source_port=ends.source_port, destination_port=ends.destination_port, protocol=ends.protocol,
            ipv6=int(self.size == 16),
        )  # fmt: skip
        return key


RANGES = {
    4: ("192.0.2.0/24", "10.244.0.0/16", "172.16.0.10/32", "0.0.0.0/1"),
    6: ("2001:db8::/64", "fd00:10:244::/48", "fd00:ac::10/128", "2000::/3"),
}


def _packed(text: str) -> bytes:
    return ip_address(text).packed


def _fragment(frame: bytes, kind: int) -> bytes | None:
    """What the fragments of a packet have in common. For IPv6, only if the fragment header comes first."""
    if kind == 0x0800 and len(frame) >= 34 and int.from_bytes(frame[20:22], "big") & 0x3FFF:
        return frame[26:34] + frame[18:20] + frame[23:24]
    if kind == 0x86DD and len(frame) >= 62 and frame[20] == 44:
        return frame[22:54] + frame[58:62] + frame[54:55]
    return None


def runners(world: ProgramNode, name: str) -> dict[str, Runner]:
    """The programs that are loaded for the round."""
    found = {
        each: Runner(world.object.programs[each]) for each in ("tc_ethernet", "tc_bridge_port", "tc_l3", "tc_egress")
    }
    if name == "xdp":
        assert world.xdp is not None
        found["xdp"] = Runner(world.xdp, xdp=True)
    return found


def play(
    world: ProgramNode,
    name: str,
    seed: int,
    number: int,
    counts: Counter[str],
    only: list[int] | None = None,
    note: Callable[[bytes, str], None] = lambda frame, program: None,
) -> None:
    """One round, or only its packets ``only``. ``note`` is called with each frame and its program."""
    made = Round(world, name, seed, counts)
    programs = runners(world, name)
    packets = None if only is None else {*only}
    choices = made.programs()
    for index in range(number):
        program, device = made.rng.choice(choices)
        frame = make(made.rng, made.pools, program == "tc_l3")
        if made.fast and made.rng.random() < 0.8:
            device = _device_of(made, frame)
        note(frame, program)
        if packets is not None and index not in packets:
            continue
        try:
            made.one(program, device, frame, programs)
        except WrongPacketError as error:
            where = f"family {world.family}, world {name!r}, seed {seed}, packet {index}, {program} on {device}"
            raise WrongPacketError(f"{error}\n{where}\nframe {frame.hex()}") from None

    made.whole()


def _link_header(program: str, frame: bytes) -> int:
    """Where the program reads the IP header.

    In a test run the kernel takes every packet for an Ethernet frame. tc_l3 asks it where the IP header is, unless the
    packet begins with one of its own length that is not GRE's.
    """
    if program != "tc_l3":
        return 14
    if frame[12:14] == b"\x08\0":
        begins = frame[0] >> 4 == 4 and frame[9] != 47 and int.from_bytes(frame[2:4], "big") == len(frame)
    else:
        begins = frame[0] >> 4 == 6 and int.from_bytes(frame[4:6], "big") + 40 == len(frame)
    return 0 if begins else 14


def _device_of(made: Round, frame: bytes) -> str:
    """Replies come in at the other device."""
    p = parse(frame, 14, int.from_bytes(frame[12:14], "big"))
    live = made.live.get(p.ends) if p else None
    return "nic" if live and live.reply else "pods"


def shrunk(world: ProgramNode, name: str, seed: int, last: int) -> list[int]:
    """The fewest packets of a round with the finding: halves, quarters and so on are left out in turn."""
    kept, size = _related(world, name, seed, last), 0
    if not _fails(world, name, seed, [*kept, last]):
        kept = list(range(last))
    size, budget = max(len(kept) // 2, 1), 60
    while size and kept and budget:
        at = 0
        while at < len(kept) and budget:
            tried = kept[:at] + kept[at + size :]
            budget -= 1
            if _fails(world, name, seed, [*tried, last]):
                kept = tried
            else:
                at += size
        size //= 2
    return [*kept, last]


def _related(world: ProgramNode, name: str, seed: int, last: int) -> list[int]:
    """The earlier packets that share an end with the last one."""
    seen: list[set[tuple[bytes, int]]] = []

    def note(frame: bytes, program: str) -> None:
        p = parse(frame, _link_header(program, frame), int.from_bytes(frame[12:14], "big"))
        places = {(p.ends.source, p.ends.source_port), (p.ends.destination, p.ends.destination_port)} if p else set()
        seen.append(places)

    with contextlib.suppress(WrongPacketError):
        play(world, name, seed, last + 1, Counter(), note=note)
    if len(seen) <= last:  # another packet fails now: the kernel chooses endpoints at random
        return list(range(last))
    return [index for index, places in enumerate(seen[:last]) if places & seen[last]]


def _fails(world: ProgramNode, name: str, seed: int, only: list[int]) -> bool:
    try:
        play(world, name, seed, only[-1] + 1, Counter(), only)
    except WrongPacketError:
        return True
    return False


def fuzz(world: ProgramNode, number: int, seed: int, names: tuple[str, ...] = tuple(SETTINGS)) -> Counter[str]:
    """Run so many packets in rounds. WrongPacketError holds the smallest case."""
    counts: Counter[str] = Counter()
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.Random(seed).choice(sorted(cpus))})
    try:
        for turn in range(-(-number // PACKETS_A_ROUND)):
            name = names[turn % len(names)]
            size = min(PACKETS_A_ROUND, number - turn * PACKETS_A_ROUND)
            try:
                play(world, name, seed + turn, size, counts)
            except WrongPacketError as error:
                last = int(str(error).split(", packet ")[1].split(",")[0])
                needed = shrunk(world, name, seed + turn, last)
                again = f"play(ProgramNode({world.family}), {name!r}, {seed + turn}, {last + 1}, Counter(), {needed})"
                raise WrongPacketError(f"{error}\nit needs {len(needed)} packets: {again}") from None
            counts[f"packets: {name}"] += size
    finally:
        os.sched_setaffinity(0, cpus)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.packet.fuzz", description=f"{__doc__} Needs root.")
    parser.add_argument("number", type=int, metavar="NUMBER", help="how many packets")
    parser.add_argument("seed", type=int, metavar="SEED", help="of the first round; the next round has the next number")
    arguments = parser.parse_args()
    number, seed = arguments.number, arguments.seed
    for family in (4, 6):
        began = time.process_time()
        world = ProgramNode(family)
        try:
            print(f"IPv{family}, seed {seed}: {number // 2} packets", flush=True)
            for what, times in sorted(fuzz(world, number // 2, seed).items()):
                print(f"{times:10d} {what}")
        finally:
            world.close()
        print(f"{time.process_time() - began:.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
