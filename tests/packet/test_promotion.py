# SPDX-License-Identifier: Apache-2.0
"""Promotion of young flows that the tests write, with the real programs and the real conntrack table."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from struct import Struct
from types import SimpleNamespace
from typing import Any

import pytest

from pyebpf_proxy.common.bpf_constants import CLOSE, RESTORE, SHORTEN
from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.datapath.connections import create, ctnetlink, drain, promotion
from pyebpf_proxy.datapath.connections.create import ABANDONED_SECONDS, Entry, Outcome, Result
from pyebpf_proxy.datapath.connections.ctnetlink import TrackedEntry
from pyebpf_proxy.datapath.connections.flow_reader import Flow, Masqueraded
from pyebpf_proxy.datapath.connections.promotion import Promoter
from pyebpf_proxy.datapath.loader import kernel_objects, programs
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Map
from pyebpf_proxy.datapath.loader.programs import Loaded, Settings, load
from pyebpf_proxy.datapath.managers.former_run import TakeOver
from pyebpf_proxy.datapath.maps import former_flows
from pyebpf_proxy.see import flows, young
from pyebpf_proxy.services.addresses import Place
from pyebpf_proxy.services.model import Protocol
from pyebpf_proxy.services.node_facts import NodeFacts
from tests.packet.fast_node import tag_of
from tests.packet.program_node import OBJECT, enter_namespace, libc
from tests.support.conntrack import create_now
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

SECOND = 10**9
CLIENT = {4: "10.244.1.9", 6: "fd00:10:244:1::9"}
FRONTEND = {4: "10.96.0.10", 6: "fd00:10:96::10"}
ENDPOINT = {4: "10.244.2.5", 6: "fd00:10:244:2::5"}
NODE = {4: "10.0.0.1", 6: "fd00:10::1"}
GATEWAY = {4: "10.244.1.1", 6: "fd00:10:244:1::1"}


@pytest.fixture(scope="module")
def loaded(bpf_objects: Path) -> Iterator[Loaded]:
    """``bpf_objects``: they are built."""
    loaded = load(Settings(netns_cookie=1, fast_path=True), objects=OBJECT.parent)
    assert not loaded.why_not_fast
    yield loaded
    loaded.close()


@pytest.fixture
def namespace() -> Iterator[None]:
    """An empty conntrack table."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert libc.unshare(0x40000000) == 0
    yield
    enter_namespace(home)
    os.close(home)


@dataclass
class Node:
    """The maps with flows, and the promoter of these programs."""

    loaded: Loaded
    family: int
    promoter: Promoter

    def young(self, port: int, age: float = 3.0, **changes: object) -> bytes:
        """Write a flow that began ``age`` seconds ago and was answered; returns its key. ``changes`` apply to both
        entries.
        """
        options = {"protocol": Protocol.TCP, "masqueraded": False, "closing": 0, "reply": True, "answers": 9}
        options |= {"to": 8080, **changes}
        size = 4 if self.family == 4 else 16

        def padded(address: str) -> bytes:
            return ip_address(address).packed.ljust(16, b"\0")

        client = padded(CLIENT[self.family]), port
        frontend = padded(FRONTEND[self.family]), 80
        endpoint = padded(ENDPOINT[self.family]), options["to"]
        seen = (padded(NODE[self.family]), port + 1000) if options["masqueraded"] else client
        there = self._key(client, frontend, options["protocol"], size)
        back = self._key(endpoint, seen, options["protocol"], size)
        self._write(there, seen, endpoint, age, 0, options["closing"])
        if options["reply"]:
            self._write(back, frontend, client, age, 1, 0, options["answers"])
        return there

    def _key(self, source: tuple[bytes, int], destination: tuple[bytes, int], protocol: object, size: int) -> bytes:
        return self.loaded.tc.btf.struct("flow_key").pack(
            source=source[0],
            destination=destination[0],
            source_port=source[1],
            destination_port=destination[1],
            protocol=int(protocol),  # type: ignore[call-overload]
            ipv6=size == 16,
        )

    def _write(
        self,
        key: bytes,
        source: tuple[bytes, int],
        to: tuple[bytes, int],
        age: float,
        reply: int,
        closing: object,
        packets: object = 9,
    ) -> None:
        rewrite = self.loaded.tc.btf.struct("flow_rewrite").pack(
            source=source[0],
            destination=to[0],
            source_port=source[1],
            destination_port=to[1],
            tag=tag_of(key),
            tag_again=tag_of(key),
        )
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        value = self.loaded.tc.btf.struct("flow").pack(
            rewrite=rewrite,
            started=now - int(age * SECOND),
            last_seen=now,
            packets=packets,
            young=1,
            reply=reply,
            closing=int(bool(closing)),
        )
        self.loaded.maps["flows"].update(key, value)

    def write(self, key: bytes, **fields: int) -> None:
        """Change fields of the client's direction; ``young``, ``packets`` and ``last_seen`` change in both."""
        flow = self.loaded.tc.btf.struct("flow")
        found = self.promoter._flows.read(key) or self.promoter._flows.read(key, young=False)
        assert found is not None
        for each in (found.key, found.answer_key):
            value = flow.unpack(self.loaded.maps["flows"].lookup(each) or b"")
            both = {name: fields.get(name, value[name]) for name in ("young", "packets", "last_seen")}
            changes = fields if each == key else both
            self.loaded.maps["flows"].update(each, flow.pack(**{**value, **changes}))

    def write_reply(self, key: bytes, **fields: int) -> None:
        """Change fields of the endpoint's direction of a kernel's flow."""
        (found,) = self.read(key, young=False)
        flow, flows = self.loaded.tc.btf.struct("flow"), self.loaded.maps["flows"]
        flows.update(found.answer_key, flow.pack(**{**flow.unpack(flows.lookup(found.answer_key) or b""), **fields}))

    def read(self, key: bytes, young: bool = True) -> list[Flow]:
        """The flow with this key, if ``young`` matches."""
        found = self.promoter._flows.read(key, young)
        return [] if found is None else [found]

    def is_young(self, key: bytes) -> bool:
        value = self.loaded.maps["flows"].lookup(key)
        assert value is not None
        return bool(self.loaded.tc.btf.struct("flow").unpack(value)["young"])

    def drain(self, on: bool) -> None:
        self.loaded.maps["fast_path"].update(bytes(4), self.loaded.tc.btf.struct("fast_path").pack(draining=int(on)))

    # The parts of see.maps.Pinned that are used.

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.loaded.maps)

    @property
    def btf(self) -> Btf:
        return self.loaded.tc.btf

    def map(self, name: str) -> Map:
        return self.loaded.maps[name]

    def packer(self, struct: str, *fields: str) -> Struct:
        return self.btf.struct(struct).packer(*fields)

    def expire_in(self, seconds: int, *more: str) -> None:
        """Set the timeout of the entry with the client's port 1000. ``more``: other options of ``conntrack -U``."""
        ends = ["-s", CLIENT[self.family], "-d", FRONTEND[self.family], "--sport", "1000", "--dport", "80"]
        command = ["conntrack", "-U", "-p", "tcp", *ends, "-t", str(seconds), *more]
        subprocess.run(command, check=True, capture_output=True)

    def listed(self) -> list[str]:
        command = ["conntrack", "-L", "-f", f"ipv{self.family}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def node(request: pytest.FixtureRequest, loaded: Loaded, namespace: None) -> Iterator[Node]:
    ports = range(1024, 32768)
    node = Node(loaded, request.param, promotion.promoter(loaded.maps, loaded.tc.programs, loaded.tc.btf, ports))
    yield node
    node.drain(False)
    for key, _ in list(loaded.maps["flows"].items()):
        loaded.maps["flows"].delete(key)
    node.promoter.pass_now()


@pytest.mark.parametrize("masqueraded", [False, True], ids=["own source", "masqueraded"])
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["TCP", "UDP"])
def test_a_flow_that_is_due_is_promoted(node: Node, masqueraded: bool, protocol: Protocol) -> None:
    key = node.young(1000, protocol=protocol, masqueraded=masqueraded)
    node.promoter.pass_now()
    (line,) = node.listed()
    family = node.family
    seen, port = (NODE[family], 2000) if masqueraded else (CLIENT[family], 1000)
    assert f"src={CLIENT[family]} dst={FRONTEND[family]} sport=1000 dport=80 " in line
    assert f"src={ENDPOINT[family]} dst={seen} sport=8080 dport={port} [ASSURED]" in line
    assert not node.is_young(key)
    statistics = node.promoter.statistics
    assert (statistics.promoted, statistics.young, statistics.last_error) == (1, 1, "")
    node.promoter.pass_now()
    assert (statistics.promoted, statistics.young) == (1, 0)


@pytest.mark.parametrize("moment", ["before the pass", "while the entry is created"])
def test_a_udp_flow_whose_endpoint_was_removed_is_ended_instead(node: Node, moment: str) -> None:
    """The clean-up has looked at conntrack before: nothing else would ever delete the entry."""
    asked: list[tuple[int, Place, Place]] = []

    def is_stale(*flow: Any) -> bool:
        asked.append(flow)
        return moment == "before the pass" or len(asked) > 1

    ports = range(1024, 32768)
    loaded = node.loaded
    node.promoter = promotion.promoter(loaded.maps, loaded.tc.programs, loaded.tc.btf, ports, is_stale=is_stale)
    stream, connection = node.young(1000, protocol=Protocol.UDP), node.young(1001)
    node.promoter.pass_now()
    assert not [line for line in node.listed() if "udp" in line]
    assert not node.is_young(connection), "a connection keeps its endpoint"
    if moment == "before the pass":
        assert node.loaded.maps["flows"].lookup(stream) is None
        assert node.promoter.statistics.stale == 1
    size = 4 if node.family == 4 else 16
    places = (ip_address(FRONTEND[node.family]).packed[:size], 80), (ip_address(ENDPOINT[node.family]).packed, 8080)
    assert set(asked) == {(0, *places)}


def test_an_entry_of_an_unknown_protocol_does_not_keep_others_from_promotion(node: Node) -> None:
    """Another program has written it. An agent that ends for it ends again after each start."""
    node.young(1000, protocol=50)
    key = node.young(1001)
    node.promoter.pass_now()
    assert not node.is_young(key)
    assert list(young.flows(node)) == []  # type: ignore[arg-type]


def test_current_timeouts_are_used(node: Node) -> None:
    """Timeouts may change while the agent runs (finding D14)."""
    setting = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established")
    for port, seconds in ((1000, 7000), (1001, 5000)):
        setting.write_text(str(seconds))
        node.young(port)
        node.promoter.pass_now()
        (line,) = (each for each in node.listed() if f" sport={port} dport=80 " in each)
        assert seconds - 100 < int(line.split()[2]) <= seconds


@pytest.mark.parametrize("changes", [{"age": 0.5}, {"closing": 1}, {"reply": False}], ids=["new", "closing", "half"])
def test_flows_that_are_not_due_stay_young(node: Node, changes: dict[str, object]) -> None:
    node.young(1000, **changes)  # type: ignore[arg-type]
    node.promoter.pass_now()
    assert node.listed() == []
    assert node.promoter.statistics.promoted == 0


def test_unanswered_datagrams_stay_new_to_the_rules(node: Node) -> None:
    """As NEW flows, so that policies that are added later apply to them."""
    key = node.young(1000, protocol=Protocol.UDP, answers=0)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert "[UNREPLIED]" in line
    assert f"src={ENDPOINT[node.family]} dst={CLIENT[node.family]} sport=8080 dport=1000 " in line
    assert not node.is_young(key)


def test_an_unanswered_connection_ends(node: Node) -> None:
    """Also if its client continues to send."""
    key = node.young(1000, answers=0)
    waiting = node.young(1001, age=6.0, answers=0)
    node.promoter.pass_now()
    assert node.is_young(key)
    assert node.loaded.maps["flows"].lookup(waiting) is None
    assert node.listed() == []


@pytest.mark.parametrize(("sent_until", "state"), [(0, "CLOSE_WAIT"), (50, "FIN_WAIT")], ids=["acknowledged", "not"])
def test_a_half_closed_connection_that_continues_is_promoted(node: Node, sent_until: int, state: str) -> None:
    """The endpoint may need minutes for its answer: kube-proxy sets the timeout of CLOSE_WAIT to an hour."""
    key = node.young(1000, age=5.0)
    node.write(key, closing=1, sent_until=sent_until)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert line.split()[3] == state
    assert not node.is_young(key)


def test_a_flow_that_ended_since_the_request_is_skipped(node: Node) -> None:
    """The flow has changed since the sweep requested it: the promoter reads it again."""
    key = node.young(1000, reply=False)
    node.loaded.maps["promotions"]._lib.bpf_map_update_elem(node.loaded.maps["promotions"].fd, promotion_null(), key, 0)
    node.promoter.pass_now()
    assert node.listed() == []
    assert node.promoter.statistics.promoted == 0


def promotion_null() -> object:
    from pyebpf_proxy.datapath.loader._libbpf import ffi

    return ffi.NULL


def test_an_entry_whose_flow_ended_meanwhile_expires_soon(node: Node) -> None:
    """The flow ends after the entry was created. The entry would stay for five days.

    It is not deleted: a new connection may use the port and the entry by then, and would be reset.
    """
    node.young(1000)
    promote = node.promoter._promote

    def late(flow: bytes) -> bool:
        assert len(node.listed()) == 1
        node.loaded.maps["flows"].delete(flow[: node.promoter._flows.key_size])
        return promote(flow)

    node.promoter._promote = late
    node.promoter.pass_now()
    (line,) = node.listed()
    assert 0 < int(line.split()[2]) <= ABANDONED_SECONDS
    assert node.promoter.statistics.promoted == 0


@pytest.mark.parametrize("to", [8081, 8080], ids=["another endpoint", "the same endpoint"])
def test_a_port_that_is_reused_meanwhile_keeps_its_own_endpoint(node: Node, to: int) -> None:
    """Otherwise the kernel would translate the new connection like the old one, or keep its entry for days."""
    key = node.young(1000)
    former = node.promoter._flows.read(key)
    assert former is not None
    promote = node.promoter._promote

    def reused(flow: bytes) -> bool:
        for each in (former.key, former.answer_key):
            node.loaded.maps["flows"].delete(each)
        assert node.young(1000, age=0.5, to=to) == key
        return promote(flow)

    node.promoter._promote = reused
    node.promoter.pass_now()
    assert node.is_young(key)
    assert node.promoter.statistics.promoted == 0
    (line,) = node.listed()
    assert 0 < int(line.split()[2]) <= ABANDONED_SECONDS
    # Its own promotion replaces the old flow's entry, or updates it.
    node.promoter._promote = promote
    node.young(1000, to=to)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert f" sport={to} dport=1000 [ASSURED]" in line
    assert not node.is_young(key)


def test_a_reused_port_waits_its_full_time_while_conntrack_is_full(node: Node) -> None:
    """Only the flow that has waited for so long ends."""
    key = node.young(1000)
    (former,) = (flow.read for flow in [node.promoter._flows.read(key)] if flow is not None)
    node.promoter._asked = {key: promotion.Refused(former, time.monotonic() - promotion.UNPROMOTED_SECONDS)}
    node.loaded.maps["flows"].delete(key)
    node.young(1000, age=0.5)
    node.promoter._end_refused()
    assert node.is_young(key)
    assert node.promoter.statistics.ended == 0


def test_an_agent_of_an_earlier_version_promotes_by_the_key(node: Node) -> None:
    """It drains with the pinned programs, after a rollback of the version."""
    key = node.young(1000)
    promote = node.promoter._promote
    node.promoter._promote = lambda flow: promote(flow[: len(key)])
    node.promoter.pass_now()
    assert not node.is_young(key)


def test_a_flow_that_leaves_the_table_meanwhile_expires_soon(node: Node) -> None:
    """Another CPU sends its RST on the fast path, so conntrack does not see it."""
    node.young(1000)
    promote = node.promoter._promote

    def and_over(read: bytes) -> bool:
        done = promote(read)
        node.loaded.maps["flows"].delete(read[: node.promoter._flows.key_size])
        return done

    node.promoter._promote = and_over
    node.promoter.pass_now()
    (line,) = node.listed()
    assert 0 < int(line.split()[2]) <= ABANDONED_SECONDS


@pytest.mark.parametrize(
    ("closing", "idle", "seconds", "left", "state"),
    [
        (2, 0, 10, 10, "CLOSE"),
        (2, 0, 30, 30, "ESTABLISHED"),
        (2, 2, 3000, 10, "CLOSE"),
        (1, 2, 10, 10, "ESTABLISHED"),
    ],
    ids=["nothing since", "a packet just now", "a packet that was overtaken", "not in sequence"],
)
@pytest.mark.parametrize("masqueraded", [False, True], ids=["own source", "masqueraded"])
def test_the_entry_of_a_flow_that_was_reset(
    node: Node, masqueraded: bool, closing: int, idle: int, seconds: int, left: int, state: str
) -> None:
    """conntrack keeps it ESTABLISHED with the timeout of CLOSE: a new SYN from this port would use its endpoint."""
    key = node.young(1000, masqueraded=masqueraded)
    node.promoter.pass_now()
    node.expire_in(seconds)
    node.write(key, closing=closing, last_seen=time.monotonic_ns() - idle * 10**9)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert line.split()[3] == state
    assert left - 5 < int(line.split()[2]) <= left
    assert f"src={ENDPOINT[node.family]} " in line


@pytest.mark.parametrize(
    ("later", "state"),
    [
        ({}, "CLOSE"),
        ({"closing": 0}, "ESTABLISHED"),
        ({"started": 1}, "ESTABLISHED"),
        ({"young": 1, "closing": 2}, "ESTABLISHED"),
    ],
    ids=["nothing since", "it goes on", "another flow", "a young flow"],
)
def test_the_entry_of_a_flow_whose_reset_overtook_a_packet_is_closed_when_it_is_quiet(
    node: Node, later: dict[str, int], state: str
) -> None:
    """For conntrack, the late packet shows that the connection continues."""
    key = node.young(1000)
    node.promoter.pass_now()
    node.expire_in(3000)
    node.write(key, closing=2, last_seen=time.monotonic_ns())
    for _ in range(2):
        node.promoter.pass_now()
        (line,) = node.listed()
        assert line.split()[3] == "ESTABLISHED"
    node.write(key, last_seen=time.monotonic_ns() - 2 * SECOND, **later)
    node.promoter._hand_over()
    (line,) = node.listed()
    assert line.split()[3] == state
    assert not node.promoter._extended


#: nf_conntrack_tcp_timeout_max_retrans, and a timeout as of an established connection.
MOST_RETRANSMISSIONS, ESTABLISHED = 300, 80_000
VANISHED = {"idle": 200, "silent": 260, "sent": 0x1234, "acknowledged": 0x771230}


def vanish(node: Node, key: bytes, *, client: bool, idle: int, silent: int, sent: int, acknowledged: int) -> None:
    """The last packet of one side came ``idle`` seconds ago, that of the other side ``silent`` seconds ago.

    ``client``: the client has vanished. ``sent``: what the side that was seen last has sent; ``acknowledged``: what the
    other one has acknowledged.
    """
    moment = time.monotonic_ns()
    last = {"last_seen": moment - idle * SECOND, "sent_until": sent, "acknowledged": 7}
    first = {"last_seen": moment - silent * SECOND, "sent_until": 7, "acknowledged": acknowledged}
    node.write(key, **(first if client else last))
    node.write_reply(key, **(last if client else first))


@pytest.mark.parametrize("client", [True, False], ids=["client", "endpoint"])
@pytest.mark.parametrize("masqueraded", [False, True], ids=["own source", "masqueraded"])
def test_the_entry_of_a_flow_whose_one_side_has_vanished_expires_soon(
    node: Node, masqueraded: bool, client: bool
) -> None:
    """conntrack has not seen all numbers, so it does not count retransmissions, and would keep the entry for a day."""
    key = node.young(1000, masqueraded=masqueraded)
    node.promoter.pass_now()
    node.expire_in(ESTABLISHED)
    vanish(node, key, client=client, **VANISHED)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert line.split()[3] == "ESTABLISHED"
    assert MOST_RETRANSMISSIONS - 5 < int(line.split()[2]) <= MOST_RETRANSMISSIONS
    # Asked once: another pass does not extend the timeout, nor shorten it if the connection goes on by the slow path.
    node.expire_in(ESTABLISHED)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert int(line.split()[2]) > MOST_RETRANSMISSIONS
    # After a packet of the flow it is judged anew.
    node.write(key, last_seen=time.monotonic_ns())
    node.promoter.pass_now()
    vanish(node, key, client=client, **VANISHED)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert int(line.split()[2]) <= MOST_RETRANSMISSIONS


@pytest.mark.parametrize(
    "changes",
    [
        {"idle": 170},
        {"silent": 205},
        {"acknowledged": 0x771234},
        {"acknowledged": 0},
    ],
    ids=["may be sent again", "answered", "acknowledged", "unknown numbers"],
)
@pytest.mark.parametrize("client", [True, False], ids=["client", "endpoint"])
def test_the_entry_of_a_quiet_flow_stays(node: Node, client: bool, changes: dict[str, int]) -> None:
    """Both sides of such a flow may still be there, with nothing to say."""
    key = node.young(1000)
    node.promoter.pass_now()
    node.expire_in(ESTABLISHED)
    vanish(node, key, client=client, **{**VANISHED, **changes})
    node.promoter.pass_now()
    (line,) = node.listed()
    assert int(line.split()[2]) > ESTABLISHED - 5
    flow = node.loaded.tc.btf.struct("flow").unpack(node.loaded.maps["flows"].lookup(key) or b"")
    assert flow["promote"] == 0, "the sweep has asked for it"
    assert [flow.vanished for flow in node.read(key, young=False)] == [False]


def test_the_entry_stays_if_a_packet_comes_after_the_sweep(node: Node) -> None:
    key = node.young(1000)
    node.promoter.pass_now()
    vanish(node, key, client=True, **VANISHED)
    node.promoter._look()
    assert [flow.vanished for flow in node.read(key, young=False)] == [True]
    node.expire_in(ESTABLISHED)
    node.write_reply(key, last_seen=time.monotonic_ns())
    for each in node.promoter._requests.pop():
        node.promoter._asked.setdefault(each)
    assert key in node.promoter._asked
    node.promoter._hand_over()
    (line,) = node.listed()
    assert int(line.split()[2]) > ESTABLISHED - 5


def test_a_short_timeout_of_a_flow_whose_one_side_has_vanished_stays(node: Node) -> None:
    key = node.young(1000)
    node.promoter.pass_now()
    node.expire_in(60)
    vanish(node, key, client=True, **VANISHED)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert int(line.split()[2]) <= 60


def test_the_next_agent_shortens_what_an_agent_was_asked_to_shorten(node: Node) -> None:
    key = node.young(1000)
    node.promoter.pass_now()
    node.expire_in(ESTABLISHED)
    vanish(node, key, client=True, **VANISHED)
    node.write(key, promote=SHORTEN, last_seen=time.monotonic_ns() - VANISHED["silent"] * SECOND)
    node.write_reply(key, last_seen=time.monotonic_ns() - VANISHED["idle"] * SECOND)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert int(line.split()[2]) > MOST_RETRANSMISSIONS, "it was asked before, and does not wait for it"
    promotion.promoter(node.loaded.maps, node.loaded.tc.programs, node.btf).pass_now()
    (line,) = node.listed()
    assert int(line.split()[2]) <= MOST_RETRANSMISSIONS


def test_the_next_agent_closes_what_an_agent_was_asked_to_close(node: Node) -> None:
    key = node.young(1000)
    node.promoter.pass_now()
    node.expire_in(10)
    node.write(key, closing=2, promote=CLOSE)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert line.split()[3] == "ESTABLISHED", "it was asked before, and does not wait for it"
    promotion.promoter(node.loaded.maps, node.loaded.tc.programs, node.btf).pass_now()
    (line,) = node.listed()
    assert line.split()[3] == "CLOSE"


def test_an_entry_waits_if_conntrack_does_not_answer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    key = node.young(1000)
    node.promoter.pass_now()
    node.expire_in(3000)
    node.write(key, closing=2, last_seen=time.monotonic_ns())
    node.promoter.pass_now()
    node.write(key, last_seen=time.monotonic_ns() - 2 * SECOND)
    with monkeypatch.context() as broken:
        broken.setattr(create, "lookup", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOBUFS, "no")))
        with pytest.raises(OSError):
            node.promoter.pass_now()
    node.promoter.pass_now()
    (line,) = node.listed()
    assert line.split()[3] == "CLOSE"


def test_the_entry_of_a_flow_that_was_reset_and_whose_replies_took_the_slow_path(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """The flow table has sent no reply, but conntrack has seen them."""
    key = node.young(1000)
    node.promoter.pass_now()
    node.write(key, closing=2, packets=0)
    node.expire_in(10)
    with caplog.at_level("INFO"):
        node.promoter.pass_now()
    (line,) = node.listed()
    assert line.split()[3] == "CLOSE"
    assert Log(caplog).lines() == []


def test_an_entry_that_conntrack_does_not_close_is_logged_once(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create, "reset", lambda *_: create.Closed([], [errno.EBUSY]))
    with caplog.at_level("INFO"):
        for port in (1000, 1001):
            key = node.young(port)
            node.promoter.pass_now()
            node.write(key, closing=2)
            node.promoter.pass_now()
    log = Log(caplog)
    assert "busy" in log.only(Message.ENTRY_STAYS_OPEN, level="info").text


def test_the_entry_of_another_flow_is_not_closed(node: Node) -> None:
    """The port was reused, and netfilter has chosen another endpoint."""
    key = node.young(1000)
    node.promoter.pass_now()
    for each in (key, node.young(1000, to=8081)):
        node.loaded.maps["flows"].delete(each)
    node.write(node.young(1000, to=8081), closing=2, young=0)
    node.expire_in(10)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert line.split()[3] == "ESTABLISHED"


def test_a_connection_that_replaces_a_reset_one_meanwhile_is_not_closed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SYN with the same ports may come between the look at the entry and its change, which cannot name its id."""
    key = node.young(1000)
    node.promoter.pass_now()
    node.expire_in(10)
    node.write(key, closing=2)
    client, frontend, endpoint = (each[node.family] for each in (CLIENT, FRONTEND, ENDPOINT))
    ends = ["-p", "tcp", "-s", client, "-d", frontend, "--sport", "1000", "--dport", "80"]
    replies = ["-r", endpoint, "-q", client, "--reply-port-src", "8081", "--reply-port-dst", "1000"]
    real, looks = ctnetlink.lookup, 0

    def lookup(*arguments: Any) -> TrackedEntry | None:
        nonlocal looks
        looks += 1
        found = real(*arguments)
        if looks == 1:
            subprocess.run(["conntrack", "-D", *ends], check=True, capture_output=True)
            fresh = ["--state", "SYN_SENT", "-t", "100"]
            subprocess.run(["conntrack", "-I", *ends, *replies, *fresh], check=True, capture_output=True)
        return found

    monkeypatch.setattr(create, "lookup", lookup)
    node.promoter.pass_now()
    assert looks
    (line,) = node.listed()
    assert " sport=8081 " in line
    assert line.split()[3] == "SYN_RECV"
    assert 10 < int(line.split()[2]) <= 60


@pytest.mark.parametrize(
    ("state", "seconds", "closing", "after"),
    [
        ("ESTABLISHED", 10, 0, "restored"),
        ("ESTABLISHED", 10, 1, "restored"),
        ("ESTABLISHED", 300, 0, "unchanged"),
        ("FIN_WAIT", 120, 0, "restored"),
        ("CLOSE_WAIT", 60, 0, "restored"),
        ("LAST_ACK", 30, 0, "restored"),
        ("TIME_WAIT", 120, 0, "restored"),
        ("CLOSE", 10, 0, "restored"),
        ("CLOSE", 10, 1, "restored"),
        ("CLOSE_WAIT", 60, 1, "unchanged"),
        ("FIN_WAIT", 120, 1, "unchanged"),
        ("SYN_SENT", 10, 0, "unchanged"),
    ],
)
@pytest.mark.parametrize("masqueraded", [False, True], ids=["own source", "masqueraded"])
def test_the_entry_of_a_flow_whose_end_was_forged_is_restored(
    node: Node, masqueraded: bool, state: str, seconds: int, closing: int, after: str
) -> None:
    """``closing``: the client has really sent a FIN. SYN_SENT: the entry is that of a new connection."""
    key = node.young(1000, masqueraded=masqueraded)
    node.promoter.pass_now()
    node.expire_in(seconds, "--state", state)
    node.write(key, closing=closing, promote=RESTORE)
    node.promoter.pass_now()
    (line,) = node.listed()
    left, now = int(line.split()[2]), line.split()[3]
    if after == "restored":
        assert now == "ESTABLISHED"
        assert left > 1000
    else:
        assert now == state
        assert left <= seconds
    assert f"src={ENDPOINT[node.family]} " in line


def test_the_entry_of_a_flow_that_both_sides_have_closed_is_not_restored(node: Node) -> None:
    key = node.young(1000)
    node.promoter.pass_now()
    node.expire_in(10, "--state", "CLOSE")
    node.write(key, closing=1, promote=RESTORE)
    node.write_reply(key, closing=1)
    node.promoter.pass_now()
    (line,) = node.listed()
    assert line.split()[3] == "CLOSE"


@pytest.mark.parametrize("what", ["gone", "another endpoint"])
def test_only_the_flows_own_entry_is_restored(node: Node, what: str) -> None:
    key = node.young(1000)
    node.promoter.pass_now()
    subprocess.run(["conntrack", "-F"], check=True, capture_output=True)
    if what == "another endpoint":
        node.young(1000, to=8081)
        node.promoter.pass_now()
        node.expire_in(10)
    node.young(1000)
    node.write(key, young=0, promote=RESTORE)
    node.promoter.pass_now()
    lines = node.listed()
    assert [int(line.split()[2]) <= 10 for line in lines] == [True] * (what != "gone")


def test_a_flow_that_closes_during_promotion_gets_a_short_timeout(node: Node) -> None:
    key = node.young(1000)
    promote = node.promoter._promote

    def closing(read: bytes) -> bool:
        done = promote(read)
        flow = node.loaded.tc.btf.struct("flow")
        value = bytearray(node.loaded.maps["flows"].lookup(key) or b"")
        value[flow.fields["closing"].offset] = 1
        node.loaded.maps["flows"].update(key, bytes(value))
        return done

    node.promoter._promote = closing
    node.promoter.pass_now()
    (line,) = node.listed()
    assert "FIN_WAIT" in line
    assert int(line.split()[2]) <= 120
    assert not node.is_young(key)


@pytest.mark.parametrize("what", ["to another endpoint", "straight to the endpoint", "in the frontend's name"])
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["TCP", "UDP"])
def test_a_conflicting_entry_is_replaced(node: Node, protocol: Protocol, what: str) -> None:
    """Otherwise such an entry could keep a flow on the fast path, where no rule applies."""
    client, frontend, endpoint = (
        (ip_address(address[node.family]).packed, port)
        for address, port in ((CLIENT, 1000), (FRONTEND, 80), (ENDPOINT, 8080))
    )
    other = {
        "to another endpoint": Entry(protocol, client, frontend, (endpoint[0], 9999)),
        "straight to the endpoint": Entry(protocol, client, endpoint, endpoint),
        "in the frontend's name": Entry(protocol, frontend, client, client),
    }[what]
    create_now([other])
    assert len(node.listed()) == 1
    key = node.young(1000, protocol=protocol)
    node.promoter.pass_now()
    assert not node.is_young(key)
    (line,) = node.listed()
    assert f"src={CLIENT[node.family]} dst={FRONTEND[node.family]} sport=1000 dport=80 " in line
    assert f"src={ENDPOINT[node.family]} dst={CLIENT[node.family]} sport=8080 dport=1000 [ASSURED]" in line
    statistics = node.promoter.statistics
    assert (statistics.promoted, statistics.failed, statistics.ended) == (1, {}, 0)


def test_a_flow_that_conntrack_knows_is_promoted(node: Node) -> None:
    key = node.young(1000)
    flow = node.promoter._flows.read(key)
    assert flow is not None
    create_now([flow.entry])
    node.promoter.pass_now()
    assert not node.is_young(key)
    assert len(node.listed()) == 1
    assert node.promoter.statistics.promoted == 1


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["TCP", "UDP"])
def test_an_entry_that_conntrack_has_seen_answered_stays_assured(node: Node, protocol: Protocol) -> None:
    """The flow began again in the flow table, which has sent no reply since."""
    key = node.young(1000, protocol=protocol)
    flow = node.promoter._flows.read(key)
    assert flow is not None
    create_now([flow.entry])
    (result,) = create_now([flow.entry._replace(answered=False)])
    assert result.outcome is Outcome.KNOWN
    (line,) = node.listed()
    assert "[ASSURED]" in line


@pytest.mark.parametrize("node", [4], indirect=True, ids=["IPv4"])
@pytest.mark.slow
def test_promotion_is_tried_again_while_conntrack_is_full(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Really fills the table, for this namespace only; the machine's limit is not changed."""
    limit = int(Path("/proc/sys/net/netfilter/nf_conntrack_max").read_text())
    if limit > 1 << 18:
        pytest.skip(f"nf_conntrack_max of this machine is {limit}: too many entries to make")
    somewhere = (ip_address(ENDPOINT[node.family]).packed, 9)
    frontends = [(ip_address(FRONTEND[node.family]).packed[:-2] + n.to_bytes(2, "big"), 9) for n in range(256)]
    for frontend in frontends:
        of = [
            Entry(Protocol.TCP, (ip_address(NODE[node.family]).packed, port), frontend, (somewhere[0], port), None)
            for port in range(20000, 20000 + limit // 256 + 1)
        ]
        of = [entry._replace(endpoint=entry.frontend) for entry in of]
        last = create_now(of)[-1]
    assert last.outcome is Outcome.FULL, "the table is full"
    key = node.young(1000)
    with caplog.at_level("INFO"):
        for _ in range(3):
            node.promoter.pass_now()
        assert node.is_young(key)
        assert node.promoter.statistics.failed == {Outcome.FULL: 3}
        assert Log(caplog).only().text.startswith(Message.CONNTRACK_FULL)
        # It does not wait forever: rules that are added meanwhile would not apply to it.
        node.young(1001)
        node.promoter.pass_now()
        node.promoter._clock = lambda: time.monotonic() + promotion.UNPROMOTED_SECONDS - 1
        node.promoter.pass_now()
        assert node.is_young(key)
        node.promoter._clock = lambda: time.monotonic() + promotion.UNPROMOTED_SECONDS
        node.promoter.pass_now()
        assert list(node.loaded.maps["flows"].items()) == []
        assert node.promoter.statistics.ended == 2
        assert Log(caplog).last().text.startswith(Message.FLOWS_ENDED)
        assert node.promoter._asked == {}
        key = node.young(1002)
        node.promoter.pass_now()
        assert node.is_young(key), "its time begins now"
        subprocess.run(
            ["conntrack", "-D", "-s", NODE[node.family], "-p", "tcp", "--dport", "9", "--sport", "20000"],
            check=True,
            capture_output=True,
        )
        node.promoter.pass_now()
    assert not node.is_young(key)
    assert Log(caplog).last().text.startswith(Message.CONNTRACK_TAKES_AGAIN)
    subprocess.run(["conntrack", "-F"], check=True, capture_output=True)


@pytest.mark.parametrize("node", [4], indirect=True, ids=["IPv4"])
def test_while_conntrack_is_full_every_flow_has_its_turn(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also flows for which the queue has no room. No pass asks for more than a part of them."""
    flows = node.loaded.maps["promotions"].max_entries * 3 // 2
    for port in range(1000, 1000 + flows):
        node.young(port)
    tried: list[set[int]] = []

    def full(netlink: object, entries: Iterable[Entry], seconds: object) -> list[Result]:
        tried.append({entry.client[1] for entry in entries})
        return [Result(Outcome.FULL, errno.ENOMEM) for _ in tried[-1]]

    monkeypatch.setattr(create, "create", full)
    passes = -(-flows // promotion.AT_ONCE)
    for _ in range(2 * passes):
        node.promoter.pass_now()
    assert set().union(*tried) == set(range(1000, 1000 + flows))
    assert [len(each) for each in tried] == [promotion.AT_ONCE] * 2 * passes
    node.promoter._clock = lambda: time.monotonic() + promotion.UNPROMOTED_SECONDS
    node.promoter.pass_now()
    assert node.promoter.statistics.ended == flows
    assert list(node.loaded.maps["flows"].items()) == []


@pytest.mark.parametrize("why", ["nothing", "conntrack has space", "other family", "voided"])
def test_a_flow_stays_young_while_conntrack_is_full_and_nothing_voids_its_permit(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """Then no rule is newer than the flow."""

    def full(netlink: object, entries: Iterable[Entry], seconds: object) -> list[Result]:
        return [Result(Outcome.FULL, errno.ENOMEM) for _ in entries]

    monkeypatch.setattr(create, "create", full)
    monkeypatch.setattr(create, "is_nearly_full", lambda: nearly_full)
    promoter, family = node.promoter, frozenset({node.family})
    lasting, nearly_full = promotion.Lasting(family), True
    promoter._lasting = lambda: lasting
    key = node.young(1000)
    with caplog.at_level("INFO"):
        promoter.pass_now()
    assert Log(caplog).lines(Message.PERMITS_EXTENDED)
    assert promoter._extended_permits.families == family
    promoter._clock = lambda: time.monotonic() + promotion.UNPROMOTED_SECONDS
    promoter.pass_now()
    assert node.is_young(key), "it would have ended"
    if why == "conntrack has space":
        nearly_full = False
    elif why == "other family":
        lasting = promotion.Lasting(frozenset({4, 6}) - family)
    elif why == "voided":
        lasting = promotion.Lasting(family, since=time.monotonic_ns())
    promoter.pass_now()
    assert promoter.statistics.ended == (why != "nothing")
    assert promoter._extended_permits.families == (frozenset() if why == "conntrack has space" else lasting.families)


@pytest.mark.parametrize("age", [0.5, 3.0], ids=["asked for by a packet", "due"])
def test_what_an_interrupted_pass_has_taken_from_the_queue_is_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, age: float
) -> None:
    """A packet asks once, until the flow is due."""
    key = node.young(1000, age=age)
    queue = node.loaded.maps["promotions"]
    queue._lib.bpf_map_update_elem(queue.fd, promotion_null(), key, 0)
    with monkeypatch.context() as broken:
        broken.setattr(create, "time_outs", _no_descriptors)
        with pytest.raises(OSError, match="Too many open files"):
            node.promoter.pass_now()
        assert node.promoter.statistics.passes == 0
    node.promoter.pass_now()
    assert not node.is_young(key)
    assert node.promoter.statistics.passes == 1


def test_a_flow_ends_though_every_pass_is_interrupted(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise no new rule would ever see it."""
    key = node.young(1000)
    monkeypatch.setattr(create, "time_outs", _no_descriptors)
    for after in (0, promotion.UNPROMOTED_SECONDS):
        node.promoter._clock = lambda after=after: time.monotonic() + after  # type: ignore[misc]
        assert node.loaded.maps["flows"].lookup(key) is not None
        with pytest.raises(OSError, match="Too many open files"):
            node.promoter.pass_now()
    assert node.loaded.maps["flows"].lookup(key) is None
    assert node.promoter.statistics.ended == 1


def _no_descriptors() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("masqueraded", [False, True], ids=["own source", "masqueraded"])
def test_flows_lists_young_ones_and_then_the_kernels(node: Node, masqueraded: bool) -> None:
    node.young(1000, masqueraded=masqueraded)
    node.young(1001, age=0.5, closing=1)
    node.young(1002, reply=False)
    found = {flow.client[1]: flow for flow in young.flows(node)}  # type: ignore[arg-type]
    assert sorted(found) == [1000, 1001]
    assert (found[1000].state, found[1001].state) == ("OPEN", "CLOSING")
    assert found[1000].packets == 19
    assert found[1000].masqueraded == masqueraded
    assert 2.5 < time.time() - (found[1000].started or 0.0) < 10.0
    node.promoter.pass_now()
    assert [flow.client[1] for flow in young.flows(node)] == [1001]  # type: ignore[arg-type]
    (kernels,) = flows.dump()
    same = (0, 1, 2, 3, 4)
    assert [kernels[n] for n in same] == [found[1000][n] for n in same]


def test_draining_promotes_new_flows_too(node: Node) -> None:
    keys = [node.young(1000 + n, age=0.1) for n in range(3000)]
    node.drain(True)
    begin = time.monotonic()
    assert node.promoter.drain(20.0) == 0
    print("3000 flows drained in", time.monotonic() - begin)
    assert not any(map(node.is_young, keys))
    assert len(node.listed()) == 3000


def test_draining_reports_the_remaining_flows(node: Node) -> None:
    node.young(1000, answers=0)
    node.drain(True)
    assert node.promoter.drain(0.2) == 1


@pytest.mark.parametrize("node", [4], indirect=True, ids=["IPv4"])
def test_draining_promotes_more_flows_than_the_queue_has_room_for(node: Node) -> None:
    flows = node.loaded.maps["promotions"].max_entries * 3 // 2
    for port in range(1000, 1000 + flows):
        node.young(port, age=0.1)
    node.drain(True)
    begin = time.monotonic()
    assert node.promoter.drain(60.0) == 0
    print(flows, "flows drained in", time.monotonic() - begin)
    assert node.promoter.statistics.promoted == flows
    assert len(node.listed()) == flows


def test_draining_promotes_half_closed_flows(node: Node) -> None:
    node.young(1000, age=0.1, closing=1)
    node.drain(True)
    assert node.promoter.drain(20.0) == 0
    assert len(node.listed()) == 1


# ---- the source address of masqueraded flows ------------------------------------------------------------------


@pytest.fixture
def endpoint(node: Node) -> Iterator[None]:
    """The endpoint serves both protocols."""
    table, layout = node.loaded.maps[f"endpoints{node.family}"], node.btf.struct(f"endpoint{node.family}_key")
    address = ip_address(ENDPOINT[node.family]).packed
    keys = [layout.pack(service=0, address=address, port=8080, protocol=int(each)) for each in Protocol]
    for key in keys:
        table.update(key, bytes(table.value_size))
    yield
    for key in keys:
        table.delete(key)


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize("others", [False, True], ids=["one address", "several addresses"])
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["TCP", "UDP"])
def test_flows_end_when_their_source_address_leaves_the_node(node: Node, protocol: Protocol, others: bool) -> None:
    """The kernel drops entries that it has masqueraded itself, but not those that the agent created (finding D7)."""
    plain = node.young(1000, protocol=protocol)
    promoted = node.young(1001, protocol=protocol, masqueraded=True)
    node.promoter.pass_now()
    young = node.young(1002, protocol=protocol, masqueraded=True, age=0.5)
    keys = [(each.key, each.answer_key) for key in (plain, promoted) for each in node.read(key, young=False)]
    keys += [(each.key, each.answer_key) for each in node.read(young)]

    def places(port: int, source: str, source_port: int, endpoint_port: int = 8080) -> Entry:
        ends = (CLIENT, port), (FRONTEND, 80), (ENDPOINT, endpoint_port)
        client, frontend, endpoint = ((ip_address(address[node.family]).packed, number) for address, number in ends)
        return Entry(protocol, client, frontend, endpoint, (ip_address(source).packed, source_port))

    here, elsewhere = NODE[node.family], GATEWAY[node.family]
    kept = [
        # Masqueraded by the kernel, which drops the entry itself. A rule of other software: its entries stay.
        places(1003, here, 40000),
        places(1004, elsewhere, 2004),
        # Not a Service's.
        places(1005, here, 2005, endpoint_port=9999),
    ]
    create_now(kept)
    assert len(node.listed()) == 5
    gone = {ip_address(here).packed}
    if others:
        gone |= {ip_address(address).packed for address in ("192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2")}

    node.promoter.pass_now(gone)
    ports = {int(line.split("sport=")[1].split()[0]) for line in node.listed()}
    assert ports == {1000, 1003, 1004, 1005}
    there = [[node.loaded.maps["flows"].lookup(key) is not None for key in pair] for pair in keys]
    assert there == [[True, True], [False, False], [False, False]]
    assert node.promoter.statistics.sources_gone == 2
    node.promoter.pass_now(gone)
    assert node.promoter.statistics.sources_gone == 2


@pytest.mark.usefixtures("endpoint")
def test_a_later_flow_with_the_key_does_not_end(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has used its port again since the table was read."""
    key = node.young(1000, masqueraded=True)
    node.promoter.pass_now()
    read = node.promoter._flows.masqueraded

    def late(*arguments: Any) -> list[Masqueraded]:
        found = list(read(*arguments))
        assert [flow.young for flow in found] == [False]
        node.young(1000, masqueraded=True, age=0.5)
        return found

    monkeypatch.setattr(node.promoter._flows, "masqueraded", late)
    node.promoter.pass_now({ip_address(NODE[node.family]).packed})
    assert node.is_young(key)


@pytest.mark.usefixtures("endpoint")
def test_the_loop_ends_flows_without_a_source_address_and_retries(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel refuses once does not stay for good (finding D7)."""
    key = node.young(1000, masqueraded=True, age=0.5)
    monkeypatch.setattr(promotion, "BUSY_SECONDS", 0.1)
    monkeypatch.setattr(promotion, "IDLE_SECONDS", 3600.0)
    real = node.promoter._end_masqueraded
    tried: list[set[bytes]] = []

    def refused_once(addresses: Collection[bytes]) -> int:
        tried.append(set(addresses))
        if len(tried) == 1:
            raise OSError("not now")
        return real(addresses)

    node.promoter._end_masqueraded = refused_once

    async def until_ended() -> None:
        task = asyncio.create_task(node.promoter.run())
        await asyncio.sleep(0)
        node.promoter.sources_gone([ip_address(NODE[node.family]).packed])
        while node.loaded.maps["flows"].lookup(key) is not None:  # noqa: ASYNC110  # The kernel has no event for it.
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(until_ended(), 10.0))
    assert tried == [{ip_address(NODE[node.family]).packed}] * 2


@pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("privileged", [True, False], ids=["with CAP_SYS_ADMIN", "without"])
def test_pinned_flows_are_drained_without_the_agent_that_opened_them(
    bpf_objects: Path, bpffs: Path, namespace: None, family: int, privileged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also flows that are not due, as ``--cleanup`` or an agent of another version does."""
    if not privileged:
        _forbid_types(monkeypatch)
    settings = Settings(netns_cookie=1, fast_path=True)
    with contextlib.closing(load(settings, bpffs / "maps", objects=bpf_objects)) as former:
        drain.pin_programs(former.tc.programs, bpffs)
        node = Node(former, family, promotion.promoter(former.maps, former.tc.programs, former.tc.btf))
        keys = [node.young(port, age=0.1) for port in range(1000, 1100)]
        assert drain.drain(bpffs) == 0
        assert not any(map(node.is_young, keys))
        assert len(node.listed()) == len(keys)


def test_draining_for_a_flow_table_of_another_size(bpf_objects: Path, bpffs: Path, namespace: None) -> None:
    """Young flows become kernel's flows and are copied. No device's quota counts flows that are gone.

    The start is killed before it attaches the new programs. The next start does the rest.
    """
    settings = Settings(netns_cookie=1, fast_path=True)

    def start(entries: int) -> Loaded:
        return load(settings, bpffs / "maps", {"flows": entries}, objects=bpf_objects)

    def counts(loaded: Loaded) -> dict[bytes, bytes]:
        return dict(loaded.maps["young_counts"].items())

    def in_table(loaded: Loaded, keys: Iterable[bytes]) -> list[int]:
        """Whether each existing flow is young."""
        values = [value for key in keys if (value := loaded.maps["flows"].lookup(key))]
        return [int(loaded.tc.btf.struct("flow").unpack(value)["young"]) for value in values]  # type: ignore[call-overload]

    with contextlib.closing(start(4096)) as former:
        drain.pin_programs(former.tc.programs, bpffs)
        node = Node(former, 4, promotion.promoter(former.maps, former.tc.programs, former.tc.btf))
        keys = [node.young(port, age=0.1) for port in range(1000, 1100)]
        waiting = node.young(1100, age=0.1, answers=0)
        former.maps["young_counts"].update((7).to_bytes(4, "little"), (101).to_bytes(4, "little"))
        with contextlib.closing(start(8192)) as killed:
            assert killed.resized == {"flows": (4096, 8192)}
            former_flows.drain_resized(bpffs, killed.maps, killed.tc.btf)
            assert len(node.listed()) == len(keys)
            assert in_table(killed, keys) == [0] * len(keys)
            assert in_table(killed, [waiting]) == []
            assert counts(killed) == {}
        # The old programs still run, and this flow is answered now.
        node.young(1100, age=0.1)
        with contextlib.closing(start(16384)) as loaded:
            assert loaded.resized == {"flows": (8192, 16384)}
            former_flows.drain_resized(bpffs, loaded.maps, loaded.tc.btf)
            assert len(node.listed()) == len(keys) + 1
            assert in_table(loaded, [*keys, waiting]) == [0] * (len(keys) + 1)
            assert counts(loaded) == {}
            state = loaded.tc.btf.struct("fast_path").unpack(loaded.maps["fast_path"].lookup(bytes(4)) or b"")
            assert state["draining"] == 1, "until the new programs are attached"
            loaded.attached()
            assert not (bpffs / "maps-former").exists()


@pytest.mark.parametrize("refused", [False, True], ids=["not configured", "refused by the kernel"])
def test_flows_are_drained_for_programs_without_a_fast_path(
    bpf_objects: Path, bpffs: Path, namespace: None, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """As by a new version whose programs the kernel does not accept. Nothing of the former run stays in memory."""
    pins = bpffs / "v2"
    settings = Settings(netns_cookie=1, fast_path=True)
    with contextlib.closing(load(settings, pins / "maps", objects=bpf_objects)) as former:
        drain.pin_programs(former.tc.programs, pins)
        node = Node(former, 4, promotion.promoter(former.maps, former.tc.programs, former.tc.btf))
        key = node.young(1000, age=0.1)
        monkeypatch.setattr(programs, "fast_path_is_built", lambda path: False)
        settings = dataclasses.replace(settings, fast_path=refused)
        with contextlib.closing(load(settings, pins / "maps", objects=bpf_objects)) as loaded:
            assert bool(loaded.why_not_fast) == refused
            manager = TakeOver(_with(pins=pins), _with(loaded=loaded), _with(writer=None))
            manager.start(NodeFacts(), {})
            assert not node.is_young(key)
            assert len(node.listed()) == 1
            loaded.attached()
            drain.unpin_programs(pins)
            left = {path.name for path in pins.rglob("*")}
            assert not left & {"flows", "promotions", "sweep_flows", "promote_flow", drain.PROGRAMS}


def _with(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


@pytest.mark.parametrize("error", [BpfError("a map", errno.EMFILE), FatalError("tc.bpf.o is missing")])
def test_an_error_of_a_drain_is_logged(
    bpffs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """The start, or the clean-up, continues: only young flows are at stake."""

    def refuse(pins: Path, seconds: float) -> int:
        raise error

    monkeypatch.setattr(drain, "_drain", refuse)
    assert drain.drain(bpffs) == 0
    assert str(error) in Log(caplog).only("the fast path could not be drained", level="error").text


def test_a_cleanup_drains_the_flow_table_that_the_attached_programs_use(
    bpf_objects: Path, bpffs: Path, namespace: None
) -> None:
    """Also if a start was killed that was changing the size."""
    settings = Settings(netns_cookie=1, fast_path=True)
    with contextlib.closing(load(settings, bpffs / "maps", {"flows": 4096}, objects=bpf_objects)) as former:
        drain.pin_programs(former.tc.programs, bpffs)
        node = Node(former, 4, promotion.promoter(former.maps, former.tc.programs, former.tc.btf))
        key = node.young(1000, age=0.1)
        load(settings, bpffs / "maps", {"flows": 8192}, objects=bpf_objects).close()
        assert drain.drain(bpffs) == 0
        assert not node.is_young(key)
        assert len(node.listed()) == 1


def _forbid_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does for a process without CAP_SYS_ADMIN."""

    def refuse(number: int) -> Btf:
        raise BpfError(f"types {number}", errno.EPERM)

    monkeypatch.setattr(kernel_objects, "types", refuse)


def test_flows_of_an_unknown_layout_are_not_changed(bpffs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their size differs and they have no BTF. The log reports it; the maps are not changed."""
    for folder, names in (("maps", drain._MAPS), ("programs", drain._PROGRAMS)):
        (bpffs / folder).mkdir()
        for name in names:
            # The file that stands for a program is never used.
            made = ["bpftool", "map", "create", bpffs / folder / name, "type", "hash", "name", "other"]
            subprocess.run([*made, "key", "4", "value", "4", "entries", "1"], check=True)
    assert drain.drain(bpffs) == 0
    assert Log(caplog).only(level="warning").text.startswith(Message.FLOWS_NOT_DRAINED)
    word = Map.open_pinned(bpffs / "maps" / "fast_path")
    assert list(word.items()) == []
    word.close()


@pytest.mark.parametrize("error", [OSError("not now"), MemoryError()])
def test_the_loop_promotes(node: Node, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Also after an error that passes."""
    monkeypatch.setattr(promotion, "IDLE_SECONDS", 0.1)
    key = node.young(1000)
    real, errors = node.promoter._sweep, [error]

    def sweep(ask_from: int, extended: frozenset[int]) -> promotion.Swept:
        if errors:
            raise errors.pop()
        return real(ask_from, extended)

    node.promoter._sweep = sweep

    async def until_promoted() -> None:
        task = asyncio.create_task(node.promoter.run())
        while node.is_young(key):  # noqa: ASYNC110  # The kernel has no event for it.
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(until_promoted(), 10.0))
    assert len(node.listed()) == 1
