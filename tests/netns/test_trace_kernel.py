# SPDX-License-Identifier: Apache-2.0
"""The kernel's events of packets and connections, with the decisions that they belong to (bcc)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.lab.addresses import CLIENT, cluster_ip, vip
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.trace.kernel import INTERPRETER, INTERPRETER_VARIABLE
from tests.netns.trace_tools import Trace
from tests.support.lab_services import Kind, build_remote_only
from tests.support.lab_tools import wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
NEARBY = Kind("nearby", 13, externalTrafficPolicy="Local")
REMEDY = "apt-get install python3-bpfcc"


@pytest.fixture(scope="module")
def bcc() -> None:
    tried = subprocess.run([INTERPRETER, "-I", "-c", "import bcc"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"{INTERPRETER} has no bcc: {REMEDY}")


@pytest.fixture(scope="module")
def world() -> Iterator[Lab]:
    with build_remote_only(WEB, NEARBY, own={"xdpDevices": []}) as made:
        yield made


@pytest.fixture
def node(world: Lab) -> Node:
    return world.nodes[0]


@pytest.mark.usefixtures("bcc")
def test_kernel_events_are_shown_with_the_decisions(world: Lab, node: Node) -> None:
    with Trace(node, kernel=True) as trace:
        assert trace.messages == ["tracing; press Ctrl-C to stop"]
        assert world.client.call(ask, vip(10).v4, 80).kind == "answered"
        (served,) = trace.until(kind="Decision", verdict="served")
        states = trace.until(count=2, kind="TcpState", client=served["source"], now="ESTABLISHED")
        trace.until(kind="TcpState", client=served["source"], now="CLOSE")
        assert world.client.call(ask, vip(13).v6, 53, "udp", timeout=0.2).kind == "timed out"
        (dropped,) = trace.until(kind="Decision", reason="drop_no_local_endpoints")
        # Other labs on this machine have the same addresses.
        (lost,) = trace.until(kind="KernelDrop", service="default/nearby:dns", source=dropped["source"])
    ends = {(each["source"], each["destination"]) for each in states}
    assert ends == {(served["source"], served["destination"]), (served["endpoint"], served["masqueradedAs"])}
    for each in states:
        assert (each["frontend"], each["service"]) == (f"{vip(10).v4}:80", "default/web:http")
        assert each["netns"] > 0
    assert {each["before"] for each in states} == {"SYN_SENT", "SYN_RECV"}
    assert (lost["source"], lost["destination"]) == (dropped["source"], dropped["destination"])
    assert lost["source"].startswith(f"[{CLIENT.v6}]:")
    assert (lost["reason"], lost["device"], lost["netns"], lost["protocol"]) == ("TC_INGRESS", "eth0", 0, "UDP")
    assert lost["where"].startswith("__netif_receive_skb_core")


@pytest.mark.usefixtures("bcc")
def test_connections_of_the_node_itself(node: Node) -> None:
    with Trace(node, "web", kernel=True) as trace:
        assert node.namespace.call(ask, cluster_ip(10).v6, 80).kind == "answered"
        (state,) = trace.until(kind="TcpState", now="ESTABLISHED", netns=0)
    assert (state["frontend"], state["before"]) == (f"[{cluster_ip(10).v6}]:80", "SYN_SENT")
    assert state["destination"] == f"[{WEB.endpoints[0].address.v6}]:8080"


@pytest.mark.usefixtures("bcc")
def test_a_filter_applies_to_kernel_events(world: Lab, node: Node) -> None:
    with Trace(node, "nearby", kernel=True) as trace:
        assert world.client.call(ask, vip(10).v4, 80).kind == "answered"
        world.client.call(ask, vip(13).v4, 53, "udp", timeout=0.2)
        trace.until(kind="KernelDrop")
    # Other labs on this machine have the same addresses, and much traffic: lost events belong to them.
    assert {line["service"] for line in trace.lines if line["kind"] != "Lost"} == {"default/nearby:dns"}


@pytest.mark.usefixtures("bcc")
def test_the_reader_of_kernel_events_ends_with_trace(node: Node) -> None:
    with Trace(node, kernel=True) as trace:
        own = trace.process.pid
        (child,) = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        assert b"kernel_side.py" in Path("/proc", child, "cmdline").read_bytes()
        os.kill(own, signal.SIGKILL)
        wait_until(lambda: not Path("/proc", child).exists(), "it is gone")


def test_without_bcc(world: Lab, node: Node, tmp_path: Path) -> None:
    """Decisions are shown, and the message names the package to install."""
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {INTERPRETER} -S "$@"\n')
    bare.chmod(0o755)
    nothing = tmp_path / "nothing"
    for interpreter, why in (
        (bare, f"bcc is not installed for {bare}: {REMEDY}"),
        (nothing, f"{nothing}: No such file or directory; python3-bpfcc needs it: {REMEDY}"),
    ):
        with Trace(node, kernel=True, **{INTERPRETER_VARIABLE: str(interpreter)}) as trace:
            assert trace.messages[0] == f"kernel drops and TCP states are not shown: {why}"
            assert world.client.call(ask, vip(10).v4, 80).kind == "answered"
            trace.until(kind="Decision")
        assert {line["kind"] for line in trace.lines} == {"Decision"}


def test_without_a_folder_to_write(world: Lab, node: Node) -> None:
    """As in the agent's pod, whose root file system is read-only. The pod also lacks bcc."""
    read_only = 'for path in / /tmp /var/tmp; do mount -o remount,bind,ro "$path" 2>/dev/null; done; cd / && exec "$@"'
    done = subprocess.run(
        [
            *("ip", "netns", "exec", node.namespace.name, "unshare", "--mount", "sh", "-c", read_only, "sh"),
            *(*command(), "trace", "--duration", "0.1s"),
        ],
        env=os.environ | {"PYEBPF_PROXY_DIRECTORY": str(node.agent.directory), INTERPRETER_VARIABLE: "/nothing"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("kernel drops and TCP states are not shown: /nothing: ")
    assert "nothing can be installed here; on the node, use" in done.stderr
