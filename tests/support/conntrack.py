# SPDX-License-Identifier: Apache-2.0
"""conntrack entries of the calling thread's network namespace."""

from __future__ import annotations

from collections.abc import Iterable

from pyebpf_proxy.datapath.connections.create import Entry, Result, create, time_outs
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.request import RequestSocket


def create_now(entries: Iterable[Entry]) -> list[Result]:
    """The agent's ``create``, with a socket of its own. OSError."""
    with RequestSocket(uapi.NETLINK_NETFILTER) as netlink:
        return create(netlink, list(entries), time_outs())
