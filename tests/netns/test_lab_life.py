# SPDX-License-Identifier: Apache-2.0
"""Start and end of the agent under traffic: no existing connection may notice."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.connections import ct_refusals
from pyebpf_proxy.lab.client import ANSWERED, ask, ask_many
from pyebpf_proxy.lab.cluster import Lab, Node, Pod
from pyebpf_proxy.lab.load import Load, failed
from tests.netns.transfers import ECHO, Transfers
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, has_program, reasons, wait_until
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)


@pytest.fixture(scope="module")
def living() -> Iterator[Lab]:
    with Lab() as lab:
        first, second = lab.nodes
        pods = (lab.add_pod("web-1", first), lab.add_pod("web-2", second))
        lab.add_pod("toolbox", first)
        for pod in pods:
            # A masqueraded connection gets a random port. At thousands a second that is soon a port that its server
            # still has in TIME_WAIT, and the server does not answer: so with any proxy. This test is only about the
            # node's own state.
            pod.namespace.sysctl({"net.ipv4.tcp_max_tw_buckets": 0})
        WEB.endpoints = ECHO.endpoints = pods
        write_nodes(lab)
        write_services(lab, WEB, ECHO)
        lab.start_agents()
        yield lab


# ---- ports used again ------------------------------------------------------------


def _tcp_counts(*wanted: str) -> int:
    """The sum of these TCP counters of this network namespace."""
    names, values = Path("/proc/self/net/netstat").read_text().splitlines()[:2]
    counts = dict(zip(names.split(), values.split(), strict=True))
    return sum(int(counts[name]) for name in wanted)


def _again() -> int:
    """How many SYNs this network namespace has retransmitted."""
    return _tcp_counts("TCPSynRetrans")


def _refused_syns(node: Node, endpoints: Sequence[Pod]) -> dict[str, int]:
    """SYNs that conntrack or an endpoint has refused, by the kernel's counters."""
    return {
        # conntrack drops the later one of two SYNs that get the same translation on two CPUs at once.
        "insert_failed": node.namespace.call(ct_refusals.read)["insert_failed"],
        # An endpoint that has not yet closed the port's former connection answers with a challenge ACK. The programs
        # must prevent that: this number only explains a failure.
        "challenged": sum(pod.namespace.call(_tcp_counts, "TCPSYNChallenge", "TCPChallengeACK") for pod in endpoints),
    }


def _reuse_ports(address: str, port: int, first: int, ports: int, count: int, reset: bool) -> tuple[int, int]:
    """``count`` connections over few client ports. Returns how many were answered, and how many SYNs were
    retransmitted.
    """
    answered, before = 0, _again()
    for index in range(count):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
            sock.settimeout(5)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", first + index % ports))
            try:
                sock.connect((address, port))
                sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
                if reset:
                    answered += sock.recv(4096).startswith(b"HTTP/1.1 200")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    while data := sock.recv(4096):
                        answered += data.startswith(b"HTTP/1.1 200")
            except TimeoutError:
                pass
    return answered, _again() - before


@pytest.mark.parametrize("ending", ["fin", "rst"])
@pytest.mark.parametrize("origin", ["toolbox", "client"])
def test_client_ports_can_be_reused_at_once(living: Lab, origin: str, ending: str, family: int) -> None:
    """2000 connections over 50 ports, as fast as possible: no SYN may be retransmitted.

    One in a thousand may be, on a machine that pauses for a second.
    """
    node = living.nodes[0]
    namespace = living.client if origin == "client" else living.pods[origin].namespace
    target = WEB.target("LoadBalancer" if origin == "client" else "ClusterIP", node)
    address, reset = target.address.of(family), ending == "rst"
    first = 20_000 + family * 100 + (1000 if reset else 0)
    opened, spare = reasons(node)["new_flow_fast"], itertools.count(first + 50)

    def is_open() -> bool:
        namespace.call(_reuse_ports, address, 80, next(spare), 1, 1, reset)
        return reasons(node)["new_flow_fast"] > opened

    # A port whose flow took the slow path does so again while conntrack knows the flow: so begin with the fast path.
    wait_until(is_open, "new flows take the fast path")
    before = reasons(node)
    answered, again = namespace.call(_reuse_ports, address, 80, first, 50, 2000, reset)
    assert (answered, again // 3) == (2000, 0), again
    counted = counted_between(before, reasons(node))
    # A SYN opens its own flow, although the port's old connection is still known. If the old one's end is uncertain, as
    # after a FIN that overtook data, the flow continues to the same endpoint: few do.
    assert counted.get("new_flow_fast", 0) + counted.get("new_flow_netfilter", 0) >= 1980, counted
    everything = {name: count - before[name] for name, count in reasons(node).items() if count != before[name]}
    assert counted.get("new_flow_fast", 0) > 1000, everything


# ---- the agent ends and comes back --------------------------------------------------


class Traffic:
    """20 transfers and as many new connections as the machine can do, both families, from outside and from a pod."""

    def __init__(self, lab: Lab) -> None:
        node = lab.nodes[0]
        toolbox = lab.pods["toolbox"].namespace
        pod = lab.pods["web-2"].address
        self.plain = self._rate([Load(lab.client, pod.v4, 8080), Load(toolbox, pod.v6, 8080)])
        vip, cluster_ip = ECHO.target("LoadBalancer", node).address, ECHO.target("ClusterIP", node).address
        self.transfers = [
            Transfers(namespace, address, 7, 5)
            for namespace, address in (
                (lab.client, vip.v4), (lab.client, vip.v6), (toolbox, cluster_ip.v4), (toolbox, cluster_ip.v6),
            )
        ]  # fmt: skip
        web_vip, web_ip = WEB.target("LoadBalancer", node).address, WEB.target("ClusterIP", node).address
        self.loads = [Load(lab.client, web_vip.v4, 80), Load(toolbox, web_ip.v6, 80)]
        self.begun = time.monotonic()
        self.more()

    def _rate(self, loads: list[Load]) -> float:
        """How many of two such loads the machine can do now, without a service."""
        begun = time.monotonic()
        wait_until(lambda: all(load.made >= 400 for load in loads), "plain connections")
        return sum(len(load.stop()) for load in loads) / (time.monotonic() - begun)

    def more(self, connections: int = 400, rounds: int = 20) -> None:
        """Wait until each load and each transfer has made so much progress."""
        start = [load.made for load in self.loads]
        least = [each.least() for each in self.transfers]
        wait_until(
            lambda: (
                any(each.done() for each in self.transfers)
                or (
                    all(load.made >= was + connections for load, was in zip(self.loads, start, strict=True))
                    and all(each.least() >= was + rounds for each, was in zip(self.transfers, least, strict=True))
                )
            ),
            "transfers and new connections continue",
            40,
        )

    def stop(self) -> None:
        """End everything. No connection may have failed, and there must have been enough."""
        took = time.monotonic() - self.begun
        results = [load.stop() for load in self.loads]
        problems = [text for each in self.transfers if (text := each.stop())]
        assert not problems, problems
        for load, samples in zip(self.loads, results, strict=True):
            assert not failed(samples), (load.name, len(failed(samples)), failed(samples)[:3])
        rate = sum(map(len, results)) / took
        # Starting agents and the transfers need a part of a small machine; a slow one makes fewer than 1000.
        assert rate > min(1000, 0.1 * self.plain), f"only {rate:.0f} a second, {self.plain:.0f} without services"


def test_sigterm_leaves_everything_working(living: Lab) -> None:
    node = living.nodes[0]
    traffic = Traffic(living)
    try:
        for each in living.nodes:
            assert each.agent.stop() == 0
        traffic.more()
        for name in ("LoadBalancer", "NodePort"):
            target = WEB.target(name, node)  # type: ignore[arg-type]
            for protocol, port in target.ports.items():
                for address in target.address:
                    outcomes = living.client.call(ask_many, 5, address, port, protocol)
                    assert {outcome.kind for outcome in outcomes} == {ANSWERED}
        for address in WEB.target("ClusterIP", node).address:
            assert node.namespace.call(ask, address, 80).kind == ANSWERED
    finally:
        living.start_agents()
    traffic.more()
    traffic.stop()


def test_restart_with_the_same_objects_changes_no_map(living: Lab) -> None:
    node = living.nodes[0]
    names = ("frontends4", "frontends6", "service_names", "service_configs", "backends4", "backends6", "endpoints4")
    before = {name: _dump(node, name) for name in names}
    assert all(before.values())
    node.agent.signal(signal.SIGKILL)
    node.agent.wait_ended()
    node.agent.start()
    node.agent.wait_synced()
    for name in names:
        assert _dump(node, name) == before[name], name


def _dump(node: Node, name: str) -> list[str]:
    """The non-empty entries of a map, as sorted text."""
    dump = json.loads(node.namespace.run("bpftool", "-j", "map", "dump", "pinned", str(node.agent.pin(name))))
    entries = [entry["formatted"] for entry in dump]
    return sorted(json.dumps(entry) for entry in entries if any(entry["value"].values()))


def test_a_start_after_changes_removes_and_applies(living: Lab, family: int) -> None:
    """While no agent runs, one service is deleted and one is changed: the start applies both, and nothing before it."""
    node = living.nodes[0]
    gone = Kind("gone", 12)
    gone.endpoints = WEB.endpoints
    living.wait_synced(write_services(living, gone))
    address = gone.target("LoadBalancer", node).address.of(family)
    web = WEB.target("LoadBalancer", node).address.of(family)
    assert living.client.call(ask, address, 80).kind == ANSWERED
    frontends = len(_dump(node, "frontends4"))
    both = WEB.endpoints
    node.agent.kill()
    try:
        (living.manifests / "gone.yaml").unlink()
        WEB.endpoints = both[1:]
        write_services(living, WEB)
        assert living.client.call(ask, address, 80).kind == ANSWERED
        node.agent.start()
        node.agent.wait_synced()
        assert living.client.call(ask, address, 80, timeout=0.3).answer is None
        pods = {outcome.answer.pod for outcome in living.client.call(ask_many, 20, web, 80) if outcome.answer}
        assert pods == {"web-2"}
        assert len(_dump(node, "frontends4")) == frontends - 8  # ClusterIP, externalIP, VIP, NodePort × TCP, UDP
    finally:
        WEB.endpoints = both
        if node.agent.process is None:
            node.agent.start()
        living.wait_synced(write_services(living, WEB))


def test_services_renamed_without_an_agent_are_served_all_the_time(living: Lab) -> None:
    """A port of one service has another name after the start, and another Service has the addresses of a second one.

    The services that the old agent left do not keep the addresses: no request fails before, during and after the start
    (finding D17).
    """
    node = living.nodes[0]
    renamed, replaced, successor = Kind("renamed", 13), Kind("replaced", 14), Kind("successor", 14)
    for kind in (renamed, replaced, successor):
        kind.endpoints = WEB.endpoints
    living.wait_synced(write_services(living, renamed, replaced))
    loads = []
    for kind in (renamed, replaced):
        vip, cluster_ip = (kind.target(name, node).address for name in ("LoadBalancer", "ClusterIP"))
        loads.append(Load(living.client, vip.v4, 80, timeout=0.9, pause=0.002))
        loads.append(Load(living.pods["toolbox"].namespace, cluster_ip.v6, 80, timeout=0.9, pause=0.002))
    log = Log(node.agent).from_now()
    try:
        wait_until(lambda: all(load.made >= 20 for load in loads), "requests before")
        node.agent.kill()
        for port in renamed.ports:
            port.name = f"new-{port.name}"
        (living.manifests / "replaced.yaml").unlink()
        write_services(living, renamed, successor)
        node.agent.start()
        node.agent.wait_synced()
        made = [load.made for load in loads]
        wait_until(lambda: all(load.made >= was + 100 for load, was in zip(loads, made, strict=True)), "and after")
    finally:
        samples = {load.name: load.stop() for load in loads}
        for name in ("renamed", "replaced", "successor"):
            (living.manifests / f"{name}.yaml").unlink(missing_ok=True)
    assert {name: failed(some) for name, some in samples.items()} == {name: [] for name in samples}
    log.none(Message.USED_BY_SERVICE)


def test_two_services_with_the_same_endpoints_without_an_agent(living: Lab, family: int) -> None:
    """Without an agent all new flows take the slow path, where the kernel changes source ports that it has in use.

    The kernel does not know the earlier young flows and may choose their ports: no request fails because of that. A SYN
    that would get the port of a living young flow is dropped; its retransmission a second later finds that it has
    ended.
    """
    node, toolbox = living.nodes[0], living.pods["toolbox"].namespace
    other = Kind("other", 15)
    other.endpoints = WEB.endpoints
    living.wait_synced(write_services(living, other))
    addresses = [kind.target("ClusterIP", node).address.of(family) for kind in (WEB, other)]
    before, refused_before = reasons(node), _refused_syns(node, WEB.endpoints)
    loads = [Load(toolbox, address, 80, timeout=3.5) for address in addresses]
    try:
        wait_until(lambda: all(load.made >= 2000 for load in loads), "young flows")
        node.agent.kill()
        flows = reasons(node)["new_flow_netfilter"] + 6000
        wait_until(lambda: reasons(node)["new_flow_netfilter"] > flows, "flows by netfilter")
    finally:
        samples = [load.stop() for load in loads]
        # Not earlier: a SYN that is dropped at the end makes the last request late.
        after, refused = reasons(node), _refused_syns(node, WEB.endpoints)
        (living.manifests / "other.yaml").unlink(missing_ok=True)
        node.agent.start()
        node.agent.wait_synced()
    drops = {name: number for name, number in after.items() if name.startswith("drop_") and number > before[name]}
    assert [failed(some) for some in samples] == [[], []], drops
    late = [sample for some in samples for sample in some if sample.took > 0.9]
    refused = {name: refused[name] - count for name, count in refused_before.items()}
    dropped = drops.get("drop_awaiting_promotion", 0) + refused["insert_failed"]
    assert len(late) <= dropped, (late, drops, refused)


def test_a_pod_that_is_added_later_is_served(living: Lab, family: int) -> None:
    """A pod that is created while the agent runs reaches services, whatever the order of events."""
    node = living.nodes[0]
    pod = living.add_pod(f"late-{family}", node, serve=False)
    wait_until(lambda: node.namespace.call(has_program, pod.device), "the agent's program is on the new pod's device")
    target = WEB.target("ClusterIP", node)
    for protocol, port in target.ports.items():
        outcome = pod.namespace.call(ask, target.address.of(family), port, protocol)
        assert outcome.answer is not None, outcome
        assert outcome.answer.peer[0] == pod.address.of(family)


def test_an_address_that_is_added_later_serves_node_ports(living: Lab, family: int, protocol: str) -> None:
    node = living.nodes[0]
    address = {4: "192.0.2.200", 6: "2001:db8:1::200"}[family]
    length = {4: "/24", 6: "/64 nodad"}[family].split()
    port = WEB.target("NodePort", node).ports[protocol]
    assert living.client.call(ask, address, port, protocol, timeout=0.3).answer is None
    node.namespace.ip(" ".join([f"addr add {address}{length[0]} dev eth0", *length[1:]]))
    try:
        wait_until(
            lambda: living.client.call(ask, address, port, protocol, timeout=0.5).kind == ANSWERED,
            "the new address serves NodePorts",
        )
    finally:
        node.namespace.ip(f"addr del {address}{length[0]} dev eth0")
    wait_until(
        lambda: living.client.call(ask, address, port, protocol, timeout=0.3).kind != ANSWERED,
        "and no longer when it is gone",
    )
