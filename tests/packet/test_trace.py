# SPDX-License-Identifier: Apache-2.0
"""Which decisions the programs report, to which readers, and what they filter."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import pytest
from scapy.layers.inet import ICMP, IP
from scapy.layers.l2 import Ether

from pyebpf_proxy.datapath.loader.reasons import reasons
from pyebpf_proxy.datapath.loader.rings import Rings
from pyebpf_proxy.trace import events
from pyebpf_proxy.trace.events import Event
from pyebpf_proxy.trace.session import TraceControl
from tests.packet.program_node import NODE_MAC, ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

EVERYTHING: dict[str, Any] = {"reasons": (1 << 64) - 1}


class Listener:
    """A reader with its own rings."""

    def __init__(self, world: ProgramNode, ring_size: int = 1 << 16) -> None:
        btf = world.object.btf
        self.control = TraceControl(world.object.maps["tracing"], btf.struct("tracing"))
        self.rings = Rings(world.object.maps["decisions"], ring_size)
        self._layout = btf.struct("decision").packer(*events.FIELDS)
        self._reasons = {number: name for name, number in reasons(btf.enum).items()}

    def heard(self) -> list[Event]:
        return [events.decode(raw, self._layout, self._reasons) for raw in self.rings.read()]


@pytest.fixture
def listener(hooks: ProgramNode) -> Iterator[Listener]:
    made = Listener(hooks)
    yield made
    made.control.clear()
    made.rings.close()


def test_a_new_flow_is_reported_with_the_whole_decision(hooks: ProgramNode, listener: Listener) -> None:
    hooks.service(["remote"])
    listener.control.start(EVERYTHING)
    hooks.run("tc_ethernet", hooks.tcp("client", "vip", 80, sport=41000))
    (event,) = listener.heard()
    assert event.source == (hooks.packed("client"), 41000)
    assert event.destination == (hooks.packed("vip"), 80)
    assert event.endpoint == (hooks.packed("remote"), 8080)
    assert (event.service, event.backend) == (1, hooks.backend_ids["remote", 1])
    assert event.device == hooks.devices["nic"]
    assert event.masquerade
    assert (event.reason, event.hook) == ("new_flow_netfilter", 1)


def test_refusals_are_reported(hooks: ProgramNode, listener: Listener) -> None:
    hooks.service([], service=1)
    listener.control.start(EVERYTHING)
    hooks.run("tc_ethernet", hooks.tcp("client", "vip", 80))
    (event,) = listener.heard()
    assert (event.reason, event.service, event.endpoint, event.masquerade) == ("reject_no_endpoints", 1, None, False)


def test_packets_of_known_flows_and_of_no_service_are_no_decisions(hooks: ProgramNode, listener: Listener) -> None:
    hooks.service(["remote"])
    listener.control.start(EVERYTHING)
    hooks.run("tc_ethernet", hooks.tcp("client", "elsewhere", 80))
    hooks.run("tc_ethernet", hooks.tcp("client", "vip", 80, flags="A"))
    assert listener.heard() == []


@pytest.mark.parametrize("node", [4], indirect=True, ids=["IPv4"])
def test_a_packet_to_loopback_may_have_any_protocol(node: ProgramNode) -> None:
    node.load(localhost_node_ports=1)
    listener = Listener(node)
    listener.control.start(EVERYTHING)
    node.run("tc_ethernet", Ether(dst=NODE_MAC) / IP(src="192.0.2.1", dst="127.0.0.1") / ICMP())
    (event,) = listener.heard()
    assert (event.reason, event.protocol) == ("drop_loopback_destination", 0)
    nowhere = events.Names(lambda event: "", lambda device: "", lambda address: "", lambda event: "")
    view = events.view(event, nowhere, 0.0)
    assert (view.source, view.destination, view.protocol) == ("192.0.2.1", "127.0.0.1", "other")
    listener.control.clear()
    listener.rings.close()


FILTERS: list[tuple[str, dict[str, Any], bool]] = [
    ("its source", {"address": "client"}, True),
    ("its destination", {"address": "vip"}, True),
    ("its endpoint", {"address": "remote"}, True),
    ("an address of another", {"address": "pod"}, False),
    ("its source port", {"port": 40000}, True),
    ("its destination port", {"port": 80}, True),
    ("its endpoint's port", {"port": 8080}, True),
    ("a port of another", {"port": 443}, False),
    ("its protocol", {"protocol": 6}, True),
    ("another protocol", {"protocol": 17}, False),
    ("its device", {"device": "nic"}, True),
    ("another device", {"device": "pods"}, False),
    ("its service, the last of many", {"services": (9, 8, 7, 6, 5, 4, 3, 2, 16, 15, 14, 13, 12, 11, 10, 1)}, True),
    ("other services", {"services": (2, 3)}, False),
    ("its reason", {"reasons": ("NEW_FLOW_NETFILTER", "NEW_FLOW_FAST")}, True),
    ("other reasons", {"reasons": ("REJECT_NO_ENDPOINTS", "NEW_FLOW_SOCKET")}, False),
]


@pytest.mark.parametrize(("wanted", "reported"), [each[1:] for each in FILTERS], ids=[each[0] for each in FILTERS])
def test_programs_filter_events(hooks: ProgramNode, listener: Listener, wanted: dict[str, Any], reported: bool) -> None:
    hooks.service(["remote"])
    asked = EVERYTHING | wanted
    if "address" in wanted:
        packed = ip_address(hooks.address(wanted["address"])).packed
        asked |= {"address": packed.ljust(16, b"\0"), "family": hooks.family}
    if "device" in wanted:
        asked["device"] = hooks.devices[wanted["device"]]
    if "reasons" in wanted:
        enum = reasons(hooks.object.btf.enum)
        asked["reasons"] = sum(1 << enum[name.lower()] for name in wanted["reasons"])
    listener.control.start(asked)
    hooks.run("tc_ethernet", hooks.tcp("client", "vip", 80))
    assert len(listener.heard()) == reported


def test_an_address_of_the_other_family_is_not_the_same_bytes(world: ProgramNode) -> None:
    listener = Listener(world)
    world.service(["remote"])
    packed = ip_address(world.address("client")).packed.ljust(16, b"\0")
    listener.control.start(EVERYTHING | {"address": packed, "family": 10 - world.family})
    world.run("tc_ethernet", world.tcp("client", "vip", 80))
    assert listener.heard() == []
    listener.rings.close()


def test_events_without_room_are_counted(hooks: ProgramNode) -> None:
    hooks.service([])
    listener = Listener(hooks, mmap.PAGESIZE)
    sent = mmap.PAGESIZE * 100 // 4096
    listener.control.start(EVERYTHING)
    assert listener.control.lost() == 0
    for i in range(sent):
        hooks.run("tc_ethernet", hooks.tcp("client", "vip", 80, sport=1000 + i))
    heard, lost = len(listener.heard()), listener.control.lost()
    assert heard > 10
    assert lost > 10
    assert heard + lost == sent
    listener.rings.close()


def test_the_next_decision_detects_a_dead_reader(hooks: ProgramNode) -> None:
    hooks.service([])
    listener = Listener(hooks)
    listener.control.start(EVERYTHING)
    listener.rings.close()
    assert listener.control.is_active()
    hooks.run("tc_ethernet", hooks.tcp("client", "vip", 80))
    assert not listener.control.is_active()
    assert listener.control.lost() == 0
    assert hooks.reasons()["REJECT_NO_ENDPOINTS"] == 1


def test_nothing_is_reported_without_a_request(hooks: ProgramNode, listener: Listener) -> None:
    hooks.service(["remote"])
    hooks.run("tc_ethernet", hooks.tcp("client", "vip", 80))
    assert listener.heard() == []
