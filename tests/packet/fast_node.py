# SPDX-License-Identifier: Apache-2.0
"""A node whose fast path is open, and flows whose packets a test sends one by one.

The tests play the part of netfilter: they give tc_ethernet the packet that comes in, and tc_egress the packet that
leaves, with the number of the hand-over record that the kernel would carry in skb->tc_index.
"""

from __future__ import annotations

import functools
import operator
import os
import struct
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from scapy.layers.inet import IP, TCP, UDP, IPOption_NOP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt, IPv6ExtHdrFragment
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from pyebpf_proxy.common.bpf_constants import LASTING_IPV4, LASTING_IPV6
from pyebpf_proxy.datapath.loader.libbpf import Object, RunResult, SkBuff
from tests import ROOT
from tests.packet.program_node import GO_ON, NODE_MAC, PROTOCOLS, ProgramNode

REDIRECT = 7
CLIENT_MAC = "02:00:00:00:0c:01"
FAR = "02:00:00:00:0f:01"
NEW = 0xEE000001
#: As in bpf/flow_maps.h.
HANDOVER_MARK, HANDOVER_SHIFT = 0xA000, 5
SECOND = 1_000_000_000
#: The clock of bpf_ktime_get_coarse_ns(). Python has no name for it.
_CLOCK_MONOTONIC_COARSE = 6
SNAT_PORTS = (20000, 20999)
#: Values of the field redirect of struct link.
OTHER_MACHINE, POD = 1, 2
#: The directions of a flow: the client's and the replies'.
BOTH = [False, True]
U64 = (1 << 64) - 1
#: As in bpf/renew.h.
CLAIMED = U64


def tag_of(key: bytes) -> int:
    """The tag in the flow table's entry with this key (bpf/flow_table.h)."""
    words = struct.unpack("<5Q", key)
    turned = [word << by | word >> 64 - by for word, by in zip(words, (0, 7, 14, 28, 21), strict=True)]
    tag = functools.reduce(operator.xor, (word & U64 for word in turned))
    return ((tag ^ tag >> 32) * 0x9E3779B97F4A7C15 & U64) >> 32 | 1


def now() -> int:
    return time.clock_gettime_ns(_CLOCK_MONOTONIC_COARSE)


@functools.cache
def _named() -> Object:
    return Object.open(ROOT / "build" / "tests" / "named.bpf.o").load()


@contextmanager
def one_cpu() -> Iterator[None]:
    """Hand-over records are per CPU: ingress and egress must run on the same one."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


@contextmanager
def real_time_priority() -> Iterator[None]:
    """Give this process real-time priority, for steps where milliseconds count."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def device(world: ProgramNode, name: str, **changes: Any) -> None:
    value = world.object.btf.struct("node_device").pack(**{"redirect": 1, "mtu": 1500, **changes})
    world.object.maps["devices"].update(world.devices[name].to_bytes(4, "little"), value)


def fast_node(world: ProgramNode, **settings: Any) -> ProgramNode:
    """The state that the agent writes: devices known, agent alive, a service of each protocol, no flow yet."""
    world.forget_flows()
    world.settings = {}
    low, high = SNAT_PORTS
    world.load(**{"fast_path": 1, "xdp": 0, "snat_port_min": low, "snat_port_max": high, **settings})
    for name in world.devices:
        device(world, name)
    world.write_fast_path_state()
    world.service(["remote"])
    world.service(["remote"], protocol="udp", service=2)
    return world


def filtering_node(world: ProgramNode, **settings: Any) -> ProgramNode:
    """As ``fast_node()``; the filter of clients whose flows conntrack may have is complete."""
    fast_node(world, load=1, **settings)
    sweep(world)
    complete_filter(world)
    return world


@dataclass
class Flow:
    """A pod's connection to ``cluster_ip``, whose endpoint is ``remote`` by default."""

    world: ProgramNode
    protocol: str = "tcp"
    client: str = "pod"
    frontend: str = "cluster_ip"
    port: int = 80
    endpoint: str = "remote"
    masquerade: str = ""
    sport: int = 40000
    entrance: str = "pods"
    exit: str = "nic"
    #: The source port that the endpoint sees, if it differs.
    snat_port: int = 0
    endpoint_port: int = 8080

    # ---- packets ------------------------------------------------------------------------------------

    def frame(self, reply: bool = False, **more: Any) -> Packet:
        """The packet as it comes in."""
        sender, port = self.masquerade or self.client, self.snat_port or self.sport
        if reply:
            return self.packet(self.endpoint, sender, self.endpoint_port, port, FAR, NODE_MAC, **more)
        return self.packet(self.client, self.frontend, self.sport, self.port, CLIENT_MAC, NODE_MAC, **more)

    def expected(self, reply: bool = False, hops: int = 64, **more: Any) -> Packet:
        """The packet that ``frame`` with the same arguments must become."""
        more["hops"] = hops - 1
        sender, port = self.masquerade or self.client, self.snat_port or self.sport
        if reply:
            return self.packet(self.frontend, self.client, self.port, self.sport, NODE_MAC, CLIENT_MAC, **more)
        return self.packet(sender, self.endpoint, port, self.endpoint_port, NODE_MAC, FAR, **more)

    def packet(
        self,
        source: str,
        destination: str,
        sport: int,
        dport: int,
        mac_from: str,
        mac_to: str,
        flags: str = "A",
        size: int = 100,
        hops: int = 64,
        seq: int = 1000,
        ack: int = 1,
        tos: int = 0,
    ) -> Packet:
        addresses = {"src": self.world.address(source), "dst": self.world.address(destination)}
        layer = IP(**addresses, ttl=hops, id=7, tos=tos) if self.world.family == 4 else IPv6(**addresses, hlim=hops)
        ports = {"sport": sport, "dport": dport}
        transport = TCP(**ports, flags=flags, seq=seq, ack=ack) if self.protocol == "tcp" else UDP(**ports)
        payload = Raw(bytes(i % 251 for i in range(size)))
        return Ether(src=mac_from, dst=mac_to) / layer / transport / payload

    # ---- the programs -------------------------------------------------------------------------------

    def run(self, reply: bool = False, frame: Packet | bytes | None = None, by: str = "", **skb: int) -> RunResult:
        """Run one packet through the ingress program, on the device where it comes in."""
        name = by or (self.exit if reply else self.entrance)
        context = SkBuff(ifindex=self.world.devices[name], **skb)
        data = bytes(self.frame(reply) if frame is None else frame)
        return self.world.object.programs["tc_ethernet"].test_run(data, context)

    def leave(
        self,
        frame: Packet,
        record: int,
        reply: bool = False,
        new: bool = False,
        by: str = "",
        came_by: str = "",
        age: int = 0,
        priority: int = 0,
        nonce: int | None = None,
        mark: int = 0,
    ) -> RunResult:
        """The packet that leaves netfilter, with the number of its record. ``nonce``: another than the record's."""
        world = self.world
        if nonce is None:
            nonce = next((nonce_of(each) for each in records(world) if each["number"] == record), 0)
        programs = _named()
        programs.maps["next"].update(bytes(4), world.object.programs["tc_egress"].fd.to_bytes(4, "little"))
        skb = SkBuff(
            ifindex=world.devices[by or (self.entrance if reply else self.exit)],
            ingress_ifindex=world.devices[came_by or (self.exit if reply else self.entrance)],
            priority=NEW if new else priority,
            mark=mark,
            cb=(HANDOVER_MARK | record << HANDOVER_SHIFT, nonce, 0, 0, 0),
        )
        # A record is valid for 20 ms, and a busy machine may run this process later: give it a time in the future.
        write_record(world, record, when=now() - age if age else now() + SECOND)
        return programs.programs["named"].test_run(bytes(frame), skb)

    def pass_netfilter(self, reply: bool = False, new: bool = False, **more: Any) -> dict[str, Any]:
        """Let a packet in, check that netfilter gets it, translate it and let it out; returns the record ({}: none)."""
        frame = self.frame(reply, **more)
        found = self.run(reply, frame)
        assert found.retval == GO_ON, self.world.reasons()
        assert found.data == bytes(frame), "netfilter translates, not the program"
        record = pending_record(self.world)
        if record:
            self.leave(self.expected(reply, **more), record["number"], reply, new)
        return record

    def open_through_netfilter(self) -> dict[str, Any]:
        """Send the first packet through netfilter."""
        return self.pass_netfilter(flags="S", size=0, new=True)

    def permit(self) -> None:
        """Send two flows of the pair through netfilter in both directions, which grants a permit."""
        first = Flow(**{**self.__dict__, "sport": self.sport + 1000})
        port = self.snat_port and self.snat_port + 1
        second = Flow(**{**self.__dict__, "sport": self.sport + 1001, "snat_port": port})
        drop_records(self.world)
        for each in (first, second):
            each.open_through_netfilter()
            each.pass_netfilter(reply=True, flags="SA", size=0)
        write_permits(self.world, until=now() + 3600 * SECOND, back_until=now() + 3600 * SECOND)
        reset_counters(self.world)

    def open_young(self) -> RunResult:
        """Send the first packet of a young flow; reads the source port that it got."""
        found = self.run(frame=self.frame(flags="S", size=0, seq=100, ack=0))
        assert found.retval == REDIRECT, self.world.reasons()
        if self.masquerade:
            self.snat_port = self.source_port(found)
        return found

    def source_port(self, found: RunResult) -> int:
        """The source port of a packet that was sent."""
        at = 14 + (20 if self.world.family == 4 else 40)
        return int.from_bytes(found.data[at : at + 2], "big")

    def answer(self) -> None:
        """Complete the handshake."""
        for reply, flags, seq, ack in ((True, "SA", 500, 101), (False, "A", 101, 501)):
            frame = self.frame(reply, flags=flags, size=0, seq=seq, ack=ack)
            assert self.run(reply, frame).retval == REDIRECT, self.world.reasons()

    # ---- the table ----------------------------------------------------------------------------------

    def key(self, reply: bool = False) -> bytes:
        """``struct flow_key`` of an incoming packet."""
        packed = self.world.packed
        sender, port = self.masquerade or self.client, self.snat_port or self.sport
        if reply:
            ends = packed(self.endpoint), packed(sender), self.endpoint_port, port
        else:
            ends = packed(self.client), packed(self.frontend), self.sport, self.port
        return self.world.object.btf.struct("flow_key").pack(
            source=ends[0].ljust(16, b"\0"),
            destination=ends[1].ljust(16, b"\0"),
            source_port=ends[2],
            destination_port=ends[3],
            protocol=PROTOCOLS[self.protocol],
            ipv6=int(self.world.family == 6),
        )

    def entry(self, reply: bool = False) -> dict[str, Any] | None:
        """The entry of the flow table; if it has none, that of an exchange."""
        value = self.world.object.maps["flows"].lookup(self.key(reply))
        if value is None and (exchange := self.exchange()) is not None:
            value = exchange.entry(reply)
        return None if value is None else dict(self.world.object.btf.struct("flow").unpack(value))

    def exchange(self) -> Exchange | None:
        """The exchange of this flow; None: there is none."""
        return Exchange.of(self.world, self.key(), self.world.packed(self.client), self.sport)

    @property
    def bucket(self) -> int:
        """The bucket of ``exchanges`` that the flow selects."""
        return bucket_of(self.world.packed(self.client), self.sport)

    def fill_bucket(self) -> None:
        """Occupy the bucket of ``exchanges`` that this flow selects: the flow enters the table."""
        layout = self.world.object.btf.struct("exchange_bucket")
        way = self.world.object.btf.struct("exchange_head")
        ways = EXCHANGE_WAYS
        future = (now() >> 20) + 3_600_000
        head = way.pack(owner=0, started=future, last_seen=future, queries=1, replies=0)
        value = layout.pack(
            there=struct.pack(f"<{ways}I", *[1] * ways), reply=struct.pack(f"<{ways}I", *[1] * ways), way=head * ways
        )
        self.world.object.maps["exchange_heads"].update(self.bucket.to_bytes(4, "little"), value)

    def entries(self) -> list[bool]:
        """Which directions are in the table."""
        return [reply for reply in (False, True) if self.entry(reply) is not None]

    def write(self, reply: bool = False, **fields: Any) -> None:
        """Change fields of an entry."""
        before = self.entry(reply)
        assert before is not None
        exchange = self.exchange()
        if exchange is not None:
            exchange.write(reply, **fields)
        else:
            value = self.world.object.btf.struct("flow").pack(**{**before, **fields})
            self.world.object.maps["flows"].update(self.key(reply), value)

    def write_rewrite(self, reply: bool = False, **fields: Any) -> None:
        """Change fields of how an entry rewrites packets."""
        layout, entry = self.world.object.btf.struct("flow_rewrite"), self.entry(reply)
        assert entry is not None
        self.write(reply, rewrite=layout.pack(**{**layout.unpack(entry["rewrite"]), **fields}))

    def set_back(self, seconds: float) -> None:
        """Set the times of both entries back."""
        span = int(seconds * SECOND)
        if (exchange := self.exchange()) is not None:
            exchange.set_back(span)
            return
        for reply in self.entries():
            entry = self.entry(reply)
            assert entry is not None
            times = {name: max(entry[name] - span, 0) for name in ("started", "last_seen", "confirmed_until")}
            if entry["confirmed_until"] == CLAIMED:
                del times["confirmed_until"]
            self.write(reply, **times)

    def link(self, reply: bool = False) -> dict[str, Any]:
        """How packets of this direction leave."""
        entry = self.entry(reply)
        assert entry is not None
        btf = self.world.object.btf
        return dict(btf.struct("link").unpack(btf.struct("flow_rewrite").unpack(entry["rewrite"])["out"]))


# ---- exchanges -------------------------------------------------------------------------------------

EXCHANGE_BUCKETS, EXCHANGE_WAYS = 3072, 4


def bucket_of(address: bytes, port: int) -> int:
    """The bucket that a client's address and port select (bpf/exchange.h)."""
    low, high = struct.unpack("<2Q", address.ljust(16, b"\0"))
    found = low ^ (port << 40 & U64)
    if len(address) == 16:
        found ^= (high << 7 | high >> 57) & U64
    found = (found ^ found >> 32) * 0x9E3779B97F4A7C15 & U64
    return (found >> 32) * EXCHANGE_BUCKETS >> 32


@dataclass
class Exchange:
    """An element of the map ``exchanges``, and its part of the bucket."""

    world: ProgramNode
    bucket: int
    way: int

    @classmethod
    def of(cls, world: ProgramNode, key: bytes, address: bytes, port: int, reply: bool = False) -> Exchange | None:
        """The exchange with this key, of a client with this address and port. ``reply``: it is the key of replies."""
        for way in range(EXCHANGE_WAYS):
            found = cls(world, bucket_of(address, port), way)
            if found.tags()[reply] and found.key(reply) == key:
                return found
        return None

    @property
    def _number(self) -> bytes:
        return (self.way * EXCHANGE_BUCKETS + self.bucket).to_bytes(4, "little")

    def value(self) -> dict[str, Any]:
        read = self.world.object.maps["exchanges"].lookup(self._number)
        assert read is not None
        return dict(self.world.object.btf.struct("exchange").unpack(read))

    def rewrite(self, reply: bool) -> dict[str, Any]:
        read = bytes(self.value()["reply" if reply else "there"])
        return dict(self.world.object.btf.struct("flow_rewrite").unpack(read))

    def key(self, reply: bool) -> bytes:
        """``struct flow_key`` of this direction: what the packets of the other one look like when they leave."""
        other = self.rewrite(not reply)
        return self.world.object.btf.struct("flow_key").pack(
            source=other["destination"],
            destination=other["source"],
            source_port=other["destination_port"],
            destination_port=other["source_port"],
            protocol=PROTOCOLS["udp"],
            ipv6=self.value()["ipv6"],
        )

    def _bucket(self) -> dict[str, Any]:
        read = self.world.object.maps["exchange_heads"].lookup(self.bucket.to_bytes(4, "little"))
        assert read is not None
        return dict(self.world.object.btf.struct("exchange_bucket").unpack(read))

    def tags(self) -> tuple[int, int]:
        bucket = self._bucket()
        there, reply = (struct.unpack(f"<{EXCHANGE_WAYS}I", bytes(bucket[name])) for name in ("there", "reply"))
        return there[self.way], reply[self.way]

    def head(self) -> dict[str, Any]:
        layout = self.world.object.btf.struct("exchange_head")
        return dict(layout.unpack(bytes(self._bucket()["way"])[self.way * layout.size :][: layout.size]))

    def write_head(self, **fields: Any) -> None:
        layout = self.world.object.btf.struct("exchange_head")
        bucket, at = self._bucket(), self.way * layout.size
        ways = bytes(bucket["way"])
        bucket["way"] = ways[:at] + layout.pack(**{**self.head(), **fields}) + ways[at + layout.size :]
        self._write_bucket(bucket)

    def _write_bucket(self, bucket: dict[str, Any]) -> None:
        value = self.world.object.btf.struct("exchange_bucket").pack(**bucket)
        self.world.object.maps["exchange_heads"].update(self.bucket.to_bytes(4, "little"), value)

    def leave_only_tag(self, reply: bool) -> None:
        """Keep one of the tags in the first way of the bucket, as if it were another flow's, and empty the element."""
        tags = {"there": bytes(4 * EXCHANGE_WAYS), "reply": bytes(4 * EXCHANGE_WAYS)}
        tags["reply" if reply else "there"] = struct.pack(f"<{EXCHANGE_WAYS}I", self.tags()[reply], 0, 0, 0)
        self._write_bucket({**self._bucket(), **tags})
        self.world.object.maps["exchanges"].update(self._number, bytes(self.world.object.btf.struct("exchange").size))

    def entry(self, reply: bool) -> bytes:
        """``struct flow`` of this direction, as the flow table would have it."""
        value, head = self.value(), self.head()
        of_both = {name: value[name] for name in ("generation", "service", "backend")}
        return self.world.object.btf.struct("flow").pack(
            **of_both,
            rewrite=value["reply" if reply else "there"],
            started=head["started"] << 20,
            last_seen=head["last_seen"] << 20,
            packets=head["replies" if reply else "queries"],
            first_counted=head["first_counted"],
            young=1,
            reply=int(reply),
        )

    def write(self, reply: bool, **fields: Any) -> None:
        """Change fields of ``struct flow`` that an exchange has."""
        value = self.value()
        for name, written in fields.items():
            if name == "packets":
                self.write_head(**{"replies" if reply else "queries": written})
            elif name == "rewrite":
                value["reply" if reply else "there"] = written
            else:
                assert name in value, name
                value[name] = written
        self.world.object.maps["exchanges"].update(self._number, self.world.object.btf.struct("exchange").pack(**value))

    def set_back(self, span: int) -> None:
        head = self.head()
        self.write_head(**{name: (head[name] - (span >> 20)) & 0xFFFFFFFF for name in ("started", "last_seen")})

    def set_idle(self, seconds: float) -> None:
        """Set its times so that its last packet was so long ago, however long the test has needed until now."""
        idle = ((now() >> 20) - self.head()["last_seen"]) & 0xFFFFFFFF
        self.set_back(int(seconds * SECOND) - (idle << 20))


# ---- maps ------------------------------------------------------------------------------------------


def reset_counters(world: ProgramNode) -> None:
    reasons = world.object.maps["counters"]
    for number in range(reasons.max_entries):
        key = number.to_bytes(4, "little")
        reasons.update(key, b"".join(bytes(len(v)) for v in reasons.lookup_cpus(key) or []))


def records(world: ProgramNode) -> list[dict[str, Any]]:
    """Hand-over records that ingress has written and the observer has not used."""
    of, layout = world.object.maps["handovers"], world.object.btf.struct("handover")
    found = []
    for slot in range(of.max_entries):
        found += [dict(layout.unpack(v)) for v in of.lookup_cpus(slot.to_bytes(4, "little")) or []]
    return [record for record in found if record["number"]]


def nonce_of(record: dict[str, Any]) -> int:
    return int.from_bytes(bytes(record["nonce"]), "little")


def pending_record(world: ProgramNode) -> dict[str, Any]:
    """The only record; {}: there is none."""
    found = records(world)
    assert len(found) <= 1
    return found[0] if found else {}


def write_record(world: ProgramNode, which: int, **fields: Any) -> None:
    of, layout = world.object.maps["handovers"], world.object.btf.struct("handover")
    key = (which % of.max_entries).to_bytes(4, "little")
    values = []
    for value in of.lookup_cpus(key) or []:
        record = dict(layout.unpack(value))
        values.append(layout.pack(**{**record, **fields}) if record["number"] else value)
    of.update(key, b"".join(values))


def drop_records(world: ProgramNode) -> None:
    for record in records(world):
        write_record(world, record["number"], number=0)


def permits(world: ProgramNode) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    btf = world.object.btf
    items = list(world.object.maps["permits"].items())
    return [(dict(btf.struct("permit_key").unpack(k)), dict(btf.struct("permit").unpack(v))) for k, v in items]


def write_permits(world: ProgramNode, **fields: Any) -> None:
    layout = world.object.btf.struct("permit")
    for key, value in list(world.object.maps["permits"].items()):
        world.object.maps["permits"].update(key, layout.pack(**{**layout.unpack(value), **fields}))


def young_flows_of(world: ProgramNode, name: str) -> int:
    value = world.object.maps["young_counts"].lookup(world.devices[name].to_bytes(4, "little"))
    return int.from_bytes(value or b"", "little")


def ask_from(world: ProgramNode, entry: int, anew: bool = False, extended: Collection[int] = ()) -> int:
    """A sweep that asks for promotions from this entry on: where the queue was full. ``anew``: an agent's first one.

    ``extended``: the families whose permits it extends.
    """
    bits = sum({4: LASTING_IPV4, 6: LASTING_IPV6}[family] for family in extended)
    request = b"".join(word.to_bytes(4, sys.byteorder) for word in (entry, anew, bits))
    return world.object.programs["sweep_flows"].test_run(bytes(14) + request).retval


def extend_permits(world: ProgramNode, families: Collection[int]) -> None:
    """A sweep while conntrack is nearly full: the permits of these families are extended."""
    ask_from(world, 0, extended=families)


def sweep(world: ProgramNode, anew: bool = False) -> dict[str, int]:
    """As the agent runs it; what it found."""
    ask_from(world, 0, anew)
    value = world.object.maps["sweep_results"].lookup(bytes(4)) or b""
    return dict(world.object.btf.struct("sweep_result").unpack(value))  # type: ignore[arg-type]


def note_tracked(world: ProgramNode, data: bytes) -> bool:
    """Note this ``struct flow_key`` as that of a flow that conntrack has; zeros complete the filter."""
    return world.object.programs["note_tracked_flow"].test_run(bytes(14) + data).retval != 0


def complete_filter(world: ProgramNode) -> None:
    """As the agent does when it has noted what conntrack had."""
    assert note_tracked(world, bytes(world.object.btf.struct("flow_key").size))


def empty_table(world: ProgramNode) -> None:
    """Remove every flow of the flow table."""
    flows = world.object.maps["flows"]
    for key, _ in list(flows.items()):
        flows.delete(key)


def set_age(world: ProgramNode, age: int) -> None:
    """Set every byte of the filter of tracked clients, in units of its clock."""
    of = world.object.maps["tracked_clients"]
    value = of.lookup(bytes(4)) or b""
    of.update(bytes(4), value[:4] + bytes([((now() >> 30) - age) % 255 + 1]) * (len(value) - 4))


@contextmanager
def route_marks(world: ProgramNode, bits: int) -> Iterator[None]:
    """Meanwhile these bits of packets' marks choose routes, in the family of the tests."""
    of, family = world.object.maps["route_marks"], int(world.family == 6).to_bytes(4, sys.byteorder)
    of.update(family, bits.to_bytes(4, sys.byteorder))
    try:
        yield
    finally:
        of.update(family, bytes(4))


def promote(world: ProgramNode, key: bytes) -> int:
    return world.object.programs["promote_flow"].test_run(bytes(14) + key).retval


def end(world: ProgramNode, key: bytes) -> int:
    return world.object.programs["end_flow"].test_run(bytes(14) + key).retval


VARIANTS: dict[str, dict[str, Any]] = {
    "own address": {},
    "masqueraded": {"client": "client", "frontend": "vip", "masquerade": "node", "entrance": "nic", "snat_port": 50000},
    "a NodePort, endpoint here": {
        "client": "client",
        "frontend": "node",
        "port": 30080,
        "masquerade": "pod_gateway",
        "snat_port": 50000,
        "entrance": "nic",
        "exit": "pods",
    },
    "hairpin": {"client": "remote", "masquerade": "pod_gateway", "exit": "pods", "snat_port": 50000},
}


def young(world: ProgramNode, protocol: str = "tcp", in_table: bool = False, **ends: Any) -> Flow:
    """A young flow; ``in_table``: a UDP flow that is no exchange."""
    flow = Flow(world, protocol, **ends)
    flow.permit()
    if in_table:
        flow.fill_bucket()
    flow.open_young()
    return flow


def options(flow: Flow, **more: Any) -> Packet:
    frame = flow.frame(**more)
    if flow.world.family == 4:
        frame[IP].options = [IPOption_NOP()] * 4
        return frame
    below = frame[IPv6].payload
    frame[IPv6].remove_payload()
    return frame / IPv6ExtHdrDestOpt() / below


def fragments(flow: Flow, reply: bool = False, number: int = 9) -> tuple[Packet, Packet]:
    """A datagram in two fragments."""
    whole = flow.frame(reply, size=72)
    transport = whole[UDP]
    link = Ether(src=whole.src, dst=whole.dst)
    return cut(flow.world, link / whole[Ether].payload, bytes(transport)[:40], bytes(transport)[40:], number)


def cut(world: ProgramNode, whole: Packet, first: bytes, later: bytes, number: int) -> tuple[Packet, Packet]:
    link = Ether(src=whole.src, dst=whole.dst)
    if world.family == 4:
        old = whole[IP]
        ip = {"src": old.src, "dst": old.dst, "ttl": old.ttl, "id": number, "proto": 17}
        return link / IP(flags="MF", **ip) / Raw(first), link / IP(frag=5, **ip) / Raw(later)
    old = whole[IPv6]
    ip6 = IPv6(src=old.src, dst=old.dst, hlim=old.hlim)
    head = {"id": number, "nh": 17}
    return (
        link / ip6 / IPv6ExtHdrFragment(m=1, **head) / Raw(first),
        link / ip6 / IPv6ExtHdrFragment(offset=5, **head) / Raw(later),
    )


CONFIRM = 3


def learned_flow(world: ProgramNode, protocol: str = "tcp", **ends: Any) -> Flow:
    """A kernel's flow that the table has learned, confirmed in both directions."""
    flow = Flow(world, protocol, **ends)
    flow.pass_netfilter(reply=True)
    if not flow.entries():
        flow.pass_netfilter(reply=True)
    assert flow.entries() == [False, True], world.reasons()
    for _ in range(10):
        flow.pass_netfilter()
        # If the machine pauses for 20 ms, the record is too old.
        if flow.link()["mtu"]:
            break
    for reply in (False, True):
        flow.write(reply, confirmed_until=now() + 3600 * SECOND)
    reset_counters(world)
    return flow


def close(flow: Flow) -> None:
    """FIN in both directions, in sequence."""
    flow.answer()
    for reply, flags, seq, ack in ((False, "FA", 101, 501), (True, "FA", 501, 102), (False, "A", 102, 502)):
        assert flow.run(reply, flow.frame(reply, flags=flags, size=0, seq=seq, ack=ack)).retval == REDIRECT


def reset_after_data(flow: Flow, reply: bool) -> None:
    """Data, and a RST before the other side has acknowledged the data."""
    seq = 501 if reply else 101
    flow.run(reply, flow.frame(reply, size=40, seq=seq))
    assert flow.run(reply, flow.frame(reply, flags="R", size=0, seq=seq + 40, ack=0)).retval == REDIRECT


# ---- the ring of recent flows (bpf/young.h) -----------------------------------------------------------

_NEXT_SLOT = (0).to_bytes(4, "little")


def rewind_recent_flows(world: ProgramNode, flows: int = 1) -> set[bytes]:
    """Let the next flow take the slot of an earlier one, by default the last. Returns these slots, on all CPUs."""
    turns = world.object.maps["recent_next"]
    values = [max(int.from_bytes(value, "little") - flows, 0) for value in turns.lookup_cpus(_NEXT_SLOT) or []]
    turns.update(_NEXT_SLOT, b"".join(value.to_bytes(4, "little").ljust(8, b"\0") for value in values))
    slots = world.object.maps["recent_flows"].max_entries
    return {(value % slots).to_bytes(4, "little") for value in values}


def open_in_slot_of(world: ProgramNode, flow: Flow, sport: int = 43000, flows: int = 1) -> None:
    """Open a new flow of the pair in the slot of ``flow``, which was opened ``flows`` flows ago."""
    slots = rewind_recent_flows(world, flows)
    entry = flow.entry()
    assert entry is not None
    # The test may have set the flow's times back; the slot holds the time of its start too.
    stamp = (int(entry["started"]) >> 20 & 0xFFFF).to_bytes(2, "little")
    recent = world.object.maps["recent_flows"]
    for slot in slots:
        values = recent.lookup_cpus(slot) or []
        recent.update(slot, b"".join(value[:-2] + stamp if any(value) else value for value in values))
    later = Flow(world, flow.protocol, sport=sport)
    later.fill_bucket()
    later.open_young()
    assert later.entries() == [False, True]
