# SPDX-License-Identifier: Apache-2.0
"""Mode ipvs with real connections: exact turns of rr, and the load according to conntrack."""

from __future__ import annotations

import json
import multiprocessing
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pyebpf_proxy.lab.client import ask, ask_many, family_of
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.namespace import Namespace
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 20)
HELD = 12


@pytest.fixture(scope="module")
def ipvs() -> Iterator[Lab]:
    with Lab() as lab:
        first, second = lab.nodes
        lab.add_pod("toolbox", first)
        WEB.endpoints = (lab.add_pod("web-1", second), lab.add_pod("web-2", second), lab.add_pod("web-3", first))
        write_nodes(lab)
        write_services(lab, WEB)
        yield lab


@contextmanager
def agents(lab: Lab, scheduler: str) -> Iterator[None]:
    lab.start_agents({"mode": "ipvs", "ipvs": {"scheduler": scheduler, "minSyncPeriod": "10ms"}})
    try:
        yield
    finally:
        lab.stop_agents()


def askers(lab: Lab, family: int) -> dict[str, tuple[Namespace, str]]:
    """The clients and their address: tc serves the outside client and the pod, the socket programs serve the node."""
    vip, cluster_ip = (WEB.target(kind, lab.nodes[0]).address.of(family) for kind in ("LoadBalancer", "ClusterIP"))  # type: ignore[arg-type]
    return {
        "client": (lab.client, vip),
        "pod": (lab.pods["toolbox"].namespace, cluster_ip),
        "node": (lab.nodes[0].namespace, cluster_ip),
    }


def pods(namespace: Namespace, address: str, count: int, protocol: str = "tcp", first_port: int = 0) -> Counter[str]:
    port = 80 if protocol == "tcp" else 53
    outcomes = namespace.call(ask_many, count, address, port, protocol, first_port=first_port)
    return Counter(outcome.answer.pod if outcome.answer else outcome.kind for outcome in outcomes)


class Held:
    """Connections that a separate process holds open until ``close``."""

    def __init__(self, namespace: Namespace, address: str, count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._end, ready = context.Event(), context.Event()
        self._task = namespace.start(_hold, address, count, ready, self._end)
        assert ready.wait(20), self._task.result(1)

    def close(self) -> None:
        self._end.set()
        self._task.result(30)


def _hold(address: str, count: int, ready: Any, end: Any) -> None:
    sockets = [socket.create_connection((address, 80), timeout=10) for _ in range(count)]
    assert sockets[0].family == family_of(address)
    ready.set()
    end.wait(120)
    for each in sockets:
        each.close()


def test_rr_takes_exact_turns_for_any_client(ipvs: Lab) -> None:
    """All clients together: they share the turns of a list, so 3 × 12 connections are 12 for each endpoint."""
    with agents(ipvs, "rr"):
        for family in (4, 6):
            total: Counter[str] = Counter()
            for name, (namespace, address) in askers(ipvs, family).items():
                found = pods(namespace, address, 12)
                assert found == {"web-1": 4, "web-2": 4, "web-3": 4}, name
                total += found
            assert set(total.values()) == {12}
            # A second datagram from the same port would belong to the existing flow.
            found = pods(*askers(ipvs, family)["client"], 9, "udp", first_port=20_000)
            assert found == {"web-1": 3, "web-2": 3, "web-3": 3}


def test_hashing_schedulers_keep_a_client_over_a_restart(ipvs: Lab) -> None:
    before = {}
    for _ in range(2):
        with agents(ipvs, "sh"):
            for family in (4, 6):
                for name, (namespace, address) in askers(ipvs, family).items():
                    found = pods(namespace, address, 6)
                    assert len(found) == 1, (name, found)
                    assert before.setdefault((family, name), found) == found
    assert len({pod for found in before.values() for pod in found}) > 1


@pytest.mark.parametrize("origin", ["client", "pod", "node"])
def test_lc_uses_the_existing_connections(ipvs: Lab, origin: str) -> None:
    """web-1 holds long connections: new ones go to the other endpoint, and to both after those have closed."""
    namespace, address = askers(ipvs, 4)[origin]
    everybody = WEB.endpoints
    held = None
    with agents(ipvs, "lc"):
        try:
            WEB.endpoints = everybody[:1]
            ipvs.wait_synced(write_services(ipvs, WEB))
            held = Held(namespace, address, HELD)
            WEB.endpoints = everybody[:2]
            ipvs.wait_synced(write_services(ipvs, WEB))
            # More than are held, so that it shows that those to web-2 have ended.
            for _ in range(3):
                assert pods(namespace, address, HELD // 2) == {"web-2": HELD // 2}
                wait_until(lambda: _load(ipvs, "web-2") == 0, "the ended connections to web-2 are not active")
            wait_until(lambda: _load(ipvs, "web-1") == HELD, "the held connections to web-1 are active")
            held.close()
            held = None
            wait_until(lambda: _load(ipvs, "web-1") == 0, "the closed connections to web-1 are not active")
            wait_until(lambda: "web-1" in pods(namespace, address, 1), "web-1 is asked again")
            found = pods(namespace, address, 64)
            assert min(found["web-1"], found["web-2"]) > 16, found
        finally:
            if held is not None:
                held.close()
            WEB.endpoints = everybody
            write_services(ipvs, WEB)


def _load(lab: Lab, pod: str) -> int:
    """Active connections of a pod's TCP backends on the first node, as the programs see them."""
    node = lab.nodes[0]

    def dump(name: str) -> dict[int, Any]:
        text = node.namespace.run("bpftool", "-j", "map", "dump", "pinned", str(node.agent.pin(name)))
        # An entry that is written at that moment has no value.
        found = (entry["formatted"] for entry in json.loads(text) if "formatted" in entry)
        return {entry["key"]: entry["value"] for entry in found}

    address = [int(part) for part in lab.pods[pod].address.v4.split(".")]
    choices, connections = dump("choices"), dump("connections")
    total = 0
    for number, backend in dump("backends4").items():
        if backend["address"] == address and backend["protocol"] == "TCP":
            counted = connections.get(number, {"active": 0, "choices": 0})
            total += counted["active"] + choices.get(number, 0) - counted["choices"]
    return total


def test_a_first_request_is_answered_with_every_scheduler(ipvs: Lab) -> None:
    for scheduler in ("mh", "lblcr"):
        with agents(ipvs, scheduler):
            for family in (4, 6):
                for name, (namespace, address) in askers(ipvs, family).items():
                    outcome = namespace.call(ask, address, 80)
                    assert outcome.answer is not None, (scheduler, name, outcome)
