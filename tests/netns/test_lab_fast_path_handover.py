# SPDX-License-Identifier: Apache-2.0
"""Young flows when the agent ends, is killed, restarts without a fast path or is removed: none is lost or moved."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import re
import time
from collections.abc import Iterator

import pytest

from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.manifests import Port, service, slices
from pyebpf_proxy.lab.namespace import LabError, Namespace
from tests.support.conversation import PORT, Conversation
from tests.support.fast_lab import ON, FastWorld, open_conversations
from tests.support.lab_tools import NAT_OF_OTHERS, wait_until
from tests.support.new_flows import BOTH, NewFlows, ending, entries, wait_until_fast

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

TWO = cluster_ip(23)
#: Of the service ``far``: its flows are masqueraded.
NODE_PORT = 30007
#: A client's address, the protocol and its port, as `Conversation.client`.
Client = tuple[str, str, int]


@pytest.fixture(scope="module")
def two(fast_world: FastWorld) -> FastWorld:
    """With a service of two endpoints: a flow that moves reaches a server that does not know it."""
    ports = [Port("tcp", PORT, PORT), Port("udp", PORT, PORT, "UDP")]
    endpoints = [(pod.address, pod.node.name) for pod in (fast_world.near, fast_world.far)]
    fast_world.node.agent.wait_synced(
        fast_world.lab.write("two.yaml", [service("two", ports, TWO), *slices("two", ports, endpoints)])
    )
    fast_world.node.namespace.run("nft", "-f", "-", stdin=NAT_OF_OTHERS)
    return fast_world


@pytest.fixture
def node(two: FastWorld) -> FastWorld:
    """Its agent runs, with the fast path on."""
    if two.node.agent.process is None:
        two.node.agent.start(own=ON)
        two.node.agent.wait_synced()
    return two


LOCAL_PORTS = "net.ipv4.ip_local_port_range"
#: How often flows are begun again when the machine stalls for so long that the agent promotes them before it ends.
ATTEMPTS = 5


@contextlib.contextmanager
def young_and_old(world: FastWorld, family: int, *, stop: bool = True) -> Iterator[list[Conversation]]:
    """Conversations of every age: some are the kernel's flows, some are young when the agent ends.

    ``stop``: end the agent.
    """
    with open_conversations() as ask, contextlib.ExitStack() as stack:
        namespace, address = world.client.namespace, TWO.of(family)
        conversations = [ask(namespace, address, protocol) for protocol in BOTH for _ in range(2)]
        promoted = {each.client for each in conversations}
        wait_until(lambda: assured(world, family) >= promoted, "the first are in conntrack, and assured")
        for _ in range(ATTEMPTS):
            flows = [NewFlows(namespace, address, protocol) for protocol in BOTH]
            with ending(*flows):
                wait_until_fast(world, *flows)
                fresh = begun_at_once(stack, namespace, address)
            conversations += fresh
            before = endpoints(world, family, conversations)
            if stop:
                world.node.agent.stop()
            found = by_the_table(world, family).keys() & {each.client for each in fresh}
            if len(found) >= 6:
                break
            if stop:
                world.node.agent.start(own=ON)
                world.node.agent.wait_synced()
        assert len(found) >= 6, "most of them are young"
        yield conversations
        for conversation in conversations:
            conversation.wait(50)
        after = endpoints(world, family, conversations)
        both = before.keys() & after.keys()
        assert {client: after[client] for client in both} == {client: before[client] for client in both}


def begun_at_once(
    stack: contextlib.ExitStack, namespace: Namespace, address: str, port: int = PORT
) -> list[Conversation]:
    """Twelve conversations that are all young when the last one has begun: so their processes are started before."""
    gate = multiprocessing.get_context("fork").Event()
    conversations = []
    for protocol in BOTH:
        for _ in range(6):
            conversation = Conversation(namespace, address, protocol, port, gate=gate)
            stack.callback(conversation.end)
            conversations.append(conversation)
    gate.set()
    for conversation in conversations:
        conversation.wait(1)
    return conversations


def assured(world: FastWorld, family: int) -> set[Client]:
    """The client's flows to the service that are ASSURED in conntrack."""
    return {client for client, _ in listed(world, family)}


def listed(world: FastWorld, family: int) -> list[tuple[Client, str]]:
    source, service = world.client.address.of(family), TWO.of(family)
    words = ["-f", f"ipv{family}", "--orig-src", source, "--orig-dst", service]
    lines = world.node.namespace.run("conntrack", "-L", *words).splitlines()
    lines = [line for line in lines if "[ASSURED]" in line]
    return [((source, line.split()[0], int(line.split("sport=")[1].split()[0])), line) for line in lines]


def endpoints(world: FastWorld, family: int, conversations: list[Conversation]) -> dict[Client, str]:
    """The endpoint of each of these flows, as far as conntrack knows."""
    clients = {each.client for each in conversations}
    return {client: line.split("src=")[2].split()[0] for client, line in listed(world, family) if client in clients}


def by_the_table(world: FastWorld, family: int) -> dict[Client, str]:
    """The endpoint of each young flow to the service."""
    address = TWO.of(family)
    return {
        e["client"]: e["endpoint"]
        for e in entries(world)
        if e["young"] and not e["reply"] and e["destination"] == address
    }


def young_counts(world: FastWorld) -> dict[int, int]:
    """Young flows by the ifindex of the device that opened them."""
    pin = str(world.node.agent.pin("young_counts"))
    rows = json.loads(world.node.namespace.run("bpftool", "-j", "map", "dump", "pinned", pin))
    return {row["formatted"]["key"]: row["formatted"]["value"] for row in rows if "formatted" in row}


def nothing_young(world: FastWorld) -> bool:
    return not any(e["young"] for e in entries(world))


def test_cleanup(node: FastWorld, family: int) -> None:
    with young_and_old(node, family) as conversations:
        node.node.agent.cleanup()
        for conversation in conversations:
            conversation.wait(100)
        assert assured(node, family) >= {each.client for each in conversations}


def test_a_restart_without_the_fast_path(node: FastWorld, family: int) -> None:
    with young_and_old(node, family) as conversations:
        node.node.agent.start(own={"fastPath": False})
        node.node.agent.wait_synced()
        for conversation in conversations:
            conversation.wait(100)
        assert assured(node, family) >= {each.client for each in conversations}
        # Nothing keeps the former flow table in memory.
        pins = {path.name for path in (node.node.agent.directory / "bpf").rglob("*")}
        assert "services" in pins
        assert not pins & {"programs", "flows", "promotions", "fast_path"}
        node.node.agent.stop()


def test_a_restart(node: FastWorld, family: int) -> None:
    with young_and_old(node, family) as conversations:
        for conversation in conversations:
            conversation.wait(20)
        node.node.agent.start(own=ON)
        node.node.agent.wait_synced()
        wait_until(
            lambda: assured(node, family) >= {each.client for each in conversations},
            "all are promoted",
        )


@pytest.mark.parametrize("size", [8192, 2048], ids=["larger", "smaller"])
def test_a_restart_with_another_size_of_the_flow_table(node: FastWorld, family: int, size: int) -> None:
    """All flows are promoted before the new table is used, and no device loses a part of its quota."""
    with young_and_old(node, family) as conversations:
        where = by_the_table(node, family)
        node.node.agent.start(own={"fastPathEntries": size})
        node.node.agent.wait_synced()
        for conversation in conversations:
            conversation.wait(100)
        clients = {each.client for each in conversations}
        wait_until(lambda: assured(node, family) >= clients, "conntrack has all of them", 20.0)
        now = endpoints(node, family, conversations)
        young = where.keys() & clients
        assert len(young) >= 6
        assert {client: now[client] for client in young} == {client: where[client] for client in young}
        wait_until(lambda: nothing_young(node), "no flow is young", 20.0)
        wait_until(lambda: not any(young_counts(node).values()), "no young flow is counted")
        namespace = node.client.namespace
        flows = [NewFlows(namespace, TWO.of(family), protocol) for protocol in BOTH]
        with ending(*flows):
            wait_until_fast(node, *flows)
    node.node.agent.stop()


def test_masqueraded_flows_keep_their_source_ports_in_a_flow_table_of_another_size(
    node: FastWorld, family: int
) -> None:
    """Fast-path flows continue. No young flow may take the port of a flow that only conntrack knows."""
    own, far, asker = node.node.address.of(family), node.far.address.of(family), node.lab.client
    port, client = 20000 + family, "198.18.9.7" if family == 4 else "2001:2::9:7"
    ends = ["-s", client, "-d", own, "--sport", "40000", "--dport", "30007", "-r", far, "-q", own]
    ends += ["--reply-port-src", str(PORT), "--reply-port-dst", str(port), "-u", "SEEN_REPLY,ASSURED"]

    def has_it() -> bool:
        return any(e["reply"] and e["client"] == (own, "tcp", port) for e in entries(node))

    with open_conversations() as ask:
        flows = [NewFlows(asker, own, protocol, port=30007) for protocol in BOTH]
        with ending(*flows):
            wait_until_fast(node, *flows)
            conversations = [ask(asker, own, protocol, 30007) for protocol in BOTH for _ in range(4)]
        node.node.agent.stop()
        node.node.namespace.run("conntrack", "-I", "-p", "tcp", "--state", "ESTABLISHED", "-t", "600", *ends)
        assert not has_it()
        node.node.agent.start(own={"fastPathEntries": 8192})
        node.node.agent.wait_synced()
        for conversation in conversations:
            conversation.wait(100)
        wait_until(has_it, "the flow table has the flow", 20.0)
    node.node.agent.stop()
    node.node.namespace.run("conntrack", "-D", "-p", "tcp", "-s", client)


@contextlib.contextmanager
def young_masqueraded(world: FastWorld, family: int) -> Iterator[list[Conversation]]:
    """An external client's conversations through a NodePort. The agent has ended while some of them were young."""
    asker, own = world.lab.client, world.node.address.of(family)
    with contextlib.ExitStack() as stack:
        for _ in range(ATTEMPTS):
            flows = [NewFlows(asker, own, protocol, port=NODE_PORT) for protocol in BOTH]
            with ending(*flows):
                wait_until_fast(world, *flows)
                conversations = begun_at_once(stack, asker, own, NODE_PORT)
            world.node.agent.stop()
            if len(young_source_ports(world)) >= 3:
                break
            world.node.agent.start(own=ON)
            world.node.agent.wait_synced()
        assert len(young_source_ports(world)) >= 3, "some are young"
        try:
            yield conversations
            for conversation in conversations:
                conversation.wait(100)
        finally:
            if world.node.agent.process is not None:
                world.node.agent.stop()


def young_source_ports(world: FastWorld) -> list[int]:
    """Of masqueraded young flows."""
    try:
        found = entries(world)
    except LabError:
        return []  # there is no flow table any more
    sources = (world.node.address.v4, world.node.address.v6)
    return [e["client"][2] for e in found if e["young"] and e["reply"] and e["client"][0] in sources]


def source_ports_of_conntrack(world: FastWorld) -> range:
    """Those that conntrack's masquerade may choose."""
    table = mounts.table_name(world.node.agent.directory)
    rules = world.node.namespace.run("nft", "list", "chain", "inet", table, "masquerading")
    found = re.search(r"masquerade to :(\d+)-(\d+)", rules)
    return range(int(found[1]), int(found[2]) + 1) if found else range(65536)


def watch_a_start(world: FastWorld, own: dict[str, object]) -> None:
    """Start an agent whose young flows have no source ports; until it has started, conntrack takes none of theirs."""
    world.node.agent.start(own=own)
    deadline = time.monotonic() + 60.0
    while True:
        free = source_ports_of_conntrack(world)
        # Read later: these flows were young before, too.
        taken = [port for port in young_source_ports(world) if port in free]
        assert not taken, f"conntrack may choose {free}"
        if len(free) == 65536:
            break
        assert time.monotonic() < deadline, f"conntrack still chooses only {free}"
    world.node.agent.wait_synced()


def test_a_start_without_the_fast_path_takes_no_source_port_of_a_young_flow(node: FastWorld, family: int) -> None:
    """Otherwise replies to a new flow of conntrack go to the client of the young one."""
    with young_masqueraded(node, family):
        watch_a_start(node, {"fastPath": False})


def test_a_start_with_fewer_source_ports_takes_none_of_a_young_flow(node: FastWorld, family: int) -> None:
    """The ports of the node's own sockets begin so low that young flows get none any more."""
    try:
        with young_masqueraded(node, family):
            node.node.namespace.sysctl({LOCAL_PORTS: "1024 20000"})
            watch_a_start(node, ON)
    finally:
        node.node.namespace.sysctl({LOCAL_PORTS: "32768 60999"})


def test_a_killed_agent_is_started_again(node: FastWorld, family: int) -> None:
    """New flows take the slow path after five seconds. Young flows stay young until an agent runs again."""
    with young_and_old(node, family, stop=False) as conversations:
        namespace, address = node.client.namespace, TWO.of(family)
        flows = [NewFlows(namespace, address, protocol, patience=5.0) for protocol in BOTH]
        with ending(*flows):
            for each in flows:
                each.wait_answered()
            killed = time.monotonic()
            node.node.agent.kill()
            before = node.count("stack_no_agent")
            wait_until(lambda: node.count("stack_no_agent") > before + 20, "new flows take the slow path")
            assert time.monotonic() - killed > 2.0, "not yet: an agent may be busy for a moment"
            fast = node.count("new_flow_fast")
            for each in flows:
                each.wait_answered(50)
            assert node.count("new_flow_fast") == fast
            for conversation in conversations:
                conversation.wait(50)
            node.node.agent.start(own=ON)
            node.node.agent.wait_synced()
            wait_until(
                lambda: assured(node, family) >= {each.client for each in conversations},
                "all are promoted",
            )
            for each in flows:
                each.wait_answered(20)
        # One may still wait for its answer.
        assert [each.made - each.answered <= 1 for each in flows] == [True, True]


def test_the_counts_of_removed_devices_are_deleted(node: FastWorld) -> None:
    """Each pod has a new ifindex: without deletion the map would fill up, and later devices would have no quota."""
    pod = node.lab.add_pod("gone", node.node, serve=False)
    index = int(json.loads(node.node.namespace.run("ip", "-j", "link", "show", pod.device))[0]["ifindex"])
    flows = [NewFlows(pod.namespace, TWO.v4, protocol) for protocol in BOTH]
    with ending(*flows):
        wait_until_fast(node, *flows)
        wait_until(lambda: young_counts(node).get(index, 0) > 0, "the device's young flows are counted")
    node.node.namespace.ip(f"link del {pod.device}")
    wait_until(lambda: index not in young_counts(node), "the count is deleted", 15.0)
    # Also devices that are deleted while no agent runs.
    node.node.agent.stop()
    pin = str(node.node.agent.pin("young_counts"))
    words = ["key", *map(str, (7001).to_bytes(4, "little")), "value", "9", "0", "0", "0"]
    node.node.namespace.run("bpftool", "map", "update", "pinned", pin, *words)
    assert 7001 in young_counts(node)
    node.node.agent.start(own=ON)
    node.node.agent.wait_synced()
    wait_until(lambda: 7001 not in young_counts(node), "the count is deleted")
