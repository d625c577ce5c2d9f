# SPDX-License-Identifier: Apache-2.0
"""The data plane with the DaemonSet's capabilities and default settings: flows are young, then promoted.

If conntrack is a module, its functions need CAP_SYS_ADMIN, which this agent lacks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.lab.addresses import CLIENT
from pyebpf_proxy.lab.agent import THREE_CAPABILITIES
from pyebpf_proxy.lab.client import ANSWERED, ask, ask_many
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.lab.manifests import Port
from pyebpf_proxy.lab.namespace import Namespace
from tests.support.conversation import PORT, Conversation, serve
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, reasons, wait_until
from tests.support.logs import Line, Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

# Answers once and closes; answers until the client ends.
WEB, LONG = Kind("web", 41), Kind("long", 42)
LONG.ports = [Port("tcp", PORT, PORT, "TCP", 30042), Port("udp", PORT, PORT, "UDP", 31042)]
#: The first two grant the permit, and on a busy machine it may expire once or twice.
ASKED, YOUNG = 12, 6
DENY = """table inet deny { chain forward { type filter hook forward priority 0;
 tcp dport 8080 tcp flags syn drop
}
}"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as made:
        first, second = made.nodes
        made.add_pod("asker", first, serve=False)
        WEB.endpoints = (made.add_pod("web", second),)
        LONG.endpoints = (made.add_pod("long", first, serve=False),)
        serve(LONG.endpoints[0])
        write_nodes(made)
        write_services(made, WEB, LONG)
        _start(first)
        yield made


def _start(node: Node) -> None:
    # As in a container: /sys is the host's. ``ip netns exec`` would mount another one.
    node.agent.start(enter=("nsenter", f"--net=/run/netns/{node.namespace.name}", *THREE_CAPABILITIES))
    node.agent.wait_synced()


def unexpected(log: Log) -> list[Line]:
    """Errors, and warnings except those that every lab and few rights cause."""
    known = (Message.NODE_PORT_ADDRESSES_UNSET, Message.OOM_SCORE_FAILS, Message.ONE_VALUE_FOR_ALL)
    lines = [line for line in log.lines() if line.level in ("warning", "error")]
    return [line for line in lines if not any(part in line.text for part in known)]


def entries(node: Node, client: str, target: str, family: int) -> list[str]:
    """Conntrack's lines of this client's flows to this address."""
    listed = node.namespace.run("conntrack", "-L", "-f", f"ipv{family}", "--orig-src", client, "--orig-dst", target)
    return listed.splitlines()


def test_the_agent_has_three_capabilities_and_the_fast_path(lab: Lab) -> None:
    process = lab.nodes[0].agent.process
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    assert f"CapEff:\t{1 << 12 | 1 << 38 | 1 << 39:016x}\n" in status
    log = Log(lab.nodes[0].agent)
    assert unexpected(log) == []
    log.none(Message.NO_FAST_PATH)
    module = Path("/sys/module/nf_conntrack/initstate").exists()
    assert module == bool(log.lines(Message.LOOKUP_NEEDS_SYS_ADMIN)), log.lines()


@pytest.mark.parametrize("by", ["ClusterIP", "NodePort"])
def test_short_connections_are_young_and_conntrack_never_sees_them(
    lab: Lab, family: int, protocol: str, by: str
) -> None:
    """A pod uses a ClusterIP; an external client uses a NodePort, and is masqueraded."""
    first = lab.nodes[0]
    client, source = lab.pods["asker"].namespace, lab.pods["asker"].address
    if by == "NodePort":
        client, source = lab.client, CLIENT
    target = WEB.target("ClusterIP" if by == "ClusterIP" else "NodePort", first)
    address = target.address.of(family)
    known = len(entries(first, source.of(family), address, family))
    before = reasons(first)
    outcomes = client.call(ask_many, ASKED, address, target.ports[protocol], protocol, source=source.of(family))
    assert [outcome.kind for outcome in outcomes] == [ANSWERED] * ASKED
    seen = {outcome.answer.peer[0] for outcome in outcomes if outcome.answer}
    assert seen == {first.address.of(family) if by == "NodePort" else source.of(family)}
    counted = counted_between(before, reasons(first))
    assert counted["new_flow_fast"] >= YOUNG, counted
    assert counted["new_flow_fast"] + counted["new_flow_netfilter"] == ASKED, counted
    assert len(entries(first, source.of(family), address, family)) == known + counted["new_flow_netfilter"]


def test_a_long_flow_is_promoted(lab: Lab, family: int, protocol: str) -> None:
    first, client = lab.nodes[0], lab.pods["asker"]
    address = LONG.target("ClusterIP", first).address.of(family)
    before = reasons(first)
    conversation = _young(lab, client.namespace, address, protocol)
    try:
        wait_until(lambda: reasons(first)["flow_promoted"] > before["flow_promoted"], "the kernel has the flow")
        lines = entries(first, client.address.of(family), address, family)
        back = f"src={LONG.endpoints[0].address.of(family)} dst={client.address.of(family)}"
        found = [line for line in lines if back in line and "[ASSURED]" in line]
        assert found, lines
        assert protocol == "udp" or any(" ESTABLISHED " in line for line in found), found
        # It continues, confirmed each second by a packet that passes netfilter.
        now = reasons(first)
        conversation.wait(500)
        wait_until(lambda: reasons(first)["flow_confirmed"] > now["flow_confirmed"], "netfilter is asked again")
        assert reasons(first)["flow_hit"] > now["flow_hit"] + 500
        assert conversation.peer == client.address.of(family)
    finally:
        conversation.end()


def _young(lab: Lab, client: Namespace, address: str, protocol: str) -> Conversation:
    """A conversation whose first packet opened it in the flow table."""
    for _ in range(10):
        client.call(_greet, address, protocol, 4)
        before = reasons(lab.nodes[0])
        conversation = Conversation(client, address, protocol)
        conversation.wait(1)
        if counted_between(before, reasons(lab.nodes[0])).get("new_flow_fast"):
            return conversation
        conversation.end()
    pytest.fail(f"no flow was young: {counted_between(before, reasons(lab.nodes[0]))}")


def _greet(address: str, protocol: str, times: int) -> None:
    """So many flows, one after the other, with one request each."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for _ in range(times):
        with socket.socket(family, socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM) as sock:
            sock.settimeout(10)
            sock.connect((address, PORT))
            sock.sendall(b"greeting")
            assert sock.recv(100)


def test_no_packet_passes_that_forward_drops(lab: Lab, family: int) -> None:
    """With a new policy, new flows of a pair with a permit are denied within a second."""
    first, client = lab.nodes[0], lab.pods["asker"].namespace
    address = WEB.target("ClusterIP", first).address.of(family)
    before = reasons(first)
    client.call(ask_many, ASKED, address, 80)
    assert counted_between(before, reasons(first))["new_flow_fast"] >= YOUNG
    first.namespace.run("nft", "-f", "-", stdin=DENY)
    try:
        wait_until(lambda: client.call(ask, address, 80, timeout=0.3).kind != ANSWERED, "denied", 1.5)
        outcomes = client.call(ask_many, 4, address, 80, timeout=0.5)
        assert not [outcome for outcome in outcomes if outcome.kind == ANSWERED]
    finally:
        first.namespace.run("nft", "delete", "table", "inet", "deny")
    assert client.call(ask, address, 80).kind == ANSWERED


def test_conversations_outlive_the_agents_restart(lab: Lab) -> None:
    """The next agent takes over the old one's state, with the same rights."""
    first, client = lab.nodes[0], lab.pods["asker"].namespace
    address = LONG.target("ClusterIP", first).address
    conversations = [_young(lab, client, address.v4, "tcp"), _young(lab, client, address.v6, "udp")]
    try:
        first.agent.kill()
        _start(first)
        before = reasons(first)
        for conversation in conversations:
            conversation.wait(200)
        assert reasons(first)["flow_hit"] > before["flow_hit"]
        assert unexpected(Log(first.agent)) == []
    finally:
        for conversation in conversations:
            conversation.end()
