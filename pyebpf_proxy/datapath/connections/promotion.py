# SPDX-License-Identifier: Apache-2.0
"""Promotion: creates conntrack entries for young flows, which only the BPF programs know (bpf/sweep.h).

A sweep, which is a program, selects the flows that are due. Each gets a conntrack entry with the programs' translation.
From then on it is a kernel's flow, and the programs confirm it through netfilter once a second (docs/fast-path.md). The
sweep also selects kernel's flows that were reset. conntrack cannot know that their RST was the last packet, so the
agent closes their entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from pyebpf_proxy.common.bpf_constants import CLOSING_IN_SEQUENCE
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.datapath.connections import create, gone_sources
from pyebpf_proxy.datapath.connections.create import Entry, Outcome, Result
from pyebpf_proxy.datapath.connections.masqueraded import endpoint_test
from pyebpf_proxy.datapath.connections.queue import Queue
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map, Program
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import NETLINK_NETFILTER
from pyebpf_proxy.services.model import Protocol as IpProtocol

#: Seconds from one pass to the next: with young flows, and without any.
BUSY_SECONDS, IDLE_SECONDS = 0.5, 1.0
#: The same if a pass left some in the queue, and while draining.
SOON_SECONDS = 0.05
#: The most flows of one pass.
AT_ONCE = 4096
#: A flow that conntrack does not accept for this long is ended. Otherwise no new netfilter rule would ever see it.
UNPROMOTED_SECONDS = 30.0
_ETHERNET_HEADER = bytes(14)
_FRAME = bytes(60)
_ZERO = bytes(4)

_log = Logger("datapath")


class Table(Protocol):
    """The used part of ``libbpf.Map``."""

    def lookup(self, key: bytes) -> bytes | None: ...


class Requests(Protocol):
    """The used part of ``Queue``."""

    def pop(self, most: int) -> list[bytes]: ...


def run_for_flow(program: Program, data: bytes) -> bool:
    """Run one of the agent's programs with the description of a flow. Returns whether it did its task. BpfError."""
    return program.test_run(_ETHERNET_HEADER + data).retval != 0


def flow_read(key: bytes, started: int) -> bytes:
    """struct flow_read (bpf/sweep.h): identifies a flow among those that use the key one after the other."""
    return key + started.to_bytes(8, sys.byteorder)


class Flow(NamedTuple):
    """A flow of the map ``flows``: the conntrack entry it has or should get, and whether a FIN or RST was seen."""

    entry: Entry
    closing: bool
    #: Keys of the client's direction and of the other one.
    key: bytes
    answer_key: bytes
    #: When the flow began (bpf_ktime_get_coarse_ns).
    started: int
    #: For a kernel's flow: its last packet was a RST with the expected sequence number.
    reset: bool = False

    @property
    def read(self) -> bytes:
        """The flow for the programs ``promote_flow`` and ``end_flow``."""
        return flow_read(self.key, self.started)


class Masqueraded(NamedTuple):
    """A flow of the map ``flows`` whose endpoint sees another source address than the client's."""

    young: bool
    #: Keys of the client's direction and of the other one.
    key: bytes
    answer_key: bytes
    #: As ``Flow.read``.
    read: bytes


class FlowReader:
    """Both directions of a flow, read from the map ``flows`` by the layouts of its BTF."""

    def __init__(self, flows: Table, btf: Btf) -> None:
        self._flows = flows
        # A pass may have thousands of flows: only the needed fields are read.
        ends = ("source", "destination", "source_port", "destination_port")
        self._key = btf.struct("flow_key").packer(*ends, "protocol", "ipv6")
        self._flow = btf.struct("flow").packer("rewrite", "started", "packets", "young", "reply", "closing")
        self._rewrite = btf.struct("flow_rewrite").packer(*ends)
        self.key_size = btf.struct("flow_key").size

    def read(self, key: bytes, young: bool = True) -> Flow | None:
        """The flow with this key of the client's direction. None: it is gone, or its ``young`` differs."""
        there = self._flows.lookup(key)
        if there is None:
            return None
        rewrite, started, _, is_young, reply, closing = self._flow.unpack(there)
        if reply or bool(is_young) is not young:
            return None
        client, frontend, client_port, frontend_port, protocol, ipv6 = self._key.unpack(key)
        source, endpoint, source_port, endpoint_port = self._rewrite.unpack(rewrite)
        # Replies come from the packet's new destination and go to its new source.
        answer_key = self._key.pack(endpoint, source, endpoint_port, source_port, protocol, ipv6)
        back = self._flows.lookup(answer_key)
        if back is None:
            return None
        rewrite, _, answers, is_young, _, closing_too = self._flow.unpack(back)
        # Otherwise the replies belong to another flow: one of the two is being replaced.
        if self._rewrite.unpack(rewrite) != (frontend, client, frontend_port, client_port):
            return None
        if bool(is_young) is not young:
            return None
        size = 16 if ipv6 else 4
        entry = Entry(
            IpProtocol(protocol),
            (client[:size], client_port),
            (frontend[:size], frontend_port),
            (endpoint[:size], endpoint_port),
            None if (source, source_port) == (client, client_port) else (source[:size], source_port),
            answered=bool(answers),
        )
        reset = not young and CLOSING_IN_SEQUENCE in (closing, closing_too)
        return Flow(entry, bool(closing or closing_too), key, answer_key, started, reset)

    def masqueraded(self, entries: Iterable[tuple[bytes, bytes]], sources: Collection[bytes]) -> Iterator[Masqueraded]:
        """Those of these keys and values that are masqueraded to one of these (packed) addresses."""
        for key, there in entries:
            rewrite, started, _, young, reply, _ = self._flow.unpack(there)
            if reply:
                continue
            client, _, _, _, protocol, ipv6 = self._key.unpack(key)
            source, endpoint, source_port, endpoint_port = self._rewrite.unpack(rewrite)
            if source != client and source[: 16 if ipv6 else 4] in sources:
                answer_key = self._key.pack(endpoint, source, endpoint_port, source_port, protocol, ipv6)
                yield Masqueraded(bool(young), key, answer_key, flow_read(key, started))


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
    #: Flows that were ended because their source address has left the node.
    sources_gone: int = 0


class Promoter:
    """Promotes young flows, in the network namespace of the calling thread.

    ``sweep`` runs the program and returns how many young flows it found; ``promote`` and ``end`` run the programs of
    that name with a flow (``Flow.read``) and return whether it was still there. ``end_masqueraded`` ends
    every flow that is masqueraded to one of the given addresses, young or promoted, and returns how many it ended.
    """

    def __init__(
        self,
        flows: FlowReader,
        requests: Requests,
        sweep: Callable[[], int],
        promote: Callable[[bytes], bool],
        end: Callable[[bytes], bool],
        end_masqueraded: Callable[[Collection[bytes]], int] = lambda addresses: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.statistics = Statistics()
        self._flows = flows
        self._requests = requests
        self._sweep = sweep
        self._promote = promote
        self._end = end
        self._end_masqueraded = end_masqueraded
        self._clock = clock
        #: Addresses that have left the node since the last pass; in the loop's thread.
        self._gone: set[bytes] = set()
        self._wake = asyncio.Event()
        #: Flows that conntrack did not accept, and since when, by ``Flow.read``.
        self._waiting: dict[bytes, float] = {}
        self._more = False
        self._full = False
        self._said = ""
        self._said_open = ""
        self._one_pass = asyncio.Lock()

    async def run(self) -> None:
        """Promote forever. An error is logged once, and the pass is retried."""
        logged = ""
        while True:
            try:
                await self.pass_once()
                logged = ""
            except OSError as error:
                if str(error) != logged:
                    _log.error("flows could not be handed to conntrack, retrying", error=str(error))
                logged = str(error)
            busy = BUSY_SECONDS if self.statistics.young else IDLE_SECONDS
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), SOON_SECONDS if self._more else busy)

    def sources_gone(self, addresses: Collection[bytes]) -> None:
        """End the flows that are masqueraded to these (packed) addresses, which have left the node, without delay.

        Call it in the loop's thread. The next packet of such a flow is treated as that of a new one.
        """
        self._gone |= set(addresses)
        self._wake.set()

    async def pass_once(self) -> None:
        """One sweep, and the promotions that are due, in another thread. OSError."""
        async with self._one_pass:
            self._wake.clear()
            gone, self._gone = self._gone, set()
            try:
                await asyncio.to_thread(self.pass_now, gone)
            except OSError:
                self._gone |= gone
                raise

    async def drain(self, seconds: float) -> int:
        """Promote until a sweep finds no young flow, ``seconds`` at most; how many are left. OSError.

        The map ``fast_path`` must have ``draining`` set: then every answered flow is due.
        """
        end = time.monotonic() + seconds
        while True:
            await self.pass_once()
            # This sweep counted before the promotions of this pass. Only the next sweep shows how many are left.
            if not self.statistics.young or time.monotonic() >= end:
                return await asyncio.to_thread(self._sweep) if self.statistics.young else 0
            await asyncio.sleep(SOON_SECONDS)

    def pass_now(self, gone: Collection[bytes] = ()) -> None:
        """The same as :meth:`pass_once`, in the caller's thread. ``gone``: as for :meth:`sources_gone`."""
        self.statistics.young = self._sweep()
        requests = self._requests.pop(AT_ONCE)
        self._more = len(requests) == AT_ONCE
        keys = list(dict.fromkeys([*(read[: self._flows.key_size] for read in self._waiting), *requests]))
        if keys:
            self._hand_over(keys)
        # After the promotions, which may include some of these flows.
        if gone:
            self._end_sources(gone)

    def _hand_over(self, keys: Iterable[bytes]) -> None:
        begin = time.monotonic()
        due: list[Flow] = []
        reset: list[Entry] = []
        for key in keys:
            if flow := self._flows.read(key):
                due.append(flow)
            elif (flow := self._flows.read(key, young=False)) and flow.reset:
                reset.append(flow.entry)
        if not due:
            self._waiting.clear()
            # The flows that conntrack had no space for have ended. The next time is logged again.
            self._full = False
        if not due and not reset:
            return
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
                        closing.append(flow.entry)
                elif result.outcome is not Outcome.KNOWN:
                    over.append(flow.entry)
            # A flow may end during this pass. Without this its entry would stay for days.
            create.abandon(netlink, over)
            create.close(netlink, closing, seconds)
            still_open = create.reset(netlink, reset, seconds)
        if still_open and (why := os.strerror(still_open[-1])) != self._said_open:
            self._said_open = why
            _log.info("conntrack does not close the entry of a connection that was reset", error=why)
        self._note(failed, len(due))
        self.statistics.last_seconds = time.monotonic() - begin

    def _end_sources(self, gone: Collection[bytes]) -> None:
        ended = self._end_masqueraded(gone)
        if ended:
            self.statistics.sources_gone += ended
            _log.info("flows were ended whose source address has left the node", flows=ended)

    def _note(self, failed: list[tuple[Flow, Result]], tried: int) -> None:
        full = [flow for flow, result in failed if result.outcome is Outcome.FULL]
        self._end_refused([flow.read for flow, _ in failed])
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
            _log.error("conntrack refuses a flow", error=refused)
        self._said = refused or self._said

    def _end_refused(self, flows: Iterable[bytes]) -> None:
        """End flows that conntrack has refused for too long. ``flows``: those that failed now, as ``Flow.read``."""
        now = self._clock()
        self._waiting = {flow: self._waiting.get(flow, now) for flow in flows}
        over = [flow for flow, since in self._waiting.items() if now - since >= UNPROMOTED_SECONDS]
        ended = sum(map(self._end, over))
        for flow in over:
            del self._waiting[flow]
        if ended:
            self.statistics.ended += ended
            _log.warning("flows that conntrack did not accept were ended", flows=ended, after=UNPROMOTED_SECONDS)


def promoter(
    maps: Mapping[str, Map], programs: Mapping[str, Program], btf: Btf, snat_ports: range = range(0)
) -> Promoter:
    """The promoter for the loaded programs: their maps and programs by name, and their BTF.

    ``snat_ports``: the source ports of masqueraded young flows; without them only young flows are ended when their
    source address goes.
    """
    results, layout = maps["sweep_results"], btf.struct("sweep_result")
    sweep_flows, promote_flow, end_flow = programs["sweep_flows"], programs["promote_flow"], programs.get("end_flow")

    def sweep() -> int:
        sweep_flows.test_run(_FRAME)
        value = results.lookup(_ZERO)
        return int(layout.unpack(value)["young"]) if value else 0

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
            else:
                for key in (flow.answer_key, flow.key):
                    maps["flows"].delete(key)
        return ended

    return Promoter(flows, Queue(maps["promotions"]), sweep, partial(run_for_flow, promote_flow), end, end_masqueraded)
