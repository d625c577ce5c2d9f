# SPDX-License-Identifier: Apache-2.0
"""Tells the programs which UDP flows conntrack has, so that they need not look up every new one (bpf/udp_filter.h)."""

from __future__ import annotations

from collections.abc import Callable

from pyebpf_proxy.datapath.connections.ctnetlink import udp_entries
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.services.model import IPFamily, Protocol


def note(btf: Btf, note_flow: Callable[[bytes], bool]) -> int:
    """Note every UDP flow that conntrack has, then complete the filter; how many were noted.

    ``note_flow`` runs the program ``note_tracked_flow`` with a ``struct flow_key`` and returns whether it did its task.
    Called when the programs that note later flows are attached. In the network namespace of the calling thread.
    OSError: the filter stays incomplete, and the programs look up every new flow.
    """
    layout = btf.struct("flow_key")
    key = layout.packer("source", "source_port", "protocol", "ipv6")
    noted = 0
    for family in IPFamily:
        for entry in udp_entries(family):
            assert entry.original is not None
            client, port = entry.original.ends[0]
            noted += note_flow(key.pack(client, port, Protocol.UDP, family is IPFamily.IPV6))
    note_flow(bytes(layout.size))
    return noted
