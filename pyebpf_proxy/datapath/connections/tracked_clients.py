# SPDX-License-Identifier: Apache-2.0
"""Tells the programs which flows conntrack has, so that they need not look up every new one (bpf/client_filters.h)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from pyebpf_proxy.datapath.connections.ctnetlink import TrackedEntry, entries
from pyebpf_proxy.datapath.connections.masqueraded import IsEndpoint
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.services.model import IPFamily, Protocol

#: With more flows than this, most bytes of the filter would be used.
MOST = 1 << 15
#: How long a connection's note lasts: NOTED_TCP_NS of bpf/client_filters.h.
NOTED_SECONDS = 200
# enum tcp_conntrack
_ESTABLISHED = 3


def note(btf: Btf, tracked_clients: Map, note_flow: Callable[[bytes], bool], most: int = MOST) -> int:
    """Note every flow that conntrack has, then complete the filter; how many were noted.

    If there are more than ``most``, all clients are noted, for as long as notes last. ``note_flow`` runs the program
    ``note_tracked_flow`` with a ``struct flow_key`` and returns whether it did its task. Called when the programs that
    note later flows are attached. In the network namespace of the calling thread. OSError: the filter stays incomplete,
    and the programs look up every new flow.
    """
    key = _flow_key(btf)
    noted = 0
    for family, entry in ((each, entry) for each in IPFamily for entry in entries(each)):
        assert entry.original is not None
        if noted == most:
            _note_all(btf, tracked_clients)
            break
        client, port = entry.original.ends[0]
        noted += note_flow(key(client, port, entry.original.protocol, family is IPFamily.IPV6))
    note_flow(bytes(btf.struct("flow_key").size))
    return noted


def note_connections(btf: Btf, tracked_clients: Map, note_flow: Callable[[bytes], bool], most: int = MOST) -> int:
    """Note the TCP connections that conntrack has, and that may last for longer than their notes; how many were noted.

    Otherwise a SYN with a forged source would open a flow in the place of a connection that the flow table has no entry
    of: one that was idle for an hour, for example. Called again before the notes expire. If conntrack has more than
    ``most`` flows, or does not list them, all clients are noted.
    """
    noted = listed = 0
    key = _flow_key(btf)
    try:
        for family, entry in ((each, entry) for each in IPFamily for entry in entries(each)):
            assert entry.original is not None
            listed += 1
            if listed > most:
                break
            if entry.original.protocol == Protocol.TCP and _lasts(entry):
                client, port = entry.original.ends[0]
                noted += note_flow(key(client, port, Protocol.TCP, family is IPFamily.IPV6))
    except OSError:
        listed = most + 1
    if listed > most:
        _note_all(btf, tracked_clients)
        note_flow(bytes(btf.struct("flow_key").size))
    return noted


def note_straight(btf: Btf, note_flow: Callable[[bytes], bool], is_endpoint: IsEndpoint, most: int = MOST) -> int:
    """Note the flows that conntrack has straight to endpoints, among its first ``most``; how many were noted.

    For programs that cannot look up conntrack. A flow through a Service from the same port would have the same replies.
    Called again before the notes expire. OSError: the flows cannot be listed.
    """
    fields = "source", "destination", "source_port", "destination_port", "protocol", "ipv6"
    pack = btf.struct("flow_key").packer(*fields).pack
    listed = ((family, entry) for family in IPFamily for entry in entries(family))
    noted = 0
    for family, entry in itertools.islice(listed, most):
        assert entry.original is not None
        (client, port), to = entry.original.ends
        if entry.reply is not None and entry.reply.ends[0] == to and is_endpoint(entry.original.protocol, to):
            noted += note_flow(pack(client, to[0], port, to[1], entry.original.protocol, family is IPFamily.IPV6))
    return noted


def _flow_key(btf: Btf) -> Callable[[bytes, int, int, bool], bytes]:
    return btf.struct("flow_key").packer("source", "source_port", "protocol", "ipv6").pack


def _lasts(entry: TrackedEntry) -> bool:
    return entry.tcp_state == _ESTABLISHED or entry.seconds > NOTED_SECONDS


def _note_all(btf: Btf, tracked_clients: Map) -> None:
    layout = btf.struct("tracked_clients")
    # filter_note() of bpf/client_filters.h.
    byte = (time.clock_gettime_ns(time.CLOCK_MONOTONIC) >> 30) % 255 + 1
    tracked_clients.update(bytes(4), layout.pack(noted=bytes([byte]) * layout.fields["noted"].size))
