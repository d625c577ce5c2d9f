# SPDX-License-Identifier: Apache-2.0
"""Which changes one sync plans: those of one namespace only for a limited time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyebpf_proxy.agent.backlog import FIRST, MOST, NAMESPACE_SECONDS, Backlog
from pyebpf_proxy.kube.source import Change, Kind


class Costs:
    """A clock, and a planner that takes ``seconds`` for each change of namespace ``tenant``."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self._seconds = seconds
        self.backlog = Backlog(lambda: self.now)

    def put(self, namespace: str, number: int, kind: Kind = "Service", first: int = 0) -> None:
        for i in range(first, first + number):
            self.backlog.put(Change(kind, namespace, f"s{i}", None))

    def sync(self) -> list[Change]:
        """What one sync plans."""
        planned = []
        for portion in self.backlog.portions():
            planned += portion
            self.now += self._seconds * sum(change.namespace == "tenant" for change in portion)
        return planned


def test_changes_of_a_namespace_that_take_long_leave_time_for_others() -> None:
    costs = Costs(NAMESPACE_SECONDS)
    costs.put("tenant", 100)
    costs.put("victim", 1)
    costs.put("", 1, "Node")
    planned = costs.sync()
    assert planned[0].kind == "Node"
    assert [change.namespace for change in planned[1:]] == ["tenant"] * FIRST + ["victim"]
    costs.put("victim", 1)
    assert costs.sync()[-1].namespace == "victim", "what has changed meanwhile is in the next sync"
    names = [change.name for _ in range(100) for change in costs.sync()]
    assert names == [f"s{i}" for i in range(2 * FIRST, 100)], "nothing is lost, and the order stays"
    assert not costs.backlog


def test_a_cheap_beginning_does_not_admit_all_the_rest_at_once() -> None:
    costs = Costs(0.0)
    costs.put("tenant", 10_000)
    sizes = [len(portion) for portion in costs.backlog.portions()]
    assert sizes[:3] == [FIRST, 2 * FIRST, 4 * FIRST]
    assert max(sizes) == MOST
    assert sum(sizes) == 10_000


def test_a_change_that_waits_is_replaced_by_a_later_one_of_the_object() -> None:
    costs = Costs(NAMESPACE_SECONDS)
    costs.put("tenant", FIRST + 1)
    costs.sync()
    costs.put("tenant", 1, first=FIRST)
    assert [change.name for change in costs.sync()] == [f"s{FIRST}"]


@pytest.mark.parametrize("take", [Backlog.all, lambda backlog: [c for part in backlog.portions() for c in part]])
def test_everything_is_taken_once(take: Callable[[Backlog], list[Change]]) -> None:
    costs = Costs(0.0)
    costs.put("tenant", 3, "EndpointSlice")
    costs.put("victim", 2)
    assert costs.backlog.slices() == {("tenant", "s0"), ("tenant", "s1"), ("tenant", "s2")}
    assert len(take(costs.backlog)) == 5
    assert not costs.backlog
    assert costs.backlog.slices() == set()
