# SPDX-License-Identifier: Apache-2.0
"""Links and addresses of this network namespace, followed by netlink without polling."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from typing import Any

from pyebpf_proxy.datapath.node.messages import (
    RTM_DELADDR,
    RTM_DELLINK,
    RTM_DELQDISC,
    RTM_DELTFILTER,
    RTM_GETADDR,
    RTM_GETLINK,
    RTM_NEWADDR,
    RTM_NEWLINK,
    RTM_NEWQDISC,
    RTM_NEWTFILTER,
    ifaddrmsg,
    ifinfmsg,
)
from pyebpf_proxy.datapath.node.netlink import Netlink, attribute
from pyebpf_proxy.datapath.node.peers import Peers
from pyebpf_proxy.datapath.node.plan import IFA_F_SECONDARY, InterfaceAddress, Link, State

GROUPS = 0x1 | 0x8 | 0x10 | 0x100  # RTMGRP_LINK, RTMGRP_TC, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
AF_BRIDGE = 7
_TC = frozenset({RTM_NEWTFILTER, RTM_DELTFILTER, RTM_NEWQDISC, RTM_DELQDISC})
SKIP_STATISTICS = 8  # RTEXT_FILTER_SKIP_STATS


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
        self._peers = Peers()
        self._requests = Netlink()
        try:
            self._events = Netlink(GROUPS)
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
        """Lists everything again."""
        fresh = State()
        message = ifinfmsg()
        message["family"] = socket.AF_UNSPEC
        message["attrs"] = [("IFLA_EXT_MASK", SKIP_STATISTICS)]
        for found in self._requests.dump(message, RTM_GETLINK, "list of links"):
            link = _link(found)
            fresh.links[link.ifindex] = link
        message = ifaddrmsg()
        message["family"] = socket.AF_UNSPEC
        for found in self._requests.dump(message, RTM_GETADDR, "list of addresses"):
            entry = _address(found)
            if entry is not None:
                fresh.addresses[_key(entry)] = entry
        self.state.links, self.state.addresses = fresh.links, fresh.addresses
        self.state.peers = self._peers.ask(fresh.links.values())

    def read(self) -> Events:
        """Processes received messages. If some were lost, everything is listed again."""
        messages, lost = self._events.events()
        seen = Events()
        if lost:
            before = set(self.state.links)
            self.refresh()
            seen.changed = True
            seen.gone = before - set(self.state.links)
            seen.filters = set(self.state.links)
            return seen
        for message in messages:
            kind = message["header"]["type"]
            if kind in (RTM_NEWLINK, RTM_DELLINK):
                self._take_link(message, kind, seen)
            elif kind in (RTM_NEWADDR, RTM_DELADDR):
                self._take_address(message, kind, seen)
            elif kind in _TC:
                seen.filters.add(message["index"])
        links = self.state.links
        # XDP at one end of a veth changes the features of the other end (veth_xdp_set()), which causes a message.
        seen.changed |= self._take_peers(self._peers.ask(links[index] for index in seen.links if index in links))
        return seen

    def look_at_peers(self) -> bool:
        """Whether the other ends of veths have changed: without a change of features there was no message."""
        return self._take_peers(self._peers.ask_some(self.state.links.values()))

    def _take_peers(self, found: dict[int, str]) -> bool:
        peers = self.state.peers
        changed = any(peers.get(index, "") != said for index, said in found.items())
        peers.update(found)
        return changed

    def _take_link(self, message: Any, kind: int, seen: Events) -> None:
        if message["family"] == AF_BRIDGE:
            return  # about its state as a bridge port; RTM_DELLINK of this family is a port that leaves, not a device
        index = message["index"]
        if kind == RTM_DELLINK:
            seen.gone.add(index)
            seen.changed = True
            self.state.links.pop(index, None)
            self.state.others.pop(index, None)
            self.state.peers.pop(index, None)
            self._peers.forget(index)
            for key in [key for key in self.state.addresses if key[0] == index]:
                del self.state.addresses[key]
            return
        link = _link(message)
        seen.links.add(index)
        if self.state.links.get(index) != link:
            self.state.links[index] = link
            seen.changed = True

    def _take_address(self, message: Any, kind: int, seen: Events) -> None:
        entry = _address(message)
        if entry is None:
            return
        addresses = self.state.addresses
        key = _key(entry)
        if kind == RTM_DELADDR:
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


def _key(entry: InterfaceAddress) -> tuple[int, ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    return entry.device, entry.address, entry.prefix_length


def _link(message: Any) -> Link:
    info = attribute(message, "IFLA_LINKINFO")
    kind = (attribute(info, "IFLA_INFO_KIND") if info is not None else None) or ""
    data = attribute(info, "IFLA_INFO_DATA") if kind == "bridge" else None
    xdp = attribute(message, "IFLA_XDP")
    mac = attribute(message, "IFLA_ADDRESS") or ""
    octets = mac.split(":") if isinstance(mac, str) else []
    return Link(
        ifindex=message["index"],
        name=attribute(message, "IFLA_IFNAME"),
        type=message["ifi_type"],
        kind=kind,
        master=attribute(message, "IFLA_MASTER") or 0,
        mac=bytes(int(octet, 16) for octet in octets) if len(octets) == 6 else bytes(6),
        lower=attribute(message, "IFLA_LINK") or 0,
        xdp=(attribute(xdp, "IFLA_XDP_PROG_ID") if xdp is not None else None) or 0,
        mtu=attribute(message, "IFLA_MTU") or 0,
        peer_netns=attribute(message, "IFLA_LINK_NETNSID") if kind == "veth" else None,
        vlan_filtering=bool(attribute(data, "IFLA_BR_VLAN_FILTERING")) if data is not None else False,
    )


def _address(message: Any) -> InterfaceAddress | None:
    peer = attribute(message, "IFA_ADDRESS")
    local = attribute(message, "IFA_LOCAL") or peer
    if local is None:
        return None
    flags = attribute(message, "IFA_FLAGS")
    return InterfaceAddress(
        device=message["index"],
        address=ipaddress.ip_address(local),
        peer=ipaddress.ip_address(peer or local),
        prefix_length=message["prefixlen"],
        scope=message["scope"],
        flags=message["flags"] if flags is None else flags,
    )
