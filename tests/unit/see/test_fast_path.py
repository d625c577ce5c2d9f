# SPDX-License-Identifier: Apache-2.0
"""The fast path in ``status`` and ``top``, from fake maps."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from struct import Struct
from typing import Any, cast

import pytest

from pyebpf_proxy.see import fast_path, local, model
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.see.top.fast_path import FastPath, line

STRUCTS = {"fast_path": Struct("=QIIIII"), "sweep_result": Struct("=II"), "permit": Struct("=QQI")}
STRUCTS["exchange_sweep_result"] = Struct("=I")
REASONS = {"NOT_SLOW": 0, "STACK_RULES": 5, "STACK_IPSEC": 7}
SECOND = 10**9
#: The generation of valid permits.
GENERATION = 3


class Table:
    """A map with one value, or with rows."""

    max_entries = 1000

    def __init__(self, value: bytes, rows: bytes = b"") -> None:
        self._value, self._rows = value, rows

    def lookup(self, key: bytes) -> bytes:
        return self._value

    def dump(self) -> tuple[bytes, bytes]:
        return b"", self._rows


class Words(Table):
    """An array of words."""

    def __init__(self, words: tuple[int, ...]) -> None:
        super().__init__(b"".join(word.to_bytes(4, sys.byteorder) for word in words))

    def lookup(self, key: bytes) -> bytes:
        at = 4 * int.from_bytes(key, sys.byteorder)
        return self._value[at : at + 4]


class Maps:
    """Maps with the contents that the programs and the agent write."""

    names = frozenset(fast_path.MAPS)

    def __init__(self) -> None:
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self.alive_until = now + 60 * SECOND
        self.closed4, self.closed6, self.draining = "NOT_SLOW", "NOT_SLOW", False
        self.entries, self.young, self.exchanges = 0, 0, 0
        self.route_marks = (0, 0)
        #: Valid until, also for replies; the generation.
        self.permits: list[tuple[int, int, int]] = []
        self.counted: defaultdict[str, int] = defaultdict(int)

    def permit(self, seconds: float = 60, back: float = 60, generation: int = GENERATION) -> None:
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self.permits.append((now + int(seconds * SECOND), now + int(back * SECOND), generation))

    def packer(self, struct: str, *fields: str) -> Struct:
        return STRUCTS[struct]

    def enum(self, name: str) -> dict[str, int]:
        return REASONS

    def counts(self) -> dict[str, int]:
        return self.counted

    def map(self, name: str) -> Table:
        closed = REASONS[self.closed4], REASONS[self.closed6]
        word = STRUCTS["fast_path"].pack(self.alive_until, 1, GENERATION, *closed, self.draining)
        swept = STRUCTS["sweep_result"].pack(self.entries, self.young)
        rows = b"".join(STRUCTS["permit"].pack(*each) for each in self.permits)
        exchanged = STRUCTS["exchange_sweep_result"].pack(self.exchanges)
        found = {"fast_path": Table(word), "sweep_results": Table(swept), "exchange_sweeps": Table(exchanged)}
        if name == "route_marks":
            return Words(self.route_marks)
        return found.get(name, Table(b"", rows))

    @property
    def pinned(self) -> Pinned:
        return cast(Pinned, self)


@pytest.fixture
def maps() -> Maps:
    return Maps()


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The agent's reply; ``asked``: how often it was requested."""
    answer: dict[str, Any] = {"asked": 0, "closed": {}}

    def state(directory: Path) -> dict[str, Any]:
        answer["asked"] += 1
        return {"datapath": answer}

    monkeypatch.setattr(local, "state", state)
    return answer


def read(maps: Maps, **reported: Any) -> model.FastPathView:
    found = fast_path.read(maps.pinned, maps.counts(), reported)
    assert found is not None
    return found


# ---- status --------------------------------------------------------------------------------------------------


def test_permits_that_are_valid_now_are_counted(maps: Maps) -> None:
    assert read(maps).permits == 0
    maps.permit()
    maps.permit()
    maps.permit(seconds=-0.1)
    maps.permit(back=-0.1)
    maps.permit(generation=GENERATION - 1)
    found = read(maps)
    assert found.permits == 2
    (text,) = fast_path.text(found)
    assert ", 2 permits; " in text


def test_marks_that_choose_routes_are_shown(maps: Maps) -> None:
    assert read(maps).route_marks == {}, "an earlier version has no such map"
    maps.names |= {"route_marks"}
    assert read(maps).route_marks == {}
    maps.route_marks = (0x80, 0)
    found = read(maps)
    assert found.route_marks == {"IPv4": 0x80}
    assert fast_path.text(found)[1].startswith("IPv4: packets with a bit of mark 0x80 take the slow path: ")


def test_flows_of_both_ages_are_told_apart(maps: Maps) -> None:
    maps.entries, maps.young = 61, 12
    text = fast_path.text(read(maps))[0]
    assert text.startswith("12 young flows, about 18 in conntrack, 61 of 1000 entries, ")
    maps.exchanges = 5
    text = fast_path.text(read(maps))[0]
    assert text.startswith("17 young flows, about 18 in conntrack, "), "exchanges have no entries"


def test_status_names_the_rule_that_closes_a_family(maps: Maps) -> None:
    maps.closed6 = "STACK_RULES"
    rule = {"reason": "stack_rules", "text": "table ip6 filter, chain FORWARD: limit"}
    assert fast_path.text(read(maps, closed={"6": rule}))[1:] == [f"closed for IPv6: stack_rules, {rule['text']}"]
    # The agent's text for another reason is outdated.
    maps.closed6 = "STACK_IPSEC"
    assert fast_path.text(read(maps, closed={"6": rule}))[1:] == ["closed for IPv6: stack_ipsec"]


# ---- top -----------------------------------------------------------------------------------------------------


def test_top_shows_the_flow_table_and_the_paths_of_new_flows(maps: Maps, reported: dict[str, Any]) -> None:
    maps.counted |= {"new_flow_fast": 1000, "new_flow_netfilter": 50}
    shown = FastPath(maps.pinned, Path("/run/nowhere"))
    maps.entries, maps.young = 6824, 12
    maps.permit()
    maps.counted |= {"new_flow_fast": 1080, "new_flow_netfilter": 52, "new_flow_socket": 2}
    found = shown.look(2.0)
    assert found is not None
    assert found.new_flows == {"fast": 40, "netfilter": 1, "socket": 1}
    assert line(found) == (
        "fast path: open · young 12 · kernel 3400 · permits 1 · new flows a second: 40 fast, 1 netfilter, 1 socket"
    )
    again = shown.look(2.0)
    assert again is not None
    assert again.new_flows == {"fast": 0, "netfilter": 0, "socket": 0}
    assert line(again) == "fast path: open · young 12 · kernel 3400 · permits 1"
    assert reported["asked"] == 0, "the agent has other work"


def test_top_names_the_rule_that_closes_a_family(maps: Maps, reported: dict[str, Any]) -> None:
    shown = FastPath(maps.pinned, Path("/run/nowhere"))

    def state() -> str:
        return line(shown.look(1.0)).partition(" · ")[0]

    reported["closed"] = {"4": {"reason": "stack_rules", "text": "table ip filter, chain FORWARD: limit"}}
    maps.closed4 = "STACK_RULES"
    assert state() == "fast path: closed for IPv4: stack_rules, table ip filter, chain FORWARD: limit"
    maps.closed6 = "STACK_IPSEC"
    assert state().endswith("chain FORWARD: limit; closed for IPv6: stack_ipsec")
    maps.closed4 = "STACK_IPSEC"
    assert state() == "fast path: closed: stack_ipsec"
    maps.closed4 = maps.closed6 = "NOT_SLOW"
    maps.draining = True
    assert state() == "fast path: draining"
    asked = reported["asked"]
    maps.alive_until = 0
    assert state() == "fast path: closed: stack_no_agent, no agent follows rules and routes"
    assert reported["asked"] == asked, "there is no fast path"


def test_top_reports_a_missing_fast_path(maps: Maps) -> None:
    maps.names = frozenset()
    shown = FastPath(maps.pinned, Path("/run/nowhere"))
    assert line(shown.look(1.0)) == "fast path: off"


@pytest.mark.parametrize("count", [0, 900])
def test_counters_that_were_reset_give_no_negative_rate(maps: Maps, count: int) -> None:
    maps.counted["new_flow_fast"] = 1000
    shown = FastPath(maps.pinned, Path("/run/nowhere"))
    maps.counted["new_flow_fast"] = count
    found = shown.look(1.0)
    assert found is not None
    assert found.new_flows["fast"] == 0
