# SPDX-License-Identifier: Apache-2.0
"""Messages about devices: what is read from them, and those that do not describe a device."""

from __future__ import annotations

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
