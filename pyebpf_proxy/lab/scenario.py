# SPDX-License-Identifier: Apache-2.0
"""Requests from a client to a target, and the comparison of their outcomes with the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.client import ANSWERED, Outcome, ask
from pyebpf_proxy.lab.cluster import Node, Pod
from pyebpf_proxy.lab.namespace import Namespace
from pyebpf_proxy.lab.rules import Decision, Destination, Expected, SourceClass, expect

MAX_REQUESTS = 64  # enough: in one of 2^63 runs, one of two endpoints would never be selected by chance
DROPPED_AFTER = 0.7  # seconds without an answer that count as a drop, if one is expected


class Client(NamedTuple):
    """The client: a pod, a node, or the outside client."""

    name: str
    namespace: Namespace
    kind: SourceClass
    address: Dual
    node: Node | None  # the node that handles its packets; None: the node to which they are sent


class Target(NamedTuple):
    """The destination: a frontend address of a service."""

    name: str
    kind: Destination
    address: Dual
    ports: dict[str, int]  # by protocol
    endpoints: tuple[Pod, ...]
    entrance: Node  # the node where packets from outside arrive
    external_local: bool = False
    internal_local: bool = False
    families: tuple[int, ...] = (4, 6)


class Observed(NamedTuple):
    """The outcomes, and the problem with them; "" if there is none."""

    outcomes: list[Outcome]
    expected: Expected
    problem: str


def observe(
    client: Client, target: Target, family: int, protocol: str, decision: Decision, patience: float = 4.0
) -> Observed:
    """Send requests until every permitted endpoint has answered, or an outcome is not as expected.

    ``patience``: seconds to wait for an expected answer.
    """
    entrance = client.node or target.entrance
    own = client.kind == "node"
    wanted = expect(family, decision, entrance, client.address.of(family), target.endpoints, own_process=own)
    timeout = DROPPED_AFTER if wanted.failure == "timed out" else patience
    address, port = target.address.of(family), target.ports[protocol]
    outcomes: list[Outcome] = []
    silent = set(wanted.sources)
    while len(outcomes) < MAX_REQUESTS:
        outcomes.append(client.namespace.call(ask, address, port, protocol, timeout=timeout))
        if outcomes[-1].answer:
            silent.discard(outcomes[-1].answer.pod)
        if not silent or outcomes[-1].kind != ANSWERED:
            break
    return Observed(outcomes, wanted, _compare(wanted, outcomes))


def _compare(wanted: Expected, outcomes: Sequence[Outcome]) -> str:
    for outcome in outcomes:
        if wanted.failure:
            if outcome.kind != wanted.failure:
                return f"{outcome}, must be {wanted.failure}"
        elif outcome.answer is None:
            return str(outcome)
        elif outcome.answer.pod not in wanted.sources:
            return f"{outcome.answer.pod} must not answer"
        elif outcome.answer.peer[0] != wanted.sources[outcome.answer.pod]:
            return f"{outcome.answer.pod} must see {wanted.sources[outcome.answer.pod]}, not {outcome.answer.peer[0]}"
    silent = set(wanted.sources) - {outcome.answer.pod for outcome in outcomes if outcome.answer}
    return f"{', '.join(sorted(silent))} never answered in {len(outcomes)} requests" if silent else ""
