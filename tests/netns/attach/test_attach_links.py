# SPDX-License-Identifier: Apache-2.0
"""The node followed through netlink: maps and devices are right after every change, without polling."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import os
import random
import re
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.node import devices, follower
from pyebpf_proxy.datapath.node.attachments import Attachments
from pyebpf_proxy.datapath.node.devices import MAPS, Node
from pyebpf_proxy.datapath.node.follower import Follower
from pyebpf_proxy.datapath.node.plan import NodeConfig, plan
from tests.netns.attach.devices import DEADLINE, carried, follow
from tests.netns.attach.router import Shell

pytestmark = [pytest.mark.needs_netns, pytest.mark.needs_bpf, pytest.mark.usefixtures("namespace")]

# Devices that these tests create; kernel modules create others (tunl0, sit0).
MADE = re.compile(r"(v|t|br)\d")


class Entry(NamedTuple):
    """A device in the programs' map: its bridge ("": none) and the bridge's address. Its MTU, also if it is down."""

    bridge: str = ""
    bridge_mac: str = "00:00:00:00:00:00"
    pod_source: int = 0
    redirect: int = 0
    mtu: int = 1500


PLAIN = Entry()


# Link-local addresses appear and become valid at any time.
NO_LINK_LOCAL = "sysctl -qw net.ipv6.conf.default.addr_gen_mode=1"


class Harness:
    """A Node with the maps of the real object, and what it has reported."""

    def __init__(self, directory: Path, programs: Object, bpffs: Path, use_tcx: bool = True) -> None:
        self.directory = directory
        self.bpffs = bpffs
        self.use_tcx = use_tcx
        self.programs = programs
        self.reports: list[str] = []
        self.node = self.start()

    def start(self, config: NodeConfig = NodeConfig()) -> Node:  # noqa: B008 - frozen
        maps = {name: self.programs.maps[name] for name in MAPS}
        folder = self.bpffs / "tcx"
        self.node = Node(self.directory, config, maps, self.programs.btf, self.reports.append, folder, self.use_tcx)
        return self.node

    def attach(self, swap: bool = False) -> None:
        fds = {name: program.fd for name, program in self.programs.programs.items()}
        if swap:
            fds |= {"tc_ethernet": fds["tc_l3"], "tc_l3": fds["tc_ethernet"]}
        self.node.attach(fds)

    def in_kernel(self) -> dict[str, dict[bytes, bytes]]:
        return {name: dict(self.programs.maps[name].items()) for name in MAPS}

    def node_addresses(self) -> dict[str, bool]:
        """The node's addresses in the programs' maps, and whether each serves NodePorts."""
        found = self.in_kernel()
        entries = [*found["node_addresses4"].items(), *found["node_addresses6"].items()]
        return {str(ipaddress.ip_address(key)): bool(*struct.unpack("=I", value)) for key, value in entries}

    def devices(self) -> dict[str, Entry]:
        """The test's devices in the programs' map, by name.

        MTU -1: it is not 0 although the device is down, or it is 0 although the device is up.
        """
        links = json.loads(subprocess.run(["ip", "-j", "link"], check=True, capture_output=True).stdout)
        down = {link["ifindex"]: link["mtu"] for link in links if not {"UP", "LOWER_UP"} <= set(link["flags"])}
        found = {}
        for key, value in self.in_kernel()["devices"].items():
            bridge, mac, pod_source, redirect, mtu = struct.unpack("=I6sBBI", value)
            (index,) = struct.unpack("=I", key)
            name = socket.if_indextoname(index)
            if not MADE.match(name):
                continue
            of_bridge = socket.if_indextoname(bridge) if bridge else ""
            right = bool(mtu) is not (index in down)
            found[name] = Entry(of_bridge, mac.hex(":"), pod_source, redirect, down.get(index, mtu) if right else -1)
        return found

    def knows(self, devices: dict[str, Entry], addresses: dict[str, bool]) -> bool:
        """Whether the maps hold exactly these, and the address of the loopback device."""
        try:
            return self.devices() == devices and self.node_addresses() == addresses | {"::1": False}
        except OSError:  # a device that does not exist any more
            return False


@pytest.fixture(params=[True, False], ids=["tcx", "clsact"])
def harness(
    namespace: None, tmp_path: Path, programs: Object, bpffs: Path, request: pytest.FixtureRequest
) -> Iterator[Harness]:
    made = Harness(tmp_path, programs, bpffs, request.param)
    yield made
    made.node.close()


def test_existing_addresses_and_devices_are_in_the_maps(
    namespace: None, tmp_path: Path, programs: Object, bpffs: Path, shell: Shell
) -> None:
    shell("ip link add v0 mtu 1400 type veth peer name v1; ip addr add 10.1.0.1/24 dev v0; ip link set v0 up")
    shell("ip link add br0 type bridge; ip link add v2 type veth peer name v3; ip link set v3 master br0")
    shell("ip link set br0 address 02:00:00:00:00:09; ip addr add 10.1.0.2/32 dev lo; ip addr add fd00::5/64 dev v2")
    harness = Harness(tmp_path, programs, bpffs)
    try:
        # br0 has no address, and v2 leads to it: v2 is the gateway of its ports.
        assert harness.devices() == {"v0": Entry(mtu=1400), "v1": PLAIN, "v2": PLAIN, "v3": Entry("br0")}
        shell("ip addr del fd00::5/64 dev v2; ip addr add fd00::5/64 dev br0")
        follow(harness.node, lambda: harness.devices()["v3"] == Entry("br0", "02:00:00:00:00:09"))
        served = {"10.1.0.1": True, "10.1.0.2": True, "fd00::5": True}
        assert harness.node_addresses() == {"::1": False, **served}
    finally:
        harness.node.close()


def test_addresses_come_and_go(harness: Harness, shell: Shell) -> None:
    shell(f"{NO_LINK_LOCAL}; ip link add v0 type veth peer name v1; ip link set v0 up")
    shell("ip addr add 10.1.0.1/24 dev v0; ip addr add fd00::1/64 dev v0 nodad")
    follow(harness.node, lambda: {"10.1.0.1", "fd00::1"} <= set(harness.node_addresses()))
    assert harness.knows({"v0": PLAIN, "v1": PLAIN}, {"10.1.0.1": True, "fd00::1": True})
    shell("ip addr del 10.1.0.1/24 dev v0; ip addr del fd00::1/64 dev v0")
    follow(harness.node, lambda: not {"10.1.0.1", "fd00::1"} & set(harness.node_addresses()))
    shell("ip addr add 10.1.0.1/24 dev v0")
    follow(harness.node, lambda: "10.1.0.1" in harness.node_addresses())
    shell("ip link del v0")
    follow(harness.node, lambda: harness.knows({}, {}))


def test_removed_addresses_are_reported(harness: Harness, shell: Shell) -> None:
    """Flows are masqueraded to them (finding D7). An address that another device also has stays on the node."""
    fast = NodeConfig(fast_path=True)
    harness.node.close()
    node = harness.start(fast)
    calls: list[int] = []
    node.on_gone = lambda: calls.append(len(node.gone))

    def gone() -> set[str]:
        return {str(ipaddress.ip_address(packed)) for packed in harness.node.gone}

    assert gone() == set()
    shell(f"{NO_LINK_LOCAL}; ip link add v0 type veth peer name v1; ip link set v0 up; ip link set v1 up")
    shell("ip addr add 10.1.0.1/32 dev v0; ip addr add 10.1.0.1/32 dev v1; ip addr add 10.1.0.2/32 dev v0")
    shell("ip addr add 10.1.0.3/32 dev v0; ip addr add fd00::1/64 dev v0 nodad; ip addr add fe80::7/64 dev v0 nodad")
    follow(node, lambda: {"10.1.0.3", "fd00::1", "fe80::7"} <= set(harness.node_addresses()))
    shell("ip addr del 10.1.0.1/32 dev v0; ip link set v1 mtu 1400")
    follow(node, lambda: harness.devices()["v1"].mtu == 1400)
    assert (gone(), calls) == (set(), [])
    shell("ip addr del 10.1.0.1/32 dev v1")
    follow(node, lambda: "10.1.0.1" not in harness.node_addresses())
    assert (gone(), calls) == ({"10.1.0.1"}, [1])
    # No flow is masqueraded to an address of a device that is down, though the node still has it.
    shell("ip link set v0 down")
    follow(node, lambda: {"10.1.0.2", "fd00::1"} <= gone())
    follow(node, lambda: "fe80::7" not in harness.node_addresses())
    assert gone() == {"10.1.0.1", "10.1.0.2", "10.1.0.3", "fd00::1"}
    assert {"10.1.0.2", "10.1.0.3"} <= set(harness.node_addresses())
    # An address that is removed, and a device that goes down, while no agent runs.
    shell("ip addr add 10.1.0.4/32 dev v1; ip addr add 10.1.0.5/32 dev lo")
    follow(node, lambda: {"10.1.0.4", "10.1.0.5"} <= set(harness.node_addresses()))
    node.close()
    shell("ip addr del 10.1.0.3/32 dev v0; ip link set v1 down")
    harness.start(fast)
    assert gone() == {"10.1.0.2", "10.1.0.3", "10.1.0.4"}


def test_an_address_with_several_peers_stays_until_the_last_one_is_removed(harness: Harness, shell: Shell) -> None:
    """As on hosts that route one address to each virtual machine. The kernel changes an IPv6 peer in place."""
    harness.node.close()
    node = harness.start(NodeConfig(fast_path=True))
    shell(f"{NO_LINK_LOCAL}; ip link add v0 type veth peer name v1; ip link set v0 up; ip link set v1 up")
    for number in (1, 2):
        shell(f"ip addr add 10.1.0.1 peer 10.9.0.{number} dev v0")
        shell(f"ip addr replace fd00::1 peer fd00:9::{number} dev v0 nodad")
    both = {"10.1.0.1", "fd00::1"}
    follow(node, lambda: both <= set(harness.node_addresses()))
    shell("ip addr del 10.1.0.1 peer 10.9.0.2 dev v0; ip link set v1 mtu 1400")
    follow(node, lambda: harness.devices()["v1"].mtu == 1400)
    assert both <= set(harness.node_addresses())
    assert node.gone == set()
    shell("ip addr del 10.1.0.1 peer 10.9.0.1 dev v0; ip addr del fd00::1 peer fd00:9::2 dev v0")
    follow(node, lambda: not both & set(harness.node_addresses()))
    assert node.gone == {ipaddress.ip_address(text).packed for text in both}


def test_removed_devices_are_reported_by_index(harness: Harness, shell: Shell) -> None:
    """If another device has got the number, entries with it belong to that device."""
    gone: list[int] = []
    harness.node.on_devices_gone = lambda indexes: gone.extend(sorted(indexes))
    shell("ip link add v0 index 7000 type veth peer name v1 index 7001; ip link add v2 index 7002 type bridge")
    follow(harness.node, lambda: {7000, 7001, 7002} <= harness.node.indexes)
    shell("ip link del v0; ip link add v3 index 7000 type bridge; ip link del v2")
    follow(harness.node, lambda: 7002 not in harness.node.indexes)
    assert gone == [7001, 7002]
    assert 7000 in harness.node.indexes


@pytest.mark.parametrize("how", ["moved", "made again"])
def test_a_device_that_leaves_and_comes_back_with_its_number(how: str, harness: Harness, shell: Shell) -> None:
    """Between two looks of the agent: its program is gone with the former one."""
    harness.attach()
    shell("ip link add v0 index 7000 type veth peer name v1; ip link set v0 up")
    follow(harness.node, lambda: 7000 in harness.node.attached)
    far = f"pep-far-{os.getpid()}"
    if how == "moved":
        there = f"ip link set v0 netns {far}; ip -n {far} link set v0 netns $$"
        shell(f"ip netns add {far}; {there} || (ip netns del {far}; false); ip netns del {far}")
    else:
        shell("ip link del v0; ip link add v0 index 7000 type veth peer name v1")
    assert socket.if_nametoindex("v0") == 7000
    follow(harness.node, lambda: carried("v0") == (["tc_ethernet"], ["tc_egress"]))
    harness.node.look()
    assert carried("v0") == (["tc_ethernet"], ["tc_egress"])
    assert harness.node.attached[7000] == "tc_ethernet"


def test_a_new_device_gets_its_program(harness: Harness, shell: Shell) -> None:
    harness.attach()
    shell("ip link add v0 type veth peer name v1")
    index = socket.if_nametoindex("v0")
    follow(harness.node, lambda: index in harness.node.attached)
    assert carried("v0") == (["tc_ethernet"], ["tc_egress"])


def test_a_new_device_settles_before_it_gets_its_program(
    harness: Harness, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a pod that is used at once may lose the reply to an ARP request, and wait for a second."""
    steps: list[str] = []
    attach = Attachments.attach

    def recorded(self: Attachments, ifindex: int, device: str, *programs: Any) -> bool:
        steps.append(device)
        return attach(self, ifindex, device, *programs)

    monkeypatch.setattr(Attachments, "attach", recorded)
    monkeypatch.setattr(time, "sleep", lambda seconds: steps.append(f"{1000 * seconds:.0f} ms"))
    harness.attach()
    shell("ip link add v0 type veth peer name v1")
    follow(harness.node, lambda: {"v0", "v1"} <= set(steps))
    assert steps[-3:] == ["5 ms", "v1", "v0"] or steps[-4:] == ["5 ms", "v1", "5 ms", "v0"]
    # A change of a device that has its program.
    steps.clear()
    shell("ip link set v0 mtu 1400")
    follow(harness.node, lambda: harness.devices()["v0"].mtu == 1400)
    assert steps == []


def test_many_new_devices_do_not_hold_up_the_loop(
    harness: Harness, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand devices that came at once, a change of a Service waited for half a minute."""
    monkeypatch.setattr(devices, "TURN_SECONDS", 0.0)
    harness.attach()
    before = len(harness.node.attached)
    seen: set[int] = set()
    problems: list[str] = []

    async def follow_node() -> None:
        stop = harness.node.follow(asyncio.get_running_loop(), lambda text, error: problems.append(f"{text}: {error}"))
        shell("".join(f"ip link add v{i} type veth peer name v{i + 1}; " for i in range(0, 8, 2)))
        async with asyncio.timeout(DEADLINE):
            while len(harness.node.attached) < before + 8:
                await asyncio.sleep(0)
                seen.add(len(harness.node.attached) - before)
        stop()

    asyncio.run(follow_node())
    assert len(seen & set(range(1, 8))) >= 4, "the loop's other work has its turn between the devices"
    assert not problems
    for i in range(8):
        assert carried(f"v{i}") == (["tc_ethernet"], ["tc_egress"])


def test_a_device_without_ethernet_header_gets_the_other_program(harness: Harness, shell: Shell) -> None:
    shell("ip tuntap add t0 mode tun; ip tuntap add t1 mode tap")
    follow(harness.node, lambda: len(harness.node.wanted.programs) == 2)
    harness.attach()
    assert carried("t0") == (["tc_l3"], [])
    assert carried("t1") == (["tc_ethernet"], ["tc_egress"])


def test_ports_of_a_bridge_have_programs_and_the_bridge_has_none(harness: Harness, shell: Shell) -> None:
    harness.attach()
    shell("ip link add v0 type veth peer name v1; ip link add br0 type bridge; ip link set v0 master br0")
    port, bridge = socket.if_nametoindex("v0"), socket.if_nametoindex("br0")
    mac = json.loads(shell("ip -j link show br0"))[0]["address"]
    follow(harness.node, lambda: port in harness.node.attached and harness.devices().get("v0") == Entry("br0", mac))
    assert harness.devices() == {"v0": Entry("br0", mac), "v1": PLAIN}
    assert bridge not in harness.node.attached
    assert harness.node.attached[port] == "tc_bridge_port"
    assert carried("v0") == (["tc_bridge_port"], ["tc_egress"])
    shell("ip link set br0 address 02:00:00:00:00:07")
    follow(harness.node, lambda: harness.devices()["v0"] == Entry("br0", "02:00:00:00:00:07"))
    shell("ip link set v0 nomaster")
    follow(harness.node, lambda: harness.devices()["v0"] == PLAIN)
    assert harness.node.attached[port] == "tc_ethernet", "leaving a bridge is not leaving the node"
    assert carried("v0") == (["tc_ethernet"], ["tc_egress"])


def test_a_device_that_stops_being_an_entrance_loses_its_filter(harness: Harness, shell: Shell) -> None:
    shell("ip link add v0 type veth peer name v1")
    follow(harness.node, lambda: harness.knows({"v0": PLAIN, "v1": PLAIN}, {}))
    harness.attach()
    harness.node.close()
    # A device stops being an entrance while no agent runs. A rename cannot do that: a program on a bridge stands for
    # it.
    shell("ip link add br0 type bridge")
    attachments = Attachments(harness.directory, harness.bpffs / "tcx", harness.use_tcx)
    bridge = socket.if_nametoindex("br0")
    attachments.attach(bridge, "br0", harness.programs.programs["tc_ethernet"].fd, None)
    attachments.close()
    assert carried("br0") == (["tc_ethernet"], [])
    harness.start()
    harness.attach()
    assert carried("br0") == ([], [])
    assert carried("v0") == (["tc_ethernet"], ["tc_egress"])
    assert "clsact" not in shell("tc qdisc show dev br0")


def test_a_device_that_left_while_no_agent_ran_leaves_nothing(harness: Harness, shell: Shell) -> None:
    """Its number may be that of another device later, whose clsact belongs to other software."""
    shell("ip link add v0 index 7000 type veth peer name v1 index 7001")
    follow(harness.node, lambda: {7000, 7001} <= harness.node.indexes)
    harness.attach()
    harness.node.close()
    shell("ip link del v0")
    harness.start()
    harness.attach()
    left = [*harness.directory.glob("clsact/700*"), *(harness.bpffs / "tcx").glob("700*")]
    assert not left


def test_a_restart_replaces_programs_and_rewrites_no_right_entry(harness: Harness, shell: Shell) -> None:
    shell(f"{NO_LINK_LOCAL}; ip link add v0 type veth peer name v1")
    shell("ip addr add 10.1.0.1/24 dev v0; ip link set v0 up; ip link set v1 up")
    follow(harness.node, lambda: harness.knows({"v0": PLAIN, "v1": PLAIN}, {"10.1.0.1": True}))
    harness.attach()
    harness.node.close()
    # A leftover entry of an earlier run is deleted at the start; a right one is not written again.
    harness.programs.maps["node_addresses4"].update(bytes([9, 9, 9, 9]), struct.pack("=I", 1))
    written = []
    for name in MAPS:
        harness.programs.maps[name] = Recording(harness.programs.maps[name], written)
    harness.start()
    harness.attach(swap=True)
    assert written == [("delete", "node_addresses4", bytes([9, 9, 9, 9]))]
    assert carried("v0") == (["tc_l3"], ["tc_egress"])


class Recording:
    """A map that records its writes."""

    def __init__(self, real: object, written: list[tuple[str, str, bytes]]) -> None:
        self._real = real
        self._written = written

    def update(self, key: bytes, value: bytes, flags: int = 0) -> None:
        self._written.append(("update", self._real.name, key))
        self._real.update(key, value, flags)

    def delete(self, key: bytes) -> bool:
        self._written.append(("delete", self._real.name, key))
        return self._real.delete(key)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return self._real.items()


def test_another_configuration_is_applied(harness: Harness, shell: Shell) -> None:
    shell("ip link add v0 type veth peer name v1; ip addr add 10.1.0.1/24 dev v0; ip addr add 10.2.0.1/24 dev v0")
    devices = {"v0": PLAIN, "v1": PLAIN}
    follow(harness.node, lambda: harness.knows(devices, {"10.1.0.1": True, "10.2.0.1": True}))
    harness.node.configure(NodeConfig(("primary",), (ipaddress.ip_address("10.2.0.1"),)))
    assert harness.knows(devices, {"10.1.0.1": False, "10.2.0.1": True})
    harness.node.configure(NodeConfig(interface_name_prefix="v1"))
    assert harness.knows({"v0": PLAIN, "v1": Entry(pod_source=1)}, {"10.1.0.1": True, "10.2.0.1": True})


@pytest.mark.parametrize("harness", [False], ids=["clsact"], indirect=True)
@pytest.mark.parametrize("how", ["tc filter del dev v0 ingress pref 1", "tc qdisc del dev v0 clsact"])
def test_a_filter_that_was_removed_comes_back(how: str, harness: Harness, shell: Shell) -> None:
    harness.attach()
    shell("ip link add v0 type veth peer name v1")
    index = socket.if_nametoindex("v0")
    follow(harness.node, lambda: index in harness.node.attached)
    shell(how)
    assert carried("v0")[0] == []
    follow(harness.node, lambda: carried("v0") == (["tc_ethernet"], ["tc_egress"]))
    assert any("v0: the agent's tc program is gone" in report for report in harness.reports)


def test_a_program_that_was_removed_comes_back_though_it_could_not_be_looked_for_at_first(
    harness: Harness, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.attach()
    shell("ip link add v0 type veth peer name v1")
    index = socket.if_nametoindex("v0")
    follow(harness.node, lambda: index in harness.node.attached)
    harness.node.look()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "tcx programs cannot be listed")

    if harness.use_tcx:
        link = tcx.open_pinned(harness.bpffs / "tcx" / f"{index}-ingress")
        tcx.detach(link)
        os.close(link)
    else:
        shell("tc qdisc del dev v0 clsact")
    with monkeypatch.context() as without:
        without.setattr(harness.node._attachments, "standing", refuse)
        harness.node.read()
        harness.node.look()
    assert carried("v0")[0] == []
    harness.node.look()
    follow(harness.node, lambda: carried("v0") == (["tc_ethernet"], ["tc_egress"]))


def test_a_full_map_is_logged_once_and_other_entries_are_written(
    namespace: None, tmp_path: Path, bpf_objects: Path, bpffs: Path, shell: Shell
) -> None:
    shell("ip link add v0 type veth peer name v1")
    for number in range(1, 7):
        shell(f"ip addr add 10.{number}.0.1/24 dev v0")
    with Object.open(bpf_objects / "tc.bpf.o", max_entries={"node_addresses4": 4}) as opened:
        harness = Harness(tmp_path, opened.load(), bpffs)
        harness.attach()
        assert len(harness.in_kernel()["node_addresses4"]) == 4
        assert len([report for report in harness.reports if "node_addresses4" in report]) == 1
        assert len(harness.node.attached) == 2
        shell("ip addr del 10.1.0.1/24 dev v0; ip addr del 10.2.0.1/24 dev v0")
        follow(harness.node, lambda: set(harness.node_addresses()) - {"::1"} == {f"10.{n}.0.1" for n in range(3, 7)})
        harness.node.close()


def test_an_attachment_that_failed_is_tried_again(
    harness: Harness, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file descriptor, for a moment: nothing reports when there is one again."""
    monkeypatch.setattr(devices, "LOOK_SECONDS", 0.0)
    harness.attach()
    attach = harness.node._attachments.attach

    def refuse(*_: object) -> bool:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(harness.node._attachments, "attach", refuse)
    shell("ip link add v0 type veth peer name v1")
    indexes = {socket.if_nametoindex("v0"), socket.if_nametoindex("v1")}
    follow(harness.node, lambda: indexes <= harness.node.indexes)
    harness.node.look()
    assert not indexes & harness.node.attached.keys()
    monkeypatch.setattr(harness.node._attachments, "attach", attach)
    harness.node.look()
    assert indexes <= harness.node.attached.keys()
    assert carried("v0") == (["tc_ethernet"], ["tc_egress"])
    assert harness.node.devices[min(indexes)].program == "tc_ethernet"
    assert len([report for report in harness.reports if "Too many open files" in report]) == 2, "once for each device"


@pytest.mark.parametrize("harness", [True], ids=["tcx"], indirect=True)
def test_without_a_bpffs_a_new_device_is_served_and_pinned_later(harness: Harness, shell: Shell) -> None:
    harness.attach()
    bpffs, folder = harness.bpffs, harness.bpffs / "tcx"
    shell(f"mkdir {bpffs}-aside; mount --bind {bpffs} {bpffs}-aside; mount -t tmpfs none {bpffs}")
    try:
        shell("ip link add v0 type veth peer name v1")
        index = socket.if_nametoindex("v0")
        follow(harness.node, lambda: index in harness.node.attached)
        assert carried("v0") == (["tc_ethernet"], ["tc_egress"])
    finally:
        shell(f"umount {bpffs}; umount {bpffs}-aside")
    harness.node.look()
    assert {f"{index}-ingress", f"{index}-egress"} <= {pin.name for pin in folder.iterdir()}
    harness.node.close()
    assert carried("v0") == (["tc_ethernet"], ["tc_egress"])


@pytest.mark.parametrize("harness", [False], ids=["clsact"], indirect=True)
def test_a_new_device_gets_its_program_though_the_run_folder_is_read_only(harness: Harness, shell: Shell) -> None:
    harness.attach()
    shell("ip link add v0 type veth peer name v1")
    before = socket.if_nametoindex("v0")
    follow(harness.node, lambda: before in harness.node.attached)
    records = harness.directory / "clsact"
    shell(f"mount --bind {records} {records}; mount -o remount,bind,ro {records}")
    try:
        shell("ip link add v2 type veth peer name v3")
        after = socket.if_nametoindex("v2")
        follow(harness.node, lambda: after in harness.node.attached)
        assert carried("v2") == (["tc_ethernet"], ["tc_egress"])
        gone: list[int] = []
        harness.node.on_devices_gone = lambda indexes: gone.extend(indexes)
        shell("ip link del v0; ip link add v4 type veth peer name v5")
        follow(harness.node, lambda: before in gone and socket.if_nametoindex("v4") in harness.node.attached)
    finally:
        shell(f"umount {records}")


def test_a_list_that_failed_after_lost_messages_is_read_again(
    harness: Harness, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.attach()
    shell("ip link add v0 type veth peer name v1")
    index = socket.if_nametoindex("v0")
    seen = harness.node._follower
    received, list_all = seen._events.received, seen._requests.list_all

    def refuse(*_: object) -> list[bytes]:
        raise OSError(errno.EAGAIN, "the list changed while it was read")

    monkeypatch.setattr(seen._events, "received", lambda: [*received(), None])
    monkeypatch.setattr(seen._requests, "list_all", refuse)
    with pytest.raises(OSError, match="the list changed"):
        harness.node.read()
    monkeypatch.setattr(seen._events, "received", received)
    with pytest.raises(OSError, match="the list changed"):
        harness.node.look()
    monkeypatch.setattr(seen._requests, "list_all", list_all)
    harness.node.look()
    assert index in harness.node.attached


def test_devices_that_left_are_forgotten_though_the_ends_of_veths_cannot_be_asked(
    harness: Harness, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.attach()
    shell("ip link add v0 type veth peer name v1")
    index = socket.if_nametoindex("v0")
    follow(harness.node, lambda: index in harness.node.attached)
    gone: list[int] = []
    harness.node.on_devices_gone = lambda indexes: gone.extend(indexes)

    def refuse(*_: object) -> dict[int, str]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as without:
        without.setattr(harness.node._follower._peers, "read", refuse)
        shell("ip link del v0")
        follow(harness.node, lambda: index in gone)
    shell("ip link add v2 type veth peer name v3")
    harness.node.look()
    assert socket.if_nametoindex("v2") in harness.node.attached
    assert not harness.node._follower.stale


def test_addresses_that_come_with_a_failure_to_list_programs_are_applied_later(
    harness: Harness, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read has both: the message about a qdisc makes the node list the device's programs, and that fails."""
    harness.attach()
    shell("ip link add v0 type veth peer name v1; ip link set v0 up; ip link set v1 up")
    follow(harness.node, lambda: {"v0", "v1"} <= harness.devices().keys())

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    harness.node.look()
    shell("tc qdisc add dev v0 root pfifo; tc qdisc del dev v0 root; ip addr add 192.0.2.1/24 dev v0")
    with monkeypatch.context() as without:
        without.setattr(harness.node._attachments, "others", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            harness.node.read()
    assert "192.0.2.1" not in harness.node_addresses()
    harness.node.look()
    assert harness.node_addresses()["192.0.2.1"]


def test_lost_messages_cause_a_full_read(
    namespace: None, tmp_path: Path, programs: Object, bpffs: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More unread events than the socket's buffer holds."""
    monkeypatch.setattr(follower, "LARGE_BUFFER", 4096)
    harness = Harness(tmp_path, programs, bpffs)
    shell("ip link add v0 type veth peer name v1")
    batch = "".join(f"addr add 10.0.{i}.1/32 dev v0\n" for i in range(100))
    (tmp_path / "batch").write_text(batch)
    shell(f"ip -batch {tmp_path / 'batch'}")
    lost = []
    received = harness.node._follower._events.received
    monkeypatch.setattr(harness.node._follower._events, "received", lambda: lost.append(list(received())) or lost[-1])
    follow(harness.node, lambda: "10.0.99.1" in harness.node_addresses())
    assert any(None in each for each in lost), "the buffer has overflowed"
    assert harness.knows({"v0": PLAIN, "v1": PLAIN}, {f"10.0.{i}.1": True for i in range(100)})
    harness.node.close()


def test_what_is_known_of_a_device_that_left_while_messages_were_lost_is_forgotten(
    namespace: None, tmp_path: Path, programs: Object, bpffs: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods come and go for months."""
    far = f"pep-far-{os.getpid()}"
    shell(f"ip netns add {far}; ip link add v0 type veth peer name v1 netns {far}")
    try:
        harness = Harness(tmp_path, programs, bpffs)
        seen = harness.node._follower
        index = socket.if_nametoindex("v0")
        assert index in seen._peers._answers
        shell("ip link del v0")
        received = seen._events.received
        monkeypatch.setattr(seen._events, "received", lambda: [*received(), None])
        harness.node.read()
        assert index not in harness.node.indexes
        assert index not in seen._peers._answers
        harness.node.close()
    finally:
        shell(f"ip netns del {far}")


def as_ip_shows_it(shell: Shell) -> tuple[dict[str, Entry], dict[str, bool], dict[str, bool]]:
    """The test's devices where packets enter, the node's addresses, and which are secondary, according to iproute2."""
    links = {link["ifname"]: link for link in json.loads(shell("ip -j -d addr show"))}
    entries, addresses, secondary = {}, {}, {}
    for name, link in links.items():
        bridge = link.get("master", "")
        if name.startswith("v"):
            entries[name] = Entry(bridge, links[bridge]["address"], mtu=link["mtu"]) if bridge else PLAIN
        for each in link["addr_info"]:
            if not each["local"].startswith("127."):
                addresses[each["local"]] = each["local"] != "::1"
                secondary[f"{name} {each['local']}"] = each.get("secondary", False)
    return entries, addresses, secondary


def as_followed(follower: Follower) -> tuple[dict[str, Entry], dict[str, bool], dict[str, bool]]:
    """What the agent derives from the messages."""
    links = follower.state.links
    wanted = plan(follower.state, NodeConfig())
    entries = {
        links[index].name: Entry(links[each.bridge].name if each.bridge else "", each.bridge_mac.hex(":"), *each[2:])
        for index, each in wanted.devices.items()
        if MADE.match(links[index].name)
    }
    addresses = {str(ipaddress.ip_address(key)): accepted for key, accepted in wanted.node_addresses.items()}
    secondary = {
        f"{links[entry.device].name} {entry.address}": bool(entry.flags & 1 and entry.address.version == 4)
        for entry in follower.state.addresses.values()
        if not str(entry.address).startswith("127.")
    }
    return entries, addresses, secondary


def test_the_followed_state_matches_the_kernel_after_any_changes(namespace: None, shell: Shell) -> None:
    """Promotion of secondary addresses, one address on two devices, ports that move: compared with iproute2's
    listing (finding T12).
    """
    shell(f"sysctl -qw net.ipv4.conf.all.promote_secondaries=1; {NO_LINK_LOCAL}")
    # Two devices of one bridge may get the same address; whether the kernel detects that depends on timing.
    shell("sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0")
    shell("ip link add br0 type bridge; ip link add v0 type veth peer name v1; ip link add v2 type veth peer name v3")
    shell("ip link set br0 address 02:00:00:00:00:05")
    devices = ["br0", "v0", "v1", "v2", "v3"]
    for device in devices:  # an IPv6 address on a device that is down is announced when it comes up
        shell(f"ip link set {device} up")
    follower = Follower()
    chance = random.Random(7)
    seen, ports = set(), set()
    for _ in range(120):
        device = chance.choice(devices)
        subnet, host = chance.randrange(3), chance.randrange(1, 5)
        line = chance.choice(
            [
                f"ip addr add 10.{subnet}.0.{host}/24 dev {device}",
                f"ip addr del 10.{subnet}.0.{host}/24 dev {device}",
                f"ip addr add fd0{subnet}::{host}/64 dev {device} nodad",
                f"ip addr del fd0{subnet}::{host}/64 dev {device}",
                f"ip addr change fd0{subnet}::{host}/64 dev {device} preferred_lft 0",
                f"ip link set {device} down; ip link set {device} up",
                # Only one end of each veth: both would form a loop, in which frames circle for ever.
                f"ip link set {chance.choice(['v0', 'v2'])} {chance.choice(['master br0', 'nomaster'])}",
            ]
        )
        shell(f"{line} 2>/dev/null || true")
        follow(follower, lambda: as_followed(follower) == as_ip_shows_it(shell))
        entries, _, secondary = as_followed(follower)
        seen |= set(secondary.values())
        ports |= {bool(entry.bridge) for entry in entries.values()}
    assert seen == {False, True}, "secondary addresses must occur"
    assert ports == {False, True}, "ports of the bridge must occur"
    follower.close()


def test_foreign_changes_of_the_maps_are_corrected(harness: Harness, shell: Shell) -> None:
    shell("ip link add v0 type veth peer name v1; ip addr add 192.0.2.1/24 dev v0; ip link set v0 up")
    follow(harness.node, lambda: "192.0.2.1" in harness.node_addresses())
    right = harness.in_kernel()
    assert harness.node.read_back() == []
    key, value = next(iter(right["devices"].items()))
    harness.programs.maps["devices"].delete(key)
    harness.programs.maps["node_addresses4"].update(bytes((192, 0, 2, 77)), struct.pack("=I", 1))
    assert harness.node.read_back() == ["node_addresses4", "devices"]
    assert harness.in_kernel() == right
    harness.programs.maps["devices"].update(key, b"\1" * len(value))
    assert harness.node.read_back() == ["devices"]
    assert harness.in_kernel() == right


def test_a_foreign_change_is_corrected_though_another_map_could_not_be_read_at_first(
    harness: Harness, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell("ip link add v0 type veth peer name v1; ip addr add 192.0.2.1/24 dev v0; ip link set v0 up")
    follow(harness.node, lambda: "192.0.2.1" in harness.node_addresses())
    right = harness.in_kernel()

    def refuse() -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    harness.programs.maps["node_addresses4"].delete(bytes((192, 0, 2, 1)))
    with monkeypatch.context() as without:
        without.setattr(harness.programs.maps["devices"], "items", refuse)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            harness.node.read_back()
    assert harness.node.read_back() == ["node_addresses4"]
    assert harness.in_kernel() == right
