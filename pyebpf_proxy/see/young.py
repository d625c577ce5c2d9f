# SPDX-License-Identifier: Apache-2.0
"""Young flows: flows in the maps ``flows`` and ``exchanges`` without a conntrack entry (docs/fast-path.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pyebpf_proxy.datapath.connections.promotion import FlowReader
from pyebpf_proxy.datapath.loader.btf import StaleObjectError
from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.netlink.uapi import IPS_ASSURED, IPS_DST_NAT, IPS_SEEN_REPLY, IPS_SRC_NAT
from pyebpf_proxy.see.answers import SeeError
from pyebpf_proxy.see.flows import Flow
from pyebpf_proxy.see.maps import Pinned

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
    layout = maps.packer("exchange", "there", "reply", "key", "reply_key")
    tag = maps.packer("flow_rewrite", "tag")
    found = {}
    for there, reply, key, reply_key in layout.iter_unpack(maps.map("exchanges").dump()[1]):
        if tag.unpack_from(there)[0] and tag.unpack_from(reply)[0]:
            found[key], found[reply_key] = there, reply
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
