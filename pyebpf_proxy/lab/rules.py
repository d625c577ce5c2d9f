# SPDX-License-Identifier: Apache-2.0
"""The expected result of a request, computed from the rules (spec/service-semantics §5).

Tests and the demo compare real outcomes with this model. It knows Services and pods, but no programs and maps.
``see.decide`` applies the same rules to the maps of a node for ``explain``; tests also compare it with this module.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from pyebpf_proxy.lab.cluster import Node, Pod

Destination = Literal["ClusterIP", "ExternalIP", "LoadBalancer", "NodePort"]
SourceClass = Literal["pod", "node", "external"]


class Decision(NamedTuple):
    """A row of the decision table: the endpoints, and whether the source is masqueraded (apart from hairpin)."""

    endpoints: Literal["cluster", "local"]
    masquerade: bool


def decide(
    destination: Destination,
    source: SourceClass,
    *,
    external_local: bool = False,
    internal_local: bool = False,
    masquerade_all: bool = False,
    detector: bool = True,
) -> Decision:
    """The decision table for a service with endpoints. Without a detector, a pod counts as an external source."""
    if not detector and source == "pod":
        source = "external"
    if destination == "ClusterIP":
        return Decision("local" if internal_local else "cluster", masquerade_all or (detector and source != "pod"))
    if not external_local:
        return Decision("cluster", True)
    if source == "pod":
        return Decision("cluster", False)
    if source == "node":
        return Decision("cluster", True)
    return Decision("local", False)


class Expected(NamedTuple):
    """The pods that may answer, and the source address that each of them must see."""

    sources: dict[str, str]  # pod name -> address; empty: none
    failure: Literal["", "refused", "timed out"] = ""


def expect(
    family: int,
    decision: Decision,
    entrance: Node,
    source: str,
    endpoints: Collection[Pod],
    *,
    own_process: bool = False,
) -> Expected:
    """The expected result of a request that the node ``entrance`` handles.

    ``source``: the client's address. ``own_process``: the client is a process of the node. It is connected directly to
    the endpoint, without NAT, so the node's routes select its source. ``endpoints``: all ready endpoints.
    """
    if not endpoints:
        return Expected({}, "refused")
    chosen = [pod for pod in endpoints if decision.endpoints == "cluster" or pod.node is entrance]
    if not chosen:
        return Expected({}, "timed out")
    sources = {}
    for pod in chosen:
        hairpin = pod.address.of(family) == source
        translated = decision.masquerade or hairpin or own_process
        sources[pod.name] = entrance.source_towards(pod).of(family) if translated else source
    return Expected(sources)
