# SPDX-License-Identifier: Apache-2.0
"""``trace`` on a node of the lab: it shows the programs' decisions as they happen, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.addresses import CLIENT, cluster_ip, vip
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.client import ask, ask_many
from pyebpf_proxy.lab.cluster import Lab, Node
from tests.netns.trace_tools import Trace
from tests.support.lab_services import Kind, build_remote_only, write_services
from tests.support.lab_tools import wait_until
from tests.support.see_tools import error

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
EMPTY = Kind("empty", 12)
NEARBY = Kind("nearby", 13, externalTrafficPolicy="Local")
#: Lines name the program that decided, so XDP is off here, also when all tests run with XDP.
TC_ONLY: dict[str, object] = {"xdpDevices": []}


@pytest.fixture(scope="module")
def world() -> Iterator[Lab]:
    with build_remote_only(WEB, EMPTY, NEARBY, empty=EMPTY, own=TC_ONLY) as made:
        yield made


@pytest.fixture
def node(world: Lab) -> Node:
    return world.nodes[0]


def everything(world: Lab, node: Node) -> None:
    """A decision of each kind; the one of Service web is the last."""
    assert world.client.call(ask, vip(12).v6, 53, "udp").kind == "refused"
    assert world.client.call(ask, vip(13).v4, 53, "udp", timeout=0.2).kind == "timed out"
    assert node.namespace.call(ask, cluster_ip(10).v4, 53, "udp").kind == "answered"
    assert world.client.call(ask, vip(10).v4, 80, source_port=0).kind == "answered"


def test_each_decision_is_a_line(world: Lab, node: Node) -> None:
    with Trace(node) as trace:
        everything(world, node)
        (served,) = trace.until(service="default/web:http", device="eth0")
        (refused,) = trace.until(verdict="refused")
        (dropped,) = trace.until(verdict="dropped")
        (socket,) = trace.until(path="socket")
    assert trace.process.returncode == 130
    assert (served["kind"], served["hook"], served["protocol"]) == ("Decision", "tc", "TCP")
    assert served["source"].startswith(f"{CLIENT.v4}:")
    assert served["destination"] == f"{vip(10).v4}:80"
    assert served["endpoint"] == f"{world.pods['web-2'].address.v4}:8080"
    assert (served["sourceName"], served["endpointName"]) == ("", "default/web-2")
    assert (served["path"], served["verdict"]) == ("netfilter", "served")
    assert (served["reason"], served["slow"]) == ("new_flow_netfilter", "slow_no_permit")
    assert served["masquerade"]
    # It is empty if the packet had not left when its line was written.
    assert served["masqueradedAs"] == "" or served["masqueradedAs"].startswith(node.address.v4)
    assert (refused["reason"], refused["service"]) == ("reject_no_endpoints", "default/empty:dns")
    assert (refused["destination"], refused["endpoint"], refused["path"]) == (f"[{vip(12).v6}]:53", "", "")
    assert (dropped["reason"], dropped["service"]) == ("drop_no_local_endpoints", "default/nearby:dns")
    assert (socket["hook"], socket["device"], socket["process"]) == ("socket", "", "python")
    assert socket["pid"] > 0
    assert socket["endpoint"] == f"{world.pods['web-2'].address.v4}:5353"
    assert socket["endpointName"] == "default/web-2"
    times = [line["time"] for line in trace.lines]
    assert len(times) == 4
    assert times == sorted(times)


def test_a_young_flow_is_reported_with_its_masquerade(world: Lab, node: Node) -> None:
    """The line is written after its translation is in the flow table."""
    with Trace(node, "web", "tcp") as trace:

        def fast() -> bool:
            assert world.client.call(ask, vip(10).v4, 80).kind == "answered"
            return any(line["path"] == "fast" for line in trace.lines)

        wait_until(fast, "a young flow", 20.0)
    line = next(line for line in trace.lines if line["path"] == "fast")
    assert (line["reason"], line["slow"], line["verdict"]) == ("new_flow_fast", "", "served")
    assert line["masquerade"]
    assert line["masqueradedAs"].startswith(f"{node.address.v4}:")


NEW, NO_ENDPOINTS, NOT_LOCAL, SOCKET = "new flow", "reject_no_endpoints", "drop_no_local_endpoints", "new_flow_socket"


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ("web", {SOCKET, NEW}),
        ("empty " + vip(12).v6, {NO_ENDPOINTS}),
        (f"client={CLIENT.v4} tcp", {NEW}),
        ("drop,reject udp eth0", {NOT_LOCAL, NO_ENDPOINTS}),
        ("process=python", {SOCKET}),
        ("endpoint=web-2 udp", {SOCKET}),
        ("endpoint=web-3", set()),
    ],
)
def test_filters(world: Lab, node: Node, words: str, reported: set[str]) -> None:
    with Trace(node, *words.split()) as trace:
        everything(world, node)
    found = [line["reason"] for line in trace.lines]
    assert {NEW if reason in ("new_flow_fast", "new_flow_netfilter") else reason for reason in found} == reported
    assert len(found) == len(reported)


def test_a_recreated_service_is_still_reported(world: Lab, node: Node) -> None:
    """It has another number then."""
    later, between = Kind("later", 14), Kind("between", 15)
    later.endpoints = between.endpoints = WEB.endpoints

    def reached(service: Kind) -> bool:
        return bool(world.client.call(ask, vip(service.number).v4, 80, timeout=0.2).kind == "answered")

    write_services(world, later)
    wait_until(lambda: reached(later), "the Service is there")
    with Trace(node, "later") as trace:
        (world.manifests / "later.yaml").unlink()
        wait_until(lambda: not reached(later), "it is gone")
        write_services(world, between)
        wait_until(lambda: reached(between), "its number is taken")
        write_services(world, later)
        seen = len(trace.lines)
        wait_until(
            lambda: reached(later) and any(line["verdict"] == "served" for line in trace.lines[seen:]), "it is reported"
        )
    assert {line["service"] for line in trace.lines} == {"default/later:http"}
    for service in (later, between):
        (world.manifests / f"{service.name}.yaml").unlink()


def test_text_lines(world: Lab, node: Node) -> None:
    with Trace(node, "udp", output="table", COLUMNS="60") as narrow:
        everything(world, node)
    assert max(map(len, narrow.raw)) <= 60
    with Trace(node, output="table") as trace:
        everything(world, node)
    refused, dropped, socket, served = trace.raw
    assert refused.endswith("UDP, default/empty:dns, REFUSED, reject_no_endpoints")
    assert dropped.endswith("UDP, default/nearby:dns, DROPPED, drop_no_local_endpoints")
    assert (
        f"> {cluster_ip(10).v4}:53 UDP, default/web:dns, to 10.244.2.10:5353 (default/web-2), socket, new_flow_socket"
        in socket
    )
    assert f" eth0 {CLIENT.v4}:" in served
    assert re.search(
        r", to 10.244.2.10:8080 \(default/web-2\), (fast|netfilter \(slow_no_permit\)), masqueraded", served
    )
    with Trace(node, output="name") as names:
        everything(world, node)
    assert names.raw == ["default/empty:dns", "default/nearby:dns", "default/web:dns", "default/web:http"]


def test_it_ends_by_count_and_by_time(world: Lab, node: Node) -> None:
    with Trace(node, "--count", "2") as trace:
        everything(world, node)
        assert trace.ended() == 0
    assert len(trace.lines) == 2
    with Trace(node, "--duration", "10ms") as trace:
        assert trace.ended() == 0


def test_a_closed_pipe_ends_it(node: Node) -> None:
    """At once, not with the next decision."""
    trace = Trace(node)
    try:
        assert trace.process.stdout is not None
        assert trace.process.stderr is not None
        assert any(line.startswith("tracing") for line in iter(trace.process.stderr.readline, ""))
        trace.process.stdout.close()
        assert trace.process.wait(20) == 141
        assert trace.process.stderr.read() == ""
    finally:
        trace.process.kill()
        trace.process.wait()


def test_losses_are_reported(world: Lab, node: Node) -> None:
    """While stopped it reads nothing; its ring has room for some thirty decisions."""
    with Trace(node, "--buffer", "4") as trace:
        inside = _own_process(trace)
        os.kill(inside, signal.SIGSTOP)
        world.client.call(ask_many, 80, vip(12).v4, 53, "udp")
        os.kill(inside, signal.SIGCONT)
        (lost,) = trace.until(kind="Lost")
    decisions = [line for line in trace.lines if line["kind"] == "Decision"]
    assert lost["what"] == "decisions"
    assert lost["count"] + len(decisions) == 80
    assert decisions


def _own_process(trace: Trace) -> int:
    """`ip netns exec` becomes the command."""
    return trace.process.pid


def test_a_killed_trace_leaves_no_state(world: Lab, node: Node) -> None:
    def word() -> int:
        shown = node.namespace.run("bpftool", "-j", "map", "dump", "pinned", str(node.agent.pin("tracing")))
        return int(json.loads(shown)[0]["formatted"]["value"]["process"])

    with Trace(node) as trace:
        assert word() == trace.process.pid
        trace.process.kill()
        trace.process.wait()
    assert world.client.call(ask, vip(10).v4, 80).kind == "answered"
    assert word() == 0
    with Trace(node) as trace:
        assert world.client.call(ask, vip(10).v4, 80).kind == "answered"
        trace.until(service="default/web:http")
    assert word() == 0


def test_without_an_agent(world: Lab, node: Node) -> None:
    node.agent.kill()
    try:
        with Trace(node) as trace:
            everything(world, node)
        assert len(trace.lines) == 4
        assert {line["endpointName"] for line in trace.lines} == {""}
        message = error(node, "trace", "endpoint=web-2", status=3)
        assert message == "only a running agent knows names of pods, and none runs: give the address instead"
    finally:
        node.agent.start(own=TC_ONLY)
        node.agent.wait_synced()


def test_it_ends_when_the_maps_are_replaced(node: Node) -> None:
    """The programs of the new maps report to none of its rings, or the names would be those of the old ones."""
    with Trace(node) as trace:
        node.agent.stop()
        node.agent.start(own={**TC_ONLY, "maps": {"backends4": 4096}})
        node.agent.wait_synced()
        try:
            assert trace.ended() == 3
            assert trace.process.stderr is not None
            assert "by a new agent or a clean-up: start this command again" in trace.process.stderr.read()
        finally:
            node.agent.stop()
            node.agent.start(own=TC_ONLY)
            node.agent.wait_synced()


def test_bad_input(node: Node) -> None:
    assert error(node, "trace", "--count", "0", status=2) == "--count 0: at least 1"
    assert error(node, "trace", "--duration", "5", status=2) == '--duration: time: missing unit in duration "5"'
    assert error(node, "trace", "--buffer", "1", status=2) == "--buffer 1: from 4 to 65536 KiB"
    assert (
        error(node, "trace", "default/wbe", status=2) == "no Service is called default/wbe; did you mean default/web?"
    )
    assert error(node, "trace", "device=eth9", status=2) == "there is no device eth9; did you mean eth0?"


def test_only_one_at_a_time(node: Node) -> None:
    with Trace(node):
        assert error(node, "trace", status=3) == "another trace is running on this node: stop it first"


def test_maps_of_an_older_version(node: Node) -> None:
    """No trace runs, so this pin is not used."""
    pin = node.agent.pin("tracing")
    aside = pin.with_name("aside")
    pin.rename(aside)
    try:
        message = error(node, "trace", status=3)
    finally:
        aside.rename(pin)
    old = "the attached programs cannot report decisions: they are of an older version; restart the agent"
    assert message == f"{old} (there is no map tracing in {pin.parent})"


def test_without_permission(node: Node) -> None:
    ran = subprocess.run(
        ["setpriv", "--reuid", "65534", "--clear-groups", *command(), "trace"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr == "Error: not permitted to read the BPF maps: run it as root (sudo)\n"
