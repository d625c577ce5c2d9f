# SPDX-License-Identifier: Apache-2.0
"""The reasons for a choice of endpoints, in words; and that they fit the choice."""

from __future__ import annotations

import pytest

from pyebpf_proxy.services.endpoints import (
    LOCAL,
    READY,
    SERVING,
    TERMINATING,
    Hints,
    SliceEndpoint,
    Topology,
    choose_lists,
    cluster_note,
    local_note,
)
from pyebpf_proxy.services.model import Endpoint

HERE = Topology("node-1", "a")
ENDING = SERVING | TERMINATING


def entry(number: int, flags: int = READY | SERVING, zones: str = "", nodes: str = "") -> SliceEndpoint:
    """``zones``, ``nodes``: hints, separated by blanks."""
    hints = Hints(frozenset(zones.split()) or None, frozenset(nodes.split()) or None)
    return SliceEndpoint(Endpoint(bytes([10, 0, 0, number]), 80, bool(flags & LOCAL)), flags, hints)


@pytest.mark.parametrize(
    ("known", "topology", "used", "note"),
    [
        ([entry(1), entry(2)], HERE, {1, 2}, ""),
        ([entry(1, zones="a"), entry(2, zones="b")], HERE, {1}, "topology hints: only endpoints for zone a"),
        (
            [entry(1, zones="a", nodes="node-1"), entry(2, zones="a", nodes="node-2")],
            HERE,
            {1},
            "topology hints: only endpoints for this node",
        ),
        (
            [entry(1, zones="a", nodes="node-1"), entry(2, zones="b")],
            HERE,
            {1},
            "topology hints: only endpoints for zone a",
        ),
        ([entry(1, zones="a"), entry(2)], HERE, {1, 2}, "topology hints are ignored: 10.0.0.2:80 has none"),
        ([entry(1), entry(2, zones="a")], HERE, {1, 2}, "topology hints are ignored: 10.0.0.1:80 has none"),
        ([entry(1, zones="b")], HERE, {1}, "topology hints are ignored: no endpoint is for zone a"),
        (
            [entry(1, zones="b")],
            Topology("node-1", ""),
            {1},
            "topology hints are ignored: the Node has no zone label",
        ),
        (
            [entry(1, nodes="node-2"), entry(2, nodes="node-2", zones="a")],
            HERE,
            {1, 2},
            "topology hints are ignored: no endpoint is for this node, and not all are for a zone",
        ),
        (
            [entry(1, nodes="node-1"), entry(2, zones="a")],
            HERE,
            {1, 2},
            "topology hints are ignored: not all are for zones, nor all for nodes",
        ),
        # Hints of an endpoint that is not ready do not count.
        ([entry(1, zones="a"), entry(2, 0)], HERE, {1}, "topology hints: only endpoints for zone a"),
        (
            [entry(1, ENDING), entry(2, TERMINATING), entry(3, 0)],
            HERE,
            {1},
            "no endpoint on any node is ready: those that terminate, but still serve, are used",
        ),
        ([entry(1, TERMINATING), entry(2, 0)], HERE, set(), ""),
    ],
)
def test_the_note_fits_the_choice(known: list[SliceEndpoint], topology: Topology, used: set[int], note: str) -> None:
    lists = choose_lists(known, topology, cluster=True, local=False, serving=False)
    assert {endpoint.address[-1] for endpoint in lists.cluster} == used
    assert cluster_note(known, topology) == note


def test_the_note_about_the_endpoints_of_this_node() -> None:
    """Hints are not applied to them (spec/service-semantics §3)."""
    assert local_note([entry(1, READY | LOCAL, zones="b"), entry(2, ENDING)]) == ""
    assert local_note([entry(1, LOCAL), entry(2)]) == ""
    ending = "no endpoint on this node is ready: those that terminate, but still serve, are used"
    assert local_note([entry(1, ENDING | LOCAL), entry(2)]) == ending
