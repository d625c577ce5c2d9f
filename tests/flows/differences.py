# SPDX-License-Identifier: Apache-2.0
"""Where flows end otherwise than with kube-proxy on purpose; docs/differences.md has the reasons by these names."""

from __future__ import annotations

from collections.abc import Callable

from tests.flows.flow import DROPPED, Flow, Seen


def _served_from_loopback(flow: Flow, theirs: Seen, ours: Seen) -> bool:
    """A node in the range of pods reaches its NodePorts on loopback, where kube-proxy's packets get lost."""
    lost = theirs.outcomes == (DROPPED,) and flow.source == "node1" and flow.address == "127.0.0.1"
    # With affinity it is not told whom the endpoint saw. A refusal or a loss of ours is no such difference.
    served = [outcome.endswith("<- node") or outcome.startswith("an endpoint") for outcome in ours.outcomes]
    return lost and "NodePort" in flow.what and bool(served) and all(served)


def _refused_not_silent(flow: Flow, theirs: Seen, ours: Seen) -> bool:
    """A datagram of the node to itself, at a NodePort that drops: its sender is told."""
    own = flow.source == "node1" and flow.protocol == "udp" and "NodePort" in flow.what
    return own and theirs.outcomes == (DROPPED,) and ours.outcomes == ("refused",)


def _served_by_itself(flow: Flow, theirs: Seen, ours: Seen) -> bool:
    """A pod that is its own endpoint, though its slice places it nowhere, or elsewhere."""
    served = set(ours.outcomes) - set(theirs.outcomes)
    itself = all(
        outcome.startswith("an endpoint") or (outcome.startswith(f"{flow.source}:") and outcome.endswith("<- node"))
        for outcome in served
    )
    return bool(served) and itself and set(theirs.outcomes) - set(ours.outcomes) == {DROPPED}


#: Name of the entry → whether it explains the difference.
DIFFERENCES: dict[str, Callable[[Flow, Seen, Seen], bool]] = {
    "datagrams to NodePorts of the node itself": _refused_not_silent,
    "NodePorts on loopback of a node in the range of pods": _served_from_loopback,
    "a pod that calls itself and is placed nowhere": _served_by_itself,
}


def difference(flow: Flow, theirs: Seen, ours: Seen) -> str | None:
    """Empty: none. The name of a listed difference, or None for one that is not listed."""
    if theirs == ours:
        return ""
    return next((name for name, explains in DIFFERENCES.items() if explains(flow, theirs, ours)), None)
