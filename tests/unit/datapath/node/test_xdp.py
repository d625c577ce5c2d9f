# SPDX-License-Identifier: Apache-2.0
"""Which devices get XDP, why others do not, and through which devices frames may be sent. Pure."""

from __future__ import annotations

from pyebpf_proxy.datapath.node.netdev import BASIC, NDO_XMIT, NDO_XMIT_SG, REDIRECT, RX_SG
from pyebpf_proxy.datapath.node.plan import ARPHRD_ETHER, TC_BRIDGE_PORT, TC_ETHERNET, TC_LAYER3, Link
from pyebpf_proxy.datapath.node.xdp import Entry, Plan, XdpConfig, plan

MAC = bytes.fromhex("020000000001")
ALL = BASIC | REDIRECT | NDO_XMIT | RX_SG | NDO_XMIT_SG
NIC = Link(2, "eth0", ARPHRD_ETHER, mac=MAC)
OLD = Link(3, "eth1", ARPHRD_ETHER, mac=MAC)
POD = Link(4, "pod1", ARPHRD_ETHER, "veth", mac=MAC)
BRIDGE = Link(5, "br0", ARPHRD_ETHER, "bridge", mac=MAC)
PORT = Link(6, "port", ARPHRD_ETHER, "veth", master=5, mac=MAC)
TUN = Link(7, "tun0", 65534, "tun")
VLAN = Link(8, "eth0.7", ARPHRD_ETHER, "vlan", mac=MAC, lower=2)
PROGRAMS = {2: TC_ETHERNET, 3: TC_ETHERNET, 4: TC_ETHERNET, 6: TC_BRIDGE_PORT, 7: TC_LAYER3, 8: TC_ETHERNET}


def planned(
    *devices: str, links: tuple[Link, ...] = (NIC, OLD, POD, BRIDGE, PORT, TUN), pods: bool = False, tags: bool = True
) -> Plan:
    features = {2: ALL, 3: 0, 4: BASIC | REDIRECT, 5: 0, 6: ALL}
    config = XdpConfig(devices, pod_sockets=pods)
    return plan({link.ifindex: link for link in links}, PROGRAMS, features, config, lambda name: tags)


def test_every_physical_device_with_xdp_and_no_other() -> None:
    assert planned("*").attach == {2: "eth0"}
    assert planned("*").refused == {}


def test_the_driver_decides_if_the_kernel_does_not_report_xdp() -> None:
    links = {link.ifindex: link for link in (NIC, OLD, POD)}
    found = plan(links, PROGRAMS, None, XdpConfig(("*",)), lambda name: False)
    assert found.attach == {2: "eth0", 3: "eth1"}
    assert found.entries[2] == Entry(MAC, 1, 1, 0), "XDP_TX with one buffer; no redirect to it"


def test_named_devices_are_used_or_rejected_with_the_reason() -> None:
    found = planned("eth1", "pod1", "port", "br0", "tun0", "none")
    assert found.attach == {3: "eth1", 4: "pod1"}
    assert found.refused == {
        "port": "it is a port of br0",
        "br0": "it does not have the tc program, which handles what XDP leaves",
        "tun0": "its packets have no Ethernet header",
        "none": "there is no such device yet",
    }


def test_vlan_offload_prevents_xdp_only_if_there_are_vlans() -> None:
    assert planned("eth0").attach == {2: "eth0"}
    tagged = planned("eth0", links=(NIC, VLAN))
    assert tagged.attach == {}
    assert "ethtool -K eth0 rxvlan off" in tagged.refused["eth0"]
    assert planned("eth0", links=(NIC, VLAN), tags=False).attach == {2: "eth0"}


def test_through_which_devices_frames_may_be_sent() -> None:
    found = planned("eth0", "pod1").entries
    assert found[2] == Entry(MAC, 1, 2, 2)
    assert found[4] == Entry(MAC, 1, 0, 0), "its peer is not ready: frames sent there are lost"
    assert found[6] == Entry(bytes(6), 0, 0, 2), "no program, but a redirect to it works"
    assert 3 not in found


def test_a_pod_whose_socket_may_have_been_left_to_tc_opens_its_flows_there() -> None:
    found = planned("eth0", "pod1", pods=True).entries
    assert (found[2].starts_flow, found[4].starts_flow) == (1, 0)
