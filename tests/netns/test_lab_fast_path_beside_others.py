# SPDX-License-Identifier: Apache-2.0
"""The fast path beside other software's rules: Docker, flannel, marks, zones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.addresses import POD_CIDR, cluster_ip
from pyebpf_proxy.lab.manifests import Port, service, slices
from pyebpf_proxy.lab.namespace import Namespace
from tests.support import aws_rules
from tests.support.conversation import PORT
from tests.support.fast_lab import FAR, NEAR, Ask, FastWorld
from tests.support.lab_tools import wait_until
from tests.support.new_flows import BOTH, Arrivals, NewFlows, ending, entries, wait_until_fast

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@contextlib.contextmanager
def rules(node: Namespace, family: int, *lines: str) -> Iterator[None]:
    """Rules in the format of iptables-save, loaded by iptables-nft for as long as the block lasts."""
    word = "ip" if family == 4 else "ip6"
    node.run(f"{word}tables-nft-restore", "-n", stdin="\n".join([*lines, ""]))
    try:
        yield
    finally:
        for table in ("raw", "mangle", "nat", "filter"):
            node.run("nft", f"delete table {word} {table}", check=False)


def new_ones_are_fast(world: FastWorld, family: int) -> None:
    for protocol in BOTH:
        for address in (NEAR, FAR):
            flows = NewFlows(world.client.namespace, address.of(family), protocol)
            with ending(flows):
                wait_until_fast(world, flows)


def test_forward_policy_drop_as_docker_sets_it(fast_world: FastWorld, ask: Ask, family: int) -> None:
    """Accepted flows are fast, others do not pass."""
    node = fast_world.node.namespace
    client, near = (pod.address.of(family) for pod in (fast_world.client, fast_world.near))
    lines = [
        "*filter",
        ":FORWARD DROP [0:0]",
        ":DOCKER-USER - [0:0]",
        "-A FORWARD -j DOCKER-USER",
        "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        f"-A DOCKER-USER -s {client} -d {near} -j ACCEPT",
        "-A DOCKER-USER -j RETURN",
        "COMMIT",
    ]
    with rules(node, family, *lines):
        arrivals = Arrivals(fast_world.far, client)
        for protocol in BOTH:
            flows = NewFlows(fast_world.client.namespace, NEAR.of(family), protocol)
            others = NewFlows(fast_world.client.namespace, FAR.of(family), protocol)
            with ending(flows, others):
                wait_until_fast(fast_world, flows)
                others.wait_made(5)
                assert others.answered == 0
        assert int(arrivals) == 0
        conversations = [ask(fast_world.client.namespace, NEAR.of(family), protocol) for protocol in BOTH]
        for conversation in conversations:
            fast_world.fast(conversation)


def test_flannels_masquerade_rules(fast_world: FastWorld, ask: Ask, family: int) -> None:
    """Pods see each other's addresses; external clients are masqueraded by flannel's rules (finding D11)."""
    pods, own = POD_CIDR[family == 6], fast_world.node.pod_cidr.of(family)
    multicast = "224.0.0.0/4" if family == 4 else "ff00::/8"
    lines = [
        "*nat",
        ":FLANNEL-POSTRTG - [0:0]",
        "-A POSTROUTING -j FLANNEL-POSTRTG",
        "-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN",
        f"-A FLANNEL-POSTRTG -s {own} -d {pods} -j RETURN",
        f"-A FLANNEL-POSTRTG -s {pods} -d {own} -j RETURN",
        f"-A FLANNEL-POSTRTG ! -s {pods} -d {own} -j RETURN",
        f"-A FLANNEL-POSTRTG -s {pods} ! -d {multicast} -j MASQUERADE --random-fully",
        f"-A FLANNEL-POSTRTG ! -s {pods} -d {pods} -j MASQUERADE --random-fully",
        "COMMIT",
    ]
    with rules(fast_world.node.namespace, family, *lines):
        new_ones_are_fast(fast_world, family)
        for address in (NEAR, FAR):
            for protocol in BOTH:
                conversation = ask(fast_world.client.namespace, address.of(family), protocol)
                fast_world.fast(conversation)
                assert conversation.peer == fast_world.client.address.of(family)
        for protocol in BOTH:
            conversation = ask(fast_world.lab.client, fast_world.node.address.of(family), protocol, 30007)
            fast_world.fast(conversation)
            assert conversation.peer == fast_world.node.address.of(family)


@pytest.mark.parametrize(
    "line",
    ["-A PREROUTING -j CONNMARK --restore-mark", "-A PREROUTING -j CONNMARK --restore-mark --nfmask 0xff00"],
    ids=["all bits", "some bits"],
)
def test_marks_that_are_restored(fast_world: FastWorld, ask: Ask, family: int, line: str) -> None:
    """The masquerade bit is not among the bits that other software clears (finding D9)."""
    with rules(fast_world.node.namespace, family, "*mangle", line, "COMMIT"):
        for protocol in BOTH:
            for _ in range(3):
                conversation = ask(fast_world.lab.client, fast_world.node.address.of(family), protocol, 30007)
                assert conversation.peer == fast_world.node.address.of(family), "masqueraded"
            fast_world.fast(conversation)


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_the_marks_of_aws_vpc_cni(fast_world: FastWorld, ask: Ask, variant: str) -> None:
    """Flows of pods have no mark, and are fast. Replies of pods to external clients have the mark that their ip rule
    needs, on the slow path.
    """
    node, address = fast_world.node.namespace, fast_world.node.address.v4
    ports = [Port(protocol, PORT, PORT, protocol.upper(), 30017) for protocol in BOTH]
    near = [(fast_world.near.address, fast_world.near.node.name)]
    objects = [service("marked", ports, cluster_ip(17)), *slices("marked", ports, near)]
    fast_world.node.agent.wait_synced(fast_world.lab.write("marked.yaml", objects))
    text = aws_rules.commands(variant, variant)
    for of_aws, of_lab in (("eni", "pod"), ("10.0.0.0/16", POD_CIDR[0]), ("10.0.1.1", address)):
        text = text.replace(of_aws, of_lab)
    node.run("sh", "-ec", text)
    try:
        before = fast_world.count("stack_route_mark")
        outside = [ask(fast_world.lab.client, address, protocol, 30017) for protocol in BOTH]
        wait_until(lambda: fast_world.count("stack_route_mark") > before, "marked", 60.0)
        new_ones_are_fast(fast_world, 4)
        for each in (NEAR, FAR):
            for protocol in BOTH:
                fast_world.fast(ask(fast_world.client.namespace, each.v4, protocol))
        # Replies of an endpoint on another node come in by a device without marks.
        fast_world.fast(ask(fast_world.lab.client, address, "tcp", 30007))
        # A rule that only counts closes nothing.
        counting = f"iptables-{variant} -t mangle"
        node.run("sh", "-ec", f"{counting} -A POSTROUTING -o eth0 -m mark --mark 0x80/0x80")
        for conversation in outside:
            conversation.wait(50)
        listed = node.run("sh", "-ec", f"{counting} -nvxL POSTROUTING")
        assert int(listed.splitlines()[-1].split()[0]) >= 100, "all replies have the mark"
    finally:
        node.run("sh", "-ec", aws_rules.removal(variant, variant))
        fast_world.node.agent.wait_synced(fast_world.lab.write("marked.yaml", []))
    fast_world.fast(ask(fast_world.client.namespace, NEAR.v4))


def test_conntrack_zones(fast_world: FastWorld, ask: Ask, family: int) -> None:
    """Flows of this zone continue when they are old enough for promotion, where conntrack must find them
    (finding D8).
    """
    with rules(fast_world.node.namespace, family, "*raw", "-A PREROUTING -j CT --zone 7", "COMMIT"):
        flows = [NewFlows(fast_world.client.namespace, NEAR.of(family), protocol) for protocol in BOTH]
        with ending(*flows):
            for each in flows:
                each.wait_answered(20)
            conversations = [
                ask(fast_world.client.namespace, NEAR.of(family), protocol) for protocol in BOTH for _ in range(3)
            ]
        clients = {each.client for each in conversations}
        wait_until(lambda: not clients & {e["client"] for e in entries(fast_world) if e["young"]}, "none is young")
        for conversation in conversations:
            conversation.wait(100)


@contextlib.contextmanager
def tunnelled(world: FastWorld, family: int) -> Iterator[None]:
    """The first node reaches the pod on the second one by a tunnel whose other end is in the route."""
    first, second = (node.namespace for node in world.lab.nodes)
    tunnel, macs = "vxlan-any", {first: "02:00:00:00:07:01", second: "02:00:00:00:07:02"}
    gateway = "169.254.7.1" if family == 4 else "fe80::7:1"
    try:
        for node, mac in macs.items():
            node.run("ip", "link", "add", tunnel, "type", "vxlan", "external", "dstport", "4789")
            node.run("ip", "link", "set", tunnel, "address", mac, "up")
        first.run("ip", f"-{family}", "neigh", "add", gateway, "lladdr", macs[second], "dev", tunnel)
        to = f"encap ip id 7 dst {world.lab.nodes[1].address.v4} via {gateway} dev {tunnel} onlink"
        first.run("ip", f"-{family}", "route", "add", world.far.address.of(family), *to.split())
        yield
    finally:
        for node in (first, second):
            node.run("ip", "link", "del", tunnel, check=False)


def test_a_tunnel_whose_other_end_is_in_the_route(fast_world: FastWorld, family: int) -> None:
    """A packet that is redirected has no route, and such a tunnel drops it."""
    with tunnelled(fast_world, family):
        for protocol in BOTH:
            flows = NewFlows(fast_world.client.namespace, FAR.of(family), protocol)
            with ending(flows):
                flows.wait_made(40)
                assert flows.answered >= flows.made - 1
