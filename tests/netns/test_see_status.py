# SPDX-License-Identifier: Apache-2.0
"""``status``, ``drops`` and ``flows`` on a node of the lab, also when something is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyebpf_proxy import __version__
from pyebpf_proxy.lab import manifests
from pyebpf_proxy.lab.addresses import CLIENT, cluster_ip, vip
from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.see.agent import running_agent
from tests.support.lab_services import Kind, build_remote_only, write_services
from tests.support.lab_tools import detach_program, full_conntrack, wait_until
from tests.support.see_tools import NO_SYS_ADMIN, answer, error, see

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
EMPTY = Kind("empty", 12)
NEARBY = Kind("nearby", 13, externalTrafficPolicy="Local")


@pytest.fixture(scope="module")
def world() -> Iterator[Lab]:
    with build_remote_only(WEB, EMPTY, NEARBY, empty=EMPTY) as made:
        yield made


@pytest.fixture
def node(world: Lab) -> Node:
    return world.nodes[0]


def warnings(node: Node) -> list[str]:
    ran = see(node, "status", "-o", "json")
    found: list[dict[str, str]] = json.loads(ran.stdout)["warnings"]
    assert ran.returncode == (1 if found else 0)
    assert all(each["remedy"] for each in found)
    return [each["what"] for each in found]


def test_status_of_a_healthy_node(node: Node) -> None:
    found = answer(node, "status")
    assert found["warnings"] == []
    (device,) = found["devices"]
    assert (device["name"], device["program"], device["attached"]) == ("eth0", "tc_ethernet", "tcx")
    assert (device["redirect"], device["limit"], device["others"]) == ("peer", "", [])
    fast = found["fastPath"]
    assert (fast["watched"], fast["closed4"], fast["closed6"], fast["rules"]) == (True, "", "", {})
    assert fast["newFlows"].keys() == {"fast", "netfilter", "socket"}
    assert fast["capacity"] > fast["used"] >= 2 * fast["young"]
    assert len(found["socketPrograms"]) == 8
    assert found["servicePorts"] == 12
    fills = {each["name"]: each["used"] for each in found["maps"]}
    assert (fills["service_configs"], fills["frontends4"], fills["services"]) == (12, 24, 12)
    agent = found["agent"]
    assert agent["running"]
    assert agent["sourceComplete"]
    assert agent["version"] == found["version"] == __version__
    assert 0 <= agent["syncedSecondsAgo"] <= agent["seconds"] + 1
    assert "OK: no warnings" in see(node, "status").stdout


def test_fits_40_columns(node: Node) -> None:
    for words in (("status",), ("drops",), ("flows",)):
        ran = see(node, *words, COLUMNS="40")
        assert max(map(len, ran.stdout.splitlines())) <= 40


def test_a_flow_has_the_names_of_its_service(node: Node, world: Lab) -> None:
    assert world.client.call(ask, vip(10).v4, 80).kind == "answered"
    (flow,) = answer(node, "flows", "default/web")["flows"]
    assert flow["service"] == "default/web:http"
    assert flow["client"].startswith(f"{CLIENT.v4}:")
    assert flow["destination"] == f"{vip(10).v4}:80"
    assert flow["endpoint"] == f"{world.pods['web-2'].address.v4}:8080"
    assert (flow["clientName"], flow["endpointName"]) == ("", "default/web-2")
    assert flow["masqueradedAs"].startswith(node.address.v4)
    assert (flow["protocol"], flow["age"]) == ("TCP", "kernel")
    for words in (
        ("service=web",),
        ("client=" + CLIENT.v4,),
        ("tcp", "web"),
        ("web-2",),
        ("endpoint=default/web-2",),
        ("age=kernel", "state=" + flow["state"]),
    ):
        assert answer(node, "flows", *words)["flows"], words
    for words in (("service=empty",), ("client=192.0.2.99",), ("udp", "web"), ("age=young",)):
        assert answer(node, "flows", *words)["flows"] == [], words
    ports = answer(node, "status")["sourcePorts"]
    assert [(each["used"] >= 1, each["capacity"]) for each in ports] == [(True, 64512)]
    assert "10.244.2.10:8080 TCP" in ports[0]["name"]


def test_a_young_flow_is_listed_and_the_fast_path_counts_it(node: Node, world: Lab) -> None:
    before = answer(node, "status", status=see(node, "status").returncode)["fastPath"]

    def young() -> list[dict[str, Any]]:
        """UDP: it lasts for some seconds, and has few packets, so it is not promoted."""
        for _ in range(3):
            assert world.client.call(ask, vip(10).v4, 53, "udp").kind == "answered"
        found: list[dict[str, Any]] = answer(node, "flows", "age=young", "service=web")["flows"]
        return found

    flow = wait_until(young, "a young flow", 30.0)[0]
    assert (flow["age"], flow["path"], flow["state"], flow["protocol"]) == ("young", "fast", "OPEN", "UDP")
    assert flow["destination"] == f"{vip(10).v4}:53"
    assert flow["endpoint"] == f"{world.pods['web-2'].address.v4}:5353"
    assert flow["masqueradedAs"].startswith(f"{node.address.v4}:")
    assert flow["packets"] == 2
    port = flow["client"].rpartition(":")[2]
    assert f"sport={port} " not in node.namespace.run("conntrack", "-L", "-p", "udp")
    fast = answer(node, "status", status=see(node, "status").returncode)["fastPath"]
    assert fast["newFlows"]["fast"] > before["newFlows"]["fast"]
    assert fast["sent"] > before["sent"]
    assert fast["slow"]["slow_no_permit"] >= 1


def test_filters_without_a_match(node: Node) -> None:
    fields = "service, client, endpoint, destination, protocol, state, age, path"
    output = error(node, "flows", "servce=web", status=2)
    assert output == f"flows have no field servce: {fields}; did you mean service?"
    states = "NONE, SYN_SENT, SYN_RECV, ESTABLISHED, FIN_WAIT"
    assert error(node, "flows", "state=FOO", status=2).startswith(f"there is no state FOO: OPEN, CLOSING, {states}")
    assert error(node, "flows", "protocol=icmp", status=2) == "there is no protocol icmp: TCP, UDP, SCTP"
    assert error(node, "flows", "client=", status=2) == "client= needs a value"
    assert see(node, "flows", "client=192.0.2.99").stdout == "no service flows match the filter\n"
    output = error(node, "flows", "default/wbe", status=2)
    assert output == "no Service is called default/wbe; did you mean default/web?"


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_no_endpoints_is_named_with_the_packet(node: Node, world: Lab, protocol: str) -> None:
    port = {"tcp": 80, "udp": 53}[protocol]
    assert world.client.call(ask, vip(12).v6, port, protocol).kind == "refused"
    drop = answer(node, "drops", status=1)["drops"][0]
    assert drop["reason"] == "reject_no_endpoints"
    assert drop["source"].startswith(f"[{CLIENT.v6}]:")
    assert (drop["destination"], drop["protocol"]) == (f"[{vip(12).v6}]:{port}", protocol.upper())
    assert drop["service"] == f"default/empty:{'http' if protocol == 'tcp' else 'dns'}"
    assert drop["device"] == "eth0"
    assert drop["secondsAgo"] < 60
    (warning,) = (text for text in warnings(node) if "no usable endpoint" in text and "[2001:db8" in text)
    name = f"default/empty:{'http' if protocol == 'tcp' else 'dns'}"
    why = "its IPv6 EndpointSlices have no usable address"
    assert warning.endswith(f"]:{port} {protocol.upper()} ({name}: {why})")
    assert re.search(r"reject_no_endpoints +\d+ +\d+ +\d+ s ago +\[2001:db8:2::2\]:\d+ >", see(node, "drops").stdout)


def test_policy_local_without_local_endpoints_is_named(node: Node, world: Lab) -> None:
    assert world.client.call(ask, vip(13).v4, 53, "udp", timeout=0.5).kind == "timed out"
    drop = next(
        each for each in answer(node, "drops", status=1)["drops"] if each["reason"] == "drop_no_local_endpoints"
    )
    assert drop["service"] == "default/nearby:dns"
    assert "policy Local" in drop["meaning"]


def test_a_process_of_the_node_is_distinguished(node: Node) -> None:
    assert node.namespace.call(ask, cluster_ip(12).v4, 80).kind == "refused"
    drop = next(e for e in answer(node, "drops", status=1)["drops"] if e["reason"] == "reject_no_endpoints_socket")
    assert (drop["device"], drop["destination"]) == ("", f"{cluster_ip(12).v4}:80")


def test_a_device_without_program_is_named(node: Node, world: Lab) -> None:
    """The agent would attach it again at once, so it must not run."""
    assert world.client.call(ask, vip(10).v4, 80).kind == "answered"
    node.agent.kill()
    try:
        assert node.namespace.call(detach_program, node.agent.directory, "eth0")
        assert {each["endpointName"] for each in answer(node, "flows")["flows"]} <= {"", "this node"}
        named = answer(node, "flows", "web", "--manifests", str(world.manifests))["flows"]
        assert {each["endpointName"] for each in named} == {"default/web-2"}
        shown = warnings(node)
        assert "no program is attached to eth0: packets that enter there do not reach services" in shown
        assert any(text.startswith("the agent is not running: traffic continues") for text in shown)
        assert answer(node, "status", status=1)["devices"][0]["attached"] == ""
    finally:
        node.agent.start()
        node.agent.wait_synced()
    assert [text for text in warnings(node) if "program" in text or "agent" in text] == []


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("services",),
        ("frontends",),
        ("backends",),
        ("drops",),
        ("flows",),
        ("explain", CLIENT.v4, f"{vip(10).v4}:80"),
        ("top", "--once", "--interval", "0.25"),
        ("trace", "--no-kernel", "--duration", "10ms"),
        ("doctor",),
    ],
    ids=lambda words: words[0],
)
def test_the_capabilities_of_the_agents_pod_are_enough(node: Node, words: tuple[str, ...]) -> None:
    """It lacks CAP_SYS_ADMIN, which reading the types and constants of loaded programs needs (``kubectl exec``)."""
    from_socket = see(node, *words, "-o", "json")
    ran = see(node, *words, "-o", "json", through=NO_SYS_ADMIN)
    assert (ran.returncode, ran.stderr) == (from_socket.returncode, from_socket.stderr)
    if words[0] in ("services", "frontends", "backends", "explain"):
        assert ran.stdout == from_socket.stdout
    if words[0] == "status":
        here, there = json.loads(ran.stdout), json.loads(from_socket.stdout)
        for name in ("devices", "features", "socketPrograms", "servicePorts", "warnings"):
            assert here[name] == there[name], name
    if words[0] == "top":
        assert json.loads(ran.stdout)["packets"] is not None


def test_without_rights_and_agent_nothing_wrong_is_shown(node: Node) -> None:
    """``explain`` once reported that no device has a program."""
    node.agent.kill()
    try:
        words = ("explain", CLIENT.v4, f"{vip(10).v4}:80")
        ran = see(node, *words, through=NO_SYS_ADMIN)
        assert (ran.returncode, ran.stdout) == (3, "")
        assert ran.stderr.startswith("Error: reading the programs' settings requires CAP_SYS_ADMIN")
        shown = [
            each["what"]
            for each in json.loads(see(node, "status", "-o", "json", through=NO_SYS_ADMIN).stdout)["warnings"]
        ]
        assert "the enabled features are unknown" in shown
        assert not any("no program is attached" in text for text in shown)
    finally:
        node.agent.start()
        node.agent.wait_synced()


def test_an_agent_that_hangs_is_named(node: Node) -> None:
    agent = running_agent(node.agent.directory)
    assert agent is not None
    output = (
        f"the agent (process {agent.pid}) does not respond: traffic continues, but changes to Services"
        " may not be applied"
    )
    assert output not in warnings(node)
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        assert output in warnings(node)
    finally:
        os.kill(agent.pid, signal.SIGCONT)


def test_syncs_that_fail_are_named() -> None:
    with build_remote_only(WEB) as lab:
        (node, *_) = lab.nodes
        node.agent.stop()
        node.agent.start({"iptables": {"minSyncPeriod": "10ms", "syncPeriod": "500ms"}})
        node.agent.wait_synced()
        assert warnings(node) == []
        # From now on the kernel refuses to write it.
        node.namespace.run("bpftool", "map", "freeze", "pinned", str(node.agent.pin("service_names")))
        write_services(lab, EMPTY)
        wait_until(lambda: "sync failed" in node.agent.log(), "a sync fails")
        output = "changes to Services are not applied (IPv4 and IPv6): syncs fail, or the agent gets no CPU"
        wait_until(lambda: warnings(node) == [output], "the warning")


def test_an_agent_that_waits_at_its_start_is_named() -> None:
    with build_remote_only(WEB) as lab:
        (node, *_) = lab.nodes
        node.agent.stop()
        without_cidrs = manifests.node(node.name, node.address, node.pod_cidr) | {"spec": {}}
        lab.write("nodes.yaml", [without_cidrs])
        node.agent.start({"detectLocalMode": "NodeCIDR"})
        wait_until(lambda: "waiting for the podCIDRs" in node.agent.log(), "the agent waits")
        assert warnings(node) == [
            "the agent has not programmed this node since it was started: changes to Services are not applied"
        ]


def test_a_flushed_nft_table_is_named(node: Node, world: Lab) -> None:
    names = re.findall(r"table inet (\S+)", node.namespace.run("nft", "list", "tables"))
    (name,) = [each for each in names if each.startswith("pyebpf-proxy")]
    node.agent.kill()
    try:
        node.namespace.run("nft", "flush", "table", "inet", name)
        output = "the nftables table of pyebpf-proxy is {}: the kernel performs no NAT for services"
        assert output.format("empty") in warnings(node)
        node.namespace.run("nft", "delete", "table", "inet", name)
        assert output.format("missing") in warnings(node)
    finally:
        node.agent.start()
        node.agent.wait_synced()
    wait_until(lambda: not any("nftables table" in text for text in warnings(node)), "the table is there again")


def test_a_full_connection_table_is_named(node: Node, world: Lab) -> None:
    with full_conntrack(node.namespace) as top_up:
        # On a slow machine the kernel evicts some entries before the command reads their number.
        wait_until(lambda: _nearly_full(node, top_up), "status shows a full table")
        assert any(re.match(r"conntrack: \d+ of \d+ in use", text) for text in warnings(node))
        found = wait_until(lambda: _explained(node, top_up), "explain reports it, too")
        assert (found["verdict"], found["reason"]) == ("dropped", "")
        assert re.match(r"conntrack is full, .*: the kernel drops new flows", found["steps"][-1])
        top_up()
        assert world.client.call(ask, vip(10).v4, 80, timeout=0.5).kind == "timed out"
    assert answer(node, "explain", CLIENT.v4, f"{vip(10).v4}:80")["verdict"] == "served"


def _nearly_full(node: Node, top_up: Callable[[], None]) -> bool:
    top_up()
    fill = answer(node, "status", status=1)["conntrack"]
    return bool(fill["used"] >= fill["capacity"] - 16)


def _explained(node: Node, top_up: Callable[[], None]) -> dict[str, Any] | None:
    """The answer; None if there was room again when the command ran."""
    top_up()
    found: dict[str, Any] = json.loads(see(node, "explain", CLIENT.v4, f"{vip(10).v4}:80", "-o", "json").stdout)
    return None if found["verdict"] == "served" else found
