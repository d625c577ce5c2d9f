# SPDX-License-Identifier: Apache-2.0
"""Follows changes that the fast path does not see: routes, devices, neighbours, rulesets, ip rules and IPsec.

The map ``fast_path`` has two numbers. ``generation`` changes with routes, devices, neighbours and endpoints: then the
programs send a packet of each flow through netfilter before they continue. ``permit_generation`` changes with routes,
devices, neighbours and every ruleset: new flows need new permits. A family is closed while the node has something that
every packet must pass: IPsec, ip rules that select by more than addresses, devices and marks, and rules that count, log
or rewrite.
The map ``route_marks`` has the bits of packets' marks with which a packet proves nothing.
The state is valid only while the agent lives: it extends the validity every second, to 5 s from then. Both families are
closed while no flows are handed to conntrack: rules would not see new ones.
A pod can change its device and its neighbour entry thousands of times per second. If links change all the time, the
numbers change only a few times per second. Otherwise no flow of the node would stay on the fast path.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.rate_limit import RateLimit
from pyebpf_proxy.common.retry import Retry
from pyebpf_proxy.datapath.connections.promotion import Lasting
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import messages
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.subscription import Subscription
from pyebpf_proxy.datapath.node import policy_routing
from pyebpf_proxy.datapath.node.neighbours import Neighbours
from pyebpf_proxy.datapath.rulesets.judge import Verdict
from pyebpf_proxy.datapath.rulesets.kernel import Reading, device
from pyebpf_proxy.datapath.rulesets.watch import Watch

_GROUPS = (
    uapi.RTNLGRP_LINK,
    uapi.RTNLGRP_IPV4_ROUTE,
    uapi.RTNLGRP_IPV4_RULE,
    uapi.RTNLGRP_IPV6_ROUTE,
    uapi.RTNLGRP_IPV6_RULE,
)
_RULE_KINDS = (uapi.RTM_NEWRULE, uapi.RTM_DELRULE)
_LINK_KINDS = (uapi.RTM_NEWLINK, uapi.RTM_DELLINK)
#: Newer than the others.
_NEXT_HOPS = (uapi.RTNLGRP_NEXTHOP,)

TRUST_SECONDS = 5.0
BEAT_SECONDS = 1.0
#: The fast path is closed after this number of beats without a complete pass of the promoter, which takes at most 1 s.
UNSERVED_BEATS = 10
#: Seconds until what could not be read is read again, since no event reports when it can be read: the first time, and
#: at most. In between it doubles.
UNREAD_SECONDS, LONGEST_UNREAD_SECONDS = 0.5, 5.0
#: This many changes of links count at once. If there are more, they count only a few times per second.
PROMPT_CHANGES, CHANGES_PER_SECOND = 10, 5.0
_IPSEC, _ROUTED, _RULES = "STACK_IPSEC", "STACK_POLICY_ROUTED", "STACK_RULES"
_NO_AGENT = "STACK_NO_AGENT"
_FAMILIES = ((4, socket.AF_INET), (6, socket.AF_INET6))
_log = Logger("datapath")


class StateMap(Protocol):
    """The used part of ``libbpf.Map``."""

    def update(self, key: bytes, value: bytes, flags: int = 0) -> None: ...

    def lookup(self, key: bytes) -> bytes | None: ...


class Layout(Protocol):
    """The used part of ``btf.Layout``."""

    def pack(self, **values: int | bytes) -> bytes: ...

    def unpack(self, data: bytes, /) -> dict[str, int | bytes]: ...


@dataclass(frozen=True, slots=True)
class ClosedReason:
    """Why a family is closed: ``code`` is of enum slow_path_reason, ``text`` describes the cause on this node."""

    code: str
    text: str


def flow_hashes() -> tuple[str, ...]:
    """``policy_routing.flow_hash`` of IPv4 and of IPv6. OSError."""
    return tuple(policy_routing.flow_hash(number) for _, number in _FAMILIES)


def closed_on_node(hashes: tuple[str, ...]) -> dict[int, ClosedReason]:
    """The families that policy routing and IPsec of this network namespace close, with :func:`flow_hashes`. OSError."""
    found = {}
    ipsec = _has_ipsec()
    for (family, number), setting in zip(_FAMILIES, hashes, strict=True):
        if setting and (route := policy_routing.several_next_hops(number)):
            # First: with this code, the programs leave the hash of packets alone, by which the kernel chooses.
            why = f"{setting}: flows of the same hosts may take different next hops of the route {route}"
            found[family] = ClosedReason(_ROUTED, why)
        elif ipsec:
            found[family] = ClosedReason(_IPSEC, "there are IPsec policies")
        elif selecting := [rule for rule in policy_routing.rules(number) if rule.selects]:
            first = selecting[0]
            found[family] = ClosedReason(_ROUTED, f"ip rule {first.priority} selects by {first.selects}")
    return found


class FastPath:
    """The maps ``fast_path`` and ``route_marks`` of the network namespace in which it is created.

    ``layout`` is that of its value, ``reasons`` are numbers of enum slow_path_reason by name, ``own_table`` is the
    name of this instance's nftables table. ``heed_rules`` False: rules of other software do not close it, they only
    cause warnings. ``holds``: no flow enters the fast path until :meth:`admit`, unless a former run has admitted flows
    and its source ports included ``snat_ports``; :attr:`draining` shows which. ``passes``: how many passes the promoter
    has completed; if that stays the same for ten seconds, both families are closed.
    Create it, then give :meth:`follow` a loop. :meth:`close` sends every packet to the kernel again.
    """

    def __init__(
        self,
        state_map: StateMap,
        layout: Layout,
        reasons: Mapping[str, int],
        own_table: str = "pyebpf-proxy",
        heed_rules: bool = True,
        holds: bool = False,
        snat_ports: range = range(0),
        passes: Callable[[], int] | None = None,
        *,
        route_marks: StateMap,
    ) -> None:
        self._map = state_map
        self._marks_map = route_marks
        #: What was written into ``route_marks``: None: nothing yet.
        self._marks: tuple[int, int] | None = None
        self._layout = layout
        self._reasons = reasons
        self._heed_rules = heed_rules
        self._passes = passes
        #: The number at the last beat, and how many beats it has been the same.
        self._passes_seen, self._beats_unserved = 0, 0
        before = layout.unpack(found) if (found := state_map.lookup(bytes(4))) else {}
        # Entries and permits of a former run are pinned: their confirmations and permits must become void.
        self._generation, self._permit_generation = (
            int(before.get(name, 0)) + 1 & 0xFFFFFFFF for name in ("generation", "permit_generation")
        )
        #: When permits were last voided (CLOCK_MONOTONIC, ns): also by the increment above.
        self._voided = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        #: By family; no entry: it is open.
        self.closed: dict[int, ClosedReason] = {}
        #: Rules that would close it with ``heed_rules``.
        self.warnings: dict[int, str] = {}
        #: No new flow enters the fast path.
        self.draining = holds and (
            not before.get("generation") or bool(before.get("draining")) or not _has_had(before, snat_ports)
        )
        self._snat_ports = (snat_ports[0], snat_ports[-1]) if snat_ports else (0, 0)
        self._on_node: dict[int, ClosedReason] = {}
        #: As :meth:`_look` has found them.
        self._flow_hashes: tuple[str, ...] = ()
        #: Routes, next hops or devices have changed since, so a family that was closed by them may be open again.
        self._routes_changed = False
        self._by_rules: dict[int, Verdict] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rules_retry = Retry(lambda: self._rules.again(), UNREAD_SECONDS, LONGEST_UNREAD_SECONDS)
        self._node_retry = Retry(self._look_again, UNREAD_SECONDS, LONGEST_UNREAD_SECONDS)
        self._neighbours_retry = Retry(self._read_neighbours, UNREAD_SECONDS, LONGEST_UNREAD_SECONDS)
        self._links = RateLimit(self._write_links, PROMPT_CHANGES, CHANGES_PER_SECOND)
        self._forgotten = RateLimit(self.moved, PROMPT_CHANGES, CHANGES_PER_SECOND)
        self._timers = (self._rules_retry, self._node_retry, self._neighbours_retry, self._links, self._forgotten)
        #: Why policy routing and IPsec cannot be read; empty: they are read.
        self._unreadable = ""
        with ExitStack() as undo:
            self._routes = undo.enter_context(Subscription(uapi.NETLINK_ROUTE, _GROUPS, _NEXT_HOPS))
            try:
                self._policies: Subscription | None = undo.enter_context(
                    Subscription(uapi.NETLINK_XFRM, [uapi.XFRMNLGRP_POLICY])
                )
            except OSError as error:
                if error.errno not in (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT):
                    raise
                self._policies = None  # A kernel without IPsec.
            self._neighbours = Neighbours()
            undo.callback(self._neighbours.close)
            self._look()
            # Subscribes before it reads the state, and reads it before any family is open.
            self._rules = Watch(own_table, self.rules_moved, self._take_rules)
            undo.callback(self._rules.close)
            self._write()
            undo.pop_all()

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep the map up to date from now on, until ``close``."""
        self._loop = loop
        loop.add_reader(self._routes, self._read, self._routes)
        if self._policies is not None:
            loop.add_reader(self._policies, self._read, self._policies)
        loop.add_reader(self._neighbours, self._read_neighbours)
        self._rules.follow(loop)
        for timer in self._timers:
            timer.follow(loop)
        self._beat()

    def moved(self) -> None:
        """Void confirmations: endpoints of UDP services have changed."""
        self._generation = self._generation + 1 & 0xFFFFFFFF
        self._write()

    def links_moved(self) -> None:
        """Void confirmations and permits: routes, devices or neighbours have changed, and so may have learned links.

        At once, or soon if they change all the time.
        """
        self._links.call()

    def rules_moved(self) -> None:
        """Void all permits: rules of other software, or source addresses, have changed."""
        self._void_permits()
        self._write()

    @property
    def generation(self) -> int:
        """The present ``generation`` of the map ``fast_path``. Safe in any thread."""
        return self._generation

    @property
    def lasting(self) -> Lasting:
        """Which permits would still be proven if flows renewed them no more. Safe in any thread."""
        families = frozenset() if self._unreadable else self._rules.lasting - self.closed.keys() - self.warnings.keys()
        return Lasting(families, self._voided)

    def admit(self) -> None:
        """From now on new flows enter the fast path."""
        self.draining = False
        self._write()

    def close(self) -> None:
        """Stop following; the fast path turns itself off."""
        if self._loop is not None:
            self._timer.cancel()
            for timer in self._timers:
                timer.close()
            self._loop.remove_reader(self._routes)
            if self._policies is not None:
                self._loop.remove_reader(self._policies)
            self._loop.remove_reader(self._neighbours)
            self._loop = None
        self._rules.close()
        self._write(trust=0.0)
        self._routes.close()
        if self._policies is not None:
            self._policies.close()
        self._neighbours.close()

    def _beat(self) -> None:
        assert self._loop is not None
        # First: this beat may fail.
        self._timer = self._loop.call_later(BEAT_SECONDS, self._beat)
        if self._passes is not None:
            self._see_passes(self._passes())
        if self._flow_hashes_moved() or self._routes_changed:
            self._look()
        self._write()

    def _flow_hashes_moved(self) -> bool:
        """No event reports a change of these settings. What cannot be read is left to :meth:`_look`, and its retry."""
        try:
            return not self._unreadable and flow_hashes() != self._flow_hashes
        except OSError:
            return True

    def _see_passes(self, passes: int) -> None:
        # Beats and not seconds: the loop may have been busy for long, and the promoter waited for it.
        was_served = self._is_served
        self._beats_unserved = self._beats_unserved + 1 if passes == self._passes_seen else 0
        self._passes_seen = passes
        if was_served is not self._is_served:
            self._decide()

    @property
    def _is_served(self) -> bool:
        return self._beats_unserved < UNSERVED_BEATS

    def _read(self, source: Subscription) -> None:
        look = source is self._policies
        devices = False
        slow = self._rules.reading.slow_devices
        spreads = any(self._flow_hashes)
        # To open a family again has time: a node may have a million routes that change all the time.
        self._routes_changed |= spreads and source is self._routes
        for data in source.received_or_logged("changes of routes"):
            if data is None:  # Messages were lost.
                look = devices = True
            elif source is self._routes:
                for kind, _, _, message in messages(data):
                    look = look or kind in _RULE_KINDS or (spreads and _may_spread(kind, message))
                    devices = devices or (kind in _LINK_KINDS and _is_slow(message, slow))
        if look:
            self._look()
        # ip rules may use marks that other rules set; other rules may be for devices without a fast path.
        if devices or (look and self._rules.reading.marks):
            self._rules.again()
        if look:
            self._write_links()  # with what was found
        else:
            self.links_moved()

    def _read_neighbours(self) -> None:
        try:
            moved = self._neighbours.read()
        except OSError as error:
            _log.error("changes of neighbours could not be followed", error=str(error))
            moved = self._neighbours.replaced = True
            self._neighbours_retry.failed()
        else:
            self._neighbours_retry.succeeded()
        if moved and self._neighbours.replaced:
            self.links_moved()
        elif moved:
            self._forgotten.call()

    def _look(self) -> None:
        """Read policy routing and IPsec. While they cannot be read, the fast path is closed."""
        before, self._unreadable = self._unreadable, ""
        self._routes_changed = False
        try:
            self._flow_hashes = flow_hashes()
            self._on_node = closed_on_node(self._flow_hashes)
        except OSError as error:
            self._unreadable = str(error)
            if self._unreadable != before:
                _log.error("ip rules could not be listed, the fast path is closed", error=self._unreadable)
            why = ClosedReason(_ROUTED, f"ip rules could not be listed: {error}")
            self._on_node = {4: why, 6: why}
            self._node_retry.failed()
        else:
            self._node_retry.succeeded()
        self._decide()

    def _look_again(self) -> None:
        self._look()
        self._write()

    def _take_rules(self, reading: Reading) -> None:
        """The rulesets were read."""
        self._by_rules = reading.verdicts
        # First: a family that opens must not learn from packets with such a mark.
        self._write_marks()
        self._decide()
        if hasattr(self, "_rules"):
            self._write()
        if reading.unread:
            self._rules_retry.failed()
        else:
            self._rules_retry.succeeded()

    def _write_links(self) -> None:
        self._void_links()
        self._write()

    def _void_links(self) -> None:
        self._generation = self._generation + 1 & 0xFFFFFFFF
        self._void_permits()

    def _void_permits(self) -> None:
        self._permit_generation = self._permit_generation + 1 & 0xFFFFFFFF
        self._voided = time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def _write_marks(self) -> None:
        marks = (self._by_rules[4].marks, self._by_rules[6].marks)
        if marks == self._marks:
            return
        for number, bits in enumerate(marks):
            self._marks_map.update(number.to_bytes(4, sys.byteorder), bits.to_bytes(4, sys.byteorder))
        before = self._marks or (0, 0)
        for family, bits, former in zip((4, 6), marks, before, strict=True):
            if bits != former:
                words = f"0x{bits:x}" if bits else "no"
                _log.info("packets with marks that choose routes take the slow path", family=f"IPv{family}", bits=words)
        self._marks = marks
        if any(bits & ~former for bits, former in zip(marks, before, strict=True)):
            # What was learned before may be of packets with such a mark.
            self._void_links()

    def _decide(self) -> None:
        closed: dict[int, ClosedReason] = {}
        warnings: dict[int, str] = {}
        for family in (4, 6):
            verdict = self._by_rules.get(family)
            if verdict is not None and verdict.closes and not self._heed_rules:
                warnings[family] = str(verdict)
            if family in self._on_node:
                closed[family] = self._on_node[family]
            elif not self._is_served:
                closed[family] = ClosedReason(_NO_AGENT, "the agent does not hand flows to conntrack")
            elif verdict is not None and verdict.closes and self._heed_rules:
                closed[family] = ClosedReason(_RULES, str(verdict))
        for family in (4, 6):
            why, before = closed.get(family), self.closed.get(family)
            if why != before:
                words = f"{why.code.lower()}: {why.text}" if why else "no"
                _log.info("fast path", family=f"IPv{family}", closed=words)
            if family in warnings and warnings[family] != self.warnings.get(family):
                _log.warning(
                    "rules on this node do not see packets of the fast path; with fastPath: auto, they close it",
                    family=f"IPv{family}",
                    rules=warnings[family],
                )
        self.closed, self.warnings = closed, warnings

    def _write(self, trust: float = TRUST_SECONDS) -> None:
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(trust * 1e9) if trust else 0
        value = self._layout.pack(
            alive_until=until,
            generation=self._generation,
            permit_generation=self._permit_generation,
            closed4=self._number(4),
            closed6=self._number(6),
            draining=int(self.draining),
            snat_port_min=self._snat_ports[0],
            snat_port_max=self._snat_ports[1],
        )
        self._map.update(bytes(4), value)

    def _number(self, family: int) -> int:
        why = self.closed.get(family)
        return 0 if why is None else self._reasons.get(why.code, self._reasons[_ROUTED])


def _has_had(before: Mapping[str, int | bytes], ports: range) -> bool:
    """Whether no one but young flows has taken these source ports in the former run."""
    low, high = int(before.get("snat_port_min", 0)), int(before.get("snat_port_max", 0))
    return not ports or (bool(low) and low <= ports[0] and ports[-1] <= high)


def _is_slow(link: bytes, known: frozenset[str]) -> bool:
    """Whether a device is not an Ethernet device, or has the name of a former one that was not."""
    name, ethernet = device(link)
    return not ethernet or name in known


def _may_spread(kind: int, message: bytes) -> bool:
    """Whether a change of routes may give a route several next hops."""
    return kind == uapi.RTM_NEWNEXTHOP or (
        kind == uapi.RTM_NEWROUTE and policy_routing.may_have_several_next_hops(message)
    )


def _has_ipsec() -> bool:
    try:
        with RequestSocket(uapi.NETLINK_XFRM) as netlink:
            return bool(list(netlink.dump(uapi.XFRM_MSG_GETPOLICY, bytes(uapi.XFRM_USERPOLICY_ID_BYTES))))
    except OSError as error:
        if error.errno in (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT):
            return False  # A kernel without IPsec.
        raise
