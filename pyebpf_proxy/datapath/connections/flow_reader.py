# SPDX-License-Identifier: Apache-2.0
"""Reads the flow table, map ``flows``: both directions of a flow as one."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple
from typing import Protocol as Interface

from pyebpf_proxy.common.bpf_constants import CLOSING_BY_RESET, CLOSING_IN_SEQUENCE, GIVEN_UP_SECONDS, SHORTEN
from pyebpf_proxy.datapath.connections.create import Entry
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.services.model import Protocol

#: Packets that a RST has overtaken arrive within this time.
QUIET_NS = 500_000_000
NANOSECONDS = 1_000_000_000
_PROTOCOLS = frozenset(map(int, Protocol))


class Table(Interface):
    """The used part of ``libbpf.Map``."""

    def lookup(self, key: bytes) -> bytes | None: ...


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
    #: For a kernel's flow: it ended by a RST with the expected sequence number.
    reset: bool = False
    #: No packet came for QUIET_NS.
    quiet: bool = False
    #: For a kernel's flow: a sweep has found that one side has given up, and no packet came since.
    vanished: bool = False
    #: One side has sent a FIN, and the other one has acknowledged it.
    half_closed: bool = False
    #: Both sides have sent a FIN or RST.
    both_closed: bool = False
    #: Of the client's direction.
    generation: int = 0

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
        flow = btf.struct("flow")
        self._flow = flow.packer("rewrite", "started", "last_seen", "packets", "young", "reply", "closing", "promote")
        # The table of an earlier version that is drained may lack it.
        self._numbers = flow.packer("acknowledged", "sent_until") if "sent_until" in flow.fields else None
        self._generation = flow.packer("generation")
        self._rewrite = btf.struct("flow_rewrite").packer(*ends)
        self.key_size = btf.struct("flow_key").size

    def read(self, key: bytes, young: bool = True) -> Flow | None:
        """The flow with this key of the client's direction. None: it is gone, or its ``young`` differs."""
        there = self._flows.lookup(key)
        if there is None:
            return None
        rewrite, started, last_seen, _, is_young, reply, closing, request = self._flow.unpack(there)
        if reply or bool(is_young) is not young:
            return None
        client, frontend, client_port, frontend_port, protocol, ipv6 = self._key.unpack(key)
        if protocol not in _PROTOCOLS:
            return None  # written by another program
        source, endpoint, source_port, endpoint_port = self._rewrite.unpack(rewrite)
        # Replies come from the packet's new destination and go to its new source.
        answer_key = self._key.pack(endpoint, source, endpoint_port, source_port, protocol, ipv6)
        back = self._flows.lookup(answer_key)
        if back is None:
            return None
        rewrite, _, last_seen_too, answers, is_young, _, closing_too, _ = self._flow.unpack(back)
        # Otherwise the replies belong to another flow: one of the two is being replaced.
        if self._rewrite.unpack(rewrite) != (frontend, client, frontend_port, client_port):
            return None
        if bool(is_young) is not young:
            return None
        size = 16 if ipv6 else 4
        entry = Entry(
            Protocol(protocol),
            (client[:size], client_port),
            (frontend[:size], frontend_port),
            (endpoint[:size], endpoint_port),
            None if (source, source_port) == (client, client_port) else (source[:size], source_port),
            answered=bool(answers),
        )
        reset = not young and CLOSING_IN_SEQUENCE in (closing, closing_too)
        # bpf_ktime_get_coarse_ns() reads the same clock, with the resolution of a timer tick.
        idle = time.monotonic_ns() - max(last_seen, last_seen_too)
        vanished = not young and request == SHORTEN and idle > GIVEN_UP_SECONDS * NANOSECONDS
        closed = closing or closing_too
        both = bool(closing and closing_too)
        half = not both and self._is_acknowledged(there, back, closed, not closing)
        (generation,) = self._generation.unpack(there)
        quiet = idle > QUIET_NS
        return Flow(entry, bool(closed), key, answer_key, started, reset, quiet, vanished, half, both, generation)

    def family(self, key: bytes) -> int:
        """The family of a flow's key: 4 or 6."""
        return 6 if self._key.unpack(key)[-1] else 4

    def _is_acknowledged(self, there: bytes, back: bytes, closing: int, by_endpoint: bool) -> bool:
        """Whether the other side has acknowledged the FIN of the side with ``closing``. Nothing acknowledges a RST."""
        if self._numbers is None or closing in (0, CLOSING_BY_RESET):
            return False
        (acknowledged, sent), (acknowledged_too, sent_too) = map(self._numbers.unpack, (there, back))
        return bool(sent_too == acknowledged & 0xFFFF if by_endpoint else sent == acknowledged_too & 0xFFFF)

    def is_kernels(self, flow: Masqueraded) -> bool:
        """Whether the key is still that of this flow of the kernel, and not of a later one."""
        there = self._flows.lookup(flow.key)
        if there is None:
            return False
        _, started, _, _, young, _, _, _ = self._flow.unpack(there)
        return not young and flow_read(flow.key, started) == flow.read

    def masqueraded(self, entries: Iterable[tuple[bytes, bytes]], sources: Collection[bytes]) -> Iterator[Masqueraded]:
        """Those of these keys and values that are masqueraded to one of these (packed) addresses."""
        for key, there in entries:
            rewrite, started, _, _, young, reply, _, _ = self._flow.unpack(there)
            if reply:
                continue
            client, _, _, _, protocol, ipv6 = self._key.unpack(key)
            source, endpoint, source_port, endpoint_port = self._rewrite.unpack(rewrite)
            if source != client and source[: 16 if ipv6 else 4] in sources:
                answer_key = self._key.pack(endpoint, source, endpoint_port, source_port, protocol, ipv6)
                yield Masqueraded(bool(young), key, answer_key, flow_read(key, started))
