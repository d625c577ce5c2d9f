# SPDX-License-Identifier: Apache-2.0
"""When the agent starts and ends by itself, and what stays (spec/configuration §5.3, §5.4, §6)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import node as node_object
from tests.netns.init_only import run_init_only
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf, pytest.mark.needs_netns]

WEB = Kind("web", 1)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(nodes=1) as lab:
        yield lab


def test_a_changed_configuration_file_only_ends_the_agent(lab: Lab) -> None:
    node = lab.nodes[0]
    server, pod = lab.add_pod("web-1", node), lab.add_pod("asker", node)
    WEB.endpoints = (server,)
    write_nodes(lab)
    write_services(lab, WEB)
    node.agent.start()
    node.agent.wait_synced()
    file = node.agent.folder / "config.yaml"
    file.chmod(0o600)
    with file.open("a") as opened:
        opened.write("# changed\n")
    assert node.agent.wait_ended() == 1
    last = Log(node.agent).last()
    assert last.level == "error"
    assert last.text.startswith(f"{Message.RUN_ERROR} error=\"content of the proxy server's configuration file was")
    target = WEB.target("ClusterIP", node)
    for family in (4, 6):
        assert pod.namespace.call(ask, target.address.of(family), 80).answer is not None
    node.agent.start()
    node.agent.wait_synced()
    assert node.agent.stop() == 0


def test_node_cidr_waits_for_pod_cidrs_and_ends_when_they_change(lab: Lab) -> None:
    node = lab.nodes[0]
    node.agent.start({"detectLocalMode": "NodeCIDR"})
    Log(node.agent).wait(Message.POD_CIDRS_AWAITED)
    Log(node.agent).none("ready")
    write_nodes(lab)
    node.agent.wait_synced()
    lab.write("nodes.yaml", [node_object(node.name, node.address, Dual("10.99.0.0/24", "fd00:99::/64"))])
    assert node.agent.wait_ended() == 1
    Log(node.agent).some(Message.POD_CIDRS_CHANGED)


def test_a_deleted_node_is_logged_and_keeps_its_addresses(lab: Lab) -> None:
    node = lab.nodes[0]
    write_nodes(lab)
    node.agent.start({"nodePortAddresses": ["primary"], "detectLocalMode": "NodeCIDR"})
    node.agent.wait_synced()
    Log(node.agent).none(Message.NODE_PORT_ADDRESSES_UNSET)
    (node.agent.manifests / "nodes.yaml").unlink()
    Log(node.agent).wait(Message.NODE_DELETED)
    assert node.agent.stop() == 0


def test_a_node_with_one_family_and_pods_of_the_other_does_not_start(lab: Lab) -> None:
    node = lab.nodes[0]
    write_nodes(lab)
    node.namespace.sysctl({"net.ipv6.conf.all.disable_ipv6": 1})
    node.agent.start({"clusterCIDR": "fd00:10::/48"})
    assert node.agent.wait_ended() == 1
    output = f"{Message.CONFIGURATION_INCORRECT}: cluster is IPv4-only but clusterCIDRs contains only IPv6 addresses"
    Log(node.agent).some(output)
    assert not (node.agent.directory / "bpf" / "pyebpf-proxy").exists()


def test_init_only_prepares_the_node_and_a_start_adopts_it(lab: Lab) -> None:
    node = lab.nodes[0]
    write_nodes(lab)
    directory = node.agent.directory
    ran = run_init_only(node)
    assert ran.returncode == 0, ran.stderr
    # A line for a node that is served: scripts wait for it.
    assert " info ready" not in ran.stderr
    assert " info prepared " in ran.stderr
    assert "nodePortAddresses is unset" in ran.stderr
    tables = node.namespace.run("nft", "list", "tables")
    assert "pyebpf-proxy" in tables
    timeout = "net.netfilter.nf_conntrack_tcp_timeout_close_wait"
    assert node.namespace.run("sysctl", "-n", timeout).strip() == "3600"
    assert not [path for path in (directory / "bpf").rglob("*") if path.name == "frontends4"]
    node.agent.start()
    node.agent.wait_synced()
    assert node.agent.stop() == 0


def test_after_init_only_a_start_needs_few_rights(lab: Lab) -> None:
    node = lab.nodes[0]
    server, pod = lab.add_pod("web-1", node), lab.add_pod("asker", node)
    WEB.endpoints = (server,)
    write_nodes(lab)
    write_services(lab, WEB)
    assert run_init_only(node).returncode == 0
    few = "-all,+net_admin,+bpf,+perfmon"
    # As in a container: /sys is the host's. ``ip netns exec`` would mount another one.
    enter = ("nsenter", f"--net=/run/netns/{node.namespace.name}")
    node.agent.start(enter=(*enter, "setpriv", f"--bounding-set={few}", f"--inh-caps={few}"))
    node.agent.wait_synced()
    Log(node.agent).none(level="error")
    target = WEB.target("ClusterIP", node)
    for family in (4, 6):
        assert pod.namespace.call(ask, target.address.of(family), 80).answer is not None
    assert node.agent.stop() == 0


def test_init_only_fails_where_a_start_would_fail(lab: Lab) -> None:
    node = lab.nodes[0]
    node.namespace.sysctl({"net.ipv6.conf.all.disable_ipv6": 1})
    ran = run_init_only(node, "--cluster-cidr=fd00::/48")
    assert ran.returncode == 1
    assert "kube-proxy configuration is incorrect" in ran.stderr.splitlines()[-1]
    assert "pyebpf-proxy" not in node.namespace.run("nft", "list", "tables")
