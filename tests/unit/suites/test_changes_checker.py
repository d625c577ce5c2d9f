# SPDX-License-Identifier: Apache-2.0
"""The checker of changes under load detects each kind of violation, and accepts everything that is allowed."""

from __future__ import annotations

import pytest

from tests.changes.checker import (
    ANSWERED,
    BROKEN,
    GRACE,
    REMEMBERED,
    Entries,
    Record,
    Stall,
    Timeline,
    check,
    check_misled,
    check_transfers,
)
from tests.changes.model import (
    REFUSED,
    SILENT,
    UNANSWERED,
    UNREACHABLE,
    Addresses,
    Allowed,
    Endpoint,
    State,
    Target,
    allowed,
)

VIP = Target("external", "LoadBalancer", 4, 1, 80, "shop")
PORT = Target("external", "NodePort", 4, 0, 30080, "shop")
ONE, TWO, BOTH = (Allowed(frozenset(names)) for names in (["one:1"], ["two:1"], ["one:1", "two:1"]))
NONE = Allowed(frozenset(), frozenset({REFUSED}))
DROPPED = Allowed(frozenset(), frozenset({SILENT}))
MS = 0.001


def timeline(*phases: Allowed, sticky: bool = False) -> Timeline:
    """Phases of a second each; each is programmed 100 ms after it was requested."""
    made = Timeline()
    for number, rule in enumerate(phases):
        made.change(f"phase {number}", float(number), number + 0.1, [rule] * 2, [sticky] * 2)
    return made


def judged(line: Timeline, *records: Record, stalls: tuple[Stall, ...] = ()) -> list[str]:
    return [violation.rule for violation in check(line, [VIP, PORT], records, stalls)]


def at(
    begun: float, name: str = "one:1", took: float = MS, end: str = ANSWERED, count: int = 0, target: int = 0
) -> Record:
    return Record(begun, begun + took, target, end, name if end == ANSWERED else "", count)


def test_allowed_outcomes_are_no_violation() -> None:
    line = timeline(ONE, BOTH, TWO)
    assert judged(line, at(0.5), at(1.05, "two:1"), at(1.5), at(1.6, "two:1"), at(2.05), at(2.5, "two:1")) == []


@pytest.mark.parametrize(
    ("begun", "took", "rule"),
    [
        (2 - 2 * MS, MS, []),
        (2.1 + GRACE - MS, MS / 2, []),  # the last moment
        (2.1 + GRACE + MS, MS, ["late"]),
        (2.5, MS, ["late"]),
        (2.1, 1.0, []),  # it began in time, and a busy machine let it end late
    ],
)
def test_a_removed_endpoint_may_answer_until_the_change_is_certain(begun: float, took: float, rule: list[str]) -> None:
    assert judged(timeline(ONE, BOTH, TWO), at(begun, took=took)) == rule


@pytest.mark.parametrize(("begun", "took", "rule"), [(1 - 3 * MS, MS, ["early"]), (1 - MS, 3 * MS, []), (1.0, MS, [])])
def test_a_new_endpoint_may_not_answer_before_it_was_requested(begun: float, took: float, rule: list[str]) -> None:
    assert judged(timeline(ONE, BOTH), at(begun, "two:1", took=took)) == rule


@pytest.mark.parametrize(
    ("since", "port", "target", "name", "rule"),
    [
        (REMEMBERED - MS, 4000, 0, "one:1", []),
        (REMEMBERED + MS, 4000, 0, "one:1", ["late"]),
        (-MS / 2, 4000, 0, "one:1", ["late"]),  # it still existed
        (1.0, 4001, 0, "one:1", ["late"]),
        (1.0, 4000, 1, "one:1", ["late"]),
        (1.0, 4000, 0, "three:1", ["late"]),
    ],
)
def test_a_reused_port_may_meet_the_old_entry(since: float, port: int, target: int, name: str, rule: list[str]) -> None:
    """Only the same port to the same address, soon, and only to the server that answered before."""
    line = timeline(Allowed(frozenset({"one:1", "three:1"})), TWO)
    late = at(1.5)._replace(port=4000)
    before = at(1.5 - since - MS, name, target=target)._replace(port=port)
    entries = Entries([before, late])
    assert [violation.rule for violation in check(line, [VIP, PORT], [late], entries=entries)] == rule
    assert entries.excused == (not rule)


def test_old_entries_affect_few_connections() -> None:
    """If there are more than machines show, connections reached the wrong server for another reason, and the course
    fails.
    """

    def led(count: int) -> Entries:
        """So many connections that each meet an older entry."""
        line = timeline(ONE, TWO)
        before = [at(1.0)._replace(port=4000 + number) for number in range(count)]
        late = [at(1.5)._replace(port=4000 + number) for number in range(count)]
        entries = Entries([*before, *late])
        assert check(line, [VIP, PORT], late, entries=entries) == []
        assert entries.excused == count
        return entries

    assert check_misled(led(2), 5000) == []
    assert [violation.rule for violation in check_misled(led(3), 5000)] == ["misled"]
    assert check_misled(led(3), 60_000) == []
    assert [violation.rule for violation in check_misled(led(4), 60_000)] == ["misled"]


def test_a_violation_names_simultaneous_connections_and_the_last_one_of_the_port() -> None:
    former, simultaneous, late = (at(begun)._replace(port=4000) for begun in (0.5, 1.5 + 3 * MS, 1.5))
    line = timeline(ONE, TWO)
    records = [former, simultaneous._replace(name="two:1", port=4001), late]
    (found,) = check(line, [VIP, PORT], records, entries=Entries([late]))
    assert "certain for 350.0 ms" in found.text
    assert found.text.endswith(f"; at that moment -1000.0 ms {VIP}: answered one:1; +3.0 ms {VIP}: answered two:1")


def test_an_answer_of_an_unknown_server_is_wrong() -> None:
    assert judged(timeline(ONE, BOTH), at(0.5, "three:1"), at(0.6, "one:2")) == ["wrong", "wrong"]


def test_a_connection_is_refused_only_while_that_is_allowed() -> None:
    line = timeline(ONE, NONE, ONE)
    ends = [at(moment, end=REFUSED) for moment in (0.5, 0.98, 1.01, 1.5, 2.05, 2.2)]
    assert judged(line, *ends) == ["refused", "refused", "refused"]
    assert judged(line, at(1.5)) == ["late"]  # an answer when it must be refused
    assert judged(line, at(1.5, end=SILENT, took=4)) == ["silent"]


def test_only_dropped_connections_may_stay_unanswered() -> None:
    line = timeline(ONE, DROPPED, ONE)
    assert judged(line, at(1.5, end=SILENT, took=4), at(1.2, took=1.5, count=1)) == []
    assert judged(line, at(0.5, end=SILENT, took=0.3)) == ["silent"]
    # The change came while it waited; its lost first packets are still a violation.
    assert judged(line, at(0.05, end=SILENT, took=4)) == ["silent"]


def test_a_lost_packet_is_seen_although_the_connection_was_made() -> None:
    line = timeline(ONE)
    assert judged(line, at(0.5, took=1.02, count=1)) == ["lost"]
    assert judged(line, at(0.5, took=1.02, count=1), stalls=(Stall(0.6, 1.5),)) == []
    assert judged(line, at(0.5, took=1.02, count=1), stalls=(Stall(0.6, 0.7), Stall(2, 3))) == ["lost"]
    assert judged(line, at(0.5, took=1.02)) == []


def test_an_ipv6_client_may_miss_the_first_refusal() -> None:
    line = timeline(NONE, ONE)
    late = at(0.95, took=1.02, count=1)
    assert judged(line, late) == ["lost"]
    assert not check(line, [VIP._replace(family=6)], [late])


def test_a_broken_connection_is_always_wrong() -> None:
    assert judged(timeline(ONE, NONE), at(0.5, end=BROKEN), at(1.5, end=BROKEN)) == ["broken", "broken"]


def test_an_unused_address_must_not_answer() -> None:
    line = timeline(ONE, Allowed(frozenset(), UNANSWERED))
    assert judged(line, at(1.5, end=UNREACHABLE), at(1.5, end=REFUSED), at(1.5, end=SILENT, took=4)) == []
    assert judged(line, at(1.5), at(0.5, end=UNREACHABLE)) == ["late", "unreachable"]


def test_affinity_is_one_endpoint_for_all_addresses_of_the_service() -> None:
    line = timeline(BOTH, BOTH, sticky=True)
    assert judged(line, at(0.5), at(0.6, target=1)) == []
    assert judged(line, at(0.5), at(0.6, "two:1", target=1)) == ["affinity"]
    # Another change does not end affinity.
    assert judged(line, at(0.5), at(1.5, "two:1")) == ["affinity"]
    # While affinity begins, two connections at a time may both be the first.
    assert judged(line, at(0.05), at(0.06, "two:1"), at(0.5)) == []


def test_affinity_ends_with_the_endpoint() -> None:
    line = timeline(BOTH, TWO, BOTH, sticky=True)
    assert judged(line, at(0.5), at(1.5, "two:1"), at(2.5, "two:1")) == []
    assert judged(line, at(0.5), at(1.5, "two:1"), at(2.5)) == ["affinity"]


def test_every_allowed_server_must_be_chosen_sometimes() -> None:
    many = [at(0.5 + i * MS) for i in range(48)]
    assert judged(timeline(BOTH), *many) == ["unused", "unused"]
    assert judged(timeline(BOTH), *many[:47]) == []
    others = [VIP, PORT._replace(source="pod")]
    half = [record._replace(target=index % 2) for index, record in enumerate(many)]
    assert [violation.rule for violation in check(timeline(BOTH), others, half)] == ["unused"]


def test_a_server_that_answers_when_the_phase_is_over_was_chosen() -> None:
    many = [at(0.5 + i * MS) for i in range(48)]
    line = timeline(BOTH, BOTH)
    assert judged(line, *many, at(0.6, "two:1", took=0.6)) == []
    # A later choice does not count.
    assert judged(line, *many, at(1.05, "two:1")) == ["unused", "unused"]
    assert judged(timeline(BOTH), *many, at(0.7, "two:1")) == []
    assert judged(timeline(BOTH, sticky=True), *many) == []


def test_a_change_before_the_last_is_certain_is_no_timeline() -> None:
    line = timeline(ONE)
    with pytest.raises(ValueError, match="phase two: asked for before phase 0 was certain"):
        line.change("phase two", 0.1, 0.2, [ONE, ONE])


def test_long_connections_end_only_with_their_server() -> None:
    def broken(name: str, ended: float, end: str = BROKEN) -> list[str]:
        found = check_transfers([VIP], [Record(0, ended, 0, end, name, 7)], [("one", 5.0)])
        return [violation.rule for violation in found]

    assert broken("one:1", 5.1) == []
    assert broken("one:1", 4.9) == ["transfer"]
    assert broken("two:1", 5.1) == ["transfer"]
    assert broken("one:1", 5.1, SILENT) == ["transfer"]
    assert broken("one:1", 9.0, ANSWERED) == []


# ---- the rules themselves --------------------------------------------------------

HERE, THERE = Endpoint("here", "node1"), Endpoint("there", "node2")
SHOP = State(Addresses(1, 1, 101, 80, 30080), (HERE, THERE))
POD_IP = Target("pod", "ClusterIP", 4, 1, 80, "shop")


def names(state: State, target: Target = VIP) -> set[str]:
    return {name.partition(":")[0] for name in allowed(state, target, "node1").names}


def test_lists_of_endpoints() -> None:
    assert names(SHOP) == {"here", "there"}
    assert names(SHOP._replace(endpoints=(HERE, THERE.ending()))) == {"here"}
    assert names(SHOP._replace(endpoints=(HERE.ending(), THERE.starting()))) == {"here"}
    local = SHOP._replace(external_local=True, internal_local=True)
    assert names(local) == names(local, POD_IP) == {"here"}
    assert names(local, VIP._replace(source="pod")) == {"here", "there"}
    # The local list's fallback ignores remote endpoints.
    assert names(local._replace(endpoints=(HERE.ending(), THERE))) == {"here"}
    assert allowed(local._replace(endpoints=(THERE,)), VIP, "node1").ends == {SILENT}
    assert allowed(local._replace(endpoints=(THERE.starting(),)), VIP, "node1").ends == {REFUSED}
    assert allowed(SHOP._replace(endpoints=()), PORT, "node1") == NONE
    assert allowed(SHOP._replace(endpoints=()), VIP._replace(source="node"), "node1").ends == UNANSWERED


def test_hints() -> None:
    hinted = SHOP._replace(endpoints=(HERE._replace(zone="a"), THERE._replace(zone="b")))
    assert names(hinted) == {"here", "there"}
    assert names(hinted._replace(zone="b")) == {"there"}
    assert names(hinted._replace(zone="c")) == {"here", "there"}
    assert names(hinted._replace(zone="b", external_local=True)) == {"here"}
    assert names(hinted._replace(zone="b", endpoints=(HERE, THERE._replace(zone="b")))) == {"here", "there"}


def test_addresses() -> None:
    assert names(SHOP, PORT) == {"here", "there"}
    for changed in (
        SHOP._replace(exists=False),
        SHOP._replace(addresses=SHOP.addresses._replace(vip=2)),
        SHOP._replace(addresses=SHOP.addresses._replace(port=81)),
    ):
        assert allowed(changed, VIP, "node1") == Allowed(frozenset(), UNANSWERED)
    assert allowed(SHOP._replace(target_port=8081), VIP, "node1").names == {"here:8081", "there:8081"}
