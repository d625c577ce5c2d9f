# SPDX-License-Identifier: Apache-2.0
"""The conntrack lookup: which flows continue, which get an endpoint, which must end."""

from __future__ import annotations

import pytest

from tests.packet.program_node import GO_ON, PRIORITY_BACKEND, PRIORITY_MIDSTREAM, ProgramNode, insert_entry

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


def tag(world: ProgramNode, source: str = "pod", protocol: str = "tcp", flags: str = "S") -> int:
    """The tag that the agent's nft table finds in the priority of a packet to the service."""
    made = (
        world.udp(source, "cluster_ip", 80) if protocol == "udp" else world.tcp(source, "cluster_ip", 80, flags=flags)
    )
    result = world.run("tc_ethernet", made)
    assert result.skb is not None
    assert (result.retval, result.skb.mark) == (GO_ON, 0)
    return result.skb.priority


def chosen(world: ProgramNode, name: str) -> int:
    return PRIORITY_BACKEND | world.backend_ids[name, 1]


@pytest.mark.parametrize("state", ["TIME_WAIT", "CLOSE"])
def test_a_client_that_reuses_the_port_of_an_ended_flow(hooks: ProgramNode, state: str) -> None:
    """The kernel replaces its entry when it sees this SYN."""
    hooks.service(["local"])
    insert_entry(hooks, "tcp", "pod", "cluster_ip", 40000, 80, "--state", state, target="remote")
    assert tag(hooks) == chosen(hooks, "local")


#: SYN_SENT2, a simultaneous open, has a greater number than the states of ended flows.
LIVING = ["SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "SYN_SENT2"]


@pytest.mark.parametrize("state", LIVING)
def test_a_syn_of_an_open_flow_changes_nothing(world: ProgramNode, state: str) -> None:
    """The first endpoint stays, even if it serves no service any more (finding D14)."""
    world.service(["local"])
    insert_entry(world, "tcp", "pod", "cluster_ip", 40000, 80, "--state", state, target="remote")
    assert tag(world) == 0
    assert [flow.reply[0] for flow in world.flows()] == [world.address("remote")]
    assert not world.reasons()


@pytest.mark.parametrize(
    "rows", [{"any_endpoints": 0}, {"external_local": 1, "any_endpoints": 1}], ids=["reject", "drop"]
)
def test_established_flows_continue_where_new_ones_are_refused(world: ProgramNode, rows: dict[str, int]) -> None:
    world.service([], **rows)
    insert_entry(world, "tcp", "client", "vip", 40000, 80, "--state", "ESTABLISHED", target="remote")
    for flags in ("S", "A", "PA", "FA", "R"):
        result = world.run("tc_ethernet", world.tcp("client", "vip", 80, sport=40000, flags=flags))
        assert result.skb is not None
        assert (result.retval, result.skb.priority) == (GO_ON, 0)
    assert not world.reasons()


@pytest.mark.parametrize("flags", ["A", "PA", "SA", "FA", "R", "RA", "F", "SR", "SF", ""])
def test_midstream_tcp_gets_no_endpoint(hooks: ProgramNode, flags: str) -> None:
    hooks.service(["remote"])
    # conntrack does not know flows of the flow table: it must not pick up packets after such a flow's end.
    assert tag(hooks, flags=flags) == (PRIORITY_MIDSTREAM if hooks.has_flow_table else 0)
    assert not hooks.reasons()


def test_a_syn_with_ecn_bits_opens_a_flow(hooks: ProgramNode) -> None:
    hooks.service(["remote"])
    assert tag(hooks, flags="SEC") == chosen(hooks, "remote")


def test_a_stuck_untranslated_syn_is_translated(hooks: ProgramNode) -> None:
    """The client sent its first SYN before the programs were attached; the retransmission must be translated."""
    hooks.service(["remote"])
    insert_entry(hooks, "tcp", "pod", "cluster_ip", 40000, 80, "--state", "SYN_SENT")
    assert tag(hooks) == chosen(hooks, "remote")
    assert not hooks.flows(), "the entry is in the way"
    assert hooks.reasons() == {"UNTRANSLATED_FLOW_REPLACED": 1, "NEW_FLOW_NETFILTER": 1}


def test_an_unanswered_syn_to_a_removed_endpoint_gets_another_when_it_is_sent_again(hooks: ProgramNode) -> None:
    """The endpoint ended before it answered. conntrack would keep it for each SYN of this port, for two minutes."""
    hooks.service(["local"])
    insert_entry(hooks, "tcp", "pod", "cluster_ip", 40000, 80, "--state", "SYN_SENT", target="remote")
    assert tag(hooks) == chosen(hooks, "local")
    assert not hooks.flows(), "the entry is in the way"
    assert hooks.reasons() == {"UNANSWERED_FLOW_REPLACED": 1, "NEW_FLOW_NETFILTER": 1}


def test_an_unanswered_syn_to_an_endpoint_of_any_service_continues(world: ProgramNode) -> None:
    """The endpoint may answer late."""
    world.service(["local"])
    world.endpoint("remote", service=0, protocol="tcp")
    insert_entry(world, "tcp", "pod", "cluster_ip", 40000, 80, "--state", "SYN_SENT", target="remote")
    assert tag(world) == 0
    assert [flow.reply[0] for flow in world.flows()] == [world.address("remote")]
    assert not world.reasons()


def test_an_answered_connection_to_a_removed_endpoint_continues(world: ProgramNode) -> None:
    world.service(["local"])
    answered = ("--state", "SYN_SENT", "--status", "SEEN_REPLY")
    insert_entry(world, "tcp", "pod", "cluster_ip", 40000, 80, *answered, target="remote")
    assert tag(world) == 0
    assert [flow.reply[0] for flow in world.flows()] == [world.address("remote")]
    assert not world.reasons()


def test_udp_to_a_removed_endpoint_gets_another_with_the_next_packet(hooks: ProgramNode) -> None:
    hooks.service(["local"], protocol="udp")
    insert_entry(hooks, "udp", "pod", "cluster_ip", 40000, 80, target="remote")
    assert tag(hooks, protocol="udp") == chosen(hooks, "local")
    assert not hooks.flows(), "the entry is in the way"
    assert hooks.reasons() == {"STALE_UDP_REPLACED": 1, "NEW_FLOW_NETFILTER": 1}


def test_udp_to_a_serving_endpoint_that_is_in_no_list_continues(world: ProgramNode) -> None:
    world.service(["local"], protocol="udp")
    world.endpoint("remote", service=1)
    insert_entry(world, "udp", "pod", "cluster_ip", 40000, 80, target="remote")
    assert tag(world, protocol="udp") == 0
    assert [flow.reply[0] for flow in world.flows()] == [world.address("remote")]
    assert not world.reasons()


def test_udp_of_a_service_without_endpoints_is_left_alone(world: ProgramNode) -> None:
    world.service([], protocol="udp")
    insert_entry(world, "udp", "pod", "cluster_ip", 40000, 80, target="remote")
    assert tag(world, protocol="udp") == 0
    assert len(world.flows()) == 1


def test_udp_to_an_address_without_node_ports_keeps_its_entry(world: ProgramNode) -> None:
    """It is of a program that uses the number of a NodePort: the service may refuse it, but has no part in it."""
    world.service(["remote"], protocol="udp")
    insert_entry(world, "udp", "client", "unserved_node", 40000, 30080)
    frame = world.udp("client", "unserved_node", 30080, sport=40000)
    assert world.run("tc_ethernet", frame).retval == GO_ON
    assert len(world.flows()) == 1
    assert "UNTRANSLATED_FLOW_REPLACED" not in world.reasons()


def test_udp_that_was_never_translated_gets_an_endpoint(hooks: ProgramNode) -> None:
    hooks.service(["remote"], protocol="udp")
    insert_entry(hooks, "udp", "pod", "cluster_ip", 40000, 80)
    assert tag(hooks, protocol="udp") == chosen(hooks, "remote")
    assert hooks.reasons() == {"UNTRANSLATED_FLOW_REPLACED": 1, "NEW_FLOW_NETFILTER": 1}


def test_without_the_lookup_every_first_packet_gets_an_endpoint(world: ProgramNode) -> None:
    """netfilter reads its nat rules only for the first packet of a flow; it ignores the tag of later ones."""
    world.load(conntrack_lookup=0)
    world.service(["local"])
    insert_entry(world, "tcp", "pod", "cluster_ip", 40000, 80, "--state", "ESTABLISHED", target="remote")
    assert tag(world) == chosen(world, "local")
    assert [flow.reply[0] for flow in world.flows()] == [world.address("remote")]


def test_sctp_is_left_to_netfilter(world: ProgramNode) -> None:
    world.service(["remote"], protocol="sctp")
    result = world.run("tc_ethernet", world.sctp("pod", "cluster_ip", 80))
    assert result.skb is not None
    assert result.skb.priority == chosen(world, "remote")
    assert world.reasons() == {"NEW_FLOW_NETFILTER": 1}
