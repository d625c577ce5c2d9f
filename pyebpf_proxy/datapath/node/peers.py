# SPDX-License-Identifier: Apache-2.0
"""Finds native XDP programs at the other end of a veth, in a pod's network namespace, which bpf_redirect_peer() skips.

A native XDP program runs where the veth hands packets over. Generic XDP, tc and packet sockets of the pod see the
packet as usual. The query needs CAP_NET_ADMIN over the user namespace of that network namespace.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute, number, values
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.rtnetlink import WITHOUT_STATISTICS
from pyebpf_proxy.datapath.node import ethtool
from pyebpf_proxy.datapath.node.plan import Link

# The driver runs it, alone or together with another mode. (XDP_ATTACHED_SKB: generic XDP.)
_NATIVE = frozenset({uapi.XDP_ATTACHED_DRV, uapi.XDP_ATTACHED_MULTI})

PROGRAM = "an XDP program is at the peer of the veth"
MAY_BE = "an XDP program may be at the peer of the veth: it could not be checked ({}), and segmentation offload is off"
# A periodic check queries at most this many; the others follow in the next checks.
_MOST_AT_ONCE = 256


class Peers:
    """Queries the other ends of veths of the network namespace in which it is used."""

    def __init__(self) -> None:
        self._answers: dict[int, tuple[int, str]] = {}
        self._begin = 0

    def read(self, links: Iterable[Link]) -> dict[int, str]:
        """The obstacle at the other end, as text, by ifindex of each veth; "": none. OSError."""
        with_peer = [link for link in links if link.peer_netns is not None]
        if not with_peer:
            return {}
        with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
            answers = netlink.get_many(uapi.RTM_GETLINK, [_link_request(each) for each in with_peer])
        return {link.ifindex: self._features_of(link, answer) for link, answer in zip(with_peer, answers, strict=True)}

    def read_some(self, links: Iterable[Link]) -> dict[int, str]:
        """As :meth:`read`, but for a limited number of devices; the next calls query the others. OSError."""
        with_peer = [link for link in links if link.peer_netns is not None]
        begin = self._begin if self._begin < len(with_peer) else 0
        self._begin = begin + _MOST_AT_ONCE
        return self.read(with_peer[begin : self._begin])

    def forget(self, ifindex: int) -> None:
        """Drop what is recorded about a device that is gone."""
        self._answers.pop(ifindex, None)

    def _features_of(self, link: Link, answer: bytes | int) -> str:
        if isinstance(answer, int):
            self._answers.pop(link.ifindex, None)
            return "" if _segments(link.name) else MAY_BE.format(errno.errorcode.get(answer, f"error {answer}"))
        # Parsing the answer takes more time than getting it, and usually it has not changed.
        known = self._answers.get(link.ifindex)
        number = hash(answer)
        if known is None or known[0] != number:
            known = number, PROGRAM if _has_native(answer) else ""
            self._answers[link.ifindex] = known
        return known[1]


def _link_request(link: Link) -> bytes:
    """IFLA_TARGET_NETNSID: the device with this ifindex in the network namespace that has this id here."""
    return (
        uapi.IFINFOMSG.pack(0, 0, link.lower, 0, 0)
        + attribute(uapi.IFLA_TARGET_NETNSID, struct.pack("=i", link.peer_netns))
        + WITHOUT_STATISTICS
    )


def _has_native(answer: bytes) -> bool:
    xdp = values(values(answer, uapi.IFINFOMSG.size).get(uapi.IFLA_XDP, b""))
    return number(xdp.get(uapi.IFLA_XDP_ATTACHED, b"")) in _NATIVE


def _segments(device: str) -> bool:
    """Whether a device accepts TCP packets to segment. A native program at a veth's other end switches that off.

    (veth_fix_features() of drivers/net/veth.c.) True, if the device is gone.
    """
    try:
        return bool(ethtool.get(device, ethtool.GTSO))
    except OSError:
        return True
