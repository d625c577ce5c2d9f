# SPDX-License-Identifier: Apache-2.0
"""Intended differences of flows from kube-proxy; docs/differences.md gives the reasons under these names."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address, ip_network

from tests.flows.flow import DROPPED, Flow, Ground, Seen

_LOOPBACK = "127.0.0.1"


def _served_from_loopback(flow: Flow, ground: Ground, expected: Seen, actual: Seen) -> bool:
    """A node in the pods' range reaches its NodePorts on loopback, where kube-proxy's packets are lost."""
    if ground.mode != "iptables" or not flow.local or not _loopback_is_in_the_range_of_pods(ground):
        return False
    # An endpoint that is the node itself answers with kube-proxy, too.
    answered = set(expected.outcomes) - {DROPPED}
    sometimes_lost = DROPPED in expected.outcomes and answered <= set(actual.outcomes)
    lost = sometimes_lost and flow.source == "node1" and flow.address == _LOOPBACK
    # With affinity the source that the endpoint saw is not reported. A refusal or a loss is no such difference.
    served = [outcome.endswith("<- node") or outcome.startswith("an endpoint") for outcome in actual.outcomes]
    return lost and "NodePort" in flow.what and bool(served) and all(served)


def _loopback_is_in_the_range_of_pods(ground: Ground) -> bool:
    """Whether the detector considers 127.0.0.1 a pod's address."""
    if ground.config.get("detectLocalMode", "ClusterCIDR") != "ClusterCIDR":
        return False
    networks = [ip_network(text) for text in ground.config.get("clusterCIDR", "").split(",") if text]
    return any(ip_address(_LOOPBACK) in network for network in networks)


def _refused_not_silent(flow: Flow, ground: Ground, expected: Seen, actual: Seen) -> bool:
    """A datagram of the node to itself, at a NodePort that drops: its sender gets an error."""
    own = flow.source == "node1" and flow.protocol == "udp" and "NodePort" in flow.what
    # On ::1 no NodePort is served, with any policy.
    unserved = ground.mode == "iptables" and (flow.local or flow.address == "::1")
    return own and unserved and expected.outcomes == (DROPPED,) and actual.outcomes == ("refused",)


def _served_by_itself(flow: Flow, ground: Ground, expected: Seen, actual: Seen) -> bool:
    """A pod that is its own endpoint, though its slice gives no node for it, or another one."""
    if ground.mode != "nftables":
        return False
    served = set(actual.outcomes) - set(expected.outcomes)
    itself = all(
        outcome.startswith("an endpoint") or (outcome.startswith(f"{flow.source}:") and outcome.endswith("<- node"))
        for outcome in served
    )
    return bool(served) and itself and set(expected.outcomes) - set(actual.outcomes) == {DROPPED}


#: Name of the entry → whether it explains the difference.
DIFFERENCES: dict[str, Callable[[Flow, Ground, Seen, Seen], bool]] = {
    "datagrams to NodePorts of the node itself": _refused_not_silent,
    "NodePorts on loopback of a node in the range of pods": _served_from_loopback,
    "a pod that calls itself and is placed nowhere": _served_by_itself,
}


def difference(flow: Flow, ground: Ground, expected: Seen, actual: Seen) -> str | None:
    """Empty: no difference. The name of a listed difference, or None for one that is not listed."""
    if expected == actual:
        return ""
    return next((name for name, explains in DIFFERENCES.items() if explains(flow, ground, expected, actual)), None)
