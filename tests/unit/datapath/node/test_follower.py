# SPDX-License-Identifier: Apache-2.0
"""Messages about devices and addresses: what is read from them, and those that do not describe a device."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute, word, zero_terminated
from pyebpf_proxy.datapath.node.follower import Events, Follower
from pyebpf_proxy.datapath.node.plan import State

_IFLA_WIRELESS = 11


def _follower() -> Follower:
    made = Follower.__new__(Follower)
    made.state = State()
    return made


def test_an_event_of_wi_fi_leaves_the_device_as_it_was() -> None:
    followed = _follower()
    header = uapi.IFINFOMSG.pack(0, 1, 7, uapi.IFF_UP, 0)
    name = attribute(uapi.IFLA_IFNAME, zero_terminated("wlan0"))
    whole = header + name + attribute(uapi.IFLA_MTU, word(1500)) + attribute(uapi.IFLA_ADDRESS, b"\2" * 6)
    seen = Events()
    followed._take_link(whole, uapi.RTM_NEWLINK, seen)
    before = followed.state.links[7]
    assert (before.mtu, before.mac, seen.changed) == (1500, b"\2" * 6, True)
    seen = Events()
    followed._take_link(header + name + attribute(_IFLA_WIRELESS, bytes(16)), uapi.RTM_NEWLINK, seen)
    assert followed.state.links[7] is before
    assert not seen.changed


@pytest.mark.parametrize(
    ("kind", "data", "external"),
    [
        ("vxlan", attribute(uapi.IFLA_VXLAN_COLLECT_METADATA, b"\1"), True),
        ("vxlan", attribute(uapi.IFLA_VXLAN_COLLECT_METADATA, b"\0"), False),
        ("geneve", attribute(uapi.IFLA_GENEVE_COLLECT_METADATA, b""), True),
        ("geneve", b"", False),
        ("bridge", attribute(uapi.IFLA_VXLAN_COLLECT_METADATA, b"\1"), False),
    ],
)
def test_tunnels_whose_other_end_is_in_the_route(kind: str, data: bytes, external: bool) -> None:
    info = attribute(uapi.IFLA_INFO_KIND, zero_terminated(kind)) + attribute(uapi.IFLA_INFO_DATA, data)
    message = uapi.IFINFOMSG.pack(0, 1, 7, 1, 0) + attribute(uapi.IFLA_MTU, word(1450))
    followed = _follower()
    followed._take_link(message + attribute(uapi.IFLA_LINKINFO, info), uapi.RTM_NEWLINK, Events())
    assert followed.state.links[7].external is external


VLAN_ID = attribute(uapi.IFLA_VLAN_ID, b"\5\0")


@pytest.mark.parametrize(
    ("kind", "data", "name"),
    [
        ("macvlan", attribute(uapi.IFLA_MACVLAN_MODE, word(uapi.MACVLAN_MODE_PASSTHRU)), "passthru"),
        ("macvlan", attribute(uapi.IFLA_MACVLAN_MODE, word(4)), ""),
        # The kernel leaves out flags that are zero.
        ("vlan", VLAN_ID, "keeps_tag"),
        ("vlan", VLAN_ID + attribute(uapi.IFLA_VLAN_FLAGS, word(2) + word(0xFFFFFFFF)), "keeps_tag"),
        ("vlan", VLAN_ID + attribute(uapi.IFLA_VLAN_FLAGS, word(3) + word(0xFFFFFFFF)), ""),
        ("vlan", b"", ""),
    ],
)
def test_devices_that_take_their_packets_in_an_unusual_way(kind: str, data: bytes, name: str) -> None:
    info = attribute(uapi.IFLA_INFO_KIND, zero_terminated(kind)) + attribute(uapi.IFLA_INFO_DATA, data)
    message = uapi.IFINFOMSG.pack(0, 1, 7, 1, 0) + attribute(uapi.IFLA_MTU, word(1450))
    followed = _follower()
    followed._take_link(message + attribute(uapi.IFLA_LINKINFO, info), uapi.RTM_NEWLINK, Events())
    link = followed.state.links[7]
    assert [each for each in ("passthru", "keeps_tag") if getattr(link, each)] == [*filter(None, [name])]


@pytest.mark.parametrize("flags", [0, uapi.IFF_UP, uapi.IFF_UP | uapi.IFF_LOWER_UP])
def test_a_device_sends_if_it_is_up_and_connected(flags: int) -> None:
    followed = _follower()
    message = uapi.IFINFOMSG.pack(0, 1, 7, flags, 0) + attribute(uapi.IFLA_MTU, word(1450))
    followed._take_link(message, uapi.RTM_NEWLINK, Events())
    assert followed.state.links[7].usable_mtu == (1450 if flags == uapi.IFF_UP | uapi.IFF_LOWER_UP else 0)


def _send(followed: Follower, kind: int, text: str, peer: str) -> None:
    address, other = ipaddress.ip_address(text), ipaddress.ip_address(peer)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    header = uapi.IFADDRMSG.pack(family, address.max_prefixlen, 0, 0, 7)
    body = attribute(uapi.IFA_ADDRESS, other.packed) + attribute(uapi.IFA_LOCAL, address.packed)
    followed._take_address(header + body, kind, Events())


def test_an_ipv4_address_stays_until_its_last_peer_is_removed() -> None:
    """A device may have it once for each peer: one host address, and a route to each virtual machine."""
    followed = _follower()
    for peer in ("10.9.0.2", "10.9.0.3"):
        _send(followed, uapi.RTM_NEWADDR, "10.0.0.1", peer)
    _send(followed, uapi.RTM_DELADDR, "10.0.0.1", "10.9.0.3")
    assert [str(entry.peer) for entry in followed.state.addresses.values()] == ["10.9.0.2"]
    _send(followed, uapi.RTM_DELADDR, "10.0.0.1", "10.9.0.2")
    assert followed.state.addresses == {}


def test_the_peer_of_an_ipv6_address_changes_in_place() -> None:
    """The kernel has such an address once on a device, and reports a new peer without a removal."""
    followed = _follower()
    for peer in ("fd00:9::2", "fd00:9::3"):
        _send(followed, uapi.RTM_NEWADDR, "fd00::1", peer)
    _send(followed, uapi.RTM_DELADDR, "fd00::1", "fd00:9::3")
    assert followed.state.addresses == {}
