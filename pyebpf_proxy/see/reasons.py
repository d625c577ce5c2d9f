# SPDX-License-Identifier: Apache-2.0
"""Meaning and remedy of each reason in bpf/reason.h for which packets are refused or dropped."""

from __future__ import annotations

from typing import NamedTuple


class Meaning(NamedTuple):
    """What has happened, and the remedy."""

    text: str
    remedy: str


_LOCAL = "policy Local uses endpoints of this node only: run one here, or use policy Cluster"
_RANGE = "add the source to loadBalancerSourceRanges, or remove the restriction"
_ENDPOINTS = "list its endpoints, with those excluded and why: pyebpf-proxy services NAME"
_REPORT = "unexpected: report it with the kernel version"

MEANINGS = {
    "reject_no_endpoints": Meaning("no usable endpoint: answered with port unreachable", _ENDPOINTS),
    "reject_no_endpoints_socket": Meaning("no usable endpoint: a process of this node got ECONNREFUSED", _ENDPOINTS),
    "drop_no_local_endpoints": Meaning("policy Local, no endpoint on this node", _LOCAL),
    "drop_no_local_endpoints_socket": Meaning("policy Local, no endpoint on this node (a process here)", _LOCAL),
    "drop_source_range": Meaning("the source is not in the Service's loadBalancerSourceRanges", _RANGE),
    "drop_source_range_socket": Meaning("this node is not in the Service's loadBalancerSourceRanges", _RANGE),
    "drop_loopback_destination": Meaning(
        "from outside to 127.0.0.0/8: the node's loopback is not reachable from outside",
        "find the sender: it is misconfigured or hostile",
    ),
    "drop_rewrite_failed": Meaning("the fast path could not rewrite a packet", _REPORT),
    "drop_awaiting_promotion": Meaning(
        "a packet that only the kernel can handle arrived before its young flow was in conntrack, or a SYN right after"
        " a forged RST or FIN: its retransmission gets through",
        "nothing to do if rare; if it persists, conntrack is full or rejects entries: pyebpf-proxy status",
    ),
    "service_config_missing": Meaning(
        "the endpoint was removed during its selection; the client retries", "nothing to do if rare"
    ),
}


#: Why a new flow (slow_) or a packet of any flow (stack_) takes the slow path.
SLOW = {
    "slow_no_permit": "the pair has no permit: netfilter must accept two new flows within a second",
    "slow_quota": "the device has reached its limit of young flows",
    "slow_table_full": "the flow table is full",
    "slow_no_port": "no source port is free for masquerade, or the client's port may have another flow to the endpoint",
    "stack_no_agent": "no agent follows rules and routes",
    "stack_draining": "the fast path is being drained",
    "stack_rules": "other rules must see every packet of the family",
    "stack_policy_routed": "routes depend on more than addresses, devices and marks",
    "stack_ipsec": "there are IPsec policies",
    "stack_ending": "a FIN or RST of a flow in conntrack",
    "stack_not_confirmed": "one packet a second of each flow in conntrack passes netfilter",
    "stack_fragment": "a fragment",
    "stack_options": "the packet has IP options",
    "stack_hops": "the TTL or hop limit expires here",
    "stack_too_big": "the packet exceeds the MTU of the egress interface",
    "stack_other_device": "the packet entered by another device than the first packets of its flow",
    "stack_device": "a device is closed: other programs run after the proxy's, or it cannot be redirected to",
    "stack_route_mark": "the packet left with a mark that rules restore from its flow and that chooses routes",
    "stack_not_plain": "the packet has a VLAN tag or a mark, or its frame is a broadcast or multicast",
}


def is_refusal(reason: str) -> bool:
    """Whether this reason counts packets that were refused or dropped."""
    return reason in MEANINGS or reason.startswith(("drop_", "reject_"))
