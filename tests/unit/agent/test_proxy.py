# SPDX-License-Identifier: Apache-2.0
"""The agent's loop: what is programmed, when, and in which order. The other packages are recording fakes."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import nullcontext

import pytest

from pyebpf_proxy.agent import proxy
from pyebpf_proxy.agent.proxy import Delta, Proxy
from pyebpf_proxy.common.errors import DatapathError, FatalError
from pyebpf_proxy.config import flags
from pyebpf_proxy.config.complete import complete
from pyebpf_proxy.config.effective import Effective, effective
from pyebpf_proxy.kube.events import ObjectReference
from pyebpf_proxy.kube.source import Batch, Change
from pyebpf_proxy.services.losses import LossMessage
from pyebpf_proxy.services.model import IPFamily, Protocol, ServicePort, ServicePortName
from pyebpf_proxy.services.node_facts import NodeFacts
from tests.support.logs import Log, Message


def name(text: str) -> ServicePortName:
    return ServicePortName("ns", text, "", Protocol.TCP, IPFamily.IPV4)


def change(text: str, gone: bool = False) -> Change:
    # The planner below only reads the name.
    return Change("Service", "ns", text, None if gone else object())  # type: ignore[arg-type]


class Script:
    """A source that runs a coroutine function."""

    def __init__(self, play: Callable[[Callable[[Batch], None]], Awaitable[None]]) -> None:
        self._play = play

    async def run(self, deliver: Callable[[Batch], None]) -> None:
        await self._play(deliver)
        await asyncio.Event().wait()


class Names:
    """A planner that makes one service port of every change."""

    lost = 0

    def __init__(self) -> None:
        self._ports: dict[ServicePortName, ServicePort] = {}
        #: ``next_zone`` becomes ``zone`` with the next update.
        self.zone = self.next_zone = ""
        self.updates: list[list[Change]] = []
        self.messages: tuple[list[LossMessage], list[LossMessage]] = ([], [])

    def new_holders(self) -> Collection[tuple[str, str]]:
        return ()

    def new_messages(self) -> tuple[list[LossMessage], list[LossMessage]]:
        messages, self.messages = self.messages, ([], [])
        return messages

    @property
    def names(self) -> Iterable[ServicePortName]:
        return self._ports.keys()

    def get(self, name: ServicePortName) -> ServicePort | None:
        return self._ports.get(name)

    def oldest_first(self) -> Iterable[ServicePortName]:
        return sorted(self._ports, reverse=True)

    def update(self, changes: Iterable[Change]) -> Delta:
        changes = list(changes)
        self.updates.append(changes)
        self.zone = self.next_zone
        delta = {
            name(c.name): None if c.object is None else ServicePort(name=name(c.name), frontends=()) for c in changes
        }
        self._ports.update({key: port for key, port in delta.items() if port is not None})
        for key in [key for key, port in delta.items() if port is None]:
            self._ports.pop(key, None)
        return delta


class Recorder:
    """A data plane that records its calls; ``failures`` syncs fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.failures = self.failing_collects = 0
        self.node_failures = 0
        self.fail_start = False
        self.overwritten = False
        self.problems: list[str] = []

    def start(self, facts: NodeFacts, wanted: Delta) -> Collection[str]:
        if self.fail_start:
            raise DatapathError("no bpffs; mount one")
        self.calls.append(("start", sorted(n.name for n in wanted)))
        self.order = [n.name for n in wanted]
        return self.problems

    def apply(self, delta: Delta, complete: bool = False) -> Collection[str]:
        if self.failures:
            self.failures -= 1
            raise DatapathError("refused")
        call = "apply all" if complete else "apply"
        self.calls.append((call, sorted(n.name if p else f"-{n.name}" for n, p in delta.items())))
        return self.problems

    def node_changed(self, facts: NodeFacts) -> None:
        if self.node_failures:
            self.node_failures -= 1
            raise DatapathError("interval overlaps")
        self.calls.append(("node", []))

    def refresh(self) -> bool:
        self.calls.append(("refresh", []))
        overwritten, self.overwritten = self.overwritten, False
        return overwritten

    async def collect(self) -> None:
        self.calls.append(("collect", []))
        if self.failing_collects:
            self.failing_collects -= 1
            raise DatapathError("refused")


class Counter:
    def __init__(self) -> None:
        self.changes = self.asked = self.planned_ports = 0
        self.complete: list[bool] = []
        self.syncs: list[bool] = []
        self.full: list[bool] = []
        self.problems: list[int] = []
        self.waiting: list[int] = []

    def changed(self, changes: Sequence[Change], complete: bool) -> None:
        self.changes += len(changes)
        self.complete.append(complete)

    def queued(self) -> None:
        self.asked += 1

    def planned(self, delta: Delta) -> None:
        self.planned_ports += len(delta)

    def synced(self, seconds: float, ok: bool, full: bool, problems: int, waiting: Collection[tuple[str, str]]) -> None:
        self.syncs.append(ok)
        self.full.append(full)
        self.problems.append(problems)
        self.waiting.append(len(waiting))

    def period_passed(self) -> None:
        pass


def settings(minimum: str = "1ms", retry: str = "1000ms") -> Effective:
    config = complete(flags.parse([]), lambda text, file: None)
    section = config.iptables.model_copy(
        update={"min_sync_period": int(float(minimum[:-2]) * 1e6), "sync_period": int(float(retry[:-2]) * 1e6)}
    )
    return effective(config.model_copy(update={"iptables": section}), flags.parse([]))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


class RecordedAgent:
    def __init__(self) -> None:
        self.datapath = Recorder()
        self.metrics = Counter()
        self.facts = NodeFacts()
        self.planner = Names()
        self.events: list[tuple[object, ...]] = []

    def event(self, *of: object) -> None:
        self.events.append(of)

    def run(self, play: Callable[[Callable[[Batch], None]], Awaitable[None]], effective: Effective) -> None:
        """Run ``play``, then end the agent by SIGTERM."""

        async def play_then_stop(deliver: Callable[[Batch], None]) -> None:
            await play(deliver)
            os.kill(os.getpid(), signal.SIGTERM)

        async def main() -> None:
            source = Script(play_then_stop)
            proxy = Proxy(effective, source, self.planner, self.datapath, self.metrics, lambda: self.facts, events=self)
            await proxy.run()

        asyncio.run(main())

    def applied(self) -> list[list[str]]:
        return [what for call, what in self.datapath.calls if call.startswith("apply")]


@pytest.fixture
def agent() -> RecordedAgent:
    return RecordedAgent()


def test_nothing_is_programmed_before_everything_has_been_listed(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([change("a")], complete=False))
        await asyncio.sleep(0.05)
        assert agent.datapath.calls == []
        assert agent.metrics.asked == 0
        deliver(Batch([change("b")], complete=True))
        await until(lambda: bool(agent.datapath.calls))

    agent.run(play, settings())
    assert agent.datapath.calls[0] == ("start", ["a", "b"])
    assert agent.datapath.order == ["b", "a"], "the order of the planner, not that of the lists"
    assert agent.metrics.changes == agent.metrics.planned_ports == 2
    assert agent.metrics.complete == [False, True]
    assert agent.metrics.syncs == [True]


def test_an_empty_folder_is_a_complete_list(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await until(lambda: bool(agent.datapath.calls))

    agent.run(play, settings())
    assert agent.datapath.calls[0] == ("start", [])


def test_changes_inside_the_minimum_period_are_one_sync(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([change("a")], complete=True))
        await until(lambda: bool(agent.datapath.calls))
        for letter in "bcd":
            deliver(Batch([change(letter)], complete=True))
            await asyncio.sleep(0)
        deliver(Batch([change("b", gone=True)], complete=True))
        await until(lambda: bool(agent.applied()))

    # Much longer than a busy machine needs between the two changes.
    agent.run(play, settings(minimum="400ms", retry="5000ms"))
    assert agent.applied() == [["-b", "c", "d"]]


def test_after_a_failed_sync_everything_is_compared_again(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([change("a")], complete=True))
        await until(lambda: bool(agent.datapath.calls))
        agent.datapath.failures = 2
        deliver(Batch([change("b")], complete=True))
        await until(lambda: bool(agent.applied()))
        deliver(Batch([change("c")], complete=True))
        await until(lambda: len(agent.applied()) == 2)

    agent.run(play, settings(retry="20ms"))
    calls = [call for call in agent.datapath.calls if call[0].startswith("apply")]
    assert calls == [("apply all", ["a", "b"]), ("apply", ["c"])]
    assert agent.metrics.syncs == [True, False, False, True, True]
    assert agent.metrics.full == [True, False, True, True, False]


def test_a_sync_that_applies_another_zone_is_full(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([change("a")], complete=True))
        await until(lambda: bool(agent.datapath.calls))
        for number, zone in enumerate(("", "z1", "z1", "z2"), 1):
            agent.planner.next_zone = zone
            deliver(Batch([change("b", gone=number % 2 == 0)], complete=True))
            await until(lambda number=number: len(agent.applied()) == number)  # type: ignore[misc]

    agent.run(play, settings())
    assert agent.metrics.full == [True, False, True, False, True]


def test_facts_that_cannot_be_applied_are_a_problem_and_services_still_change(
    agent: RecordedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([change("a")], complete=True))
        await until(lambda: bool(agent.datapath.calls))
        agent.datapath.node_failures = 2
        agent.facts = NodeFacts(node_ips={IPFamily.IPV4: b"\n\0\0\1"})
        deliver(Batch([change("b")], complete=True))
        await until(lambda: bool(agent.applied()))
        assert ("node", []) not in agent.datapath.calls
        # Without another change of objects: again until it succeeds.
        await until(lambda: ("node", []) in agent.datapath.calls and len(agent.metrics.problems) > 3)

    agent.run(play, settings(retry="20ms"))
    assert agent.applied()[0] == ["b"]
    assert all(agent.metrics.syncs)
    assert agent.metrics.problems[:3] == [0, 1, 1]
    assert agent.metrics.problems[-1] == 0
    Log(caplog).only("interval overlaps", level="error")


def test_an_error_at_the_start_ends_the_agent_with_the_reason(agent: RecordedAgent) -> None:
    agent.datapath.fail_start = True

    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await asyncio.sleep(5)

    with pytest.raises(FatalError, match="no bpffs; mount one"):
        agent.run(play, settings())


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_collection_is_off_during_the_first_sync(
    agent: RecordedAgent, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    searched: list[tuple[str, bool]] = []

    def noting(owner: object, method: str) -> None:
        really = getattr(owner, method)

        def note(*given: object, **named: object) -> object:
            searched.append((method, gc.isenabled()))
            return really(*given, **named)

        monkeypatch.setattr(owner, method, note)

    noting(Names, "update")
    noting(agent.datapath, "start")
    noting(agent.datapath, "apply")
    noting(gc, "freeze")
    agent.datapath.fail_start = fails

    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([change("a")], complete=True))
        await until(lambda: bool(agent.datapath.calls))
        deliver(Batch([change("b")], complete=True))
        await until(lambda: bool(agent.applied()))

    assert gc.isenabled()
    with pytest.raises(FatalError) if fails else nullcontext():
        agent.run(play, settings())
    assert gc.isenabled()
    first = [("update", False), ("start", False)]
    later = [("freeze", False), ("update", True), ("apply", True)]
    assert searched == first + ([] if fails else later)


def test_new_node_facts_reach_the_data_plane_before_changes_of_the_same_batch(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await until(lambda: bool(agent.datapath.calls))
        agent.facts = NodeFacts(node_ips={IPFamily.IPV4: b"\n\0\0\1"})
        deliver(Batch([change("a")], complete=True))
        await until(lambda: bool(agent.applied()))

    agent.run(play, settings())
    calls = [call for call, _ in agent.datapath.calls if call != "collect"]
    assert calls == ["start", "node", "apply"]


@pytest.mark.parametrize("known", [True, False])
def test_a_node_whose_addresses_are_unknown_is_reported(
    agent: RecordedAgent, known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if known:
        agent.facts = NodeFacts(node_ips={IPFamily.IPV4: b"\n\0\0\1"})

    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await until(lambda: bool(agent.datapath.calls))

    agent.run(play, settings())
    assert bool(Log(caplog).lines(Message.NO_ADDRESS_OF_NODE)) is not known


def test_removals_wait_for_an_idle_moment(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await until(lambda: ("collect", []) in agent.datapath.calls)

    agent.run(play, settings())
    assert [call for call, _ in agent.datapath.calls] == ["start", "collect"]


def test_removals_that_failed_are_repeated_without_a_change(
    agent: RecordedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "COLLECT_AGAIN_SECONDS", 0.01)
    agent.datapath.failing_collects = 2

    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await until(lambda: agent.datapath.calls.count(("collect", [])) == 3)

    agent.run(play, settings())
    assert [call for call, _ in agent.datapath.calls] == ["start", "collect", "collect", "collect"]


def test_a_change_during_a_removal_is_followed_by_another_one(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await until(lambda: ("collect", []) in agent.datapath.calls)
        deliver(Batch([change("a")], complete=True))
        await until(lambda: agent.datapath.calls.count(("collect", [])) == 2)

    agent.run(play, settings())


def test_a_problem_is_logged_once(agent: RecordedAgent, caplog: pytest.LogCaptureFixture) -> None:
    agent.datapath.problems = ["ns/a: map frontends4 is full"]

    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await until(lambda: bool(agent.datapath.calls))
        deliver(Batch([change("b")], complete=True))
        await until(lambda: len(agent.applied()) == 1)
        agent.datapath.problems = []
        deliver(Batch([change("c")], complete=True))
        await until(lambda: len(agent.applied()) == 2)
        agent.datapath.problems = ["ns/a: map frontends4 is full"]
        deliver(Batch([change("d")], complete=True))
        await until(lambda: len(agent.applied()) == 3)

    agent.run(play, settings())
    assert len(Log(caplog).lines("ns/a: map frontends4 is full")) == 2


def test_a_namespace_has_a_limited_number_of_lines_in_each_sync(
    agent: RecordedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """With 4000 Services that claim one address, one update of the oldest gives 4000 lines on every node."""
    lost = [LossMessage("ns", f"s{number}", f"s{number} lost") for number in range(4000)]
    caplog.set_level("INFO")
    shared = [LossMessage("ns", f"s{number}", f"s{number} shared") for number in range(300)]
    agent.planner.messages = ([*lost, LossMessage("other", "a", "a lost")], shared)

    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await until(lambda: bool(agent.datapath.calls))

    agent.run(play, settings())
    texts = [line.text for line in Log(caplog).lines() if re.search("lost|shared|more", line.text)]
    assert texts == [
        *(f"s{number} lost" for number in range(proxy.MOST_LINES)),
        "a lost",
        "more Services are not served as they specify namespace=ns lines=3900",
        *(f"s{number} shared" for number in range(proxy.MOST_LINES)),
        "more service addresses are also those of a Node namespace=ns lines=200",
    ]


def test_of_many_updates_of_one_object_only_the_last_is_planned(agent: RecordedAgent) -> None:
    many = [change("b") for _ in range(1000)]

    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await until(lambda: bool(agent.datapath.calls))
        deliver(Batch([*many, change("c")], complete=True))
        await until(lambda: bool(agent.applied()))

    agent.run(play, settings())
    planned = [each for update in agent.planner.updates for each in update]
    assert [each.name for each in planned] == ["b", "c"]
    assert planned[0] is many[-1]


def test_a_tenants_costly_changes_do_not_hold_up_others(agent: RecordedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """28 Services that claim the same 2048 addresses take three seconds. minSyncPeriod is not waited for again."""
    update = agent.planner.update

    def slow(changes: Iterable[Change]) -> Delta:
        changes = list(changes)
        time.sleep(0.02 * sum(each.namespace == "tenant" for each in changes))
        return update(changes)

    monkeypatch.setattr(agent.planner, "update", slow)

    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await until(lambda: bool(agent.datapath.calls))
        deliver(Batch([change(f"t{i:03}")._replace(namespace="tenant") for i in range(100)], complete=True))
        await until(lambda: bool(agent.applied()))
        deliver(Batch([change("victim")], complete=True))
        await until(lambda: any("t099" in names for names in agent.applied()))

    agent.run(play, settings(minimum="100ms", retry="60000ms"))
    with_victim = next(i for i, names in enumerate(agent.applied()) if "victim" in names)
    assert with_victim == 1, "the next sync has it"
    assert sorted(name for names in agent.applied() for name in names) == [f"t{i:03}" for i in range(100)] + ["victim"]
    assert agent.metrics.waiting[0] == agent.metrics.waiting[-1] == 0, "these are no slices"
    assert agent.metrics.asked >= len(agent.metrics.syncs) > 3, "a sync is queued until everything is planned"


def test_messages_of_the_planner_are_logged_and_cause_an_event_if_they_have_a_reason(
    agent: RecordedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    lost, refused = LossMessage("ns", "a", "a lost 10.0.0.1"), LossMessage("ns", "b", "b may not", "AddressRefused")
    agent.planner.messages = ([lost, refused], [LossMessage("ns", "c", "c is a Node's")])
    agent.planner.lost = 22

    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await until(lambda: bool(agent.datapath.calls))
        deliver(Batch([change("b")], complete=True))
        await until(lambda: len(agent.applied()) == 1)

    agent.run(play, settings())
    logged = [tuple(line) for line in Log(caplog).lines() if line.text[1] == " "]
    assert logged == [("error", "a lost 10.0.0.1"), ("error", "b may not"), ("info", "c is a Node's")]
    about = ObjectReference("Service", "ns", "b")
    assert agent.events == [(about, "Warning", "AddressRefused", "Serve", "b may not")]
    assert agent.metrics.problems == [22, 22]


def test_foreign_changes_are_repaired_every_sync_period(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        await asyncio.sleep(0.05)
        assert agent.datapath.calls == []
        deliver(Batch([], complete=True))
        await until(lambda: agent.datapath.calls.count(("refresh", [])) == 2)

    agent.run(play, settings(retry="20ms"))
    assert agent.datapath.calls[0][0] == "start"


def test_a_short_sync_period_occupies_no_core(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([], complete=True))
        await asyncio.sleep(0.4)

    agent.run(play, settings(retry="1ms"))
    assert agent.datapath.calls.count(("refresh", [])) <= 1


def test_maps_with_foreign_changes_are_compared_completely(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        deliver(Batch([change("a"), change("b")], complete=True))
        await until(lambda: bool(agent.datapath.calls))
        agent.datapath.overwritten = True
        await until(lambda: ("apply all", ["a", "b"]) in agent.datapath.calls)
        await until(lambda: agent.datapath.calls.count(("refresh", [])) > 3)

    agent.run(play, settings(retry="20ms"))
    assert [call for call, _ in agent.datapath.calls].count("apply all") == 1


def test_an_error_of_the_source_ends_the_agent(agent: RecordedAgent) -> None:
    async def play(deliver: Callable[[Batch], None]) -> None:
        raise FatalError("the folder is gone")

    with pytest.raises(FatalError, match="the folder is gone"):
        agent.run(play, settings())
