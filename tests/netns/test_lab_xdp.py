# SPDX-License-Identifier: Apache-2.0
"""XDP on the device of external traffic: real packets, programs that come and go, other software's programs."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyebpf_proxy
from pyebpf_proxy.datapath.loader import _libbpf
from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.node.xdp import takes_tags_off
from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.client import REFUSED, ask
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.lab.manifests import Port, service, slices
from tests.netns.top_tools import watching
from tests.netns.xdp_lab import NODE_PORT, XDP, as_nics, counted, offloads, receive, restart, shown, talking
from tests.support.conversation import PORT
from tests.support.fast_lab import ON, FastWorld, build_fast_world
from tests.support.lab_tools import wait_until
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf, pytest.mark.needs_netns]

OBJECT = Path(pyebpf_proxy.__file__).parent / "bpf" / "xdp.bpf.o"


@pytest.fixture(scope="module")
def shared() -> Iterator[FastWorld]:
    with Lab() as lab:
        yield build_fast_world(lab)


@pytest.fixture
def outside(shared: FastWorld) -> FastWorld:
    return as_nics(shared)


def program_id(node: Node) -> int:
    program = shown(node).get("prog", {})
    return int(program["id"]) if isinstance(program, dict) and program else 0


def new_flows(world: FastWorld) -> int:
    """On both paths."""
    return world.count("new_flow_fast") + world.count("new_flow_netfilter")


# ---- packets ---------------------------------------------------------------------------------------------------


def test_xdp_sends_back_packets_for_another_node(outside: FastWorld, family: int, protocol: str) -> None:
    with talking(outside.lab.client, outside.node.address.of(family), protocol, NODE_PORT) as conversation:
        counted(outside, "xdp_flow_hit")
        conversation.wait()
        assert conversation.peer == outside.node.address.of(family), "masqueraded"


def test_top_says_how_many_packets_xdp_sends(outside: FastWorld) -> None:
    """Its own program runs at tc, which does not see them."""
    with (
        talking(outside.lab.client, outside.node.address.v4, "udp", NODE_PORT),
        watching(outside.node) as seen,
    ):
        counted(outside, "xdp_flow_hit")
        seen.until(lambda: any(note.startswith("XDP sent ") for note in seen.last.notes), "a note")


@pytest.mark.parametrize("size", [1400, 40_000], ids=["whole packets", "a stream"])
def test_large_questions(outside: FastWorld, size: int) -> None:
    """A direction with large segments is left to tc for good."""
    with talking(outside.lab.client, outside.node.address.v4, "tcp", NODE_PORT, size) as conversation:
        counted(outside, "xdp_left_stream")
        conversation.wait()


def test_jumbo_frames(outside: FastWorld) -> None:
    """Frames of several buffers, on a device with such an MTU."""
    path = [(outside.lab.client, "eth0"), (outside.lab.core, "client0"), (outside.lab.core, "lan0")]
    path += [(outside.lab.core, node.name) for node in outside.lab.nodes]
    path += [(node.namespace, "eth0") for node in outside.lab.nodes]
    path += [(outside.far.node.namespace, outside.far.device), (outside.far.namespace, "eth0")]
    for namespace, device in path:
        namespace.ip(f"link set {device} mtu 9000")
    try:
        with talking(outside.lab.client, outside.node.address.v4, "udp", NODE_PORT, 8000) as conversation:
            counted(outside, "xdp_flow_hit")
            conversation.wait()
    finally:
        for namespace, device in reversed(path):
            namespace.ip(f"link set {device} mtu 1500")


def test_tc_serves_a_pod_that_accepts_no_xdp_frames(outside: FastWorld) -> None:
    """The peer in a pod has neither XDP nor GRO: frames that XDP sends there would be lost silently."""
    web = outside.node.address.v4
    with talking(outside.client.namespace, web, "tcp", NODE_PORT) as conversation:
        before = outside.count("xdp_left_device")
        # Replies come in through eth0, for the pod.
        wait_until(lambda: outside.count("xdp_left_device") > before + 10, "answers left to tc", 60.0)
        conversation.wait()


def test_checksums_that_senders_leave_to_devices_are_left_to_tc(outside: FastWorld, protocol: str) -> None:
    offloads(outside, "on")
    with talking(outside.lab.client, outside.node.address.v4, protocol, NODE_PORT) as conversation:
        counted(outside, "xdp_left_checksum")
        conversation.wait()


def test_tc_serves_a_wire_whose_other_end_accepts_no_xdp_frames(outside: FastWorld) -> None:
    """When the other end begins to accept frames, XDP sends there: no packet is lost."""
    receive(outside, "off")
    with talking(outside.lab.client, outside.node.address.v4, "tcp", NODE_PORT) as conversation:
        counted(outside, "xdp_left_device")
        conversation.wait()
        receive(outside, "on")
        counted(outside, "xdp_flow_hit")
        conversation.wait()


def test_a_wire_whose_other_end_stops_accepting_frames_while_the_agent_has_no_descriptor(outside: FastWorld) -> None:
    """The kernel reports it once, and the agent cannot list the features then."""
    agent = outside.node.agent
    assert agent.process is not None
    log = Log(agent).from_now()
    before = resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE)
    with talking(outside.lab.client, outside.node.address.v4, "tcp", NODE_PORT) as conversation:
        counted(outside, "xdp_flow_hit")
        # Fewer than it has: a descriptor that it closes cannot be used again.
        resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            receive(outside, "off")
            log.wait("changes of devices' XDP features could not be followed")
        finally:
            resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, before)
        counted(outside, "xdp_left_device")
        conversation.wait()


def test_new_flows_without_the_fast_path(outside: FastWorld, family: int, protocol: str) -> None:
    restart(outside, {"xdpDevices": ["eth0"]})
    before = new_flows(outside)
    with talking(outside.lab.client, outside.node.address.of(family), protocol, NODE_PORT) as conversation:
        conversation.wait()
        assert conversation.peer == outside.node.address.of(family)
    assert new_flows(outside) == before + 1, "the flow is counted once"


def test_generic_mode(outside: FastWorld) -> None:
    """Packets that are left to tc are served, though the kernel passes them without their link header."""
    node = outside.node
    ports = [Port("tcp", PORT, PORT, "TCP", 30008)]
    outside.lab.write("none.yaml", [service("none", ports, cluster_ip(9)), *slices("none", ports, [])])
    restart(outside, {**XDP, "xdpMode": "generic"})
    refused = outside.count("reject_no_endpoints")
    assert outside.lab.client.call(ask, node.address.v4, 30008, "tcp").kind == REFUSED
    assert outside.count("reject_no_endpoints") > refused, "tc served it, not the node's own stack"
    wait_until(lambda: shown(outside.node).get("mode") == 2, "XDP in generic mode")
    before = new_flows(outside)
    with talking(outside.lab.client, outside.node.address.v4, "tcp", NODE_PORT) as conversation:
        conversation.wait()
        assert new_flows(outside) == before + 1
    with (
        talking(outside.lab.client, outside.node.address.v4, "tcp", NODE_PORT, 40_000),
        watching(outside.node) as seen,
    ):
        counted(outside, "xdp_left_stream")
        seen.until(lambda: sum(seen.bytes.values()) > 400_000, "the meter counts what is left to tc")
    restart(outside, XDP)
    wait_until(lambda: shown(outside.node).get("mode") == 1, "XDP in native mode again")


def test_generic_mode_without_devices(outside: FastWorld, family: int) -> None:
    """The agent did not start: its programs referred to a map that is created only with devices."""
    restart(outside, {"xdpMode": "generic"})
    with talking(outside.lab.client, outside.node.address.of(family), "tcp", NODE_PORT) as conversation:
        conversation.wait()
    restart(outside, XDP)
    wait_until(lambda: shown(outside.node).get("mode") == 1, "XDP in native mode again")


# ---- programs --------------------------------------------------------------------------------------------------


def test_xdp_works_without_an_agent_and_the_next_one_replaces_the_program(outside: FastWorld) -> None:
    node = outside.node
    first = program_id(node)
    node.agent.kill()
    assert program_id(node) == first
    node.agent.start(own=XDP)
    node.agent.wait_synced()
    assert program_id(node) not in (0, first)
    page = node.agent.metrics()
    assert 'pyebpf_proxy_xdp_device{device="eth0",mode="native"} 1' in page


def test_xdp_is_detached_when_it_is_turned_off(outside: FastWorld) -> None:
    restart(outside, {**ON, "xdpDevices": []})
    wait_until(lambda: not shown(outside.node), "the kernel takes it off")
    assert not list(outside.node.agent.directory.glob("bpf/**/xdp_devices"))


def test_cleanup_detaches_xdp(outside: FastWorld) -> None:
    outside.node.agent.stop()
    outside.node.agent.cleanup()
    wait_until(lambda: not shown(outside.node), "the kernel takes it off")


@contextlib.contextmanager
def foreign(world: FastWorld) -> Iterator[int]:
    """A foreign program on eth0, attached by netlink as `ip link` does; returns its id."""
    node = world.node
    path = node.agent.directory / "bpf" / "foreign"
    with Object.open(OBJECT) as loaded:
        program = loaded.load().programs["xdp_ethernet"]
        _libbpf.checked(_libbpf.lib().bpf_obj_pin(program.fd, str(path).encode()), "pin")
    try:
        node.namespace.ip(f"link set dev eth0 xdpdrv pinned {path}")
        yield program_id(node)
    finally:
        node.namespace.ip("link set dev eth0 xdpdrv off")
        path.unlink()


def test_a_foreign_program_is_never_replaced(outside: FastWorld) -> None:
    node = outside.node
    restart(outside, {**ON, "xdpDevices": []})
    with foreign(outside) as other:
        restart(outside, XDP)
        assert program_id(node) == other
        Log(node.agent).some(f"{Message.XDP_NOT_ON}eth0: it already has another XDP program, which stays")
        with talking(outside.lab.client, node.address.v4, "tcp", NODE_PORT) as conversation:
            conversation.wait()
        node.agent.stop()
        node.agent.cleanup()
        assert program_id(node) == other
        node.agent.start(own=XDP)
        node.agent.wait_synced()
        assert program_id(node) == other
    wait_until(lambda: program_id(node), "the agent's program, once the device is free")


def test_the_agents_program_is_not_replaced(outside: FastWorld) -> None:
    own = program_id(outside.node)
    with contextlib.suppress(Exception), foreign(outside):
        pass
    assert program_id(outside.node) == own


@pytest.mark.parametrize("how", ["the pin is removed", "the link is detached"])
def test_a_removed_program_is_attached_again(outside: FastWorld, how: str) -> None:
    node = outside.node
    (pin,) = node.agent.directory.glob("bpf/**/xdp/*-native")
    if how == "the pin is removed":
        pin.unlink()
    else:
        node.namespace.run("bpftool", "link", "detach", "pinned", str(pin))
    wait_until(lambda: not shown(node), "the kernel takes it off")
    # Or after syncPeriod.
    node.namespace.ip("link add any0 type veth peer name any1")
    try:
        wait_until(lambda: shown(node), "XDP on eth0 again")
        assert 'pyebpf_proxy_repairs_total{object="xdp_program"} 1' in node.agent.metrics()
        Log(node.agent).some("device eth0: the agent's XDP program is gone, attaching it again")
    finally:
        node.namespace.ip("link del any0")


# ---- devices ---------------------------------------------------------------------------------------------------


def test_devices_that_come_and_go(outside: FastWorld) -> None:
    node = outside.node
    restart(outside, {**XDP, "xdpDevices": ["eth0", "late0"]})
    Log(node.agent).some(f"{Message.XDP_NOT_ON}late0: there is no such device yet")
    for _ in range(2):
        node.namespace.ip("link add late0 type veth peer name late1")
        wait_until(lambda: shown(node, "late0"), "XDP on the new device")
        node.namespace.ip("link del late0")
    wait_until(lambda: len(list(node.agent.directory.glob("bpf/**/xdp/*-native"))) == 1, "its pin is gone")


def test_a_device_that_gets_another_name(outside: FastWorld) -> None:
    node = outside.node
    restart(outside, {**XDP, "xdpDevices": ["eth0", "early0", "late0"]})
    node.namespace.ip("link add early0 type veth peer name late1")
    try:
        wait_until(lambda: shown(node, "early0"), "XDP on the new device")
        node.namespace.ip("link set early0 name late0")
        named = 'pyebpf_proxy_xdp_device{{device="{}",mode="native"}} 1'.format
        wait_until(lambda: named("late0") in node.agent.metrics(), "its new name")
        assert named("early0") not in node.agent.metrics()
    finally:
        node.namespace.ip("link del late1")


def test_devices_that_do_not_support_xdp(outside: FastWorld) -> None:
    node = outside.node
    node.namespace.ip(
        "link add br7 type bridge", "link add port7 type veth peer name far7", "link set port7 master br7"
    )
    try:
        restart(outside, {**XDP, "xdpDevices": ["eth0", "port7", "br7"]})
        Log(node.agent).some(f"{Message.XDP_NOT_ON}port7: it is a port of br7")
        Log(node.agent).some(f"{Message.XDP_NOT_ON}br7: it does not have the tc program")
        assert shown(node)
    finally:
        node.namespace.ip("link del port7", "link del br7")


def test_vlan_offload_is_read_from_the_device(outside: FastWorld) -> None:
    node = outside.node
    assert node.namespace.call(takes_tags_off, "eth0")
    node.namespace.run("ethtool", "-K", "eth0", "rxvlan", "off")
    try:
        assert not node.namespace.call(takes_tags_off, "eth0")
    finally:
        node.namespace.run("ethtool", "-K", "eth0", "rxvlan", "on")


def test_auto_excludes_veths(outside: FastWorld) -> None:
    restart(outside, {**XDP, "xdpDevices": "auto"})
    wait_until(lambda: not shown(outside.node), "the kernel takes it off")
    Log(outside.node.agent).some(Message.XDP_NOWHERE)
