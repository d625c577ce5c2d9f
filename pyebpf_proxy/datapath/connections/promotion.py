# SPDX-License-Identifier: Apache-2.0
"""Promotion: creates conntrack entries for young flows, which only the BPF programs know (bpf/sweep.h).

A sweep, which is a program, selects the flows that are due. Each gets a conntrack entry with the programs' translation.
From then on it is a kernel's flow, and the programs confirm it through netfilter once a second (docs/fast-path.md). The
sweep also selects kernel's flows that were reset. conntrack cannot know that their RST was the last packet, so the
agent closes their entries. If a RST or FIN was forged, conntrack cannot know that either, so the agent restores them.
If one side of a flow has vanished, the agent shortens the timeout of the entry.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from pyebpf_proxy.common.bpf_constants import LASTING_IPV4, LASTING_IPV6
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.threads import in_thread
from pyebpf_proxy.common.waiting import wait_briefly
from pyebpf_proxy.datapath.connections import create, gone_sources
from pyebpf_proxy.datapath.connections.create import Entry, Outcome, Result, TcpState
from pyebpf_proxy.datapath.connections.flow_reader import Flow, FlowReader
from pyebpf_proxy.datapath.connections.masqueraded import endpoint_test
from pyebpf_proxy.datapath.connections.queue import Queue
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map, Program
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import NETLINK_NETFILTER
from pyebpf_proxy.services.addresses import Place
from pyebpf_proxy.services.model import Protocol as IpProtocol

#: Seconds from one pass to the next: with young flows, and without any.
BUSY_SECONDS, IDLE_SECONDS = 0.5, 1.0
#: The same if a pass promoted flows and left others, and while draining.
SOON_SECONDS = 0.05
#: The most flows of one request to conntrack.
AT_ONCE = 4096
#: A flow that conntrack does not accept for this long is ended. Otherwise no new netfilter rule would ever see it.
UNPROMOTED_SECONDS = 30.0
_ETHERNET_HEADER = bytes(14)
_ZERO = bytes(4)
_LASTING = {4: LASTING_IPV4, 6: LASTING_IPV6}

#: Whether a UDP flow of this generation (struct flow), to this frontend, should be ended because this endpoint no
#: longer serves. Called in any thread.
IsStale = Callable[[int, Place, Place], bool]

_log = Logger("datapath")


class Requests(Protocol):
    """The used part of ``Queue``."""

    def pop(self) -> list[bytes]: ...


def run_for_flow(program: Program, data: bytes) -> bool:
    """Run one of the agent's programs with the description of a flow. Returns whether it did its task. BpfError."""
    return program.test_run(_ETHERNET_HEADER + data).retval != 0


class Swept(NamedTuple):
    """The result of a sweep."""

    #: How many young flows it found.
    young: int
    #: Where the next sweep should begin to ask for promotions, because the queue was full; 0: all were asked for.
    ask_from: int = 0


class Asked(NamedTuple):
    """The flows for which the programs have asked the agent to do something."""

    #: Young flows that should be promoted.
    due: list[Flow]
    #: Kernel's flows that were reset.
    reset: list[Flow]
    #: Kernel's flows with a side that has vanished.
    vanished: list[Flow]
    #: Other kernel's flows: a RST or FIN may have been forged.
    going_on: list[Flow]


class Lasting(NamedTuple):
    """The families in which nothing changes unnoticed that a permit depends on.

    A permit that nothing has voided is then as good as a new one. ``since``: when all were last voided
    (CLOCK_MONOTONIC, ns).
    """

    families: frozenset[int] = frozenset()
    since: int = 0


class Refused(NamedTuple):
    """A flow (``Flow.read``) that is not promoted yet, and since when, by the promoter's clock."""

    flow: bytes
    since: float


@dataclass
class Statistics:
    """Since the start. ``failed``: by outcome; each retry of a flow counts."""

    promoted: int = 0
    failed: Counter[Outcome] = field(default_factory=Counter)
    #: Of the last flow that could not be promoted; "": the last pass promoted all flows.
    last_error: str = ""
    #: Of the last pass that had something to promote.
    last_seconds: float = 0.0
    #: Flows that were ended because conntrack did not accept them.
    ended: int = 0
    #: Young flows that the last sweep found.
    young: int = 0
    #: UDP flows that were ended because their endpoint no longer serves.
    stale: int = 0
    #: Flows that were ended because their source address has left the node.
    sources_gone: int = 0
    #: Passes that the kernel did not interrupt by an error.
    passes: int = 0


class Promoter:
    """Promotes young flows, in the network namespace of the calling thread.

    ``sweep`` runs the program, with ``Swept.ask_from`` of the former run, and extends the permits of the given
    families; ``promote`` and ``end`` run the programs of that name with a flow (``Flow.read``) and return whether it
    was still there. ``end_masqueraded`` ends every flow that is masqueraded to one of the given addresses, young or
    promoted, and returns how many it ended.

    While conntrack is nearly full, it may forward no new flow, and permits could not be renewed. Then those of
    ``lasting`` are extended, and its flows stay on the fast path for as long as conntrack does not accept them.

    A UDP flow for which ``is_stale`` returns True is ended instead: the clean-up that would delete its conntrack entry
    may be over.
    """

    def __init__(
        self,
        flows: FlowReader,
        requests: Requests,
        sweep: Callable[[int, frozenset[int]], Swept],
        promote: Callable[[bytes], bool],
        end: Callable[[bytes], bool],
        end_masqueraded: Callable[[Collection[bytes]], int] = lambda addresses: 0,
        clock: Callable[[], float] = time.monotonic,
        lasting: Callable[[], Lasting] = Lasting,
        is_stale: IsStale = lambda generation, frontend, endpoint: False,
    ) -> None:
        self.statistics = Statistics()
        self._flows = flows
        self._requests = requests
        self._sweep = sweep
        self._promote = promote
        self._end = end
        self._end_masqueraded = end_masqueraded
        self._clock = clock
        self._lasting = lasting
        self._is_stale = is_stale
        #: What the last pass has extended, because conntrack is nearly full.
        self._extended_permits = Lasting()
        #: Addresses that have left the node since the last pass; in the loop's thread.
        self._gone: set[bytes] = set()
        self._wake = asyncio.Event()
        #: Keys that the programs have asked for, in the order in which they are tried. A flow that was due stays until
        #: it is promoted or has ended; None: it was not read yet.
        self._asked: dict[bytes, Refused | None] = {}
        #: Flows that were reset whose conntrack entry had a packet since: the key, and ``Flow.started``.
        self._extended: dict[bytes, int] = {}
        self._ask_from = 0
        #: The last pass left flows that were not tried.
        self._more = False
        self._full = False
        self._said = ""
        self._said_open = ""
        self._one_pass = asyncio.Lock()

    async def run(self) -> None:
        """Promote forever. If the kernel refuses something, that is logged once, and the pass is retried."""
        logged = ""
        while True:
            before = self.statistics.promoted
            try:
                await self.pass_once()
                logged = ""
            except (OSError, MemoryError) as error:
                if str(error) != logged:
                    _log.error("young flows could not be promoted; retrying", error=str(error))
                logged = str(error)
            pause = BUSY_SECONDS if self.statistics.young else IDLE_SECONDS
            if self._more and self.statistics.promoted > before:
                pause = SOON_SECONDS
            await wait_briefly(self._wake, pause)

    def sources_gone(self, addresses: Collection[bytes]) -> None:
        """End the flows that are masqueraded to these (packed) addresses, which have left the node, without delay.

        Call it in the loop's thread. The next packet of such a flow is treated as that of a new one.
        """
        self._gone |= set(addresses)
        self._wake.set()

    async def pass_once(self) -> None:
        """One sweep, and the promotions that are due, in another thread. OSError, MemoryError."""
        async with self._one_pass:
            self._wake.clear()
            gone, self._gone = self._gone, set()
            try:
                await in_thread(self.pass_now, gone)
            except (OSError, MemoryError):
                self._gone |= gone
                raise

    def drain(self, seconds: float) -> int:
        """Promote until no young flow is left that can be promoted, ``seconds`` at most; how many are left. OSError.

        The map ``fast_path`` must have ``draining`` set: then every answered flow is due. In the caller's thread.
        """
        end = self._clock() + seconds
        self.pass_now()
        while self.statistics.young and self._clock() < end:
            time.sleep(SOON_SECONDS)
            before = self.statistics.promoted
            self.pass_now()
            if self.statistics.promoted == before and not self._more:
                break
        # The number is from before the last promotions.
        if self.statistics.young:
            self._look()
        return self.statistics.young

    def pass_now(self, gone: Collection[bytes] = ()) -> None:
        """The same as :meth:`pass_once`, in the caller's thread. ``gone``: as for :meth:`sources_gone`. OSError."""
        self._look()
        for key in self._requests.pop():
            self._asked.setdefault(key)
        try:
            self._hand_over()
        finally:
            self._end_refused()
        self.statistics.passes += 1
        # Last: this pass may have promoted some of them.
        if gone:
            self._end_sources(gone)

    def _look(self) -> None:
        try:
            nearly_full = create.is_nearly_full()
        except OSError:  # for example no file descriptor: the sweep needs none
            nearly_full = False
        before = self._extended_permits.families
        self._extended_permits = self._lasting() if nearly_full else Lasting()
        extended = self._extended_permits.families
        self.statistics.young, self._ask_from = self._sweep(self._ask_from, extended)
        if bool(extended) != bool(before):
            words = "conntrack is nearly full: permits are extended" if extended else "permits are no longer extended"
            _log.info(words, families=" ".join(f"IPv{family}" for family in sorted(extended or before)))

    def _hand_over(self) -> None:
        """Try what was asked for. If conntrack is full the rest has its turn in the next passes. OSError."""
        begin = time.monotonic()
        if self._extended:
            with RequestSocket(NETLINK_NETFILTER) as netlink:
                self._close_reset(netlink, self._still_reset(), create.time_outs())
        keys, tried = list(self._asked), 0
        failed: list[tuple[Flow, Result]] = []
        is_full = False
        while keys and not is_full:
            batch, keys = keys[:AT_ONCE], keys[AT_ONCE:]
            asked = self._read(batch)
            due = asked.due
            refused = self._promote_all(asked) if any(asked) else []
            # In this order, so that those that fail are the next pass's last.
            waiting = {flow.key: self._asked[flow.key] for flow, _ in refused}
            for key in batch:
                del self._asked[key]
            self._asked |= waiting
            tried += len(due)
            failed += refused
            is_full = any(result.outcome is Outcome.FULL for _, result in refused)
        self._more = bool(keys or self._ask_from)
        if tried:
            self._note(failed, tried)
            self.statistics.last_seconds = time.monotonic() - begin
        else:
            # The flows that conntrack had no space for have ended. The next time is logged again.
            self._full = False

    def _read(self, keys: Iterable[bytes]) -> Asked:
        """The flows with these keys. The young flows wait from now on. BpfError."""
        now = self._clock()
        asked = Asked([], [], [], [])
        for key in keys:
            if flow := self._flows.read(key):
                asked.due.append(flow)
                known = self._asked[key]
                if known is None or known.flow != flow.read:
                    self._asked[key] = Refused(flow.read, now)
            elif flow := self._flows.read(key, young=False):
                (asked.reset if flow.reset else asked.vanished if flow.vanished else asked.going_on).append(flow)
        return asked

    def _promote_all(self, asked: Asked) -> list[tuple[Flow, Result]]:
        """Give the flows that are due conntrack entries, and mend those of the others.

        Returns the flows that conntrack did not accept. OSError.
        """
        due = self._without_stale(asked.due)
        with RequestSocket(NETLINK_NETFILTER) as netlink:
            seconds = create.time_outs()
            results = create.create(netlink, [flow.entry for flow in due], seconds)
            over: list[Entry] = []
            closing: list[Entry] = []
            failed: list[tuple[Flow, Result]] = []
            for flow, result in zip(due, results, strict=True):
                if not result.exists:
                    failed.append((flow, result))
                elif self._promote(flow.read):
                    self.statistics.promoted += 1
                    now = self._flows.read(flow.key, young=False)
                    if now is None:
                        over.append(flow.entry)
                    elif now.closing:
                        state = TcpState.CLOSE_WAIT if flow.half_closed else TcpState.FIN_WAIT
                        closing.append(flow.entry._replace(state=state))
                elif result.outcome is not Outcome.KNOWN:
                    over.append(flow.entry)
            # An endpoint may have been removed meanwhile, and the clean-up may have been too early for these entries.
            create.delete(netlink, [flow.entry for flow in due if self._has_lost_endpoint(flow)])
            # A flow may end during this pass. Without this its entry would stay for days.
            create.abandon(netlink, over)
            create.close(netlink, closing, seconds)
            self._close_reset(netlink, asked.reset, seconds)
            going_on = [(flow.entry, flow.closing) for flow in asked.going_on if not flow.both_closed]
            create.restore(netlink, going_on, seconds)
            create.shorten(netlink, (flow.entry for flow in asked.vanished))
        return failed

    def _has_lost_endpoint(self, flow: Flow) -> bool:
        entry = flow.entry
        return entry.protocol is IpProtocol.UDP and self._is_stale(flow.generation, entry.frontend, entry.endpoint)

    def _without_stale(self, due: list[Flow]) -> list[Flow]:
        """Those that are to be promoted. The others are ended: the next packet of such a flow is that of a new one."""
        stale = {flow.key for flow in due if self._has_lost_endpoint(flow) and self._end(flow.read)}
        self.statistics.stale += len(stale)
        return [flow for flow in due if flow.key not in stale]

    def _close_reset(
        self, netlink: RequestSocket, reset: Iterable[Flow], seconds: Mapping[tuple[IpProtocol, TcpState], int]
    ) -> None:
        """Close the entries of these flows. Those that had a packet after the RST wait for a later pass. OSError."""
        flows = {flow.entry: flow for flow in reset}
        try:
            closed = create.reset(netlink, [(entry, flow.quiet) for entry, flow in flows.items()], seconds)
        except OSError:
            self._extended |= {flow.key: flow.started for flow in flows.values()}
            raise
        for entry in closed.extended:
            self._extended[flows[entry].key] = flows[entry].started
        if closed.refused and (why := os.strerror(closed.refused[-1])) != self._said_open:
            self._said_open = why
            _log.info("the conntrack entry of a reset connection could not be closed; it expires by itself", error=why)

    def _still_reset(self) -> list[Flow]:
        """The flows that wait for this, as they are now, without those that go on or are gone. BpfError."""
        waiting, self._extended = self._extended, {}
        flows = ((self._flows.read(key, young=False), started) for key, started in waiting.items())
        return [flow for flow, started in flows if flow and flow.reset and flow.started == started]

    def _end_sources(self, gone: Collection[bytes]) -> None:
        ended = self._end_masqueraded(gone)
        if ended:
            self.statistics.sources_gone += ended
            _log.info("ended flows whose source address has left the node", flows=ended)

    def _note(self, failed: list[tuple[Flow, Result]], tried: int) -> None:
        full = [flow for flow, result in failed if result.outcome is Outcome.FULL]
        self.statistics.failed.update(result.outcome for _, result in failed)
        self.statistics.last_error = str(failed[-1][1]) if failed else ""
        if full and not self._full:
            _log.warning(
                "conntrack accepts no more flows; they stay on the fast path for now",
                flows=len(full),
                of=tried,
                seconds=UNPROMOTED_SECONDS,
            )
        if bool(full) != self._full and not full:
            _log.info("conntrack accepts flows again")
        self._full = bool(full)
        refused = next((str(result) for _, result in failed if result.outcome is Outcome.REFUSED), "")
        if refused and refused != self._said:
            _log.error("conntrack refused the entry of a young flow", error=refused)
        self._said = refused or self._said

    def _stays(self, flow: bytes) -> bool:
        """Whether this flow (``Flow.read``) began under the present rules, and need not meet them again for now."""
        key, started = flow[: self._flows.key_size], int.from_bytes(flow[self._flows.key_size :], sys.byteorder)
        return started > self._extended_permits.since and self._flows.family(key) in self._extended_permits.families

    def _end_refused(self) -> None:
        now = self._clock()
        over = [
            (key, each.flow)
            for key, each in self._asked.items()
            if each and now - each.since >= UNPROMOTED_SECONDS and not self._stays(each.flow)
        ]
        ended = 0
        for key, flow in over:
            ended += self._end(flow)
            del self._asked[key]
        if ended:
            self.statistics.ended += ended
            _log.warning("ended young flows that could not be promoted", flows=ended, after=UNPROMOTED_SECONDS)


def promoter(
    maps: Mapping[str, Map],
    programs: Mapping[str, Program],
    btf: Btf,
    snat_ports: range = range(0),
    lasting: Callable[[], Lasting] = Lasting,
    is_stale: IsStale = lambda generation, frontend, endpoint: False,
) -> Promoter:
    """The promoter for the loaded programs: their maps and programs by name, and their BTF.

    ``snat_ports``: the source ports of masqueraded young flows; without them only young flows are ended when their
    source address goes. ``lasting`` and ``is_stale``: as for :class:`Promoter`.
    """
    results, layout = maps["sweep_results"], btf.struct("sweep_result")
    sweep_flows, promote_flow, end_flow = programs["sweep_flows"], programs["promote_flow"], programs.get("end_flow")

    first = 1

    def sweep(ask_from: int, extended: frozenset[int]) -> Swept:
        nonlocal first
        bits = sum(bit for family, bit in _LASTING.items() if family in extended)
        request = b"".join(each.to_bytes(4, sys.byteorder) for each in (ask_from, first, bits))
        # 0: also of a program that a version without this result has pinned.
        full_at = sweep_flows.test_run(_ETHERNET_HEADER + request).retval
        first = 0
        value = results.lookup(_ZERO)
        return Swept(int(layout.unpack(value)["young"]) if value else 0, full_at)

    def end(flow: bytes) -> bool:
        # Draining uses the programs pinned by a former run, and does not last that long.
        return end_flow is not None and run_for_flow(end_flow, flow)

    flows = FlowReader(maps["flows"], btf)
    endpoints = endpoint_test(maps, btf) if snat_ports else lambda protocol, place: False

    def end_masqueraded(addresses: Collection[bytes]) -> int:
        ended = gone_sources.end_promoted(addresses, snat_ports, endpoints)
        # After conntrack's entries: a packet in between is the kernel's, which knows what to do with it.
        for flow in flows.masqueraded(maps["flows"].items(), addresses):
            if flow.young:
                ended += end(flow.read)
            elif flows.is_kernels(flow):
                for key in (flow.answer_key, flow.key):
                    maps["flows"].delete(key)
        return ended

    return Promoter(
        flows,
        Queue(maps["promotions"]),
        sweep,
        partial(run_for_flow, promote_flow),
        end,
        end_masqueraded,
        lasting=lasting,
        is_stale=is_stale,
    )
