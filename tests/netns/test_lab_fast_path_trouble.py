# SPDX-License-Identifier: Apache-2.0
"""Failures of a node while flows take the fast path: traffic recovers at once, and no stale entry stays."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from pyebpf_proxy.lab.addresses import Dual, cluster_ip
from pyebpf_proxy.lab.cluster import Lab, Node, Pod
from pyebpf_proxy.lab.manifests import Object, Port, service, slices
from pyebpf_proxy.lab.namespace import LabError
from tests.support.conversation import PORT, Conversation, serve
from tests.support.fast_lab import FAR, Ask, FastWorld, build_fast_world, slowness, without_pause
from tests.support.lab_tools import Capture, full_conntrack, wait_until
from tests.support.new_flows import NewFlows, ask_once, ending, wait_until_fast

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

BOTH = [Port("tcp", PORT, PORT), Port("udp", PORT, PORT, "UDP")]
MOVED = cluster_ip(9)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_neighbours_entry_is_deleted(fast_world: FastWorld, ask: Ask, protocol: str) -> None:
    conversation = ask(fast_world.client.namespace, FAR.v4, protocol)
    fast_world.fast(conversation)
    with without_pause(conversation):
        fast_world.node.namespace.ip(f"neigh del {fast_world.lab.nodes[1].address.v4} dev eth0")
    fast_world.fast(conversation)


def test_the_neighbour_has_another_link_address(fast_world: FastWorld, far: Conversation) -> None:
    other = fast_world.lab.nodes[1]
    old = link_address(other)
    try:
        with without_pause(far):
            other.namespace.ip("link set dev eth0 address 02:00:00:00:0e:02")
            # As a machine does that has taken an address over.
            tell(fast_world, other, "02:00:00:00:0e:02")
        fast_world.fast(far)
        stray = Capture(other.namespace, "eth0", lambda frame: frame[:6] == old, deadline=1.0)
        far.wait()
        assert stray.frame() is None, "packets still go to the old link address"
    finally:
        other.namespace.ip(f"link set dev eth0 address {old.hex(':')}")
        tell(fast_world, other, old.hex(":"))
    fast_world.fast(far)


def ask_patiently(address: str, protocol: str) -> bool:
    """Whether one client gets an answer. It sends again from the same port, as TCP and resolvers do."""
    if protocol == "tcp":
        return ask_once(address, PORT, protocol, 5.0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.5)
        sock.connect((address, PORT))
        # With more than six packets it would be promoted.
        for _ in range(5):
            with contextlib.suppress(OSError):
                sock.send(b"question")
                return sock.recv(64).startswith(b"question")
    return False


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_new_flows_find_the_neighbours_new_link_address(fast_world: FastWorld, protocol: str) -> None:
    """Their pair has a permit, which was granted before the change, and no answer shows that it is out of date."""
    other = fast_world.lab.nodes[1]
    old = link_address(other).hex(":")
    fast_world.node.namespace.ip(f"neigh replace {other.address.v4} lladdr {old} dev eth0 nud reachable")
    try:
        for turn in range(4):
            flows = NewFlows(fast_world.client.namespace, FAR.v4, protocol)
            with ending(flows):
                wait_until_fast(fast_world, flows)
            address = old if turn % 2 else "02:00:00:00:0e:02"
            other.namespace.ip(f"link set dev eth0 address {address}")
            asking = fast_world.client.namespace.start(ask_patiently, FAR.v4, protocol)
            tell(fast_world, other, address)
            assert asking.result()
            assert fast_world.client.namespace.call(ask_patiently, FAR.v4, protocol)
    finally:
        other.namespace.ip(f"link set dev eth0 address {old}")
        tell(fast_world, other, old)


def tell(fast_world: FastWorld, other: Node, address: str) -> None:
    fast_world.node.namespace.ip(f"neigh replace {other.address.v4} lladdr {address} dev eth0 nud reachable")


def test_the_mtu_is_lowered(fast_world: FastWorld, ask: Ask) -> None:
    conversation = ask(fast_world.client.namespace, FAR.v4, size=20_000)
    fast_world.fast(conversation)
    other = fast_world.lab.nodes[1].namespace
    back = f"route replace {fast_world.node.pod_cidr.v4} via {fast_world.node.address.v4}"
    # The device also accepts no longer frames: a local veth would, unless its other end has XDP.
    other.ip(f"{back} mtu 1300")
    try:
        with without_pause(conversation):
            fast_world.node.namespace.ip("link set dev eth0 mtu 1300")
        fast_world.fast(conversation)
    finally:
        fast_world.node.namespace.ip("link set dev eth0 mtu 1500")
        other.ip(back)
    fast_world.fast(conversation)


@contextlib.contextmanager
def second_device(fast_world: FastWorld) -> Iterator[None]:
    lan = fast_world.node.namespace
    (bridge,) = fast_world.lab.core.run("ip", "-br", "link", "show", "dev", "lan0").splitlines()
    fast_world.lab.core.ip(
        # Otherwise its link address would change with its ports, and hosts would send to the former one for a while.
        f"link set lan0 address {bridge.split()[2]}",
        f"link add second type veth peer name eth1 netns {lan.name}",
        "link set second master lan0",
        "link set second up",
    )
    try:
        lan.ip("link set eth1 up", "addr add 192.0.2.211/32 dev eth1")
        yield
    finally:
        fast_world.lab.core.ip("link del second")


def test_the_route_changes_to_another_device(fast_world: FastWorld, far: Conversation) -> None:
    other, lan = fast_world.lab.nodes[1], fast_world.node.namespace
    with second_device(fast_world):
        try:
            with without_pause(far):
                lan.ip(
                    f"route add {other.address.v4}/32 dev eth1",
                    f"route replace {other.pod_cidr.v4} via {other.address.v4}",
                )
            arrives = Capture(lan, "eth1", lambda frame: frame[12:14] == b"\x08\x00", deadline=60.0)
            far.wait()
            assert arrives.frame() is not None, "no packet takes the new route"
            stray = Capture(lan, "eth0", lambda frame: is_between(frame, fast_world), deadline=1.0)
            far.wait()
            assert stray.frame() is None, "packets still take the old route"
        finally:
            lan.ip(f"route del {other.address.v4}/32 dev eth1")
    lan.ip(f"route replace {other.pod_cidr.v4} via {other.address.v4}")
    fast_world.fast(far)


def send_to(fast_world: FastWorld, device: str) -> None:
    """The router and the other node send the node's packets to this device's link address from now on."""
    for address in fast_world.node.address:
        neighbour = f"neigh replace {address} lladdr {link_address(fast_world.node, device).hex(':')}"
        fast_world.lab.core.ip(f"{neighbour} dev lan0 nud reachable")
        fast_world.lab.nodes[1].namespace.ip(f"{neighbour} dev eth0 nud reachable")


@pytest.mark.parametrize("change", ["link address", "device"])
def test_clients_of_young_flows_arrive_by_another_way(
    fast_world: FastWorld, ask: Ask, change: str, family: int
) -> None:
    """The node's link address changes, as that of a bond may, or clients use its other device from now on.

    conntrack does not have the connection yet, so the kernel would reset it.
    """
    lan, old = fast_world.node.namespace, link_address(fast_world.node)

    def young() -> Conversation | None:
        before = fast_world.count("new_flow_fast")
        found = ask(fast_world.lab.client, fast_world.node.address.of(family), "tcp", 30007)
        return found if fast_world.count("new_flow_fast") > before else None

    with second_device(fast_world):
        # Only send_to() decides which device packets come in by.
        lan.run("sysctl", "-qw", "net.ipv4.conf.eth1.arp_ignore=8")
        send_to(fast_world, "eth0")
        try:
            conversation = wait_until(young, "a young flow", 20.0)
            if change == "device":
                send_to(fast_world, "eth1")
            else:
                lan.ip("link set dev eth0 address 02:00:00:00:0e:03")
                send_to(fast_world, "eth0")
            conversation.wait()
            assert not conversation.over
        finally:
            lan.ip(f"link set dev eth0 address {old.hex(':')}")
            send_to(fast_world, "eth0")


def is_between(frame: bytes, fast_world: FastWorld) -> bool:
    """From the client to the far pod."""
    ends = b"".join(bytes(map(int, pod.address.v4.split("."))) for pod in (fast_world.client, fast_world.far))
    return frame[26:34] == ends


class Sources(NamedTuple):
    """Source addresses that the node may masquerade flows to, and the matching ones of the other node."""

    first: str
    second: str
    other: str
    length: int


SOURCES = {
    4: Sources("198.18.7.1", "198.18.7.3", "198.18.7.2", 24),
    6: Sources("fd00:10:244:f7::1", "fd00:10:244:f7::3", "fd00:10:244:f7::2", 64),
}


@contextlib.contextmanager
def masqueraded_to(fast_world: FastWorld, family: int) -> Iterator[Sources]:
    """Flows to pods of the other node are masqueraded to ``first``, or to ``second`` if it is the only address."""
    sources, nodes = SOURCES[family], fast_world.lab.nodes
    lan, other = nodes[0].namespace, nodes[1]
    pods = other.pod_cidr.of(family)
    other.namespace.ip(address_line("add", sources.other, sources))
    try:
        lan.ip(address_line("add", sources.first, sources), f"route replace {pods} via {sources.other}")
        yield sources
    finally:
        for address in (sources.first, sources.second):
            with contextlib.suppress(LabError):
                lan.ip(address_line("del", address, sources))
        lan.ip(f"route replace {pods} via {other.address.of(family)}")
        other.namespace.ip(address_line("del", sources.other, sources))


def address_line(verb: str, address: str, sources: Sources) -> str:
    return f"addr {verb} {address}/{sources.length} dev eth0" + (" nodad" if ":" in address and verb == "add" else "")


def clients_ports(fast_world: FastWorld, family: int, source: str, below: int) -> set[int]:
    """The client ports of conntrack entries that are masqueraded to this address and a port below ``below``."""
    text = fast_world.node.namespace.run("conntrack", "-L", "-f", f"ipv{family}", "--reply-dst", source)
    found = [[int(number) for number in re.findall(r"[sd]port=(\d+)", line)] for line in text.splitlines()]
    return {numbers[0] for numbers in found if len(numbers) == 4 and numbers[3] < below}


def test_the_source_address_of_masqueraded_flows_leaves_the_node(fast_world: FastWorld, ask: Ask, family: int) -> None:
    """As with kube-proxy: datagrams get another source address, connections are reset (finding D7)."""
    asker, address = fast_world.lab.client, fast_world.node.address.of(family)
    with masqueraded_to(fast_world, family) as sources:

        def begin(count: int) -> list[Conversation]:
            flows = [NewFlows(asker, address, protocol, port=30007) for protocol in ("tcp", "udp")]
            with ending(*flows):
                wait_until_fast(fast_world, *flows)
                return [ask(asker, address, protocol, 30007) for protocol in ("tcp", "udp") for _ in range(count)]

        conversations = begin(4)
        assert {conversation.peer for conversation in conversations} == {sources.first}

        def are_promoted() -> bool:
            # The kernel itself uses other ports.
            promoted = clients_ports(fast_world, family, sources.first, below=32768)
            return all({each.own_port for each in some} & promoted for some in (conversations[:4], conversations[4:]))

        wait_until(are_promoted, "flows of both protocols are promoted")
        conversations += begin(2)
        fast_world.node.namespace.ip(
            address_line("del", sources.first, sources),
            address_line("add", sources.second, sources),
            f"route replace {fast_world.lab.nodes[1].pod_cidr.of(family)} via {sources.other}",
        )
        # It would still send to the old address, and netfilter would translate those packets.
        fast_world.lab.nodes[1].namespace.ip(f"neigh del {sources.first} dev eth0")
        tcp, udp = [*conversations[:4], *conversations[8:10]], [*conversations[4:8], *conversations[10:]]
        for conversation in udp:
            # The second address, or for a moment another one of the node.
            wait_until(
                lambda each=conversation: each.peer != sources.first,
                "datagrams have another source address",
                20.0,
            )
            conversation.wait()
        wait_until(lambda: all(conversation.over for conversation in tcp), "the connections were reset")
        wait_until(lambda: not clients_ports(fast_world, family, sources.first, below=65536), "no entry is left")
        assert ask(asker, address, "tcp", 30007).peer != sources.first


def moved_service(pod: Pod) -> list[Object]:
    return [service("moved", BOTH, MOVED), *slices("moved", BOTH, [(pod.address, pod.node.name)])]


def test_the_endpoints_device_is_deleted(fast_world: FastWorld, ask: Ask, far: Conversation) -> None:
    """The endpoint's device. When the service has another endpoint, datagrams go there; other flows are not
    affected.
    """
    gone = fast_world.lab.add_pod(f"gone-{len(fast_world.lab.pods)}", fast_world.node, serve=False)
    serve(gone)
    fast_world.node.agent.wait_synced(fast_world.lab.write("moved.yaml", moved_service(gone)))
    conversation = ask(fast_world.client.namespace, MOVED.v4, "udp")
    fast_world.fast(conversation)
    before = fast_world.count("drop_rewrite_failed")
    with without_pause(far):
        fast_world.node.namespace.ip(f"link del {gone.device}")
    assert conversation.stops()
    fast_world.lab.write("moved.yaml", moved_service(fast_world.far))
    with without_pause(far):
        fast_world.fast(conversation)
    assert fast_world.count("drop_rewrite_failed") == before
    assert not entries(fast_world, "udp", gone.address.v4), "the entry of the removed endpoint"


def entries(fast_world: FastWorld, protocol: str, endpoint: str) -> list[str]:
    """conntrack's entries of flows to the service with this endpoint."""
    text = fast_world.node.namespace.run("conntrack", "-L", "-p", protocol, "--reply-src", endpoint)
    return [line for line in text.splitlines() if MOVED.v4 in line]


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_conntrack_entry_is_deleted(fast_world: FastWorld, ask: Ask, protocol: str) -> None:
    conversation = ask(fast_world.client.namespace, FAR.v4, protocol)
    fast_world.fast(conversation)
    before = fast_world.count("flow_changed")
    fast_world.node.namespace.run("conntrack", "-D", "-p", protocol, "--orig-dst", FAR.v4)
    if protocol == "udp":
        with without_pause(conversation):
            pass
        fast_world.fast(conversation)
        return
    # As without the fast path: the connection is not translated any more.
    assert conversation.stops()
    wait_until(lambda: fast_world.count("flow_changed") > before, "the flow is taken out of the table", 60.0)
    again = ask(fast_world.client.namespace, FAR.v4)
    with without_pause(again):
        fast_world.fast(again)


def test_a_bond_fails_over(fast_world: FastWorld, far: Conversation) -> None:
    """The bond is the device of an entry; the bond itself chooses the port for each packet."""
    node, core = fast_world.node.namespace, fast_world.lab.core
    try:
        node.ip("link add bond9 type bond mode active-backup miimon 10")
    except LabError as error:
        pytest.skip(f"no bonding in this kernel: {str(error).splitlines()[0]}")
    other = fast_world.lab.nodes[1]
    try:
        for name in ("one", "two"):
            core.ip(f"link add {name} type veth peer name {name} netns {node.name}", f"link set {name} master lan0 up")
            node.ip(f"link set {name} master bond9")
        node.ip("link set bond9 up", f"route add {other.address.v4}/32 dev bond9")
        node.ip(f"route replace {other.pod_cidr.v4} via {other.address.v4}")
        fast_world.fast(far)
        with without_pause(far):
            core.ip("link set one down")
        fast_world.fast(far)
    finally:
        node.ip("link del bond9")
        core.ip("link del one", "link del two")
        node.ip(f"route replace {other.pod_cidr.v4} via {other.address.v4}")


SECOND_WAY = Dual("192.0.3.11", "2001:db8:11::11"), Dual("192.0.3.12", "2001:db8:11::12")


def add_way(first: Node, second: Node) -> None:
    """A second link between the two nodes, eth1."""
    first.namespace.ip(f"link add eth1 type veth peer name eth1 netns {second.namespace.name}")
    for node, address in zip((first, second), SECOND_WAY, strict=True):
        addresses = f"addr add {address.v4}/24 dev eth1", f"addr add {address.v6}/64 dev eth1 nodad"
        node.namespace.ip(*addresses, "link set eth1 up")


def hash_flows(node: Node, other: Node, family: int) -> None:
    """The flows from a node to the other one's pods are spread over both links."""
    node.namespace.sysctl({f"net.ipv{family}.fib_multipath_hash_policy": 1})
    second = SECOND_WAY[int(other.address.v4 > node.address.v4)].of(family)
    hops = f"nexthop via {other.address.of(family)} dev eth0 nexthop via {second} dev eth1"
    node.namespace.ip(f"route replace {other.pod_cidr.of(family)} {hops}")


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_way_back_depends_on_the_flow(lab: Lab, family: int, protocol: str) -> None:
    """Half of the replies come in by another device than the one by which the client's packets leave."""
    first, second = lab.nodes
    add_way(first, second)
    hash_flows(second, first, family)
    for name in ("eth0", "eth1"):
        # As the device of a machine: frames are not put straight into the namespace at its other end.
        first.namespace.run("tc", "qdisc", "add", "dev", name, "root", "pfifo")
    world = build_fast_world(lab)
    # Less than until a SYN is sent again.
    flows = NewFlows(world.client.namespace, FAR.of(family), protocol, patience=0.9)
    try:
        wait_until_fast(world, flows)
        made, answered = flows.made, flows.answered
        flows.wait_made(60)
        # The machine may stand still for a moment; otherwise a quarter of them would have no answer.
        assert flows.answered - answered >= flows.made - made - 3
    finally:
        flows.end()


def test_the_next_hop_depends_on_the_flow(lab: Lab, family: int) -> None:
    """Each way masquerades to its own address, and conntrack ends a masqueraded flow whose device changes."""
    first, second = lab.nodes
    add_way(first, second)
    hash_flows(first, second, family)
    client = build_fast_world(lab).client.namespace
    for _ in range(8):
        assert client.call(talk, first.address.of(family), 30007)
        # After it, a flow that netfilter must see would come again.
        time.sleep(1.1)


def test_packets_pass_another_device_with_the_same_link_address_first(lab: Lab, family: int) -> None:
    """Each packet passes the programs of both devices. The first one must not take it for one that came astray."""
    first, other = lab.nodes
    own = f"{first.address.v4}/24", f"{first.address.v6}/64"
    first.namespace.ip(
        "link add up0 link eth0 type macvlan mode passthru",
        *(f"addr del {address} dev eth0" for address in own),
        *(f"addr add {address} dev up0" for address in own),
        "link set up0 up",
        *(f"route replace {cidr} via {via} dev up0" for cidr, via in zip(other.pod_cidr, other.address, strict=True)),
    )
    client = build_fast_world(lab).client.namespace
    # The second one and later ones would be young.
    for _ in range(6):
        begun = time.monotonic()
        assert client.call(talk, FAR.of(family), PORT)
        assert time.monotonic() - begun < 1.0 * slowness()


def talk(address: str, port: int) -> bool:
    """Whether a connection answers three times."""
    with socket.create_connection((address, port), 5.0) as made:
        for _ in range(3):
            made.sendall(b"question".ljust(64, b"."))
            if not made.recv(64):
                return False
    return True


def test_the_conntrack_table_is_full(fast_world: FastWorld, far: Conversation) -> None:
    """Established flows continue; flows of a pair without a permit are refused until there is room."""
    node = fast_world.node.namespace
    hits = fast_world.count("flow_hit")
    asker = fast_world.client.namespace
    with full_conntrack(node) as top_up:

        def refused() -> bool:
            # Flows that have ended meanwhile leave room.
            top_up()
            if not asker.call(_connects, FAR.v4, 0.2):
                return True
            # There was room. The pair has a permit now, which lasts while the table is full; a change of rules ends it.
            node.run("nft", "add table ip elsewhere; delete table ip elsewhere")
            return False

        wait_until(refused, "a new flow is refused", 60.0)
        far.wait()
        assert fast_world.count("flow_hit") > hits + 10
    assert asker.call(_connects, FAR.v4, 60.0)
    fast_world.fast(far)


def _connects(address: str, seconds: float) -> bool:
    try:
        socket.create_connection((address, PORT), timeout=seconds).close()
    except TimeoutError:
        return False
    return True


def link_address(of: Node, device: str = "eth0") -> bytes:
    # Not from /sys, which is that of the machine.
    (line,) = of.namespace.run("ip", "-br", "link", "show", "dev", device).splitlines()
    return bytes.fromhex(line.split()[2].replace(":", ""))
