# SPDX-License-Identifier: Apache-2.0
"""Whether each connection had a result that the rules of its moment allow. Pure: it reads records and a timeline.

A change takes effect after its manifest is written, and at the latest ``GRACE`` after the agent has reported it. In
between the old and the new state are both possible. A connection's endpoint is chosen between its begin and its end, so
its result must be one that a state of that time allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tests.changes.model import REFUSED, SILENT, UNANSWERED, UNREACHABLE, Allowed, Target

#: Seconds that a change may need after the agent has reported that it is programmed.
GRACE = 0.05
#: The kernel repeats an unanswered SYN after one second; less than that is the first one.
FIRST_SYN = 0.9
#: A machine that pauses for so many seconds retransmits packets that were not lost.
STALLED = 0.2
#: How many seconds conntrack keeps the entry of a reset connection (nf_conntrack_tcp_timeout_close).
REMEMBERED = 10.0
#: Such an entry may affect one connection in so many, and SELDOM more; measured: one in 400 000.
MISLED, SELDOM = 50_000, 2
#: How many violations of a course are described, each with how many simultaneous connections.
DESCRIBED, NEIGHBOURS = 3, 8
#: The outcomes after which a SYN is repeated. If a client on the same machine is still in connect() when its ICMP error
#: comes, Linux ignores it for IPv6; the next error, a second later, counts.
_OVERHEARD = {4: {SILENT}, 6: {SILENT, REFUSED}}
ANSWERED = "answered"
BROKEN = "broken off"
MOVED = "moved to another endpoint"


class Record(NamedTuple):
    """One connection. Times are seconds of the monotonic clock. ``end``: the outcome in one word; ``name``: of the
    server.
    """

    begun: float
    ended: float
    target: int
    end: str
    name: str = ""
    #: How many packets (new connections) or rounds (long ones) were repeated.
    count: int = 0
    #: The client's port, to find it in a capture.
    port: int = 0


class Stall(NamedTuple):
    """A time in which the machine ran no process."""

    begun: float
    ended: float


class Entries:
    """Entries that conntrack may still have of connections that were answered and reset.

    If a client uses a port again for the same address, the connection may meet such an entry and reach its endpoint,
    whatever the rules are then (``tests/netns/attach/test_attach_reused_port.py``). ``excused``: how many answers were
    so.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.excused = 0
        self._answered: dict[tuple[int, int, str], list[float]] = defaultdict(list)
        for record in records:
            if record.end == ANSWERED and record.port:
                self._answered[record.target, record.port, record.name].append(record.ended)

    def led(self, record: Record) -> bool:
        """Whether an entry may have led this connection to the server that answered it."""
        ends = self._answered.get((record.target, record.port, record.name), ())
        if not any(0 <= record.begun - ended <= REMEMBERED for ended in ends):
            return False
        self.excused += 1
        return True


class Phase(NamedTuple):
    """A state of the world from the moment it was requested; from ``certain`` on it is the only possible one."""

    name: str
    asked: float
    certain: float
    rules: tuple[Allowed, ...]  # by target
    sticky: tuple[bool, ...]  # by target: session affinity holds


class Timeline:
    """Phases one after the other. The first one is active from the beginning."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    def change(
        self, name: str, asked: float, programmed: float, rules: Sequence[Allowed], sticky: Sequence[bool] = ()
    ) -> None:
        """A state that was requested at ``asked`` and programmed at ``programmed``, as the agent reported."""
        if self.phases and asked < self.phases[-1].certain:
            raise ValueError(f"{name}: asked for before {self.phases[-1].name} was certain")
        held = tuple(sticky) or (False,) * len(rules)
        self.phases.append(Phase(name, asked, programmed + GRACE, tuple(rules), held))

    def between(self, begun: float, ended: float) -> list[Phase]:
        """The phases that may have been active in that time."""
        found = []
        for index, phase in enumerate(self.phases):
            over = self.phases[index + 1].certain if index + 1 < len(self.phases) else float("inf")
            if phase.asked <= ended and begun <= over:
                found.append(phase)
        return found

    def alone(self, index: int) -> tuple[float, float]:
        """The time in which only this phase may have been active."""
        over = self.phases[index + 1].asked if index + 1 < len(self.phases) else float("inf")
        return self.phases[index].certain, over


class Violation(NamedTuple):
    """What was wrong with one connection, or with one target in one phase."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


def check_misled(entries: Entries, connections: int) -> list[Violation]:
    """Old entries affect few connections. If more reached the wrong server, there is another reason."""
    most = SELDOM + connections // MISLED
    if entries.excused <= most:
        return []
    return [Violation("misled", f"{entries.excused} of {connections} connections, at most {most} may be")]


def check(
    timeline: Timeline,
    targets: Sequence[Target],
    records: Iterable[Record],
    stalls: Sequence[Stall] = (),
    entries: Entries | None = None,
) -> list[Violation]:
    """Every violation of every rule, in the order of the records. ``entries``: left by these and earlier
    connections.
    """
    known = list(records)
    entries = entries or Entries(known)
    found = []
    for record in known:
        problem = _judge(timeline, record, targets[record.target].family, stalls, entries)
        if problem:
            rule, text = problem
            when = _when(timeline, record.begun)
            took = f"{(record.ended - record.begun) * 1000:.1f} ms"
            connection = f"{targets[record.target]} from port {record.port}"
            others = "" if len(found) >= DESCRIBED else f"; at that moment {_simultaneous(known, record, targets)}"
            found.append(Violation(rule, f"{connection}, {when}, took {took}: {text}{others}"))
    return found + _unsteady(timeline, targets, known) + _unused(timeline, targets, known)


def _when(timeline: Timeline, moment: float) -> str:
    """A moment in words: how long after which change."""
    past = [phase for phase in timeline.phases if phase.asked <= moment] or timeline.phases[:1]
    phase = past[-1]
    since = (moment - phase.certain) * 1000
    certain = f", certain for {since:.1f} ms" if since >= 0 else ", not yet certain"
    return f"{(moment - phase.asked) * 1000:.1f} ms after “{phase.name}”{certain}"


def _simultaneous(records: Iterable[Record], record: Record, targets: Sequence[Target]) -> str:
    """The connections nearest in time, and the last one from the same client port: evidence for the cause."""
    mine = targets[record.target]
    same = [each for each in records if each is not record and targets[each.target].service == mine.service]
    near = sorted(same, key=lambda each: abs(each.begun - record.begun))[:NEIGHBOURS]
    former = [each for each in same if (each.target, each.port) == (record.target, record.port) and each < record]
    lines = [
        f"{(each.begun - record.begun) * 1000:+.1f} ms {targets[each.target]}: {each.end} {each.name}".rstrip()
        for each in sorted({*near, *former[-1:]})
    ]
    return "; ".join(lines) or "no others"


def _judge(
    timeline: Timeline, record: Record, family: int, stalls: Sequence[Stall], entries: Entries
) -> tuple[str, str] | None:
    """The rule that a connection has broken, and how; None: none."""
    phases = timeline.between(record.begun, record.ended)
    rules = [phase.rules[record.target] for phase in phases]
    first = [
        phase.rules[record.target]
        for phase in timeline.between(record.begun, min(record.ended, record.begun + FIRST_SYN))
    ]
    wanted = "; then ".join(str(rule) for rule in rules)
    if record.end == ANSWERED:
        if not any(record.name in rule.names for rule in rules):
            if entries.led(record):
                return None
            return _wrong_answer(timeline, record), f"answered by {record.name}, must be {wanted}"
        lost = record.count and not any(rule.ends & _OVERHEARD[family] for rule in first)
        if lost and not _stalled(stalls, record.begun, record.ended):
            return "lost", f"answered by {record.name}, but packets had to be sent {record.count} times more"
        return None
    if record.end == SILENT:
        return None if any(SILENT in rule.ends for rule in first) else ("silent", f"no answer, must be {wanted}")
    if record.end in (REFUSED, UNREACHABLE):
        if any(record.end in rule.ends for rule in rules):
            return None
        return record.end, f"{record.end}, must be {wanted}"
    return "broken", f"{record.end}, must be {wanted}"


def _wrong_answer(timeline: Timeline, record: Record) -> str:
    """Early: it may answer later; late: it was allowed to before; wrong: never."""
    later = [p for p in timeline.phases if p.asked > record.ended and record.name in p.rules[record.target].names]
    before = [p for p in timeline.phases if p.asked <= record.ended and record.name in p.rules[record.target].names]
    return "late" if before else "early" if later else "wrong"


def _stalled(stalls: Sequence[Stall], begun: float, ended: float) -> bool:
    """Whether the machine paused in that time for so long that timers expired."""
    lost = sum(min(stall.ended, ended) - max(stall.begun, begun) for stall in stalls if _meet(stall, begun, ended))
    return lost >= STALLED


def _meet(stall: Stall, begun: float, ended: float) -> bool:
    return stall.begun < ended and begun < stall.ended


def _within(
    timeline: Timeline,
    records: Iterable[Record],
    key: Callable[[Record], object],
    wanted: Callable[[Phase, int], bool],
    over: bool = True,
) -> dict[tuple[int, object], list[Record]]:
    """Answered connections that began while only one phase was active, by phase and ``key``.

    ``over``: only those that also ended in that time; otherwise only the others.
    """
    groups: dict[tuple[int, object], list[Record]] = defaultdict(list)
    spans = [timeline.alone(index) for index in range(len(timeline.phases))]
    for record in records:
        if record.end != ANSWERED:
            continue
        for index, (begun, ended) in enumerate(spans):
            then = begun <= record.begun < ended and (record.ended < ended) == over
            if then and wanted(timeline.phases[index], record.target):
                groups[index, key(record)].append(record)
    return groups


def _unsteady(timeline: Timeline, targets: Sequence[Target], records: Iterable[Record]) -> list[Violation]:
    """Session affinity (spec/service-semantics §4.1): a client of a service port keeps its endpoint at all addresses.

    Checked only if the client may use the same endpoints at all addresses that it asks.
    """

    def client(record: Record) -> tuple[str, int, str]:
        target = targets[record.target]
        return target.source, target.family, target.service

    groups = _within(timeline, records, client, lambda phase, target: phase.sticky[target])
    found = []
    for key in sorted({(t.source, t.family, t.service) for t in targets}):
        mine = [i for i, t in enumerate(targets) if (t.source, t.family, t.service) == key]
        bound = ""
        for index, phase in enumerate(timeline.phases):
            served = {phase.rules[target].names for target in mine} - {frozenset()}
            if not all(phase.sticky[target] for target in mine) or len(served) != 1:
                bound = ""
                continue
            eligible = served.pop()
            names = {record.name for record in groups.get((index, key), ())}
            if bound in eligible:
                names.add(bound)
            if len(names) > 1:
                text = f"IPv{key[1]}, {key[0]} to {key[2]}, “{phase.name}”: {', '.join(sorted(names))}"
                found.append(Violation("affinity", text + (f", was bound to {bound}" if bound in names else "")))
            bound = names.pop() if len(names) == 1 else ""
    return found


#: So many connections per endpoint: one of them gets none by chance once in e^24 times.
ENOUGH = 24


def _unused(timeline: Timeline, targets: Sequence[Target], records: Iterable[Record]) -> list[Violation]:
    """Without affinity, and with enough connections, every allowed server must answer."""

    def eligible(record: Record) -> tuple[str, frozenset[str]]:
        rules = timeline.between(record.begun, record.ended)[0].rules
        return targets[record.target].service, rules[record.target].names

    def client(record: Record) -> object:
        target = targets[record.target]
        return target.source, target.family, eligible(record)

    found = []
    # Per client if it makes enough connections; on a slow machine for all clients together.
    for key in (client, eligible):
        groups = _within(timeline, records, key, lambda phase, target: not phase.sticky[target])
        # A server that is not chosen in time on a busy machine may answer when the phase is over.
        late = _within(timeline, records, key, lambda phase, target: not phase.sticky[target], over=False)
        for (index, clients), group in groups.items():
            phase, target = timeline.phases[index], group[0].target
            names = phase.rules[target].names
            idle = names - {record.name for record in [*group, *late.get((index, clients), ())]}
            if idle and len(group) >= ENOUGH * len(names):
                text = f"{', '.join(sorted(idle))} got none of {len(group)} connections"
                found.append(Violation("unused", f"{targets[target]} and others, “{phase.name}”: {text}"))
    return found


def check_transfers(
    targets: Sequence[Target], records: Iterable[Record], ends: Iterable[tuple[str, float]]
) -> list[Violation]:
    """Long connections continue, whatever happens to the service (§10). ``ends``: which server was ended, and when."""
    gone = list(ends)
    found = []
    for record in records:
        if record.end == ANSWERED:
            continue
        server = record.name.partition(":")[0]
        if any(server == pod and record.ended >= moment for pod, moment in gone) and record.end == BROKEN:
            continue
        text = f"{targets[record.target]}, to {record.name or 'no server'}: {record.end} after {record.count} rounds"
        found.append(Violation("transfer", text))
    return found


__all__ = [
    "GRACE",
    "UNANSWERED",
    "Entries",
    "Record",
    "Stall",
    "Timeline",
    "Violation",
    "check",
    "check_misled",
    "check_transfers",
]
