# SPDX-License-Identifier: Apache-2.0
"""Messages about devices that do not describe them."""

from __future__ import annotations

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute, word, zero_terminated
from pyebpf_proxy.datapath.node.follower import Events, Follower
from pyebpf_proxy.datapath.node.plan import State

_IFLA_WIRELESS = 11


def test_an_event_of_wi_fi_leaves_the_device_as_it_was() -> None:
    followed = Follower.__new__(Follower)
    followed.state = State()
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
