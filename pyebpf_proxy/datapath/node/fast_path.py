# SPDX-License-Identifier: Apache-2.0
"""What the flow cache cannot see by itself: routes, devices, neighbours, rules of routing and IPsec that change.

The programs ask the kernel again about a flow when the generation in the map ``fast_path`` has moved, and once a
second. Policy routing and IPsec are nothing they could ask about: while there is any, the family is closed. All of it
holds only while somebody watches: the time until which the programs may trust is pushed on every second.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Protocol

from pyebpf_proxy.datapath.connections.rawlink import RawLink, attributes
from pyebpf_proxy.datapath.node.neighbours import Neighbours
from pyebpf_proxy.log import Logger

# include/uapi/linux/netlink.h, rtnetlink.h, xfrm.h
_NETLINK_ROUTE, _NETLINK_XFRM = 0, 6
_GROUPS = (1, 7, 8, 11, 19, 32)  # LINK, IPV4_ROUTE, IPV4_RULE, IPV6_ROUTE, IPV6_RULE, NEXTHOP
_XFRM_POLICY_GROUP = 4
_ADD_MEMBERSHIP, _SOL_NETLINK = 1, 270
_NEWRULE, _DELRULE, _GETRULE = 32, 33, 34
_GETPOLICY, _POLICY_ID_BYTES = 0x15, 64
_RULE_HEADER = struct.Struct("=BBBBBBBBI")  # struct fib_rule_hdr
_PRIORITY, _TABLE, _PROTOCOL = 6, 15, 21
_SUPPRESS_PREFIXLENGTH = 14
_HARMLESS = {_PRIORITY, _TABLE, _PROTOCOL, _SUPPRESS_PREFIXLENGTH}
#: (priority, table) of the rules that the kernel makes itself.
_KERNELS_OWN = {(0, 255), (32766, 254), (32767, 253)}
_MESSAGE = struct.Struct("=IHHII")
_RECEIVE_BYTES = 1 << 17

TRUST_SECONDS = 5.0
BEAT_SECONDS = 1.0
_log = Logger("datapath")


class Word(Protocol):
    """What is used of ``libbpf.Map``."""

    def update(self, key: bytes, value: bytes, flags: int = 0) -> None: ...

    def lookup(self, key: bytes) -> bytes | None: ...


class Layout(Protocol):
    """What is used of ``btf.Layout``."""

    def pack(self, **values: int | bytes) -> bytes: ...

    def unpack(self, data: bytes, /) -> dict[str, int | bytes]: ...


class FastPath:
    """The map ``fast_path`` of the network namespace it was made in.

    ``layout`` is that of its value, ``reasons`` are numbers of enum reason by name. Make it, then give :meth:`follow`
    a loop. :meth:`close` sends every packet to the kernel again. ``xdp``: link addresses are in the cache, too.
    """

    def __init__(self, word: Word, layout: Layout, reasons: Mapping[str, int], xdp: bool = False) -> None:
        self._word = word
        self._layout = layout
        self._reasons = reasons
        before = word.lookup(bytes(4))
        # Entries of a former run are pinned: nothing of them may count any more.
        self._generation = (int(layout.unpack(before)["generation"]) if before else 0) + 1 & 0xFFFFFFFF
        self._closed: dict[int, str] = {}
        self._routes = _subscribe(_NETLINK_ROUTE, _GROUPS)
        try:
            self._policies: socket.socket | None = _subscribe(_NETLINK_XFRM, (_XFRM_POLICY_GROUP,))
        except OSError as error:
            if error.errno not in (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT):
                self._routes.close()
                raise
            self._policies = None  # A kernel without IPsec.
        self._neighbours = Neighbours() if xdp else None
        self._look()
        self._write()

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep the map right from now on, until ``close``."""
        self._loop = loop
        loop.add_reader(self._routes, self._read, self._routes)
        if self._policies is not None:
            loop.add_reader(self._policies, self._read, self._policies)
        if self._neighbours is not None:
            loop.add_reader(self._neighbours, self._read_neighbours, self._neighbours)
        self._beat()

    def moved(self) -> None:
        """Something that flows depend on is another: endpoints of UDP services, or what the devices map says."""
        self._generation = self._generation + 1 & 0xFFFFFFFF
        self._write()

    def close(self) -> None:
        """Nobody watches any more."""
        if hasattr(self, "_timer"):
            self._timer.cancel()
            self._loop.remove_reader(self._routes)
            if self._policies is not None:
                self._loop.remove_reader(self._policies)
            if self._neighbours is not None:
                self._loop.remove_reader(self._neighbours)
        self._write(trust=0.0)
        self._routes.close()
        if self._policies is not None:
            self._policies.close()
        if self._neighbours is not None:
            self._neighbours.close()

    def _beat(self) -> None:
        self._write()
        self._timer = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _read(self, source: socket.socket) -> None:
        look = source is self._policies
        while True:
            try:
                data = source.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    _log.error("changes of routes could not be followed", error=str(error))
                    break
                look = True  # Some were lost.
                continue
            look = look or _has_rule(data)
        if look:
            self._look()
        self.moved()

    def _read_neighbours(self, neighbours: Neighbours) -> None:
        try:
            moved = neighbours.read()
        except OSError as error:
            _log.error("changes of neighbours could not be followed", error=str(error))
            moved = True
        if moved:
            self.moved()

    def _look(self) -> None:
        """What there is of policy routing and IPsec."""
        closed = {}
        try:
            ipsec = self._policies is not None and _has_ipsec()
            for family, number in ((4, socket.AF_INET), (6, socket.AF_INET6)):
                if ipsec:
                    closed[family] = "STACK_IPSEC"
                elif _has_rules(number):
                    closed[family] = "STACK_POLICY_ROUTED"
        except OSError as error:
            _log.error("rules of routing could not be listed: no fast path", error=str(error))
            closed = {4: "STACK_POLICY_ROUTED", 6: "STACK_POLICY_ROUTED"}
        if closed != self._closed:
            for family in (4, 6):
                why = closed.get(family)
                if why != self._closed.get(family):
                    _log.info("fast path", family=f"IPv{family}", closed=why.lower() if why else "no")
        self._closed = closed

    def _write(self, trust: float = TRUST_SECONDS) -> None:
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(trust * 1e9) if trust else 0
        value = self._layout.pack(
            alive_until=until,
            generation=self._generation,
            closed4=self._reasons[self._closed.get(4, "REASON_UNSPECIFIED")],
            closed6=self._reasons[self._closed.get(6, "REASON_UNSPECIFIED")],
        )
        self._word.update(bytes(4), value)


def _subscribe(protocol: int, groups: tuple[int, ...]) -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
    try:
        made.bind((0, 0))
        for group in groups:
            try:
                made.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
            except OSError as error:
                # Next hop objects are younger than the rest.
                if not (protocol == _NETLINK_ROUTE and group == 32 and error.errno == errno.EINVAL):
                    raise
    except BaseException:
        made.close()
        raise
    return made


def _has_rule(data: bytes) -> bool:
    at = 0
    while at + _MESSAGE.size <= len(data):
        length, kind, _, _, _ = _MESSAGE.unpack_from(data, at)
        if kind in (_NEWRULE, _DELRULE):
            return True
        at += max(length + 3 & ~3, _MESSAGE.size)
    return False


def _has_rules(family: int) -> bool:
    """Whether routing goes by anything else than the destination."""
    try:
        with RawLink(_NETLINK_ROUTE) as link:
            return any(map(_is_policy, link.dump(_GETRULE, _RULE_HEADER.pack(family, *[0] * 8))))
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EOPNOTSUPP):
            return False  # No such family here, or a kernel that knows no rules.
        raise


def _is_policy(message: bytes) -> bool:
    _, to_length, from_length, tos, table, _, _, _, _ = _RULE_HEADER.unpack_from(message)
    priority = 0
    for kind, begin, end in attributes(message, _RULE_HEADER.size, len(message)):
        if kind == _PRIORITY:
            priority = int.from_bytes(message[begin:end], sys.byteorder)
        elif kind not in _HARMLESS:
            return True
    return bool(to_length or from_length or tos) or (priority, table) not in _KERNELS_OWN


def _has_ipsec() -> bool:
    with RawLink(_NETLINK_XFRM) as link:
        return bool(list(link.dump(_GETPOLICY, bytes(_POLICY_ID_BYTES))))
