# SPDX-License-Identifier: Apache-2.0
"""XDP in a pod: what the agent learns about a veth's other end, and how packets are then sent there."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import RTM_GETLINK
from pyebpf_proxy.datapath.node import peers
from pyebpf_proxy.datapath.node.devices import MAPS, Node
from pyebpf_proxy.datapath.node.follower import Follower
from pyebpf_proxy.datapath.node.peers import PROGRAM, Peers
from pyebpf_proxy.datapath.node.plan import REDIRECT_DEVICE, REDIRECT_PEER, Link, NodeConfig
from tests.netns.attach.devices import follow
from tests.netns.attach.router import Shell

pytestmark = [pytest.mark.needs_netns, pytest.mark.needs_bpf, pytest.mark.usefixtures("namespace")]

PASS = """
__attribute__((section("xdp"), used)) int pass(void *frame) { return 2; }
char LICENSE[] __attribute__((section("license"), used)) = "GPL";
"""
#: The capabilities of the DaemonSet.
FEW = "-all,+bpf,+net_admin,+perfmon"
# Run as a separate process: what is known about the other ends of all veths.
ASK = """
from pyebpf_proxy.datapath.node.follower import Follower
follower = Follower()
print({follower.state.links[index].name: peer for index, peer in follower.state.peers.items()})
"""


class Pod(NamedTuple):
    """``device``: `pod`, the node's end of the veth. ``xdp`` attaches a program to the other end ("xdpdrv"), or
    detaches it.
    """

    device: int
    xdp: Callable[..., None]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pass")
    (folder / "pass.c").write_text(PASS)
    subprocess.run(
        ["clang", "-O2", "-g", "-target", "bpf", "-c", folder / "pass.c", "-o", folder / "pass.o"], check=True
    )
    return folder / "pass.o"


@pytest.fixture
def pod(namespace: None, shell: Shell, program: Path) -> Iterator[Pod]:
    name = f"pep-{os.getpid()}-peer"
    shell(f"ip netns add {name}; ip link add pod type veth peer name eth0 netns {name}; ip link set pod up")
    shell(f"ip -n {name} link set eth0 up")

    def xdp(mode: str, off: bool = False) -> None:
        shell(f"ip netns exec {name} ip link set dev eth0 {mode} {'off' if off else f'obj {program} sec xdp'}")

    yield Pod(socket.if_nametoindex("pod"), xdp)
    subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def start(tmp_path: Path, bpffs: Path, programs: Object) -> Iterator[Callable[[], Node]]:
    made: list[Node] = []

    def begin() -> Node:
        maps = {name: programs.maps[name] for name in MAPS}
        made.append(
            Node(tmp_path, NodeConfig(fast_path=True), maps, programs.btf, lambda text: None, bpffs / "tcx", True)
        )
        made[0].attach({name: program.fd for name, program in programs.programs.items()})
        return made[0]

    yield begin
    for node in made:
        node.close()


def written(programs: Object, device: int) -> int:
    """The redirect mode in the map."""
    value = programs.maps["devices"].lookup(device.to_bytes(4, sys.byteorder))
    assert value is not None
    return programs.btf.struct("node_device").unpack(value)["redirect"]


def limit(node: Node, device: int) -> tuple[int, str]:
    state = node.devices[device]
    return state.redirect, state.limit


def test_a_program_comes_and_goes(start: Callable[[], Node], pod: Pod, programs: Object) -> None:
    node = start()
    moves: list[int] = []
    node.on_devices = lambda: moves.append(1)
    assert limit(node, pod.device) == (REDIRECT_PEER, "")
    for _ in range(2):
        moves.clear()
        pod.xdp("xdpdrv")
        follow(node, lambda: limit(node, pod.device) == (REDIRECT_DEVICE, PROGRAM))
        assert written(programs, pod.device) == REDIRECT_DEVICE
        assert moves, "known flows learn of it"
        pod.xdp("xdpdrv", off=True)
        follow(node, lambda: limit(node, pod.device) == (REDIRECT_PEER, ""))
        assert written(programs, pod.device) == REDIRECT_PEER


def test_a_program_that_was_there_before_the_agent(start: Callable[[], Node], pod: Pod) -> None:
    pod.xdp("xdpdrv")
    assert limit(start(), pod.device) == (REDIRECT_DEVICE, PROGRAM)


def test_generic_xdp_sees_redirected_packets(start: Callable[[], Node], pod: Pod) -> None:
    node = start()
    pod.xdp("xdpgeneric")
    node.read()
    node.look()
    assert limit(node, pod.device) == (REDIRECT_PEER, "")


def test_without_a_message_the_next_check_finds_the_program(start: Callable[[], Node], pod: Pod, shell: Shell) -> None:
    shell("ethtool -K pod tso off tx-udp-segmentation off tx-sctp-segmentation off tx-gso-list off")
    node = start()
    for off, wanted in ((False, (REDIRECT_DEVICE, PROGRAM)), (True, (REDIRECT_PEER, ""))):
        before = limit(node, pod.device)
        pod.xdp("xdpdrv", off)
        node.read()
        assert limit(node, pod.device) == before, "no message came: if this kernel sends one, the test shows nothing"
        node.look()
        assert limit(node, pod.device) == wanted


def known_with(capabilities: str) -> str:
    command = ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}", sys.executable, "-c", ASK]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_capabilities_of_the_daemonset_are_enough(pod: Pod) -> None:
    assert known_with(FEW) == "{'pod': ''}"
    pod.xdp("xdpdrv")
    assert known_with(FEW) == f"{{'pod': '{PROGRAM}'}}"


def test_offload_decides_if_the_peer_may_not_be_read(pod: Pod) -> None:
    without = FEW.replace(",+net_admin", "")
    assert known_with(without) == "{'pod': ''}"
    pod.xdp("xdpdrv")
    assert known_with(without) == f"{{'pod': '{peers.MAY_BE.format('EACCES')}'}}"


def test_the_other_end_moves_to_another_namespace(pod: Pod, shell: Shell) -> None:
    """The veth's own message has the new place of its peer."""
    follower = Follower()
    shell("ip link add host type veth peer name moves; ip link set host up; ip link set moves up")
    index = socket.if_nametoindex("host")
    follow(follower, lambda: index in follower.state.links)
    assert index not in follower.state.peers
    shell(f"ip link set moves netns {pod_namespace()}; ip -n {pod_namespace()} link set moves up")
    follow(follower, lambda: follower.state.peers.get(index) == "")
    shell("ip link del host")
    follow(follower, lambda: index not in follower.state.links)
    assert index not in follower.state.peers
    follower.close()


def pod_namespace() -> str:
    return f"pep-{os.getpid()}-peer"


def test_many_peers_are_asked_in_batches(pod: Pod) -> None:
    pod.xdp("xdpdrv")
    follower = Follower()
    veth = follower.state.links[pod.device]
    follower.close()
    many = [veth._replace(ifindex=1000 + number) for number in range(600)]
    peers = Peers()
    turns = [peers.read_some(many) for _ in range(4)]
    assert [len(turn) for turn in turns] == [256, 256, 88, 256]
    assert turns[0] | turns[1] | turns[2] == {link.ifindex: PROGRAM for link in many}
    assert turns[3].keys() == turns[0].keys()
    assert peers.read([Link(1, "lo", 772)]) == {}


def test_errors_are_among_the_answers(pod: Pod) -> None:
    """Each question gets its own answer, in the order of the questions."""
    here = [struct.pack("=BxHiII", 0, 0, index, 0, 0) for index in (1, 999_999, pod.device)]
    with RequestSocket(socket.NETLINK_ROUTE) as netlink:
        answers = netlink.get_many(RTM_GETLINK, here * 40)
    found = [answer if isinstance(answer, int) else struct.unpack_from("=BxHi", answer)[2] for answer in answers]
    assert found == [1, errno.ENODEV, pod.device] * 40
