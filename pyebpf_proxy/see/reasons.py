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
_REPORT = "not expected: report it with the kernel's version"

MEANINGS = {
    "reject_no_endpoints": Meaning("no endpoint is usable: answered with port unreachable", _ENDPOINTS),
    "reject_no_endpoints_socket": Meaning("a process of this node: no endpoint is usable: ECONNREFUSED", _ENDPOINTS),
    "drop_no_local_endpoints": Meaning("policy Local, and no endpoint on this node", _LOCAL),
    "drop_no_local_endpoints_socket": Meaning("a process of this node: policy Local, and no endpoint here", _LOCAL),
    "drop_source_range": Meaning("the source is in none of the Service's loadBalancerSourceRanges", _RANGE),
    "drop_source_range_socket": Meaning("a process of this node, which is in none of loadBalancerSourceRanges", _RANGE),
    "drop_loopback_destination": Meaning(
        "from outside to 127.0.0.0/8: nobody may reach the node's loopback", "find the sender: it is broken or hostile"
    ),
    "drop_rewrite_failed": Meaning("the fast path could not rewrite a packet", _REPORT),
    "drop_awaiting_promotion": Meaning(
        "one packet of a young flow that only the kernel can treat came before conntrack knew the flow: sent again, it"
        " gets through",
        "nothing, if rare; if it goes on, conntrack is full or refuses entries: pyebpf-proxy status",
    ),
    "table_missing": Meaning("the endpoint went away while it was chosen; the client tries again", "nothing, if rare"),
}


#: Why a new flow (slow_), or a packet of a known or new flow (stack_), takes the slow path.
SLOW = {
    "slow_no_permit": "the pair has no permit: it takes two new flows within a second that netfilter lets through",
    "slow_quota": "packets of the device have opened as many young flows as one device may",
    "slow_table_full": "the flow table is full",
    "slow_no_port": "no source port was free to masquerade with, or none is set aside",
    "stack_no_agent": "no agent follows rules and routes",
    "stack_draining": "the fast path is being drained",
    "stack_rules": "rules of others must see every packet of the family",
    "stack_policy_routed": "rules of routing select by more than addresses, devices and marks",
    "stack_ipsec": "there are IPsec policies",
    "stack_ending": "a FIN or RST of a flow that the kernel has",
    "stack_not_confirmed": "once a second a packet of each flow of the kernel's goes through netfilter",
    "stack_fragment": "a fragment",
    "stack_options": "the packet has IP options",
    "stack_hops": "the hop limit ends here",
    "stack_too_big": "the packet is larger than the way out takes",
    "stack_other_device": "the packet came in by another device than its flow's first packets",
    "stack_device": "a device is closed: something stands behind our program, or the device can't be sent by",
    "stack_not_plain": "the packet is not plain: a VLAN tag, a mark, or metadata of others",
}


def is_refusal(reason: str) -> bool:
    """Whether packets that are counted here got no further."""
    return reason in MEANINGS or reason.startswith(("drop_", "reject_"))
