# SPDX-License-Identifier: Apache-2.0
"""What each reason of bpf/reason.h for which packets are refused or dropped means, and what to do. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Meaning(NamedTuple):
    """For people: what happened, and what to do about it."""

    text: str
    remedy: str


_LOCAL = "with policy Local only endpoints of this node are used: run one here, or use policy Cluster"
_RANGE = "add the source to loadBalancerSourceRanges, or take the restriction away"
_ENDPOINTS = "see which endpoints there are, and why not: pyebpf-proxy services NAME"
_TABLE = "raise nf_conntrack_max (conntrack.maxPerCore), or find who opens so many flows: pyebpf-proxy flows"
_REPORT = "not expected: report it with the kernel's version"

MEANINGS = {
    "reject_no_endpoints": Meaning("no endpoint is usable: answered with port unreachable", _ENDPOINTS),
    "reject_no_endpoints_socket": Meaning("a process of this node: no endpoint is usable: ECONNREFUSED", _ENDPOINTS),
    "drop_no_local_endpoints": Meaning("policy Local, and no endpoint on this node", _LOCAL),
    "drop_no_local_endpoints_socket": Meaning("a process of this node: policy Local, and no endpoint here", _LOCAL),
    "drop_source_range": Meaning("the source is in none of the Service's loadBalancerSourceRanges", _RANGE),
    "drop_source_range_socket": Meaning("a process of this node, which is in none of loadBalancerSourceRanges", _RANGE),
    "drop_conntrack_full": Meaning("the kernel's connection table has no room for a new flow", _TABLE),
    "drop_insert_failed": Meaning(
        "the connection table refused the new flow: mostly all source ports towards one endpoint are taken",
        "more endpoints, or addresses to masquerade with; see pyebpf-proxy status for the busiest",
    ),
    "drop_nat_failed": Meaning("the kernel refused the translation of a new flow", _REPORT),
    "drop_loopback_destination": Meaning(
        "from outside to 127.0.0.0/8: nobody may reach the node's loopback", "find the sender: it is broken or hostile"
    ),
    "drop_rewrite_failed": Meaning("the fast path could not rewrite a packet", _REPORT),
    "table_missing": Meaning("the endpoint went away while it was chosen; the client tries again", "nothing, if rare"),
}


def is_refusal(reason: str) -> bool:
    """Whether packets that are counted here got no further."""
    return reason in MEANINGS or reason.startswith(("drop_", "reject_"))
