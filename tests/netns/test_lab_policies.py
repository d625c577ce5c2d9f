# SPDX-License-Identifier: Apache-2.0
"""Affinity, source ranges, and flows whose endpoints change (spec/service-semantics §§4, 7, 10)."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.addresses import CLIENT
from pyebpf_proxy.lab.client import ANSWERED, REFUSED, RESET, TIMED_OUT, ask, ask_many
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.load import Load, failed, first_answer, last_answer
from pyebpf_proxy.lab.manifests import Port
from pyebpf_proxy.lab.scenario import DROPPED_AFTER
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, reasons, wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

STICKY = Kind("sticky", 10, sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 600}})
CLIENT_ONLY = Kind("client-only", 11, loadBalancerSourceRanges=[f"{CLIENT.v4}/32", f"{CLIENT.v6}/128"])
CHANGING = Kind("changing", 12)
SECOND_ADDRESS = {4: "198.51.100.77", 6: "2001:db8:2::77"}


@pytest.fixture(scope="module")
def policies() -> Iterator[Lab]:
    with Lab() as lab:
        first, second = lab.nodes
        pods = [lab.add_pod("web-1", first), lab.add_pod("web-2", second), lab.add_pod("web-3", first)]
        lab.add_pod("toolbox", first)
        STICKY.endpoints = tuple(pods)
        CLIENT_ONLY.endpoints = tuple(pods[:2])
        CHANGING.endpoints = tuple(pods[:2])
        write_nodes(lab)
        write_services(lab, STICKY, CLIENT_ONLY, CHANGING)
        lab.client.ip(f"addr add {SECOND_ADDRESS[4]}/24 dev eth0", f"addr add {SECOND_ADDRESS[6]}/64 dev eth0 nodad")
        lab.start_agents()
        yield lab


def test_a_client_stays_with_its_endpoint_on_every_address(policies: Lab, family: int, protocol: str) -> None:
    node = policies.nodes[0]
    seen = set()
    for name in ("ExternalIP", "LoadBalancer", "NodePort"):
        target = STICKY.target(name, node)  # type: ignore[arg-type]
        asked = (target.address.of(family), target.ports[protocol], protocol)
        outcomes = policies.client.call(ask_many, 8, *asked, source=CLIENT.of(family))
        seen |= {outcome.answer.pod if outcome.answer else outcome.kind for outcome in outcomes}
    assert len(seen) == 1, seen
    assert seen < {"web-1", "web-2", "web-3"}


def test_affinity_ends_with_the_endpoint(policies: Lab, family: int) -> None:
    target = STICKY.target("LoadBalancer", policies.nodes[0])
    asked = (target.address.of(family), 80)
    answer = policies.client.call(ask, *asked).answer
    assert answer is not None
    everybody = STICKY.endpoints
    try:
        STICKY.endpoints = tuple(pod for pod in everybody if pod.name != answer.pod)
        policies.wait_synced(write_services(policies, STICKY))
        outcomes = policies.client.call(ask_many, 10, *asked)
        assert all(outcome.kind == ANSWERED for outcome in outcomes)
        others = {outcome.answer.pod for outcome in outcomes if outcome.answer}
        assert len(others) == 1
        assert answer.pod not in others
    finally:
        STICKY.endpoints = everybody
        policies.wait_synced(write_services(policies, STICKY))


def test_affinity_turned_off_and_on_starts_again(policies: Lab, family: int) -> None:
    """Long before its timeout. The same one of three endpoints by chance: once in 3^40 runs."""
    asked = (STICKY.target("LoadBalancer", policies.nodes[0]).address.of(family), 80)
    sticky = dict(STICKY.spec)

    def who_answers() -> str:
        answer = policies.client.call(ask, *asked, source=CLIENT.of(family)).answer
        assert answer is not None
        return answer.pod

    first = who_answers()
    try:
        for _ in range(40):
            STICKY.spec["sessionAffinity"] = "None"
            policies.wait_synced(write_services(policies, STICKY))
            STICKY.spec["sessionAffinity"] = "ClientIP"
            policies.wait_synced(write_services(policies, STICKY))
            if who_answers() != first:
                return
    finally:
        STICKY.spec.update(sticky)
    pytest.fail(f"40 times {first}")


def test_source_ranges_apply_only_to_the_vip(policies: Lab, family: int, protocol: str) -> None:
    node = policies.nodes[0]
    vip = CLIENT_ONLY.target("LoadBalancer", node)
    port = vip.ports[protocol]
    allowed, other = CLIENT.of(family), SECOND_ADDRESS[family]
    assert policies.client.call(ask, vip.address.of(family), port, protocol, source=allowed).kind == ANSWERED
    before = reasons(node)
    for namespace, source in ((policies.client, other), (policies.pods["toolbox"].namespace, None)):
        outcome = namespace.call(ask, vip.address.of(family), port, protocol, source=source, timeout=DROPPED_AFTER)
        assert outcome.kind == TIMED_OUT, outcome
    assert counted_between(before, reasons(node)).get("drop_source_range", 0) >= 2
    for name in ("ExternalIP", "NodePort"):
        target = CLIENT_ONLY.target(name, node)  # type: ignore[arg-type]
        asked = (target.address.of(family), target.ports[protocol], protocol)
        assert policies.client.call(ask, *asked, source=other).kind == ANSWERED


def test_endpoints_come_and_go_under_load_without_a_failure(policies: Lab, family: int, protocol: str) -> None:
    node = policies.nodes[0]
    vip, cluster_ip = CHANGING.target("LoadBalancer", node), CHANGING.target("ClusterIP", node)
    loads = [
        Load(policies.client, vip.address.of(family), vip.ports[protocol], protocol),
        Load(policies.pods["toolbox"].namespace, cluster_ip.address.of(family), vip.ports[protocol], protocol),
        Load(node.namespace, cluster_ip.address.of(family), vip.ports[protocol], protocol),
    ]
    all_three = tuple(policies.pods[name] for name in ("web-1", "web-2", "web-3"))
    moments, synced = [], []
    try:
        for endpoints in (all_three, all_three[:2], all_three, all_three[:2]):
            CHANGING.endpoints = endpoints
            moments.append(time.monotonic())
            policies.wait_synced(write_services(policies, CHANGING))
            synced.append(time.monotonic())
            start = [load.made for load in loads]
            wait_until(
                lambda start=start: all(load.made >= was + 60 for load, was in zip(loads, start, strict=True)),
                "60 more requests of each load",
            )
    finally:
        CHANGING.endpoints = all_three[:2]
        results = [load.stop() for load in loads]
    for load, samples in zip(loads, results, strict=True):
        lost = failed(samples)
        if load is loads[2] and protocol == "udp":
            # A socket of the node that waits for the removed endpoint's answer is ended with it (§10).
            lost = [s for s in lost if s.kind != RESET or not any(s.begun < synced[i] < s.begun + 4 for i in (1, 3))]
        assert not lost, (load.name, lost[:3])
        arrived = first_answer(samples, "web-3", moments[2])
        assert arrived is not None, load.name
        assert moments[2] + arrived < moments[3]
        assert last_answer(samples, "web-3", moments[3]) < 2.0
        assert samples[-1].pod != "web-3"


def test_a_udp_flow_leaves_a_removed_endpoint(policies: Lab, family: int) -> None:
    """Same client port, so the same flow: the next datagram gets a serving endpoint."""
    node = policies.nodes[0]
    vip = CHANGING.target("LoadBalancer", node)
    asked = (vip.address.of(family), 53, "udp")
    old, new = policies.pods["web-1"], policies.pods["web-2"]
    pods = []
    try:
        for endpoints in ((old,), (new,)):
            CHANGING.endpoints = endpoints
            policies.wait_synced(write_services(policies, CHANGING))
            for _ in range(3):
                outcome = policies.client.call(ask, *asked, source_port=20_000 + family)
                assert outcome.answer is not None, outcome
                pods.append(outcome.answer.pod)
    finally:
        CHANGING.endpoints = (old, new)
        policies.wait_synced(write_services(policies, CHANGING))
    assert pods == ["web-1"] * 3 + ["web-2"] * 3


def test_a_udp_flow_from_before_the_first_endpoint_recovers(policies: Lab, family: int) -> None:
    vip = CHANGING.target("LoadBalancer", policies.nodes[0])
    asked = (vip.address.of(family), 53, "udp")
    both = CHANGING.endpoints
    try:
        CHANGING.endpoints = ()
        policies.wait_synced(write_services(policies, CHANGING))
        assert policies.client.call(ask, *asked, source_port=20_100 + family).kind == REFUSED
    finally:
        CHANGING.endpoints = both
        policies.wait_synced(write_services(policies, CHANGING))
    assert policies.client.call(ask, *asked, source_port=20_100 + family).kind == ANSWERED


def test_a_udp_flow_from_before_the_service_recovers(policies: Lab, family: int) -> None:
    """It was routed without translation, and conntrack has such an entry."""
    newborn = Kind("newborn", 15 + family)
    newborn.endpoints = (policies.pods["web-2"],)
    vip = newborn.target("LoadBalancer", policies.nodes[0])
    asked = (vip.address.of(family), 53, "udp")
    assert policies.client.call(ask, *asked, source_port=20_200, timeout=0.3).answer is None
    policies.wait_synced(write_services(policies, newborn))
    # By this packet, or before it by the clean-up after a sync.
    assert policies.client.call(ask, *asked, source_port=20_200).kind == ANSWERED


def test_a_silent_udp_flow_is_deleted(policies: Lab, family: int) -> None:
    node = policies.nodes[0]
    vip = CHANGING.target("LoadBalancer", node).address.of(family)
    both = CHANGING.endpoints
    source = 20_300 + 100 * family

    def flows() -> str:
        command = (
            "conntrack",
            "-L",
            "-f",
            f"ipv{family}",
            "-p",
            "udp",
            "--orig-dst",
            vip,
            "--orig-port-src",
            str(source),
        )
        return node.namespace.run(*command, "--orig-port-dst", "53")

    def is_in_conntrack() -> bool:
        """Another port each time: with a permit from flows of other tests, the flow would stay young."""
        nonlocal source
        source += 1
        assert policies.client.call(ask, vip, 53, "udp", source_port=source).kind == ANSWERED
        return flows().count("udp") == 1

    try:
        CHANGING.endpoints = both[:1]
        policies.wait_synced(write_services(policies, CHANGING))
        wait_until(is_in_conntrack, "a flow to the first endpoint that the kernel knows")
        CHANGING.endpoints = ()
        policies.wait_synced(write_services(policies, CHANGING))
        CHANGING.endpoints = both[1:]
        before = flows()
        policies.wait_synced(write_services(policies, CHANGING))
        assert before.count("udp") == 1, "a flow stays while no endpoint serves"
        wait_until(lambda: not flows(), "the flow to the endpoint that is gone is deleted")
    finally:
        CHANGING.endpoints = both
        policies.wait_synced(write_services(policies, CHANGING))


def _echo(address: str, port: int, rounds: object) -> int:
    """A connection that ends by a word from the pipe; returns how many echoes came back."""
    done = 0
    with socket.create_connection((address, port), timeout=10) as sock:
        rounds.send("up")  # type: ignore[attr-defined]
        while rounds.recv():  # type: ignore[attr-defined]
            sock.sendall(b"x" * 1000)
            got = 0
            while got < 1000:
                got += len(sock.recv(1000 - got))
            done += 1
            rounds.send("echoed")  # type: ignore[attr-defined]
    return done


def test_a_tcp_connection_outlives_its_endpoints_and_its_service(policies: Lab, family: int) -> None:
    """Existing connections continue, whatever happens to the service (§10)."""
    echo = Kind("echo", 13)
    echo.ports = [Port("echo", 7, 7007, "TCP", 30013)]
    echo.endpoints = (policies.pods["web-2"],)
    policies.wait_synced(write_services(policies, echo))
    target = echo.target("LoadBalancer", policies.nodes[0])
    here, there = multiprocessing.Pipe()
    task = policies.client.start(_echo, target.address.of(family), 7, there)

    def one_more() -> None:
        here.send(True)
        assert here.poll(10)
        assert here.recv() == "echoed"

    assert here.recv() == "up"
    one_more()
    echo.endpoints = (policies.pods["web-1"],)
    policies.wait_synced(write_services(policies, echo))
    one_more()
    echo.endpoints = ()
    policies.wait_synced(write_services(policies, echo))
    one_more()
    (policies.manifests / "echo.yaml").unlink()
    answer = lambda: policies.client.call(ask, target.address.of(family), 7, timeout=0.3).kind  # noqa: E731
    wait_until(lambda: answer() != REFUSED, "the service is gone")
    one_more()
    here.send(False)
    assert task.result() == 4


def test_one_client_port_directly_and_through_the_service(policies: Lab, family: int, protocol: str) -> None:
    """The endpoint cannot distinguish the two flows unless one of them gets another source port."""
    pod = policies.pods["web-2"]
    alone = Kind("alone", 14, externalTrafficPolicy="Cluster")
    alone.endpoints = (pod,)
    policies.wait_synced(write_services(policies, alone))
    target = alone.target("ClusterIP", policies.nodes[0])
    direct = (pod.address.of(family), {"tcp": 8080, "udp": 5353}[protocol], protocol)
    served = (target.address.of(family), target.ports[protocol], protocol)
    toolbox = policies.pods["toolbox"].namespace
    for asked in (direct, served, direct, served):
        outcome = toolbox.call(ask, *asked, source_port=23_000 + family)
        assert outcome.answer is not None, (asked, outcome)
        assert outcome.answer.pod == "web-2"
        assert outcome.took < 0.9, (asked, outcome)  # no retransmission
