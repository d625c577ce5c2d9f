# SPDX-License-Identifier: Apache-2.0
"""Links and addresses of this network namespace, followed by netlink without polling."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import messages, number, text, values
from pyebpf_proxy.datapath.netlink.rtnetlink import WITHOUT_STATISTICS, Rtnetlink
from pyebpf_proxy.datapath.netlink.subscription import LARGE_BUFFER, Subscription
from pyebpf_proxy.datapath.node.peers import Peers
from pyebpf_proxy.datapath.node.plan import IFA_F_SECONDARY, InterfaceAddress, Link, State

GROUPS = (uapi.RTNLGRP_LINK, uapi.RTNLGRP_TC, uapi.RTNLGRP_IPV4_IFADDR, uapi.RTNLGRP_IPV6_IFADDR)
AF_BRIDGE = 7
_ADDRESS_SIZES = {socket.AF_INET: 4, socket.AF_INET6: 16}
_TC = frozenset({uapi.RTM_NEWTFILTER, uapi.RTM_DELTFILTER, uapi.RTM_NEWQDISC, uapi.RTM_DELQDISC})


_EXTERNAL = {"vxlan": uapi.IFLA_VXLAN_COLLECT_METADATA, "geneve": uapi.IFLA_GENEVE_COLLECT_METADATA}
#: Kinds whose own attributes are read.
_WITH_DATA = frozenset({"bridge", "macvlan", "vlan", *_EXTERNAL})


@dataclass
class Events:
    """The result of one read of the socket."""

    changed: bool = False  # links or addresses
    gone: set[int] = field(default_factory=set)  # devices that left
    filters: set[int] = field(default_factory=set)  # devices whose tc filters or qdiscs have changed
    links: set[int] = field(default_factory=set)  # devices with a link message


class Follower:
    """Mirrors the kernel in ``state``. Subscribes first and lists afterwards, so that no change is missed."""

    def __init__(self) -> None:
        self.state = State()
        #: Changes may be missing in ``state``. The next :meth:`read` lists everything again.
        self.stale = False
        self._peers = Peers()
        self._requests = Rtnetlink()
        try:
            self._events = Subscription(uapi.NETLINK_ROUTE, GROUPS, buffer=LARGE_BUFFER)
        except BaseException:
            self._requests.close()
            raise
        self.refresh()

    def fileno(self) -> int:
        """For ``loop.add_reader``; call :meth:`read` when it is readable."""
        return self._events.fileno()

    def close(self) -> None:
        self._events.close()
        self._requests.close()

    def refresh(self) -> None:
        """Lists everything again. OSError: ``state`` is as before."""
        fresh = State()
        every_link = bytes(uapi.IFINFOMSG.size) + WITHOUT_STATISTICS
        for found in self._requests.list_all(uapi.RTM_GETLINK, every_link, "list of links"):
            link = _link(found)
            fresh.links[link.ifindex] = link
        every_address = bytes(uapi.IFADDRMSG.size)
        for found in self._requests.list_all(uapi.RTM_GETADDR, every_address, "list of addresses"):
            entry = _address(found)
            if entry is not None:
                fresh.addresses[entry.key] = entry
        peers = self._peers.read(fresh.links.values())
        self.state.links, self.state.addresses, self.state.peers = fresh.links, fresh.addresses, peers
        self.stale = False

    def read(self) -> Events:
        """Processes received messages. If some were lost, everything is listed again.

        OSError: this failed, and ``stale`` stays set, because no message reports when it would succeed.
        """
        seen = Events()
        stale, self.stale = self.stale, True  # until all that was received has been processed
        received = list(self._events.received())
        if stale or None in received:
            before = set(self.state.links)
            self.refresh()
            seen.changed = True
            seen.gone = before - set(self.state.links)
            for index in seen.gone:
                self._peers.forget(index)
            seen.filters = set(self.state.links)
            return seen
        for kind, _, _, message in chain.from_iterable(messages(data) for data in received if data):
            if kind in (uapi.RTM_NEWLINK, uapi.RTM_DELLINK):
                self._take_link(message, kind, seen)
            elif kind in (uapi.RTM_NEWADDR, uapi.RTM_DELADDR):
                self._take_address(message, kind, seen)
            elif kind in _TC:
                seen.filters.add(uapi.TCMSG.unpack_from(message)[1])
        links = self.state.links
        if uapi.TCM_IFINDEX_MAGIC_BLOCK in seen.filters:
            seen.filters.update(links)  # a block of filters, which several devices may share
        try:
            # XDP at one end of a veth changes the features of the other end (veth_xdp_set()), which causes a message.
            peers = self._peers.read(links[index] for index in seen.links if index in links)
        except OSError:
            return seen  # still stale; what the messages have said counts
        seen.changed |= self._take_peers(peers)
        self.stale = False
        return seen

    def look_at_peers(self) -> bool:
        """Check the other ends of veths: the kernel reports only changes of features. True: one has changed."""
        return self._take_peers(self._peers.read_some(self.state.links.values()))

    def _take_peers(self, found: dict[int, str]) -> bool:
        peers = self.state.peers
        changed = any(peers.get(index, "") != peer for index, peer in found.items())
        peers.update(found)
        return changed

    def _take_link(self, message: bytes, kind: int, seen: Events) -> None:
        family, _, index, _, _ = uapi.IFINFOMSG.unpack_from(message)
        if family == AF_BRIDGE:
            return  # about its state as a bridge port; RTM_DELLINK of this family is a port that leaves, not a device
        if kind == uapi.RTM_DELLINK:
            seen.gone.add(index)
            seen.changed = True
            self.state.links.pop(index, None)
            self.state.others.pop(index, None)
            self.state.peers.pop(index, None)
            self._peers.forget(index)
            for key in [key for key in self.state.addresses if key[0] == index]:
                del self.state.addresses[key]
            return
        if uapi.IFLA_MTU not in values(message, uapi.IFINFOMSG.size):
            return  # of Wi-Fi (net/wireless/wext-core.c): an event, without the device's properties
        link = _link(message)
        seen.links.add(index)
        if self.state.links.get(index) != link:
            self.state.links[index] = link
            seen.changed = True

    def _take_address(self, message: bytes, kind: int, seen: Events) -> None:
        entry = _address(message)
        if entry is None:
            return
        addresses = self.state.addresses
        key = entry.key
        if kind == uapi.RTM_DELADDR:
            seen.changed |= addresses.pop(key, None) is not None
            return
        before = addresses.get(key)
        if before == entry:
            return
        seen.changed = True
        if before is None and entry.address.version == 6:
            # The kernel keeps the newest first, and prefers it among equals.
            self.state.addresses = {key: entry, **addresses}
            return
        if before is not None and before.flags & IFA_F_SECONDARY and entry.address.version == 4:
            addresses.pop(key)  # a promoted secondary address goes after the other primary ones
        addresses[key] = entry


def _link(message: bytes) -> Link:
    _, type_, index, flags, _ = uapi.IFINFOMSG.unpack_from(message)
    parts = values(message, uapi.IFINFOMSG.size)
    info = values(parts.get(uapi.IFLA_LINKINFO, b""))
    kind = text(info.get(uapi.IFLA_INFO_KIND, b""))
    data = values(info.get(uapi.IFLA_INFO_DATA, b"")) if kind in _WITH_DATA else {}
    xdp = values(parts.get(uapi.IFLA_XDP, b""))
    mac = parts.get(uapi.IFLA_ADDRESS, b"")
    peer = parts.get(uapi.IFLA_LINK_NETNSID) if kind == "veth" else None
    return Link(
        ifindex=index,
        name=text(parts.get(uapi.IFLA_IFNAME, b"")),
        type=type_,
        kind=kind,
        master=number(parts.get(uapi.IFLA_MASTER, b"")),
        mac=mac if len(mac) == 6 else bytes(6),
        lower=number(parts.get(uapi.IFLA_LINK, b"")),
        xdp=number(xdp.get(uapi.IFLA_XDP_PROG_ID, b"")),
        mtu=number(parts.get(uapi.IFLA_MTU, b"")),
        peer_netns=None if peer is None else int.from_bytes(peer, sys.byteorder, signed=True),
        vlan_filtering=kind == "bridge" and data.get(uapi.IFLA_BR_VLAN_FILTERING, b"\0") != b"\0",
        # A number of vxlan, a flag of geneve.
        external=data.get(_EXTERNAL.get(kind, 0), b"\0") != b"\0",
        keeps_tag=kind == "vlan" and _keeps_tag(data),
        passthru=kind == "macvlan" and number(data.get(uapi.IFLA_MACVLAN_MODE, b"")) == uapi.MACVLAN_MODE_PASSTHRU,
        up=bool(flags & uapi.IFF_UP),
        carrier=bool(flags & uapi.IFF_LOWER_UP),
    )


def _keeps_tag(data: Mapping[int, bytes]) -> bool:
    """Of a VLAN's attributes. The flags, which a mask follows, are left out if there are none."""
    flags = number(data.get(uapi.IFLA_VLAN_FLAGS, b"")[:4])
    return uapi.IFLA_VLAN_ID in data and not flags & uapi.VLAN_FLAG_REORDER_HDR


def _address(message: bytes) -> InterfaceAddress | None:
    family, prefix_length, flags, scope, index = uapi.IFADDRMSG.unpack_from(message)
    parts = values(message, uapi.IFADDRMSG.size)
    peer = parts.get(uapi.IFA_ADDRESS, b"")
    local = parts.get(uapi.IFA_LOCAL, peer)
    size = _ADDRESS_SIZES.get(family)
    if len(local) != size or len(peer or local) != size:
        return None
    return InterfaceAddress(
        device=index,
        address=ipaddress.ip_address(local),
        peer=ipaddress.ip_address(peer or local),
        prefix_length=prefix_length,
        scope=scope,
        flags=number(parts[uapi.IFA_FLAGS]) if uapi.IFA_FLAGS in parts else flags,
    )
