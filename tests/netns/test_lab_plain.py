# SPDX-License-Identifier: Apache-2.0
"""The lab itself, without a proxy: if this fails, the other results have no meaning."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from pyebpf_proxy.lab import leftovers
from pyebpf_proxy.lab.addresses import CLIENT, cluster_ip
from pyebpf_proxy.lab.client import ANSWERED, REFUSED, RESET, TIMED_OUT, UNREACHABLE, ask
from pyebpf_proxy.lab.cluster import Lab, PodNetwork
from pyebpf_proxy.lab.namespace import LabError
from pyebpf_proxy.lab.rules import decide, expect

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns]


@pytest.mark.parametrize("pod_network", ["routed", "bare", "bridge"])
def test_every_client_reaches_every_pod_untranslated(pod_network: PodNetwork) -> None:
    with Lab(nodes=2, pod_network=pod_network) as lab:
        first, second = lab.nodes
        pods = [lab.add_pod("a", first), lab.add_pod("b", first), lab.add_pod("c", second)]
        for family in (4, 6):
            sources = [(lab.client, CLIENT.of(family))] + [(pod.namespace, pod.address.of(family)) for pod in pods]
            for namespace, source in sources:
                for pod in pods:
                    for protocol, port in (("tcp", 8080), ("udp", 5353)):
                        outcome = namespace.call(ask, pod.address.of(family), port, protocol)
                        assert outcome.kind == ANSWERED, (namespace.name, pod.name, protocol, outcome)
                        assert outcome.answer is not None
                        assert outcome.answer.pod == pod.name
                        assert outcome.answer.peer[0] == source
                        assert outcome.answer.local == (pod.address.of(family), port)
            for node in lab.nodes:
                for pod in pods:
                    outcome = node.namespace.call(ask, pod.address.of(family), 8080)
                    assert outcome.answer is not None, (node.name, pod.name, outcome)
                    assert outcome.answer.peer[0] == node.source_towards(pod).of(family)


def test_outcomes_are_distinguished(lab: Lab, family: int) -> None:
    pod = lab.add_pod("a", lab.nodes[0])
    address = pod.address.of(family)
    for protocol in ("tcp", "udp"):
        assert lab.client.call(ask, address, 81, protocol).kind == REFUSED
    assert lab.client.call(ask, address, 81, "udp", connected=False).kind == REFUSED
    # An unused address: the node cannot resolve it and reports that.
    lab.core.ip(f"route add unreachable {cluster_ip(9).of(family)}")
    assert lab.client.call(ask, cluster_ip(9).of(family), 81).kind == UNREACHABLE
    lab.nodes[0].namespace.ip(f"route add blackhole {cluster_ip(8).of(family)}")
    via = lab.nodes[0].address.of(family)
    lab.core.ip(f"route add {cluster_ip(8).of(family)} via {via}")
    for protocol in ("tcp", "udp"):
        assert lab.client.call(ask, cluster_ip(8).of(family), 81, protocol, timeout=0.2).kind == TIMED_OUT


def test_a_connection_cut_in_the_middle_is_reset(lab: Lab) -> None:
    pod = lab.add_pod("a", lab.nodes[0])
    task = lab.client.start(ask, pod.address.v4, 8080, reply_size=200_000_000)
    time.sleep(0.05)  # the transfer cannot be complete, whether it has begun or not
    pod.stop()
    assert task.result().kind in (RESET, REFUSED)


def test_large_datagrams_and_transfers(lab: Lab, family: int) -> None:
    pod = lab.add_pod("a", lab.nodes[0])
    outcome = lab.client.call(ask, pod.address.of(family), 5353, "udp", size=20_000, reply_size=30_000, fragment=True)
    assert outcome.answer is not None, outcome
    assert (outcome.answer.received, outcome.size) == (20_000, 30_000)
    outcome = lab.client.call(ask, pod.address.of(family), 8080, size=20_000, reply_size=5_000_000)
    assert outcome.answer is not None, outcome
    assert outcome.size == 5_000_000


def test_the_lab_is_removed_completely_also_after_an_error() -> None:
    with pytest.raises(LabError, match="no node 'node7'"), Lab(nodes=1) as lab:
        tag = lab.tag
        lab.add_pod("a", lab.nodes[0])
        assert len(leftovers.namespaces_of(tag)) == 4
        lab.node("node7")
    assert leftovers.namespaces_of(tag) == []
    assert not leftovers.folder_of(tag).exists()
    with open("/proc/self/mountinfo") as file:
        assert tag not in file.read()


DIES = """
import os, signal
from pyebpf_proxy.lab.cluster import Lab
with Lab(nodes=1) as lab:
    lab.add_pod("a", lab.nodes[0])
    print(lab.tag, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

WAITS = """
import signal, sys
from pyebpf_proxy.lab.cluster import Lab
with Lab(nodes=1) as lab:
    print(lab.tag, flush=True)
    signal.pause()
"""


@pytest.mark.alone  # a demo that runs at the same time also cleans up
def test_clean_removes_only_the_leftovers_of_a_killed_run() -> None:
    killed = subprocess.run([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    dead = killed.stdout.strip()
    assert leftovers.namespaces_of(dead)
    with Lab(nodes=1) as alive:
        done = subprocess.run(
            [sys.executable, "-c", "from pyebpf_proxy.lab.cli import main; raise SystemExit(main(['clean']))"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert dead in done.stdout
        assert alive.tag not in done.stdout
        assert len(leftovers.namespaces_of(alive.tag)) == 3
    assert leftovers.namespaces_of(dead) == []
    assert not leftovers.folder_of(dead).exists()
    with open("/proc/self/mountinfo") as file:
        assert dead not in file.read()


def test_ctrl_c_removes_the_lab() -> None:
    command = [sys.executable, "-c", WAITS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    tag = process.stdout.readline().strip()
    assert leftovers.namespaces_of(tag)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) != 0
    assert leftovers.namespaces_of(tag) == []
    assert not os.path.exists(leftovers.folder_of(tag))


def test_the_decision_table_as_written_in_the_rules() -> None:
    """spec/service-semantics §5, line by line: the other tests compare packets with this function."""
    assert decide("ClusterIP", "pod") == ("cluster", False)
    assert decide("ClusterIP", "pod", masquerade_all=True) == ("cluster", True)
    assert decide("ClusterIP", "external") == ("cluster", True)
    assert decide("ClusterIP", "external", detector=False) == ("cluster", False)
    assert decide("ClusterIP", "pod", internal_local=True) == ("local", False)
    assert decide("ClusterIP", "pod", external_local=True) == ("cluster", False)
    for kind in ("ExternalIP", "LoadBalancer", "NodePort"):
        for source in ("pod", "node", "external"):
            assert decide(kind, source) == ("cluster", True)
            assert decide(kind, source, internal_local=True) == ("cluster", True)
        assert decide(kind, "pod", masquerade_all=True, external_local=True) == ("cluster", False)
        assert decide(kind, "pod", external_local=True) == ("cluster", False)
        assert decide(kind, "node", external_local=True) == ("cluster", True)
        assert decide(kind, "external", external_local=True) == ("local", False)
        assert decide(kind, "pod", external_local=True, detector=False) == ("local", False)


def test_expectations_follow_from_rules_and_addresses(lab: Lab) -> None:
    first, second = lab.nodes
    near = lab.add_pod("near", first, serve=False)
    far = lab.add_pod("far", second, serve=False)
    both = (near, far)
    cluster, local = decide("NodePort", "external"), decide("NodePort", "external", external_local=True)
    assert expect(4, cluster, first, CLIENT.v4, both).sources == {"near": first.gateway.v4, "far": first.address.v4}
    assert expect(6, local, first, CLIENT.v6, both).sources == {"near": CLIENT.v6}
    assert expect(4, local, first, CLIENT.v4, [far]).failure == "timed out"
    assert expect(4, local, first, CLIENT.v4, []).failure == "refused"
    hairpin = expect(4, decide("ClusterIP", "pod"), first, near.address.v4, both)
    assert hairpin.sources == {"near": first.gateway.v4, "far": near.address.v4}
