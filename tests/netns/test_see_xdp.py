# SPDX-License-Identifier: Apache-2.0
"""``status`` and ``explain`` with XDP and the fast path."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.addresses import CLIENT, vip
from pyebpf_proxy.lab.cluster import Lab, Node
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, reasons, wait_until
from tests.support.see_tools import answer, see

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
RANGES = Kind("ranges", 12, loadBalancerSourceRanges=["192.0.2.0/24", "2001:db8:1::/64"])
EMPTY = Kind("empty", 13)


@pytest.fixture(scope="module")
def world() -> Iterator[Lab]:
    with Lab(nodes=2) as made:
        WEB.endpoints = RANGES.endpoints = (made.add_pod("web-1", made.nodes[0]), made.add_pod("web-2", made.nodes[1]))
        write_nodes(made)
        write_services(made, WEB, RANGES, EMPTY)
        made.nodes[0].agent.start(own={"fastPath": True, "xdpDevices": ["eth0"]})
        made.nodes[0].agent.wait_synced()
        yield made


@pytest.fixture
def node(world: Lab) -> Node:
    return world.nodes[0]


def test_status_names_devices_modes_and_the_cache(node: Node) -> None:
    found = answer(node, "status")
    assert {each["name"]: (each["program"], each["xdp"]) for each in found["devices"]}["eth0"] == (
        "tc_ethernet",
        "native",
    )
    assert found["fastPath"]["watched"]
    assert (found["fastPath"]["closed4"], found["fastPath"]["closed6"]) == ("", "")
    assert found["fastPath"]["capacity"] > 0
    assert "XDP native on eth0" in see(node, "status").stdout


@pytest.mark.parametrize("source", [CLIENT.v4, CLIENT.v6])
def test_both_programs_are_run_and_agree(node: Node, source: str) -> None:
    before = reasons(node), node.namespace.run("conntrack", "-L")
    address = vip(10).v6 if ":" in source else vip(10).v4
    found = answer(node, "explain", source, f"[{address}]:80" if ":" in address else f"{address}:80")
    assert (found["verdict"], found["disagreements"]) == ("served", [])
    assert found["xdp"]["verdict"] == "served"
    assert found["xdp"]["counted"] == ["new_flow_netfilter"]
    endpoints = {each["backend"]: each for each in found["endpoints"]}
    assert found["xdp"]["backend"] in endpoints
    assert counted_between(before[0], reasons(node)) == {}
    assert [line for line in node.namespace.run("conntrack", "-L").splitlines() if source in line] == [
        line for line in before[1].splitlines() if source in line
    ]


def test_xdp_drops_what_it_may_and_leaves_refusals_to_tc(node: Node) -> None:
    found = answer(node, "explain", CLIENT.v4, f"{vip(12).v4}:80", status=1)
    assert (found["verdict"], found["disagreements"]) == ("dropped", [])
    assert (found["xdp"]["verdict"], found["xdp"]["counted"]) == ("dropped", ["drop_source_range"])
    found = answer(node, "explain", CLIENT.v4, f"{vip(13).v4}:80", status=1)
    assert (found["verdict"], found["xdp"]["verdict"], found["disagreements"]) == ("refused", "left", [])
    text = see(node, "explain", CLIENT.v4, f"{vip(10).v4}:80").stdout
    assert re.search(r"Dry run of the XDP program: .* by 10\.244\.", text)
    assert "Dry run of the tc program: served by 10.244." in text


@pytest.mark.parametrize("source", [CLIENT.v4, CLIENT.v6])
def test_generic_mode(node: Node, source: str) -> None:
    """The tc program then uses the map of XDP devices, which a dry run does not have."""
    node.agent.stop()
    node.agent.start(own={"fastPath": True, "xdpDevices": ["eth0"], "xdpMode": "generic"})
    node.agent.wait_synced()
    try:
        address = f"[{vip(10).v6}]:80" if ":" in source else f"{vip(10).v4}:80"
        found = answer(node, "explain", source, address)
        assert (found["verdict"], found["disagreements"]) == ("served", [])
        assert (found["program"]["verdict"], found["xdp"]["verdict"]) == ("served", "served")
    finally:
        node.agent.stop()
        node.agent.start(own={"fastPath": True, "xdpDevices": ["eth0"]})
        node.agent.wait_synced()


def test_without_its_agent_the_fast_path_is_off(node: Node) -> None:
    node.agent.kill()
    try:
        wait_until(lambda: not answer(node, "status", status=1)["fastPath"]["watched"], "no agent watches")
        assert "closed: no agent follows rules and routes (stack_no_agent)" in see(node, "status").stdout
    finally:
        node.agent.start(own={"fastPath": True, "xdpDevices": ["eth0"]})
        node.agent.wait_synced()


def test_a_warning_names_xdp_without_a_device(node: Node) -> None:
    """The program stays attached as long as its pin exists. A running agent would attach it again."""
    node.agent.kill()
    try:
        (pin,) = node.agent.pin("services").parents[1].glob("xdp/*")
        pin.unlink()
        wait_until(lambda: '"xdp":' not in node.namespace.run("ip", "-j", "link", "show", "dev", "eth0"), "XDP is off")
        shown = [each["what"] for each in answer(node, "status", status=1)["warnings"]]
        assert "XDP is configured, but the program is attached to no device: tc handles all packets" in shown
    finally:
        node.agent.start(own={"fastPath": True, "xdpDevices": ["eth0"]})
        node.agent.wait_synced()


def test_xdp_without_the_fast_path_is_one_warning(node: Node) -> None:
    node.agent.stop()
    try:
        node.agent.start(own={"fastPath": False, "xdpDevices": ["eth0"]})
        node.agent.wait_synced()
        shown = [each["what"] for each in answer(node, "status", status=1)["warnings"]]
        why = "XDP needs the fast path, which is off (fastPath: false)"
        assert [what for what in shown if "XDP" in what] == [f"XDP is not available: {why}"]
    finally:
        node.agent.stop()
        node.agent.start(own={"fastPath": True, "xdpDevices": ["eth0"]})
        node.agent.wait_synced()
