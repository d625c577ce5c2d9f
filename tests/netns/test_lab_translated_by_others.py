# SPDX-License-Identifier: Apache-2.0
"""A program after the agent's translates ClusterIPs of pods itself, as Cilium's does, and applies NetworkPolicy to the
endpoint that it has chosen. The agent must not translate the packet to another endpoint.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.lab.addresses import Dual, cluster_ip
from pyebpf_proxy.lab.client import Outcome, ask, ask_many
from pyebpf_proxy.lab.cluster import Lab, Node, Pod
from pyebpf_proxy.lab.manifests import Port, service, slices
from tests.netns.foreign_programs import TRANSLATES, attached, compiled, nat
from tests.support.lab_services import write_nodes
from tests.support.lab_tools import wait_until
from tests.support.see_tools import see

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

PORT = 5353
ADDRESS, LATER = cluster_ip(40), cluster_ip(41)
NODE_PORT = 30040
#: With two endpoints, so many requests are not answered by the same one by chance.
MANY = 30


def write(lab: Lab, name: str, address: Dual, node_port: int, *endpoints: Pod) -> float:
    ports = [Port("dns", PORT, PORT, "UDP", node_port)]
    found = slices(name, ports, [(pod.address, pod.node.name) for pod in endpoints])
    return lab.write(f"{name}.yaml", [service(name, ports, address), *found])


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if not tcx.available():
        pytest.skip("this kernel has no tcx: others have filters, after the agent's (test_attach_others)")
    with Lab() as made:
        first, second = made.nodes
        for name, node in (("near", first), ("far", second), ("client-pod", first), ("other-pod", first)):
            made.add_pod(name, node)
        write_nodes(made)
        write(made, "both", ADDRESS, NODE_PORT, made.pods["near"], made.pods["far"])
        made.start_agents()
        yield made


def names(found: list[Outcome]) -> set[str]:
    """The pods that have answered. An unanswered request is "None"."""
    return {str(each.answer and each.answer.pod) for each in found}


def answered_by(lab: Lab, client: str, address: str, port: int = PORT, count: int = MANY) -> set[str]:
    namespace = lab.pods[client].namespace if client in lab.pods else lab.client
    return names(namespace.call(ask_many, count, address, port, "udp", connected=False))


@contextlib.contextmanager
def meanwhile(pod: Pod, address: str) -> Iterator[set[str]]:
    """Ask all the time. When the block has ended, the set has the pods that have answered."""
    here, there = multiprocessing.Pipe()
    task = pod.namespace.start(_ask_until_told, address, there)
    there.close()
    answering: set[str] = set()
    with here:
        yield answering
        here.send("end")
        answering |= names(task.result())


def _ask_until_told(address: str, channel: Any) -> list[Outcome]:
    found = []
    while not channel.poll():
        found.append(ask(address, PORT, "udp", connected=False))
    return found


def programs_of_others(node: Node, device: str) -> list[str]:
    """Those on a device, as the agent reports them. ``status`` exits with 1 if it also warns of a restored table."""
    status = json.loads(see(node, "status", "-o", "json").stdout)
    found: list[str] = next(each for each in status["devices"] if each["name"] == device)["others"]
    return found


def table(lab: Lab) -> str:
    node = lab.nodes[0]
    name = mounts.table_name(node.agent.directory)
    return node.namespace.run("nft", "list", "table", "inet", name, check=False)


def test_a_translated_packet_keeps_its_endpoint(lab: Lab, family: int, tmp_path: Path) -> None:
    node, pod, far = lab.nodes[0], lab.pods["client-pod"], lab.pods["far"]
    address = ADDRESS.of(family)
    both = {"near", "far"}
    assert answered_by(lab, "client-pod", address) == both
    rules = nat(ADDRESS, far.address)
    with attached(node.namespace, compiled(tmp_path), TRANSLATES, pod.device, where=tcx.AFTER, nat=rules) as foreign:
        # After the table, the agent closes the fast path of the device.
        wait_until(lambda: programs_of_others(node, pod.device), "the agent knows the program")
        assert f"{address} . udp . {PORT}" in table(lab)
        assert answered_by(lab, "client-pod", address) == {"far"}
        assert int(foreign) >= MANY
        # What no other program translates is still served.
        assert answered_by(lab, "other-pod", address) == both
        assert answered_by(lab, "outside", node.address.of(family), NODE_PORT) == both
        lab.wait_synced(write(lab, "later", LATER, NODE_PORT + 1, lab.pods["near"]))
        assert answered_by(lab, "client-pod", LATER.of(family), count=1) == {"near"}
        assert answered_by(lab, "outside", node.address.of(family), NODE_PORT + 1, count=1) == {"near"}
        # Without an agent, and while it starts.
        node.agent.kill()
        assert answered_by(lab, "client-pod", address) == {"far"}
        with meanwhile(pod, address) as answering:
            node.agent.start()
            node.agent.wait_synced()
        assert answering == {"far"}
        lab.wait_synced(lab.write("later.yaml", []))
        assert f"{LATER.of(family)} . udp" not in table(lab)
        node.namespace.run("nft", "flush", "ruleset")
        wait_until(lambda: f"{address} . udp . {PORT}" in table(lab), "the table is restored")
        assert answered_by(lab, "client-pod", address) == {"far"}
    wait_until(lambda: "frontends" not in table(lab), "the table no longer knows them")
    assert answered_by(lab, "client-pod", address) == both
