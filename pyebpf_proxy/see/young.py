# SPDX-License-Identifier: Apache-2.0
"""Young flows: flows in the maps ``flows`` and ``exchanges`` without a conntrack entry (docs/fast-path.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pyebpf_proxy.datapath.connections.flow_reader import FlowReader
from pyebpf_proxy.datapath.loader.btf import StaleObjectError
from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.netlink.uapi import IPS_ASSURED, IPS_DST_NAT, IPS_SEEN_REPLY, IPS_SRC_NAT
from pyebpf_proxy.see.answers import SeeError
from pyebpf_proxy.see.flows import Flow
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.services.model import Protocol

OPEN, CLOSING = "OPEN", "CLOSING"


class _Snapshot:
    """The dump of a map."""

    def __init__(self, entries: dict[bytes, bytes]) -> None:
        self._entries = entries

    def lookup(self, key: bytes) -> bytes | None:
        return self._entries.get(key)


def _exchanged(maps: Pinned) -> dict[bytes, bytes]:
    """The entries of all exchanges, as the map ``flows`` would have them. BpfError. SeeError."""
    if "exchanges" not in maps.names:
        return {}
    element = maps.packer("exchange", "there", "reply", "ipv6")
    bucket = maps.packer("exchange_bucket", "way")
    head = maps.packer("exchange_head", "started", "queries", "replies")
    ends = maps.packer("flow_rewrite", "tag", "source", "destination", "source_port", "destination_port")
    key = maps.packer("flow_key", "source", "destination", "source_port", "destination_port", "protocol", "ipv6")
    entry = maps.packer("flow", "rewrite", "started", "packets", "young", "reply")
    elements = list(element.iter_unpack(maps.map("exchanges").dump()[1]))
    buckets = list(bucket.iter_unpack(maps.map("exchange_heads").dump()[1]))
    clock = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    found = {}
    for number, (there, reply, ipv6) in enumerate(elements):
        (tag, *sent), (reply_tag, *answered) = ends.unpack(there), ends.unpack(reply)
        if not tag or not reply_tag:
            continue
        # The first elements of all buckets come first (bpf/exchange.h).
        way, of_bucket = divmod(number, len(buckets))
        started, queries, replies = head.unpack_from(buckets[of_bucket][0], way * head.size)
        # Units of 2^20 ns, of which the map has the lower 32 bits.
        age = ((clock >> 20) - started & 0xFFFFFFFF) << 20
        # Packets of one direction look like those of the other when they leave, with the ends exchanged.
        for packets, rewrite, back, is_reply in ((queries, there, answered, False), (replies, reply, sent, True)):
            source, destination, source_port, destination_port = back
            packed = key.pack(destination, source, destination_port, source_port, Protocol.UDP, ipv6)
            found[packed] = entry.pack(rewrite, clock - age, packets, 1, is_reply)
    return found


def flows(maps: Pinned) -> Iterator[Flow]:
    """Every young flow, in state OPEN or CLOSING, without timeout and byte counts. Raises SeeError."""
    if "flows" not in maps.names:
        return
    try:
        entries = {**_exchanged(maps), **dict(maps.map("flows").items())}
        reader = FlowReader(_Snapshot(entries), maps.btf)
    except BpfError as error:
        raise SeeError(str(error)) from None
    except StaleObjectError as error:
        raise SeeError(f"maps of another layout: {error.what}") from None
    counted = maps.packer("flow", "started", "packets")
    now, clock = time.time(), time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    for key, value in entries.items():
        found = reader.read(key)
        if found is None:
            continue
        entry = found.entry
        started, packets = counted.unpack(value)
        _, answers = counted.unpack(entries[found.answer_key])
        yield Flow(
            entry.protocol,
            entry.client,
            entry.frontend,
            entry.endpoint,
            entry.seen,
            IPS_DST_NAT | (IPS_SRC_NAT if entry.source else 0) | (IPS_SEEN_REPLY | IPS_ASSURED if answers else 0),
            CLOSING if found.closing else OPEN,
            0,
            # The entry does not count the packet that created it.
            1 + packets + answers,
            None,
            now - (clock - started) / 1e9,
            young=True,
        )
