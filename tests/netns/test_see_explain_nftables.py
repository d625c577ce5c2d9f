# SPDX-License-Identifier: Apache-2.0
"""``explain`` in mode nftables: the table refuses or drops packets to unknown service addresses. Each is also sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.addresses import cluster_ip, vip
from pyebpf_proxy.lab.client import REFUSED, TIMED_OUT, UNREACHABLE, ask
from pyebpf_proxy.lab.cluster import Lab
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import detach_program
from tests.support.see_tools import answer, see

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
UNDEFINED_PORT, FREE = 4242, 77
CONFIG: dict[str, object] = {"mode": "nftables", "nftables": {"minSyncPeriod": "10ms"}}
CIDRS = ["10.96.0.0/24", "fd00:10:96::/112"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        WEB.endpoints = (lab.add_pod("web-1", lab.nodes[0]),)
        lab.add_pod("toolbox", lab.nodes[0])
        write_nodes(lab)
        write_services(lab, WEB)
        kind = {"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR"}
        lab.write("cidrs.yaml", [{**kind, "metadata": {"name": "kubernetes"}, "spec": {"cidrs": CIDRS}}])
        lab.start_agents(CONFIG)
        yield lab


def place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


@pytest.mark.parametrize("source", ["pod", "node"])
def test_an_address_without_a_frontend(lab: Lab, source: str, family: int, protocol: str) -> None:
    node, pod = lab.nodes[0], lab.pods["toolbox"]
    sender = pod if source == "pod" else node
    # The kernel rejects an outgoing datagram to its sender with EPERM.
    refused = UNREACHABLE if (source, protocol) == ("node", "udp") else REFUSED
    dropped = UNREACHABLE if (source, protocol) == ("node", "udp") else TIMED_OUT
    known, free = cluster_ip(10).of(family), cluster_ip(FREE).of(family)
    texts = {
        known: ("refused", refused, "is a cluster IP, and nftables refuses ports that its Service does not have"),
        free: ("dropped", dropped, "is in a ServiceCIDR, and no Service has it: nftables drops the packet"),
    }
    for address, (verdict, outcome, text) in texts.items():
        asked = (sender.address.of(family), place(address, UNDEFINED_PORT), protocol)
        found = answer(node, "explain", *asked, status=1)
        assert (found["verdict"], found["reason"], found["disagreements"]) == (verdict, "", [])
        assert found["steps"][-1] == f"mode nftables: {address} {text}"
        # A refusal may come only after the SYN is repeated, a second later.
        seconds = 0.5 if verdict == "dropped" else 4.0
        assert sender.namespace.call(ask, address, UNDEFINED_PORT, protocol, timeout=seconds).kind == outcome


def test_other_addresses_are_passed_to_the_kernel(lab: Lab, family: int) -> None:
    """The last address of the ServiceCIDR and the first one after it; a VIP; an address of the node."""
    node, pod = lab.nodes[0], lab.pods["toolbox"].address.of(family)
    last, after = {4: ("10.96.0.255", "10.96.1.0"), 6: ("fd00:10:96::ffff", "fd00:10:96::1:0")}[family]
    assert answer(node, "explain", pod, place(last, 80), status=1)["verdict"] == "dropped"
    for address in (after, vip(10).of(family), node.address.of(family)):
        assert answer(node, "explain", pod, place(address, UNDEFINED_PORT))["verdict"] == "left"


def test_a_device_without_a_program(lab: Lab, family: int) -> None:
    """The table drops what goes to a defined port of a cluster IP: the client's next attempt may be served."""
    node, pod = lab.nodes[0], lab.pods["toolbox"]
    node.agent.kill()
    try:
        for device in ("pod0", "pod1"):
            assert node.namespace.call(detach_program, node.agent.directory, device)
        for address, verdict in ((cluster_ip(10).of(family), "dropped"), (vip(10).of(family), "left")):
            found = answer(node, "explain", pod.address.of(family), place(address, 80), status=1)
            assert (found["verdict"], found["endpoints"]) == (verdict, [])
        # The lab's router sends what goes to a VIP back to the node, to eth0, which has its program.
        assert pod.namespace.call(ask, cluster_ip(10).of(family), 80, timeout=0.5).kind == TIMED_OUT
    finally:
        node.agent.start(CONFIG)
        node.agent.wait_synced()


def test_a_table_that_is_gone_refuses_nothing(lab: Lab, family: int) -> None:
    node, pod = lab.nodes[0], lab.pods["toolbox"].address.of(family)
    asked = ("explain", pod, place(cluster_ip(10).of(family), UNDEFINED_PORT))
    assert "It is refused" in see(node, *asked).stdout
    node.agent.stop()
    try:
        for line in node.namespace.run("nft", "list", "tables").splitlines():
            node.namespace.run("nft", "delete", *line.split())
        assert answer(node, *asked)["verdict"] == "left"
    finally:
        node.agent.start(CONFIG)
        node.agent.wait_synced()
