# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicy and the fast path: a flow that FORWARD or POSTROUTING denies never passes, even if the endpoint helps
it.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6

from pyebpf_proxy.lab.addresses import CLIENT, Dual, cluster_ip, vip
from pyebpf_proxy.lab.cluster import Pod
from pyebpf_proxy.lab.manifests import Port, service, slices
from pyebpf_proxy.lab.namespace import Namespace
from tests.netns.policies import KINDS, policy
from tests.support.conversation import PORT, Conversation
from tests.support.fast_lab import FAR, NEAR, Ask, FastWorld, slowness
from tests.support.lab_tools import wait_until
from tests.support.new_flows import BOTH, Arrivals, NewFlows, ask_once, ending, entries, wait_all_made, wait_until_fast

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

_own_ports = itertools.count(21_000)
TWO, DENIED, VIP = cluster_ip(20), cluster_ip(25), vip(24)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


def forge_answers(family: int, source: str, destination: str, port: int, protocol: str) -> None:
    """Run in the endpoint: send packets from its port to a client's port, as if it answered, until the test ends."""
    inet = socket.AF_INET if family == 4 else socket.AF_INET6
    head = (IP if family == 4 else IPv6)(src=source, dst=destination)
    if protocol == "udp":
        packets = [head / UDP(sport=PORT, dport=port) / b"forged"]
    else:
        packets = [head / TCP(sport=PORT, dport=port, flags=flags, seq=1, ack=1) for flags in ("SA", "A", "PA", "S")]
    with socket.socket(inet, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        while True:
            for packet in packets:
                raw.sendto(bytes(packet), (destination, 0))
            time.sleep(0.01)


@contextlib.contextmanager
def colluding(pod: Pod, client: str, family: int, ports: dict[str, int]) -> Iterator[None]:
    """The endpoint sends to the client's ports. ``client``: the client's address as the endpoint sees it."""
    ends = pod.address.of(family), client
    tasks = [pod.namespace.start(forge_answers, family, *ends, ports[protocol], protocol) for protocol in BOTH]
    try:
        yield
    finally:
        for task in tasks:
            task.stop()


@dataclass
class Way:
    """A client and a frontend of a Service. Rules see ``source``, the endpoint sees ``peer``."""

    asker: Namespace
    address: str
    port: int
    endpoint: Pod
    source: str
    peer: str

    def flows(self, protocol: str, own_port: int = 0) -> NewFlows:
        return NewFlows(self.asker, self.address, protocol, self.port, own_port=own_port)

    def conversation(self, ask: Ask, protocol: str) -> Conversation:
        return ask(self.asker, self.address, protocol, self.port)


def ways(world: FastWorld, family: int) -> dict[str, Way]:
    """By the names that the tests use. All but the first two are masqueraded."""
    node, near, far, pod = world.node, world.near, world.far, world.client

    def of_pod(address: Dual, endpoint: Pod) -> Way:
        source = pod.address.of(family)
        return Way(pod.namespace, address.of(family), PORT, endpoint, source, source)

    def from_outside(address: Dual, port: int, endpoint: Pod) -> Way:
        peer = node.source_towards(endpoint).of(family)
        return Way(world.lab.client, address.of(family), port, endpoint, CLIENT.of(family), peer)

    itself = near.address.of(family)
    return {
        "same node": of_pod(NEAR, near),
        "other node": of_pod(FAR, far),
        # External traffic policy Cluster, with an endpoint on the other node.
        "NodePort": from_outside(node.address, 30007, far),
        "VIP": from_outside(VIP, PORT, near),
        "hairpin": Way(near.namespace, NEAR.of(family), PORT, near, itself, node.source_towards(near).of(family)),
    }


@pytest.fixture(scope="module")
def with_vip(fast_world: FastWorld) -> FastWorld:
    ports, endpoints = [Port("tcp", PORT, PORT), Port("udp", PORT, PORT, "UDP")], [fast_world.near]
    objects = [
        service("vip", ports, cluster_ip(24), vip=VIP),
        *slices("vip", ports, [(pod.address, pod.node.name) for pod in endpoints]),
    ]
    fast_world.node.agent.wait_synced(fast_world.lab.write("vip.yaml", objects))
    return fast_world


# ---- what is denied from the start -------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["forward", "postrouting"])
def test_no_denied_packet_passes(fast_world: FastWorld, kind: str, family: int, hook: str) -> None:
    """Also while the endpoint sends to the client's ports, which is allowed (finding D1)."""
    client, near = fast_world.client, fast_world.near
    ends = client.address.of(family), near.address.of(family)
    ports = {protocol: next(_own_ports) for protocol in BOTH}
    node = fast_world.node.namespace
    with policy(node, kind, family, hook=hook) as rules, colluding(near, ends[0], family, ports):
        rules.deny(*ends)
        arrivals = Arrivals(near, ends[0])
        before = fast_world.count("new_flow_netfilter")
        flows = [
            NewFlows(client.namespace, NEAR.of(family), protocol, own_port=own_port)
            for protocol in BOTH
            for own_port in (0, ports[protocol])
        ]
        with ending(*flows):
            wait_all_made(flows, 12)
        assert [each.answered for each in flows] == [0] * len(flows), _seen(fast_world, family)
        assert fast_world.count("new_flow_netfilter") > before + 20, "netfilter has seen the flows"
        assert int(arrivals) == 0


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        ("nft set", "forward"),
        ("nft set", "postrouting"),
        ("nft set", "postrouting, masqueraded"),
        ("iptables-legacy", "forward"),
        ("iptables-legacy", "postrouting"),
    ],
)
def test_no_denied_packet_passes_at_any_frontend(with_vip: FastWorld, family: int, kind: str, hook: str) -> None:
    """NodePort and VIP with policy Cluster, hairpin, an endpoint on another node (finding D1)."""
    found = [way for name, way in ways(with_vip, family).items() if name != "same node"]
    arrivals = []
    for pod in (with_vip.near, with_vip.far):
        peers = sorted({way.peer for way in found if way.endpoint is pod})
        arrivals.append(Arrivals(pod, f"{{ {', '.join(peers)} }}"))
    before = with_vip.count("new_flow_netfilter")
    with contextlib.ExitStack() as stack:
        rules = stack.enter_context(policy(with_vip.node.namespace, kind, family, hook=hook))
        flows: list[NewFlows] = []
        for way in found:
            ports = {protocol: next(_own_ports) for protocol in BOTH}
            rules.deny(way.peer if "masqueraded" in hook else way.source, way.endpoint.address.of(family))
            stack.enter_context(colluding(way.endpoint, way.peer, family, ports))
            flows += [way.flows(protocol, own_port) for protocol in BOTH for own_port in (0, ports[protocol])]
        with ending(*flows):
            wait_all_made(flows, 12)
        assert [each.answered for each in flows] == [0] * len(flows), _seen(with_vip, family)
        assert with_vip.count("new_flow_netfilter") > before + 100, "netfilter has seen the flows"
        assert [int(each) for each in arrivals] == [0, 0]


def test_another_endpoint_of_the_service_gives_no_permit(fast_world: FastWorld, family: int) -> None:
    client, near, far = fast_world.client, fast_world.near, fast_world.far
    ports = [Port("tcp", PORT, PORT), Port("udp", PORT, PORT, "UDP")]
    endpoints = [(pod.address, pod.node.name) for pod in (near, far)]
    fast_world.node.agent.wait_synced(
        fast_world.lab.write("two.yaml", [service("two", ports, TWO), *slices("two", ports, endpoints)])
    )
    with policy(fast_world.node.namespace, "nft", family) as rules:
        rules.deny(client.address.of(family), near.address.of(family))
        arrivals = Arrivals(near, client.address.of(family))
        flows = [NewFlows(client.namespace, TWO.of(family), protocol, patience=0.05) for protocol in BOTH]
        with ending(*flows):
            wait_until_fast(fast_world, *flows)
            wait_all_made(flows, 20)
        assert int(arrivals) == 0
        for each in flows:
            assert each.answered < each.made, "half of the flows get the other endpoint"


#: Rules that deny a frontend, before its address is translated or after.
OF_A_FRONTEND = {
    "before translation": "prerouting priority raw; {ip} daddr {address} drop;",
    "after it": "forward priority 0; ct original {ip} daddr {address} drop;",
    "iptables-legacy": "",
}


@pytest.mark.parametrize("which", OF_A_FRONTEND)
def test_another_frontend_of_the_endpoint_gives_no_permit(fast_world: FastWorld, family: int, which: str) -> None:
    """As a policy for a NodePort or a VIP before DNAT: the same client reaches the same endpoint by another address."""
    client, near, node = fast_world.client, fast_world.near, fast_world.node
    ports = [Port("tcp", PORT, PORT), Port("udp", PORT, PORT, "UDP")]
    endpoints = [(near.address, near.node.name)]
    node.agent.wait_synced(
        fast_world.lab.write("denied.yaml", [service("denied", ports, DENIED), *slices("denied", ports, endpoints)])
    )
    ip, address = "ip" if family == 4 else "ip6", DENIED.of(family)
    if rule := OF_A_FRONTEND[which].format(ip=ip, address=address):
        node.namespace.run("nft", f"table inet denies {{ chain c {{ type filter hook {rule} }}; }}")
    else:
        node.namespace.run(f"{ip}tables-legacy", "-t", "mangle", "-A", "PREROUTING", "-d", address, "-j", "DROP")
    try:
        allowed = [NewFlows(client.namespace, NEAR.of(family), protocol) for protocol in BOTH]
        denied = [NewFlows(client.namespace, address, protocol, patience=0.05) for protocol in BOTH]
        with ending(*allowed, *denied):
            wait_until_fast(fast_world, *allowed)
            wait_all_made(denied, 20)
        assert [each.answered for each in denied] == [0, 0]
    finally:
        node.namespace.run("nft", "delete table inet denies", check=False)
        node.namespace.run(f"{ip}tables-legacy", "-t", "mangle", "-F", check=False)


# ---- a policy is added -------------------------------------------------------------------------------------


def test_a_new_policy_applies_at_once(fast_world: FastWorld, ask: Ask, kind: str, family: int) -> None:
    """New flows are denied within a second; established flows continue, as the rules allow, also young ones."""
    client, near = fast_world.client, fast_world.near
    with policy(fast_world.node.namespace, kind, family) as rules:
        old = [ask(client.namespace, NEAR.of(family), protocol) for protocol in BOTH]
        for conversation in old:
            fast_world.fast(conversation)
        promoted = fast_world.count("flow_promoted")
        wait_until(lambda: fast_world.count("flow_promoted") > promoted + 1 or _known(fast_world, family), "promoted")
        flows = [NewFlows(client.namespace, NEAR.of(family), protocol) for protocol in BOTH]
        with ending(*flows):
            wait_until_fast(fast_world, *flows)
            opened = fast_world.count("new_flow_fast")
            young = [ask(client.namespace, NEAR.of(family), protocol) for protocol in BOTH]
            wait_until(lambda: fast_world.count("new_flow_fast") > opened + 5, "flows that are young")
            rules.deny(client.address.of(family), near.address.of(family))
            denied = time.monotonic()
            wait_all_made(flows, 12)
            for each in flows:
                late = each.last_answered - denied
                assert late < 1.0 * slowness(), f"a flow that began {late:.2f} s after the rule is answered"
        for conversation in (*old, *young):
            conversation.wait(100)


@pytest.mark.parametrize(("kind", "hook"), [("nft set", "forward"), ("iptables-legacy", "postrouting")])
def test_a_new_policy_applies_at_every_frontend(
    with_vip: FastWorld, ask: Ask, family: int, kind: str, hook: str
) -> None:
    """As the test before: from and to another machine, masqueraded or not, and hairpin."""
    found = ways(with_vip, family)
    with policy(with_vip.node.namespace, kind, family, hook=hook) as rules, contextlib.ExitStack() as stack:
        conversations: list[Conversation] = []
        for name, way in found.items():
            flows = [way.flows(protocol) for protocol in BOTH]
            with ending(*flows):
                # One frontend at a time: the counter does not show which client's flows were fast.
                wait_until_fast(with_vip, *flows)
                conversations += [way.conversation(ask, protocol) for protocol in BOTH]
            assert {conversation.peer for conversation in conversations[-2:]} == {way.peer}, name
        flows = [way.flows(protocol) for way in found.values() for protocol in BOTH]
        stack.enter_context(ending(*flows))
        for each in flows:
            each.wait_answered(10)
        for way in found.values():
            rules.deny(way.source, way.endpoint.address.of(family))
        denied = time.monotonic()
        wait_all_made(flows, 12)
        late = [round(each.last_answered - denied, 2) for each in flows]
        assert max(late) < 1.0 * slowness(), f"seconds after the rules, in the order of the frontends: {late}"
        for conversation in conversations:
            conversation.wait(50)


def _seen(world: FastWorld, family: int) -> str:
    """For the message of a failure."""
    node = world.node.namespace
    return node.run("conntrack", "-L", "-f", f"ipv{family}") + node.run("nft", "list ruleset") + str(entries(world))


def _known(world: FastWorld, family: int) -> bool:
    """Whether conntrack has the flows of both protocols from the client's pod."""
    node, source = world.node.namespace, world.client.address.of(family)
    return all(
        "ASSURED" in node.run("conntrack", "-L", "-f", f"ipv{family}", "-p", protocol, "--orig-src", source)
        for protocol in BOTH
    )


@pytest.mark.parametrize(
    ("kind", "name"), [("nft set", "same node"), ("iptables-legacy", "same node"), ("nft set", "NodePort")]
)
def test_a_policy_without_established_ends_flows(
    fast_world: FastWorld, ask: Ask, family: int, kind: str, name: str
) -> None:
    """As with kube-proxy, the rules see their packets: those of kernel's flows within a second, those of young ones
    after three.
    """
    way = ways(fast_world, family)[name]
    with policy(fast_world.node.namespace, kind, family, established=False) as rules:
        old = [way.conversation(ask, protocol) for protocol in BOTH]
        for conversation in old:
            fast_world.fast(conversation)
        flows = [way.flows(protocol) for protocol in BOTH]
        with ending(*flows):
            wait_until_fast(fast_world, *flows)
            young = [way.conversation(ask, protocol) for protocol in BOTH]
            rules.deny(way.source, way.endpoint.address.of(family))
        arrivals = Arrivals(way.endpoint, way.peer)
        for conversation in (*old, *young):
            assert conversation.stops(), "the flow continues"
        # TCP retransmits.
        seen = int(arrivals)
        assert not way.asker.call(ask_once, way.address, way.port, "udp")
        wait_until(lambda: fast_world.count("stack_not_confirmed") > 0, "packets that go the slow way")
        assert int(arrivals) == seen


#: Rules that let a flow pass because its first packet has left something in conntrack.
REMEMBERED = {
    "mark": "ct state new ct mark set 7; ct mark != 7 drop;",
    "label": "ct state new ct label set 7; ct label != 7 drop;",
    "map": "ct state new ct mark set 7; ct mark vmap { 7 : accept }; drop;",
}


@contextlib.contextmanager
def closed_by(world: FastWorld, rule: str, *flows: NewFlows) -> Iterator[None]:
    """A rule in the forward hook that closes the fast path; ``flows`` go on all the time, and end with it."""
    node = world.node.namespace
    with ending(*flows):
        # The agent may not have read yet that the rules of the test before are gone.
        wait_until_fast(world, *flows)
        before = world.count("stack_rules")
        node.run("nft", f"table inet closing {{ chain c {{ type filter hook forward priority 0; {rule} }}; }}")
        try:
            # Until the agent has read the rule, new permits may let flows pass, and young flows get no mark.
            wait_until(lambda: world.count("stack_rules") > before, "closed for the rule", 60.0)
            yield
        finally:
            node.run("nft", "delete table inet closing")


@pytest.mark.parametrize("which", REMEMBERED)
def test_a_policy_that_remembers_flows_in_conntrack(fast_world: FastWorld, ask: Ask, family: int, which: str) -> None:
    """A promoted flow would have no mark and no label, so its packets would be dropped."""
    client = fast_world.client.namespace
    flows = [NewFlows(client, NEAR.of(family), protocol) for protocol in BOTH]
    with closed_by(fast_world, REMEMBERED[which], *flows):
        wait_all_made(flows, 20)
        conversations = [ask(client, NEAR.of(family), protocol) for protocol in BOTH]
        time.sleep(3)
        for conversation in conversations:
            conversation.wait(100, deadline=10)


def connects(address: str, segment: int) -> bool:
    """Whether a connection is made whose SYN asks for segments of this size."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.settimeout(0.3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        with contextlib.suppress(OSError):
            sock.connect((address, PORT))
            return True
        return False


def test_a_rule_about_packets_of_a_pair_drops_each_of_them(fast_world: FastWorld, family: int) -> None:
    """Connections with very small segments cost the endpoint much, so firewalls refuse them."""
    client, address = fast_world.client.namespace, NEAR.of(family)
    assert client.call(connects, address, 400)
    rule = "tcp flags syn tcp option maxseg size 1-500 drop;"
    with closed_by(fast_world, rule, NewFlows(client, address, "tcp")):
        assert [client.call(connects, address, 400) for _ in range(5)] == [False] * 5


# ---- unanswered flows ---------------------------------------------------------------------------------------


def send_datagrams(address: str, own_port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.bind(("", own_port))
        sock.connect((address, PORT))
        while True:
            with contextlib.suppress(OSError):
                sock.send(b"one way")
            time.sleep(0.01)


def send_segments(family: int, source: str, address: str, own_port: int, flags: str) -> None:
    """A SYN, then data, whatever is answered."""
    inet = socket.AF_INET if family == 4 else socket.AF_INET6
    head = (IP if family == 4 else IPv6)(src=source, dst=address)
    with socket.socket(inet, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        raw.sendto(bytes(head / TCP(sport=own_port, dport=PORT, flags="S", seq=100)), (address, 0))
        while True:
            time.sleep(0.01)
            raw.sendto(bytes(head / TCP(sport=own_port, dport=PORT, flags=flags, seq=200) / b"data"), (address, 0))


@pytest.mark.parametrize("what", ["udp", "tcp", "tcp that always ends"])
def test_an_unanswered_flow_passes_netfilter_again(fast_world: FastWorld, family: int, what: str) -> None:
    """Two colluding ends could keep the flow young for ever, and a policy would never apply to it."""
    client, near, node = fast_world.client, fast_world.near, fast_world.node.namespace
    own_port, source = next(_own_ports), client.address.of(family)
    protocol = what[:3]
    silent = f"meta l4proto {{{{ tcp, udp }}}} th {{}} {own_port} drop"
    chain = ["chain i { type filter hook prerouting priority -300;", *map(silent.format, ("sport", "dport")), "}"]
    # Neither kernel may answer by itself.
    for pod in (client, near):
        pod.namespace.run("nft", "-f", "-", stdin="\n".join(["table inet silent {", *chain, "}"]))
    try:
        with policy(node, "nft set", family) as rules:
            flows = NewFlows(client.namespace, NEAR.of(family), protocol)
            with ending(flows):
                wait_until_fast(fast_world, flows)
                opened = fast_world.count("new_flow_fast")
                if protocol == "udp":
                    task = client.namespace.start(send_datagrams, NEAR.of(family), own_port)
                else:
                    how = (source, NEAR.of(family), own_port, "PA" if what == "tcp" else "FPA")
                    task = client.namespace.start(send_segments, family, *how)
                wait_until(lambda: fast_world.count("new_flow_fast") > opened, "it begins")
                arrivals = Arrivals(near, source, f"th sport {own_port}")
                wait_until(lambda: int(arrivals) > 10, "its packets arrive")
                rules.deny(source, near.address.of(family))

            def stands() -> bool:
                before = int(arrivals)
                time.sleep(0.5)
                return int(arrivals) == before

            wait_until(stands, "nothing arrives any more", 20.0)
            task.stop()
    finally:
        for pod in (client, near):
            pod.namespace.run("nft", "delete table inet silent")
