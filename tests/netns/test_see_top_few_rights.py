# SPDX-License-Identifier: Apache-2.0
"""``top`` with an agent that has the DaemonSet's capabilities and may not read the names of programs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.loader.kernel_objects import program_info
from pyebpf_proxy.datapath.loader.libbpf import Map, Object
from pyebpf_proxy.datapath.node.devices import LOOK_SECONDS
from pyebpf_proxy.datapath.node.mounts import tcx_directory
from pyebpf_proxy.lab.cluster import Lab, Node
from tests.netns.init_only import run_init_only
from tests.netns.top_tools import watching
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import wait_until
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 1)
FEW = "-all,+net_admin,+bpf,+perfmon"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Lab(nodes=1) as lab:
        node = lab.nodes[0]
        WEB.endpoints = (lab.add_pod("web-1", node),)
        write_nodes(lab)
        write_services(lab, WEB)
        ran = run_init_only(node)
        assert ran.returncode == 0, ran.stderr
        # As in a container: /sys is the host's. ``ip netns exec`` would mount another one.
        enter = ("nsenter", f"--net=/run/netns/{node.namespace.name}")
        node.agent.start(enter=(*enter, "setpriv", f"--bounding-set={FEW}", f"--inh-caps={FEW}"))
        node.agent.wait_synced()
        yield node


@pytest.fixture
def foreign(node: Node, tmp_path: Path) -> Iterator[int]:
    """Another software's program in the chain of eth0, after the agent's."""
    (tmp_path / "foreign.c").write_text(
        'struct __sk_buff;\n__attribute__((section("tc"), used)) int goes_on(struct __sk_buff *skb) { return -1; }\n'
        'char LICENSE[] __attribute__((section("license"), used)) = "GPL";\n'
    )
    made = tmp_path / "foreign.o"
    subprocess.run(["clang", "-O2", "-g", "-target", "bpf", "-c", tmp_path / "foreign.c", "-o", made], check=True)
    with Object.open(made) as unloaded, unloaded.load() as loaded:
        program = loaded.programs["goes_on"].fd
        pin = pins(node).parent / "foreign"
        node.namespace.start(put, program, pin).result()
        yield tcx.described(program)["prog_id"]
        pin.unlink()


def put(program: int, pin: Path) -> None:
    link = tcx.attach(program, socket.if_nametoindex("eth0"), tcx.INGRESS, tcx.AFTER)
    tcx.pin(link, pin)
    os.close(link)


def pins(node: Node) -> Path:
    return tcx_directory(node.agent.directory / "bpf", node.agent.directory)


def logged(node: Node) -> set[str]:
    """What the log says about meters without a pin."""
    return {name for name in os.listdir(pins(node)) if name.startswith("meter-")}


def chains(node: Node) -> dict[int, list[str]]:
    """Names of the programs at ingress of every device."""
    return {
        index: [program_info(number).name for number in node.namespace.call(tcx.chain, index, tcx.INGRESS)]
        for index, _ in node.namespace.call(socket.if_nameindex)
    }


def redirects(node: Node, bpf_objects: Path) -> dict[int, int]:
    """How the fast path sends through each device."""
    with Object.open(bpf_objects / "tc.bpf.o") as unset:
        layout = unset.btf.struct("node_device")
    table = Map.open_pinned(node.agent.pin("devices"))
    try:
        return {int.from_bytes(key, sys.byteorder): layout.unpack(value)["redirect"] for key, value in table.items()}
    finally:
        table.close()


def with_meters(chain: list[str]) -> list[str]:
    return ["meter_l3" if chain[0] == "tc_l3" else "meter_ethernet", *chain] if chain else []


def test_the_agent_keeps_the_meters_before_its_programs(node: Node, foreign: int, bpf_objects: Path) -> None:
    device = next(index for index, name in node.namespace.call(socket.if_nameindex) if name == "eth0")
    wait_until(lambda: redirects(node, bpf_objects)[device] == 0, "the agent has seen the foreign program")
    chain, redirect = chains(node), redirects(node, bpf_objects)
    assert chain[device] == ["tc_ethernet", "goes_on"]
    assert redirect[device] == 0
    assert any(redirect.values()), "the other devices are open"
    with watching(node):
        assert len(logged(node)) == 2
        end = time.monotonic() + 2 * LOOK_SECONDS
        while time.monotonic() < end:
            assert chains(node) == {index: with_meters(names) for index, names in chain.items()}
            assert redirects(node, bpf_objects) == redirect
            time.sleep(0.3)
    Log(node.agent).none(Message.ATTACHING_AGAIN)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_removed_meters_are_not_shown(node: Node, number: int) -> None:
    """The next ``top`` removes what a killed one leaves."""
    with watching(node) as seen:
        first = logged(node)
        assert len(first) == 2
        seen.process.send_signal(number)
        seen.process.wait(20)
    wait_until(lambda: not any("meter" in name for names in chains(node).values() for name in names), "they are gone")
    if number == signal.SIGINT:
        assert logged(node) == set()
    with watching(node):
        assert len(logged(node)) == 2
        assert logged(node).isdisjoint(first)
