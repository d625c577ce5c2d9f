# SPDX-License-Identifier: Apache-2.0
"""Young flows: in the table from their first packet on; their rewritten packets, how they end, what the table cannot
send.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scapy.layers.inet import UDP
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw

from pyebpf_proxy.datapath.loader.libbpf import SkBuff
from tests.packet.fast_node import (
    FAR,
    NODE_MAC,
    REDIRECT,
    SNAT_PORTS,
    VARIANTS,
    Flow,
    cut,
    device,
    fast_node,
    fragments,
    one_cpu,
    options,
    records,
    reset_counters,
    write_permits,
    young,
    young_flows_of,
)
from tests.packet.program_node import GO_ON, PRIORITY_BACKEND, SHOT, SIZES, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]


@pytest.fixture
def fast(node: ProgramNode) -> Iterator[ProgramNode]:
    with one_cpu():
        yield fast_node(node)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packets_are_rewritten_completely(fast: ProgramNode, protocol: str, variant: str) -> None:
    flow = Flow(fast, protocol, **VARIANTS[variant])
    flow.permit()
    first = flow.open_young()
    assert first.data == bytes(flow.expected(flags="S", size=0, seq=100, ack=0))
    for size in (0, 1, 1000, 1001):
        for reply in (True, False):
            found = flow.run(reply, flow.frame(reply, size=size))
            assert found.retval == REDIRECT, fast.reasons()
            # The expected checksums are computed from scratch.
            assert found.data == bytes(flow.expected(reply, size=size))
    assert not fast.flows(), "conntrack does not know the flow"
    assert fast.reasons() == {"NEW_FLOW_FAST": 1, "FLOW_HIT": 9}
    for reply in (False, True):
        entry = flow.entry(reply)
        assert entry is not None
        assert (entry["young"], entry["reply"], entry["backend"]) == (
            1,
            int(reply),
            fast.backend_ids["remote", flow_service(flow)],
        )
    assert young_flows_of(fast, flow.entrance) == 1


def flow_service(flow: Flow) -> int:
    return 2 if flow.protocol == "udp" else 1


def test_udp_without_a_checksum_gets_none(fast: ProgramNode) -> None:
    if fast.family == 6:
        pytest.skip("IPv6 has no UDP without a checksum")
    flow = young(fast, "udp")
    frame = flow.frame()
    frame[UDP].chksum = 0
    assert Ether(flow.run(frame=frame).data)[UDP].chksum == 0


def test_masqueraded_flows_get_distinct_ports(fast: ProgramNode) -> None:
    ports = set()
    for number in range(20):
        flow = Flow(fast, **{**VARIANTS["masqueraded"], "sport": 40000 + number})
        if not number:
            flow.permit()
        flow.open_young()
        ports.add(flow.snat_port)
    assert len(ports) == 20
    assert min(ports) >= SNAT_PORTS[0]
    assert max(ports) <= SNAT_PORTS[1]


def test_without_a_free_port_flows_take_the_slow_path(node: ProgramNode) -> None:
    with one_cpu():
        fast = fast_node(node, snat_port_min=20000, snat_port_max=20001)
        flow = Flow(fast, **VARIANTS["masqueraded"])
        flow.permit()
        for number in range(40):
            each = Flow(fast, **{**VARIANTS["masqueraded"], "sport": 42000 + number})
            assert each.run(frame=each.frame(flags="S")).retval in (REDIRECT, GO_ON)
        assert fast.reasons()["NEW_FLOW_FAST"] == 2
        assert fast.reasons()["SLOW_NO_PORT"] == 38


def test_without_a_port_range_masqueraded_flows_take_the_slow_path(node: ProgramNode) -> None:
    with one_cpu():
        fast = fast_node(node, snat_port_min=0, snat_port_max=0)
        flow = Flow(fast, **VARIANTS["masqueraded"])
        flow.permit()
        assert flow.run(frame=flow.frame(flags="S")).retval == GO_ON
        assert fast.reasons()["SLOW_NO_PORT"] == 1
        young(fast)


def test_a_port_conflict_at_the_endpoint_gives_another_source_port(fast: ProgramNode) -> None:
    """Two frontends, one client port, one endpoint: the replies could not be told apart."""
    flow = young(fast)
    fast.service(["remote"], service=3, port=81, node_port=30081)
    Flow(fast, port=81, sport=42000).permit()
    other = Flow(fast, port=81)
    assert other.run(frame=other.frame(flags="S")).retval == REDIRECT
    entry = other.entry(False)
    assert entry is not None
    rewrite = fast.object.btf.struct("flow_rewrite").unpack(entry["rewrite"])
    assert rewrite["source_port"] != flow.sport, "it gets another port, as netfilter would choose"
    assert flow.entries() == [False, True]


# ---- flows that may not be young------------------------------------------------------------------------


def reasons_not_young(world: ProgramNode, flow: Flow, frame: Packet | None = None, **skb: int) -> dict[str, int]:
    """Why this first packet opens no young flow. Netfilter gets it with its endpoint."""
    reset_counters(world)
    found = flow.run(frame=flow.frame(flags="S") if frame is None else frame, **skb)
    assert found.skb is not None
    assert found.retval == GO_ON
    assert found.skb.priority == PRIORITY_BACKEND | world.backend_ids["remote", flow_service(flow)]
    reasons = world.reasons()
    assert reasons.pop("NEW_FLOW_NETFILTER") == 1
    return dict(reasons)


def test_the_agent_is_dead(fast: ProgramNode) -> None:
    flow = young(fast)
    fast.write_fast_path_state(alive=-1)
    assert reasons_not_young(fast, Flow(fast, sport=40001)) == {"STACK_NO_AGENT": 1}
    assert flow.run().retval == REDIRECT, "existing flows continue"


@pytest.mark.parametrize("why", ["STACK_IPSEC", "STACK_POLICY_ROUTED", "STACK_RULES"])
def test_the_family_is_closed(fast: ProgramNode, why: str) -> None:
    flow = young(fast)
    number = fast.object.btf.enum("slow_path_reason")[why]
    fast.write_fast_path_state(**{f"closed{fast.family}": number})
    assert reasons_not_young(fast, Flow(fast, sport=40001)) == {why: 1}
    # A record changes the packet's hash, by which the kernel may choose the next hop.
    assert bool(records(fast)) is (why != "STACK_POLICY_ROUTED")
    assert flow.run().retval == REDIRECT, "only its entry can translate its packets"
    fast.write_fast_path_state(**{f"closed{10 - fast.family}": number})
    Flow(fast, sport=40001).open_young()


def test_draining(fast: ProgramNode) -> None:
    flow = young(fast)
    fast.write_fast_path_state(draining=1)
    assert reasons_not_young(fast, Flow(fast, sport=40001)) == {"STACK_DRAINING": 1}
    assert flow.run().retval == REDIRECT


def test_a_device_has_a_quota(node: ProgramNode) -> None:
    with one_cpu():
        fast = fast_node(node, flow_quota=3)
        Flow(fast).permit()
        for number in range(3):
            Flow(fast, sport=43000 + number).open_young()
        assert reasons_not_young(fast, Flow(fast, sport=43003)) == {"SLOW_QUOTA": 1}
        other = Flow(fast, **VARIANTS["masqueraded"])
        write_permits(fast)
        other.permit()
        other.open_young()
        assert young_flows_of(fast, "pods") == 3


def test_the_table_is_full(fast: ProgramNode) -> None:
    Flow(fast).permit()
    made, sport = 0, 43000
    frame = bytearray(bytes(Flow(fast).frame(flags="S")))
    at = 14 + (20 if fast.family == 4 else 40)
    for sport in range(43000, 43000 + SIZES["flows"]):
        frame[at : at + 2] = sport.to_bytes(2, "big")
        made += Flow(fast).run(frame=bytes(frame)).retval == REDIRECT
    # The kernel preallocates some more elements, one for each CPU.
    assert SIZES["flows"] // 2 - 2 <= made <= SIZES["flows"] // 2 + 16
    reasons = fast.reasons()
    assert reasons["SLOW_TABLE_FULL"] == SIZES["flows"] - made
    assert Flow(fast, sport=sport).entries() == [], "a flow without room leaves no entry"
    assert young_flows_of(fast, "pods") == made


def tagged(flow: Flow, **more: Any) -> Packet:
    frame = flow.frame(**more)
    below = frame[Ether].payload
    frame[Ether].remove_payload()
    return frame / Dot1Q(vlan=0, prio=3) / below


def test_packets_that_only_the_kernel_can_handle_open_no_young_flow(fast: ProgramNode) -> None:
    Flow(fast).permit()
    flow = Flow(fast)
    assert reasons_not_young(fast, flow, options(flow, flags="S")) == {"STACK_OPTIONS": 1}
    assert reasons_not_young(fast, flow, flow.frame(flags="S", hops=1)) == {"STACK_HOPS": 1}
    assert reasons_not_young(fast, flow, flow.frame(flags="S", size=1500)) == {"STACK_TOO_BIG": 1}
    assert reasons_not_young(fast, flow, mark=7) == {"STACK_NOT_PLAIN": 1}
    assert flow.entries() == []


def test_schedulers_that_count_connections_see_each(node: ProgramNode) -> None:
    with one_cpu():
        fast = fast_node(node, scheduler=5)
        flow = Flow(fast)
        flow.permit()
        assert reasons_not_young(fast, flow) == {"SLOW_NO_PERMIT": 1}


def test_a_bare_ack_is_no_first_packet(fast: ProgramNode) -> None:
    flow = Flow(fast)
    flow.permit()
    found = flow.run()
    assert (found.retval, found.data, flow.entries()) == (GO_ON, bytes(flow.frame()), [])


# ---- whose packets they are --------------------------------------------------------------------------


@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
def test_a_syn_from_another_device_is_not_changed(fast: ProgramNode, reply: bool) -> None:
    flow = young(fast)
    flow.answer()
    before = [flow.entry(False), flow.entry(True)]
    frame = flow.frame(reply, flags="S", seq=501 if reply else 101)
    found = flow.run(reply, frame, by="pods" if reply else "nic")
    assert (found.retval, found.data) == (GO_ON, bytes(frame))
    assert [flow.entry(False), flow.entry(True)] == before
    assert fast.reasons()["STACK_OTHER_DEVICE"] == 1


@pytest.mark.parametrize("answered", [False, True], ids=["not answered", "answered"])
@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("flags", ["A", "R", "FA"])
def test_packets_from_another_device_wait_for_the_agent(
    fast: ProgramNode, reply: bool, flags: str, answered: bool
) -> None:
    """conntrack does not know the flow: the kernel would answer the client with RST, or not translate a reply."""
    flow = young(fast)
    if answered:
        flow.answer()
    before = [flow.entry(False), flow.entry(True)]
    frame = flow.frame(reply, flags=flags, seq=501 if reply else 101)
    for _ in range(2):
        assert flow.run(reply, frame, by="pods" if reply else "nic").retval == SHOT
    for entry, known in zip([flow.entry(False), flow.entry(True)], before, strict=True):
        assert entry is not None
        assert known is not None
        assert {**entry, "promote": 0} == {**known, "promote": 0}
    assert fast.promotions() == ([flow.key()] if answered else []), "requested once"
    assert fast.reasons()["STACK_OTHER_DEVICE"] == 2
    assert fast.reasons()["DROP_AWAITING_PROMOTION"] == 2


@pytest.mark.parametrize("ack", [101, 102], ids=["right", "forged"])
def test_the_answer_to_a_syn_may_come_in_by_another_device(fast: ProgramNode, ack: int) -> None:
    """With several uplinks and routes that depend on the flow (ECMP). Who forges it does not know the SYN's number."""
    flow = young(fast)
    answer = flow.frame(True, flags="SA", seq=500, ack=ack, size=0)
    assert (flow.run(True, answer, by="pods").retval == SHOT) == (ack == 102)
    entry = flow.entry(True)
    assert entry is not None
    assert entry["packets"] == (ack == 101)
    if ack == 101:
        assert flow.run(True, flow.frame(True, flags="A", seq=501, ack=101), by="pods").retval == REDIRECT
        assert flow.run(True, flow.frame(True, flags="A", seq=501, ack=101)).retval == SHOT, "it comes in there now"


FORMER_MAC, BRIDGE_MAC = bytes.fromhex("020000000e77"), bytes.fromhex("020000000b11")


def mac_in_of(flow: Flow, reply: bool = False) -> bytes:
    """The link address that frames of this direction are for."""
    entry = flow.entry(reply)
    assert entry is not None
    return bytes(flow.world.object.btf.struct("flow_rewrite").unpack(entry["rewrite"])["mac_in"])


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
def test_a_flow_goes_on_when_its_device_has_another_link_address(fast: ProgramNode, reply: bool, protocol: str) -> None:
    flow = young(fast, protocol, in_table=True)
    if protocol == "tcp":
        flow.answer()
    flow.write_rewrite(reply, mac_in=FORMER_MAC)
    assert flow.run(reply, flow.frame(reply, seq=501 if reply else 101)).retval == REDIRECT
    assert mac_in_of(flow, reply).hex(":") == NODE_MAC
    assert fast.promotions() == []


@pytest.mark.parametrize("present", [True, False], ids=["present", "another"])
def test_a_flow_goes_on_when_its_bridge_has_another_link_address(fast: ProgramNode, present: bool) -> None:
    """It is not that of the port."""
    flow = young(fast)
    flow.answer()
    flow.write_rewrite(mac_in=FORMER_MAC)
    device(fast, "pods", bridge=fast.devices["nic"], bridge_mac=BRIDGE_MAC if present else FORMER_MAC)
    frame = flow.frame(seq=101)
    frame[Ether].dst = BRIDGE_MAC.hex(":")
    found = fast.object.programs["tc_bridge_port"].test_run(bytes(frame), SkBuff(ifindex=fast.devices["pods"]))
    assert found.retval == (REDIRECT if present else SHOT)
    assert mac_in_of(flow) == (BRIDGE_MAC if present else FORMER_MAC)


@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
def test_frames_for_another_host_do_not_belong_to_the_flow(fast: ProgramNode, reply: bool) -> None:
    flow = young(fast)
    before = [flow.entry(False), flow.entry(True)]
    for at in range(6):
        frame = bytearray(bytes(flow.frame(reply, flags="R")))
        frame[at] ^= 4
        found = flow.run(reply, bytes(frame))
        assert (found.retval, found.data) == (GO_ON, bytes(frame)), at
    assert [flow.entry(False), flow.entry(True)] == before


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_frames_for_an_unknown_address_on_a_bridge_port_wait_for_the_agent(fast: ProgramNode, protocol: str) -> None:
    """The bridge, or the client behind another port, has a new link address, which the agent has not written yet."""
    flow = young(fast, protocol)
    program = fast.object.programs["tc_bridge_port"]
    context = SkBuff(ifindex=fast.devices["nic"])
    frame = flow.frame(True, flags="SA", seq=500, ack=101)
    assert program.test_run(bytes(frame), context).retval == REDIRECT
    frame[Ether].dst = FAR
    assert program.test_run(bytes(frame), context).retval == SHOT
    assert fast.promotions() == [flow.key()]


# ---- what cannot be sent from here -------------------------------------------------------------------

UNUSUAL = {
    "options": (options, "STACK_OPTIONS"),
    "the last hop": (lambda flow, **more: flow.frame(hops=1, **more), "STACK_HOPS"),
    "too big": (lambda flow, **more: flow.frame(size=1500, **more), "STACK_TOO_BIG"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_clients_packet_takes_the_slow_path_to_the_same_endpoint(fast: ProgramNode, name: str) -> None:
    make, reason = UNUSUAL[name]
    flow = young(fast)
    fast.service(["local"])
    frame = make(flow)
    for _ in range(2):
        found = flow.run(frame=frame)
        assert found.skb is not None
        assert (found.retval, found.data) == (GO_ON, bytes(frame))
        assert found.skb.priority == PRIORITY_BACKEND | fast.backend_ids["remote", 1]
    assert fast.reasons()[reason] == 2
    assert fast.promotions() == [flow.key()], "requested once"


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_endpoints_packet_waits_for_the_agent(fast: ProgramNode, name: str) -> None:
    make, reason = UNUSUAL[name]
    flow = young(fast)
    found = flow.run(True, make(flow, reply=True))
    assert found.retval == SHOT
    reasons = fast.reasons()
    assert (reasons[reason], reasons["DROP_AWAITING_PROMOTION"]) == (1, 1)
    ((port, to, _),) = fast.refused("DROP_AWAITING_PROMOTION")
    assert (port, to) == (flow.endpoint_port, flow.sport)
    assert fast.promotions() == [flow.key()]


def test_a_masqueraded_flows_packet_waits_for_the_agent(fast: ProgramNode) -> None:
    """netfilter would choose another source port."""
    flow = young(fast, **VARIANTS["masqueraded"])
    assert flow.run(frame=flow.frame(hops=1)).retval == SHOT
    assert fast.promotions() == [flow.key()]


def test_segments_that_fit_are_sent_as_one(fast: ProgramNode) -> None:
    flow = young(fast)
    frame = flow.frame(size=2800)
    assert flow.run(frame=frame, gso_size=1400, gso_segs=2).retval == REDIRECT
    assert flow.run(frame=frame, gso_size=1490, gso_segs=2).retval == GO_ON
    assert fast.reasons()["STACK_TOO_BIG"] == 1


@pytest.mark.parametrize("mac", ["ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", "33:33:00:00:00:01"])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_frame_for_many_hosts_opens_no_flow(fast: ProgramNode, protocol: str, mac: str) -> None:
    """The kernel gets such a packet, and does not forward it."""
    flow = Flow(fast, protocol)
    flow.permit()
    frame = flow.frame(flags="S", size=0)
    frame[Ether].dst = mac
    found = flow.run(frame=frame)
    assert (found.retval, found.data) == (GO_ON, bytes(frame))
    assert flow.entries() == []
    assert fast.reasons()["STACK_NOT_PLAIN"] == 1


# ---- fragments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", [False, True], ids=["request", "reply"])
@pytest.mark.parametrize("variant", ["own address", "masqueraded"])
def test_fragments_follow_the_first(fast: ProgramNode, reply: bool, variant: str) -> None:
    flow = young(fast, "udp", **VARIANTS[variant])
    first, later = fragments(flow, reply)
    assert flow.run(reply, later).retval == GO_ON, "the first fragment has not come yet"
    expected = flow.expected(reply, size=72)
    body = bytes(expected[UDP])
    wanted = cut(fast, expected, body[:40], body[40:], 9)
    for frame, becomes in zip((first, later), wanted, strict=True):
        found = flow.run(reply, frame)
        assert found.retval == REDIRECT, fast.reasons()
        assert found.data == bytes(becomes)
    _, another = fragments(flow, reply, number=10)
    assert flow.run(reply, another).retval == GO_ON


def test_a_later_fragment_of_another_time_is_left_to_the_kernel(fast: ProgramNode) -> None:
    """The 16-bit id has come round: this datagram's first fragment took another path, or comes later."""
    flow = young(fast, "udp")
    first, later = fragments(flow)
    assert flow.run(frame=first).retval == REDIRECT
    sent = fast.object.maps["flow_fragments"]
    layout = fast.object.btf.struct("flow_rewrite")
    ((key, value),) = sent.items()
    fields = layout.unpack(value)
    # Units of 0.13 s: each fragment renews the time.
    for age, verdict in ((6, REDIRECT), (6, REDIRECT), (9, GO_ON)):
        fields = layout.unpack(sent.lookup(key) or b"")
        sent.update(key, layout.pack(**{**fields, "fragment_sent": (int(fields["fragment_sent"]) - age) % 65536}))
        found = flow.run(frame=later)
        assert found.retval == verdict, age
    assert found.data == bytes(later)


def test_later_fragments_do_not_follow_without_end(fast: ProgramNode) -> None:
    """Nothing counts them, and no rule of netfilter, however new, would see them."""
    flow = young(fast, "udp")
    first, later = fragments(flow)
    sent = fast.object.maps["flow_fragments"]
    layout = fast.object.btf.struct("flow_rewrite")
    for _ in range(2):
        assert flow.run(frame=first).retval == REDIRECT
        ((key, _),) = sent.items()
        verdicts = []
        # One fragment in 0.8 s.
        for _ in range(8):
            fields = layout.unpack(sent.lookup(key) or b"")
            fields["fragment_sent"] = (int(fields["fragment_sent"]) - 6) % 65536
            fields["out"] = fast.object.btf.struct("link").pack(**back_by(fast, fields["out"], 6))
            sent.update(key, layout.pack(**fields))
            verdicts.append(flow.run(frame=later).retval)
        assert verdicts == [REDIRECT] * 6 + [GO_ON] * 2
    entry = flow.entry()
    assert entry is not None
    fields = fast.object.btf.struct("flow_rewrite").unpack(entry["rewrite"])
    assert fast.object.btf.struct("link").unpack(fields["out"])["first_fragment"] == 0, "links are compared whole"


def back_by(world: ProgramNode, link: bytes, units: int) -> dict[str, Any]:
    """The fields of a link in ``flow_fragments``; its first fragment was sent so much earlier."""
    fields = dict(world.object.btf.struct("link").unpack(link))
    return {**fields, "first_fragment": (int(fields["first_fragment"]) - units) % 256}


def test_a_first_fragment_that_is_left_to_the_kernel_takes_the_later_ones_along(fast: ProgramNode) -> None:
    """Another flow of the two hosts has a packet with the same id soon after."""
    flow = young(fast, "udp")
    first, later = fragments(flow)
    assert flow.run(frame=first).retval == REDIRECT
    other = first.copy()
    other[Raw].load = (9).to_bytes(2, "big") + bytes(other[Raw].load)[2:]
    assert flow.run(frame=other).retval == GO_ON
    assert flow.run(frame=later).retval == GO_ON


@pytest.mark.parametrize("what", ["too big", "last hop"])
def test_a_first_fragment_that_only_the_kernel_can_handle_is_left_to_it(fast: ProgramNode, what: str) -> None:
    """The kernel fragments it again, or reports the error to the sender. Later fragments follow the first one there."""
    flow = young(fast, "udp")
    whole = flow.frame(size=2000, hops=64 if what == "too big" else 1)
    body = bytes(whole[UDP])
    at = 1560 if what == "too big" else 40
    first, later = cut(fast, whole, body[:at], body[at:], 9)
    found = flow.run(frame=first)
    assert found.skb is not None
    assert (found.retval, found.data) == (GO_ON, bytes(first)), fast.reasons()
    assert found.skb.priority == PRIORITY_BACKEND | fast.backend_ids["remote", 2]
    assert len(fast.promotions()) == 1
    assert flow.run(frame=later).retval == GO_ON


def test_fragments_from_elsewhere_do_not_follow(fast: ProgramNode) -> None:
    flow = young(fast, "udp")
    first, later = fragments(flow)
    assert flow.run(frame=first).retval == REDIRECT
    assert flow.run(frame=later, by="nic").retval == GO_ON
    later[Ether].dst = FAR
    assert flow.run(frame=later).retval == GO_ON


def test_other_traffic_is_not_changed(fast: ProgramNode) -> None:
    flow = young(fast)
    reset_counters(fast)
    frame = flow.packet("client", "elsewhere", 1234, 443, FAR, NODE_MAC)
    found = flow.run(reply=True, frame=frame)
    assert (found.retval, found.data, fast.reasons(), records(fast)) == (GO_ON, bytes(frame), {}, [])


def test_without_the_fast_path_no_flow_is_young(node: ProgramNode) -> None:
    node.forget_flows()
    node.settings = {}
    node.load(fast_path=0, xdp=0)
    node.service(["remote"])
    flow = Flow(node)
    for reply in (True, False, True):
        found = flow.run(reply)
        assert (found.retval, found.data) == (GO_ON, bytes(flow.frame(reply)))
    assert node.reasons() == {}
    assert "flows" not in node.object.maps or not list(node.object.maps["flows"].items())
