# SPDX-License-Identifier: Apache-2.0
"""The direct lane and the kernel's conntrack: every trap of creating entries from BPF, and what must not be touched."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from world import GO_ON, MARK, PRIORITY_BACKEND, SHOT, World, enter_namespace

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


def insert_entry(
    world: World, protocol: str, source: str, destination: str, sport: int, dport: int, *extra: str, target: str = ""
) -> None:
    """An entry that somebody else made; with `target`, translated to that endpoint's port 8080."""
    command = [
        "conntrack",
        "-I",
        "-p",
        protocol,
        "-t",
        "60",
        "-s",
        world.address(source),
        "-d",
        world.address(destination),
    ]
    command += ["--sport", str(sport), "--dport", str(dport)]
    if target:
        end = world.address(target)
        command += ["-g", f"{end}:8080" if world.family == 4 else f"[{end}]:8080"]
    else:
        command += ["-r", world.address(destination), "-q", world.address(source)]
        command += ["--reply-port-src", str(dport), "--reply-port-dst", str(sport)]
    subprocess.run([*command, *extra], check=True, capture_output=True)


def test_new_entries_have_the_protocols_timeouts(world: World) -> None:
    world.service(["remote"])
    world.service(["remote"], protocol="udp", service=2)
    world.run("tc_ethernet", world.tcp("pod", "cluster_ip", 80))
    world.run("tc_ethernet", world.udp("pod", "cluster_ip", 80))
    timeouts = {flow.protocol: flow.timeout for flow in world.flows()}
    assert 110 < timeouts["tcp"] <= 120
    assert 25 < timeouts["udp"] <= 30


def test_masqueraded_flows_get_random_ports(world: World) -> None:
    world.service(["remote"])
    for i in range(20):
        world.run("tc_ethernet", world.tcp("client", "vip", 80, sport=41000 + i))
    flows = world.flows()
    ports = {flow.reply[3] for flow in flows}
    assert {flow.reply[1] for flow in flows} == {world.address("node")}
    assert len(ports) == 20
    assert all(port >= 1024 for port in ports)
    kept = sum(flow.reply[3] == flow.original[2] for flow in flows)
    assert kept < 5, "the client's port is no hint of the masqueraded one"


def test_a_flow_that_is_not_masqueraded_keeps_its_port(world: World) -> None:
    world.service(["remote"])
    world.run("tc_ethernet", world.tcp("pod", "cluster_ip", 80, sport=41234))
    (flow,) = world.flows()
    assert flow.reply == (world.address("remote"), world.address("pod"), 8080, 41234)


def test_a_clash_with_a_direct_flow_of_the_same_client_port(world: World) -> None:
    """Without a source in the NAT the reply tuples are the same and the insert fails: the SYN would be lost."""
    world.service(["remote"])
    insert_entry(world, "tcp", "pod", "remote", 40000, 8080, "--state", "ESTABLISHED")
    result = world.run("tc_ethernet", world.tcp("pod", "cluster_ip", 80, sport=40000))
    assert result.retval == GO_ON
    made = [flow for flow in world.flows() if flow.original[1] == world.address("cluster_ip")]
    assert len(made) == 1
    assert made[0].reply[:3] == (world.address("remote"), world.address("pod"), 8080)
    assert made[0].reply[3] != 40000


@pytest.mark.parametrize("state", ["TIME_WAIT", "CLOSE"])
def test_a_client_that_reuses_the_port_of_an_ended_flow(lanes: World, state: str) -> None:
    world = lanes
    world.service(["local"])
    insert_entry(world, "tcp", "pod", "cluster_ip", 40000, 80, "--state", state, target="remote")
    result = world.run("tc_ethernet", world.tcp("pod", "cluster_ip", 80, sport=40000))
    assert result.retval == GO_ON
    assert world.reasons()["CLOSING_FLOW_REPLACED"] == 1
    if world.direct:
        (flow,) = world.flows()
        assert flow.reply[0] == world.address("local")
    else:
        assert result.skb is not None
        assert result.skb.priority & 0xFF000000 == PRIORITY_BACKEND


@pytest.mark.parametrize("state", ["SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK"])
def test_a_syn_of_a_living_flow_changes_nothing(lanes: World, state: str) -> None:
    """A retransmission, above all; the endpoint chosen first stays, even if it left the list meanwhile."""
    world = lanes
    world.service(["local"])
    insert_entry(world, "tcp", "pod", "cluster_ip", 40000, 80, "--state", state, target="remote")
    result = world.run("tc_ethernet", world.tcp("pod", "cluster_ip", 80, sport=40000))
    assert result.skb is not None
    assert (result.retval, result.skb.priority) == (GO_ON, 0)
    (flow,) = world.flows()
    assert flow.reply[0] == world.address("remote")
    assert not world.reasons()


@pytest.mark.parametrize(
    "rows", [{"any_endpoints": 0}, {"external_local": 1, "any_endpoints": 1}], ids=["reject", "drop"]
)
def test_established_flows_survive_what_would_refuse_new_ones(lanes: World, rows: dict[str, int]) -> None:
    world = lanes
    world.service([], **rows)
    insert_entry(world, "tcp", "client", "vip", 40000, 80, "--state", "ESTABLISHED", target="remote")
    for flags in ("S", "A", "PA", "FA", "R"):
        result = world.run("tc_ethernet", world.tcp("client", "vip", 80, sport=40000, flags=flags))
        assert result.skb is not None
        assert (result.retval, result.skb.priority) == (GO_ON, 0)
    assert not world.reasons()


@pytest.mark.parametrize("flags", ["A", "PA", "SA", "FA", "R", "RA", "F", "SR", "SF", ""])
def test_tcp_in_mid_stream_gets_no_endpoint(lanes: World, flags: str) -> None:
    world = lanes
    world.service(["remote"])
    result = world.run("tc_ethernet", world.tcp("pod", "cluster_ip", 80, flags=flags))
    assert result.skb is not None
    assert (result.retval, result.skb.priority, result.skb.mark) == (GO_ON, 0, 0)
    assert not world.flows()
    assert not world.reasons()


def test_a_syn_with_ecn_bits_opens_a_flow(world: World) -> None:
    world.service(["remote"])
    world.run("tc_ethernet", world.tcp("pod", "cluster_ip", 80, flags="SEC"))
    assert len(world.flows()) == 1


def test_a_stuck_untranslated_syn_is_translated(world: World) -> None:
    """The client began before we did: its SYN went nowhere, and its retransmission must not follow."""
    world.service(["remote"])
    insert_entry(world, "tcp", "pod", "cluster_ip", 40000, 80, "--state", "SYN_SENT")
    world.run("tc_ethernet", world.tcp("pod", "cluster_ip", 80, sport=40000))
    (flow,) = world.flows()
    assert flow.reply[0] == world.address("remote")
    assert world.reasons()["UNTRANSLATED_FLOW_REPLACED"] == 1


def test_udp_to_a_gone_endpoint_heals_with_the_next_packet(world: World) -> None:
    world.service(["local"], protocol="udp")
    insert_entry(world, "udp", "pod", "cluster_ip", 40000, 80, target="remote")
    world.run("tc_ethernet", world.udp("pod", "cluster_ip", 80, sport=40000))
    (flow,) = world.flows()
    assert flow.reply[0] == world.address("local")
    assert world.reasons() == {"STALE_UDP_REPLACED": 1, "NEW_FLOW_DIRECT": 1}


def test_udp_to_an_endpoint_that_serves_but_is_in_no_list_goes_on(world: World) -> None:
    world.service(["local"], protocol="udp")
    world.endpoint("remote", service=1)
    insert_entry(world, "udp", "pod", "cluster_ip", 40000, 80, target="remote")
    world.run("tc_ethernet", world.udp("pod", "cluster_ip", 80, sport=40000))
    assert [flow.reply[0] for flow in world.flows()] == [world.address("remote")]
    assert not world.reasons()


def test_udp_of_a_service_without_endpoints_is_left_alone(world: World) -> None:
    world.service([], protocol="udp")
    insert_entry(world, "udp", "pod", "cluster_ip", 40000, 80, target="remote")
    result = world.run("tc_ethernet", world.udp("pod", "cluster_ip", 80, sport=40000))
    assert result.skb is not None
    assert (result.retval, result.skb.priority) == (GO_ON, 0)
    assert len(world.flows()) == 1


def test_udp_that_was_never_translated_gets_an_endpoint(world: World) -> None:
    world.service(["remote"], protocol="udp")
    insert_entry(world, "udp", "pod", "cluster_ip", 40000, 80)
    world.run("tc_ethernet", world.udp("pod", "cluster_ip", 80, sport=40000))
    (flow,) = world.flows()
    assert flow.reply[0] == world.address("remote")


@pytest.mark.alone
def test_the_same_first_packet_on_two_cpus(world: World) -> None:
    """Exactly one entry comes out of it, and neither packet is dropped.

    Two processes run each frame at the same moment of the clock: threads would wait for each other's interpreter lock.
    """
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("one CPU: nothing runs at the same time")
    world.service(["remote", "local"])
    rounds, step = 1000, 200_000
    frames = [bytes(world.tcp("client", "vip", 80, sport=20000 + i)) for i in range(rounds)]
    begin = time.monotonic_ns() + 50_000_000
    children = []
    for cpu in cpus:
        child = os.fork()
        if child == 0:
            os.sched_setaffinity(0, {cpu})
            dropped = 0
            for i, frame in enumerate(frames):
                while time.monotonic_ns() < begin + i * step:
                    pass
                dropped += world.run("tc_ethernet", frame).retval == SHOT
            os._exit(min(dropped, 255))
        children.append(child)
    dropped = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert dropped == [0, 0]
    assert len(world.flows()) == rounds
    assert world.reasons()["NEW_FLOW_DIRECT"] == rounds


@pytest.fixture
def small_conntrack_table(world: World) -> Iterator[int]:
    """nf_conntrack_max below what this namespace holds. It is set for all namespaces: large, and for a short time."""
    limit = Path("/proc/sys/net/netfilter/nf_conntrack_max")
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    def write(text: str) -> str:
        enter_namespace(world._home)
        before = limit.read_text()
        limit.write_text(text)
        enter_namespace(here)
        return before

    entries = 20_000
    world.service(["remote"], protocol="udp")
    frame = bytearray(bytes(world.udp("pod", "cluster_ip", 80)))
    at = 14 + (20 if world.family == 4 else 40)
    for port in range(1024, 1024 + entries):
        frame[at : at + 2] = port.to_bytes(2, "big")
        world.run("tc_ethernet", bytes(frame))
    before = write(str(entries // 2))
    yield entries
    write(before)
    os.close(here)


@pytest.mark.alone
def test_a_full_conntrack_table_drops_and_counts(world: World, small_conntrack_table: int) -> None:
    """The kernel makes room where it can; where it cannot the packet is dropped, with its reason."""
    verdicts: Counter[int] = Counter()
    for i in range(400):
        verdicts[world.run("tc_ethernet", world.udp("client", "vip", 80, sport=30000 + i)).retval] += 1
        if verdicts[SHOT] >= 3:
            break
    assert verdicts[SHOT] >= 1
    assert world.reasons()["DROP_CONNTRACK_FULL"] == verdicts[SHOT]


@pytest.mark.slow
def test_all_masquerading_ports_of_one_endpoint_in_use(world: World) -> None:
    """64 512 ports; what does not fit is dropped and counted, and everything that is let go has an entry."""
    world.service(["remote"], protocol="udp")
    frame = bytearray(bytes(world.udp("client", "vip", 80)))
    at = 14 + (20 if world.family == 4 else 40)
    source = 14 + (15 if world.family == 4 else 23)  # last byte of the source address
    verdicts: Counter[int] = Counter()
    for i in range(66_000):
        frame[source] = 1 + i // 60_000
        frame[at : at + 2] = (1024 + i % 60_000).to_bytes(2, "big")
        verdicts[world.run("tc_ethernet", bytes(frame)).retval] += 1
    assert verdicts[GO_ON] <= 64_512
    assert verdicts[SHOT] >= 66_000 - 64_512
    reasons = world.reasons()
    assert reasons["DROP_INSERT_FAILED"] == verdicts[SHOT]
    assert reasons["NEW_FLOW_DIRECT"] == verdicts[GO_ON]


def test_no_route_to_masquerade_with_leaves_it_to_the_kernel(world: World) -> None:
    world.service(["nowhere"])
    result = world.run("tc_ethernet", world.tcp("client", "vip", 80))
    assert result.skb is not None
    assert result.skb.priority & 0xFF000000 == PRIORITY_BACKEND
    assert result.skb.mark == MARK
    assert world.reasons() == {"NEW_FLOW_NETFILTER": 1, "LANE_NO_ROUTE": 1}


def test_endpoints_outside_the_pod_network_take_the_netfilter_lane(world: World) -> None:
    world.service(["outside"])
    result = world.run("tc_ethernet", world.tcp("pod", "cluster_ip", 80))
    assert result.skb is not None
    assert result.skb.priority == PRIORITY_BACKEND | world.backend_ids["outside", 1]
    assert not world.flows()
    assert world.reasons() == {"NEW_FLOW_NETFILTER": 1, "LANE_BACKEND_OUTSIDE": 1}


def test_sctp_takes_the_netfilter_lane(world: World) -> None:
    world.service(["remote"], protocol="sctp")
    result = world.run("tc_ethernet", world.sctp("client", "vip", 80))
    assert result.skb is not None
    assert result.skb.priority == PRIORITY_BACKEND | world.backend_ids["remote", 1]
    assert result.skb.mark == MARK
    assert world.reasons() == {"NEW_FLOW_NETFILTER": 1, "LANE_SCTP": 1}


def test_the_masquerade_address_is_that_of_the_way_out(world: World) -> None:
    world.service(["local"])
    world.run("tc_ethernet", world.tcp("client", "vip", 80))
    (flow,) = world.flows()
    assert flow.reply[1] == world.address("pod_gateway")


def test_the_node_address_is_the_last_resort_to_masquerade_with(world: World) -> None:
    """A device that the masquerade maps do not know."""
    world.service(["remote"])
    masquerade = world.object.maps[f"masquerade{world.family}"]
    for key, _ in list(masquerade.items()):
        masquerade.delete(key)
    world.run("tc_ethernet", world.tcp("client", "vip", 80))
    (flow,) = world.flows()
    assert flow.reply[1] == world.address("node")
