# SPDX-License-Identifier: Apache-2.0
"""The fast path when the flow table, a device's quota or conntrack's table is full."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.cluster import Lab, Pod
from pyebpf_proxy.lab.manifests import Port, service, slices
from tests.support.conversation import Conversation
from tests.support.fast_lab import NEAR, Ask, FastWorld, build_fast_world
from tests.support.lab_tools import full_conntrack, wait_until
from tests.support.logs import Log, Message
from tests.support.new_flows import BOTH, NewFlows, ask_once, ending, entries, wait_until_fast

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

#: Room for 512 flows, 256 of which one device may open.
ENTRIES = 1024
FAMILIES = (4, 6)
MUTE_PORT, VOID_PORT = 7400, 7401
MUTE, VOID = cluster_ip(30), cluster_ip(31)
QUESTION, SILENT = b"question", b"silent"
SILENCE = f"""table inet silence {{ chain c {{ type filter hook prerouting priority -400;
 meta l4proto {{ tcp, udp }} th dport {VOID_PORT} drop
 }}; }}"""


@dataclass
class Small:
    """A world with a small flow table. ``hogs``: pods that open many flows to a Service that answers few of them."""

    world: FastWorld
    hogs: list[Pod]


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
    with Lab() as lab:
        world = build_fast_world(lab, {"fastPathEntries": ENTRIES})
        hogs = [lab.add_pod(f"hog-{number}", world.node, serve=False) for number in range(3)]
        near, ports = world.near, [Port("mute", MUTE_PORT, MUTE_PORT, "UDP")]
        answering(near)
        objects = [service("mute", ports, MUTE), *slices("mute", ports, [(near.address, near.node.name)])]
        # Its endpoint drops everything.
        near.namespace.run("nft", "-f", "-", stdin=SILENCE)
        void = [Port("tcp", VOID_PORT, VOID_PORT), Port("udp", VOID_PORT, VOID_PORT, "UDP")]
        objects += [service("void", void, VOID), *slices("void", void, [(near.address, near.node.name)])]
        world.node.agent.wait_synced(lab.write("mute.yaml", objects))
        yield Small(world, hogs)


def answering(pod: Pod) -> None:
    wait, ready = multiprocessing.Pipe(duplex=False)
    pod.namespace.start(_answer_questions, ready)
    ready.close()
    wait.recv()
    wait.close()


def _answer_questions(ready: Any) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::", MUTE_PORT))
        ready.send("ready")
        while True:
            data, peer = sock.recvfrom(2048)
            if data.startswith(QUESTION):
                with contextlib.suppress(OSError):
                    sock.sendto(data, peer)


class Flood:
    """Datagrams of one pod, each in a new flow. One in sixteen is a request that waits for its answer."""

    def __init__(self, pod: Pod, family: int) -> None:
        context = multiprocessing.get_context("fork")
        self._state = context.RawArray("d", [0.0, 0.0])  # asked, answered
        self._task = pod.namespace.start(_flood, MUTE.of(family), self._state)

    @property
    def asked(self) -> int:
        return int(self._state[0])

    @property
    def answered(self) -> int:
        return int(self._state[1])

    def end(self) -> None:
        self._task.stop()


def _flood(address: str, state: Any) -> None:
    for number, own_port in enumerate(itertools.cycle(range(8_000, 32_000))):
        if number % 16:
            _send(address, own_port)
        else:
            answered = ask_once(address, MUTE_PORT, "udp", 5.0, own_port)
            state[1] += answered
            state[0] += 1
        time.sleep(0.0005)


def _send(address: str, own_port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", own_port))
        sock.sendto(SILENT, (address, MUTE_PORT))


class OneWay:
    """Unanswered first packets of this pod, SYNs and datagrams in turn, until it ends. ``sent``: how many so far."""

    def __init__(self, pod: Pod, family: int) -> None:
        self._sent = multiprocessing.get_context("fork").Value("Q", 0, lock=False)
        self._task = pod.namespace.start(_send_one_way, VOID.of(family), self._sent)

    @property
    def sent(self) -> int:
        return int(self._sent.value)

    def end(self) -> None:
        self._task.stop()


def _send_one_way(address: str, sent: Any) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for own_port in itertools.cycle(range(8_000, 32_000)):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with socket.socket(family, kind | socket.SOCK_NONBLOCK) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("", own_port))
                # A socket that is closed now sends its SYN once, and no RST.
                sock.connect_ex((address, VOID_PORT))
                if kind == socket.SOCK_DGRAM:
                    with contextlib.suppress(OSError):
                        sock.send(SILENT)
            sent.value += 1
        time.sleep(0.0002)


@contextlib.contextmanager
def flooding(pods: list[Pod], family: int) -> Iterator[list[Flood]]:
    """The flows end with the block."""
    floods = [Flood(pod, family) for pod in pods]
    try:
        yield floods
    finally:
        for flood in floods:
            flood.end()


def packets(world: FastWorld, conversation: Conversation) -> int:
    """How many packets of the client the table has sent for this conversation; -1: the flow is not in the table."""
    return next((e["packets"] for e in entries(world) if e["client"] == conversation.client and not e["reply"]), -1)


def goes_by_the_table(world: FastWorld, conversation: Conversation) -> None:
    before = packets(world, conversation)
    conversation.wait(20)
    wait_until(lambda: packets(world, conversation) > before + 10, "the table sends its packets")


def all_answered(flows: list[NewFlows]) -> None:
    # The last one may still wait for its answer.
    assert [each.made - each.answered <= 1 for each in flows] == [True] * len(flows)


def new_flows_of(pod: Pod, family: int) -> list[NewFlows]:
    return [NewFlows(pod.namespace, NEAR.of(family), protocol, patience=5.0) for protocol in BOTH]


# ---- the flow table ------------------------------------------------------------------------------------------


def test_one_pod_uses_up_its_quota(small: Small, family: int) -> None:
    """Its further flows take the slow path. Another pod's flows are as fast as before."""
    world, hog = small.world, small.hogs[0]
    flows = new_flows_of(world.client, family)
    with ending(*flows):
        with flooding([hog], family) as (flood,):
            before = world.count("slow_quota")
            wait_until(lambda: world.count("slow_quota") > before + 200, "the quota is used up")
            asked = flood.asked
            wait_until(lambda: flood.asked > asked + 20, "it asks on")
            assert flood.answered >= flood.asked - 1, "the slow path serves the flow"
        # Now no other client opens flows; those of the flood stay for a while.
        over = world.count("slow_quota")
        wait_until_fast(world, *flows)
        assert world.count("slow_quota") == over
        all_answered(flows)

    def has_room() -> bool:
        opened, over = world.count("new_flow_fast"), world.count("slow_quota")
        for _ in range(5):
            assert hog.namespace.call(ask_once, MUTE.of(family), MUTE_PORT, "udp", 5.0)
        return world.count("new_flow_fast") >= opened + 3 and world.count("slow_quota") == over

    wait_until(has_room, "its flows have ended, and it has room again")


def test_the_table_is_full(small: Small, ask: Ask, family: int) -> None:
    """New flows of any client take the slow path. Existing flows stay on the fast path."""
    world = small.world
    old = [ask(world.client.namespace, NEAR.of(family), protocol) for protocol in BOTH]
    for conversation in old:
        goes_by_the_table(world, conversation)
    flows = new_flows_of(world.client, family)
    with ending(*flows):
        wait_until_fast(world, *flows)
        with flooding(small.hogs, family) as floods:
            young = [ask(world.client.namespace, NEAR.of(family), protocol) for protocol in BOTH]
            before = world.count("slow_table_full")
            wait_until(lambda: world.count("slow_table_full") > before + 200, "the table is full")
            for conversation in old:
                goes_by_the_table(world, conversation)
            for conversation in young:
                conversation.wait(100)
            for each in flows:
                each.wait_made(30)
            asked = [flood.asked for flood in floods]
            wait_until(lambda: all(f.asked > a + 20 for f, a in zip(floods, asked, strict=True)), "they ask on")
            assert [flood.asked - flood.answered <= 1 for flood in floods] == [True] * len(floods)
            after = world.count("slow_table_full")
            wait_until(lambda: world.count("slow_table_full") > after + 20, "the table was full all the time")
        all_answered(flows)
        wait_until(lambda: len(entries(world)) < ENTRIES // 2, "what is over is swept")
        wait_until_fast(world, *flows)
        all_answered(flows)
    for conversation in (*old, *young):
        conversation.wait(50)


# ---- conntrack -----------------------------------------------------------------------------------------------


def assured(world: FastWorld) -> set[tuple[str, str, int]]:
    """The client's flows that conntrack has, as `Conversation.client`."""
    node, found = world.node.namespace, set()
    for family in FAMILIES:
        source = world.client.address.of(family)
        lines = node.run("conntrack", "-L", "-f", f"ipv{family}", "--orig-src", source).splitlines()
        found |= {
            (source, line.split()[0], int(line.split("sport=")[1].split()[0])) for line in lines if "[ASSURED]" in line
        }
    return found


def young_clients(world: FastWorld) -> set[tuple[str, str, int]]:
    return {e["client"] for e in entries(world) if e["young"] and not e["reply"]}


def begin(world: FastWorld, ask: Ask, count: int) -> list[Conversation]:
    namespace = world.client.namespace
    return [ask(namespace, NEAR.of(family), protocol) for protocol in BOTH for family in FAMILIES for _ in range(count)]


def new_flows(world: FastWorld) -> list[NewFlows]:
    return [flows for family in FAMILIES for flows in new_flows_of(world.client, family)]


def test_young_flows_continue_while_conntrack_is_full(small: Small, ask: Ask) -> None:
    """The agent retries the promotion until there is room: no flow is lost meanwhile."""
    world, agent = small.world, small.world.node.agent
    log = Log(agent).from_now()
    with full_conntrack(world.node.namespace, free=2000) as top_up:
        flows = new_flows(world)
        with ending(*flows):
            wait_until_fast(world, *flows)
            top_up()
            conversations: list[Conversation] = []

            def are_young() -> bool:
                conversations.extend(begin(world, ask, 3))
                for _ in range(9):
                    top_up()
                return len(young_clients(world) & {each.client for each in conversations}) >= 6

            def some_are_refused_and_go_on() -> bool:
                # The kernel sometimes makes room for them, by evicting an unanswered entry.
                if not young_clients(world) & {each.client for each in conversations}:
                    wait_until(are_young, "enough of them are young")
                gone_on = set()
                for conversation in conversations:
                    top_up()
                    conversation.wait(5)
                    gone_on |= young_clients(world) & {conversation.client}
                return bool(gone_on and log.lines(Message.CONNTRACK_FULL))

            # A permit may expire on a machine that pauses for a second.
            wait_until(some_are_refused_and_go_on, "the agent reports that conntrack is full, and some go on")
        clients = {each.client for each in conversations}
        for conversation in conversations:
            top_up()
            conversation.wait(50)
    wait_until(lambda: not young_clients(world) & clients, "all are promoted")
    wait_until(lambda: assured(world) >= clients, "conntrack has them")
    log.wait(Message.CONNTRACK_TAKES_AGAIN)
    for conversation in conversations:
        goes_by_the_table(world, conversation)


def are_fast_without_new_permits(world: FastWorld, number: int) -> bool:
    granted, fast = world.count("permit_granted"), world.count("new_flow_fast")
    wait_until(lambda: world.count("new_flow_fast") > fast + number, "new flows take the fast path")
    return world.count("permit_granted") == granted


LATER_RULE = "table inet later { chain c { type filter hook forward priority 0; accept\n }; }"


def test_new_flows_continue_while_conntrack_is_full(small: Small) -> None:
    """No flow could renew their permits, which therefore last. A commit of rules voids them all the same."""
    world = small.world
    log = Log(world.node.agent).from_now()
    flows = new_flows(world)
    with ending(*flows):
        wait_until_fast(world, *flows)
        with full_conntrack(world.node.namespace) as top_up:
            top_up()
            log.wait(Message.PERMITS_EXTENDED)
            # Permits expire after a second. So many flows take two seconds at least.
            wait_until(lambda: are_fast_without_new_permits(world, 800), "permits last")
            before = world.count("slow_no_permit")
            world.node.namespace.run("nft", "-f", "-", stdin=LATER_RULE)
            try:
                wait_until(lambda: world.count("slow_no_permit") > before, "new flows need new permits")
            finally:
                world.node.namespace.run("nft", "delete table inet later")
        for each in flows:
            each.wait_answered()


@pytest.mark.parametrize("flood", ["tcp", "udp"])
def test_conntrack_is_full_of_unanswered_flows(small: Small, ask: Ask, flood: str) -> None:
    """As under a flood of SYNs or datagrams. The kernel evicts such entries, so new flows are served (finding D3).

    A pod of the node floods it too, without an end.
    """
    world = small.world
    old = begin(world, ask, 1)
    for conversation in old:
        goes_by_the_table(world, conversation)
    with full_conntrack(world.node.namespace, answered=False, protocol=flood) as top_up:
        flows = new_flows(world)
        floods = [OneWay(small.hogs[0], family) for family in FAMILIES]
        try:
            with ending(*flows):
                for _ in range(3):
                    top_up()
                    wait_until_fast(world, *flows)
                fresh = begin(world, ask, 1)
                for each in floods:
                    sent = each.sent
                    wait_until(lambda each=each, sent=sent: each.sent > sent + 2000, "the flood goes on")
                for each in flows:
                    each.wait_answered(20)
            all_answered(flows)
        finally:
            for each in floods:
                each.end()
        for conversation in (*old, *fresh):
            top_up()
            conversation.wait(50)
    clients = {each.client for each in fresh}
    wait_until(lambda: not young_clients(world) & clients, "all are promoted")
    for conversation in (*old, *fresh):
        goes_by_the_table(world, conversation)
