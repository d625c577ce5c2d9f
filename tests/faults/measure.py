# SPDX-License-Identifier: Apache-2.0
"""One fault on one ground: before, during, after, and the evaluation of the records."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import msgspec

from tests.changes.checker import ANSWERED, Record
from tests.faults.ground import AFTERWARDS, MEANWHILE, RATE, Ground, wait_until

#: Other faults keep so much of the rate; and everything recovers so soon after a fault of the node, or of the API
#: server.
LEAST_RATE, SOON, SOON_API = 90.0, 1.0, 30.0
#: Seconds that count as never.
NEVER = 40.0
_REASON = re.compile(r'^pyebpf_proxy_reasons_total\{reason="(\w+)"\} (\S+)$', re.MULTILINE)
#: Other counters, and gauges of problems.
_LABELLED = re.compile(
    r'^pyebpf_proxy_(conntrack_refusals|netlink_overruns|api_retries|repairs)_total\{\w+="(\w+)"\} (\S+)$', re.MULTILINE
)
_PLAIN = re.compile(
    r"^pyebpf_proxy_(service_port_problems|failed_syncs_total|run_directory_writable) (\S+)$", re.MULTILINE
)
_OVER_LIMIT = re.compile(r"^pyebpf_proxy_service_over_limit\{[^}]*\} (\S+)$", re.MULTILINE)
_LONGEST_LINE = 200
#: Counters that change by chance, whatever happens to the node.
_CHANCE = frozenset({"closing_flow_replaced", "flow_changed", "flow_forgotten", "young_ended", "flow_promoted"})


class Fault(NamedTuple):
    """``make`` is entered when the fault begins and left when it ends. ``once``: it ends by itself at once."""

    name: str
    words: str
    make: Callable[[Ground], AbstractContextManager[None]]
    seconds: float = 5.0
    once: bool = False
    #: Whether the node is right again, besides its traffic.
    healed: Callable[[Ground], bool] = lambda ground: True
    #: Both proxies use an API server.
    api: bool = False
    #: Why kube-proxy cannot have this fault; empty: it can.
    not_beside: str = ""
    #: It affects all connections of the node.
    affects_all: bool = False
    #: The kernel fails a few connections then, without any proxy, too: no proxy can count them.
    kernels_own: bool = False
    #: The node refuses something because of it, perhaps none of the recorded connections: that is counted and named.
    refuses: bool = False
    #: ``status`` names it while it lasts, since only an operator can end it.
    named: bool = False
    own: dict[str, Any] | None = None
    environment: Callable[[], tuple[str, ...]] = lambda: ()


class Moments(NamedTuple):
    """Times of the monotonic clock: the start, the fault requested, the fault active, its end requested, its end."""

    start: float
    asked: float
    there: float
    ending: float
    over: float


class Outcome(msgspec.Struct, kw_only=True):
    """The outcome of one fault for one proxy."""

    proxy: str
    tried: int
    failed: int
    #: Of the long connections.
    lost: int
    #: Answered connections a second during the fault, in per cent of before.
    rate: float
    before: float
    #: Seconds from the end until no connection failed, until changes during the fault were served, and until the node
    #: was right.
    traffic_right: float
    change_right: float
    healed: float
    #: Seconds for a change afterwards.
    change_after: float
    how: dict[str, int]
    status: list[str]
    metrics: dict[str, int]
    log: list[str]
    #: Seconds from the request to end the fault until it had ended: such as the start of a proxy that was killed.
    ending: float = 0.0
    stalled: float = 0.0
    #: What the fault has measured itself.
    notes: str = ""
    #: Of the sources that gave this outcome.
    commit: str = ""

    @property
    def right(self) -> float:
        return max(self.traffic_right, self.change_right, self.healed)


Pause = Callable[[float], None]


def run(
    ground: Ground, fault: Fault, before: float = 4.0, scale: float = 1.0, count: int = 0, rate: float = RATE
) -> Outcome:
    """A whole fault. ``count``: wait for so many connections of each load, instead of for seconds."""

    def pass_by(seconds: float) -> None:
        if count:
            ground.more(count)
        else:
            time.sleep(seconds)

    ground.notes.clear()
    ground.begin_traffic(rate)
    ground.more(50)
    first = reasons(ground)
    start = time.monotonic()
    pass_by(before)
    usual = reasons(ground)
    # Read everything before the fault that it must not affect.
    said = ground.proxy.complaints()
    warned = set(ground.status())
    meanwhile = ground.service("meanwhile", MEANWHILE, "web-1")
    asked = time.monotonic()
    context = fault.make(ground)
    context.__enter__()
    there = time.monotonic()
    if fault.once:
        context.__exit__(None, None, None)
    over = time.monotonic()
    healed = change_right = 0.0
    if fault.once:
        # It lasts until the proxy has repaired it: this change is made meanwhile.
        ground.proxy.apply("meanwhile", meanwhile)
        healed = _seconds_until(lambda: fault.healed(ground), over)
        change_right = _seconds_until(lambda: ground.serves(MEANWHILE), over)
    try:
        pass_by(fault.seconds * scale / 2)
        if not fault.once:
            ground.proxy.apply("meanwhile", meanwhile)
        pass_by(fault.seconds * scale / 2)
        ending = time.monotonic()
        # Some counters exist only during the fault.
        peak = reasons(ground)
        status = [] if fault.once else ground.status()
        asked_end = time.monotonic()
    finally:
        if not fault.once:
            context.__exit__(None, None, None)
            over = time.monotonic()
    if not fault.once:
        change_right = _seconds_until(lambda: ground.serves(MEANWHILE), over)
        healed = _seconds_until(lambda: fault.healed(ground), over)
    status += ground.status() if fault.once else []
    changed = time.monotonic()
    ground.proxy.apply("afterwards", ground.service("afterwards", AFTERWARDS, "web-1"))
    change_after = _seconds_until(lambda: ground.serves(AFTERWARDS), changed)
    if change_right >= NEVER:
        # It may need the next change.
        change_right = _seconds_until(lambda: ground.serves(MEANWHILE), over, NEVER / 2)
    # Longer than a connection waits for its second SYN.
    pass_by(2.5)
    lost = ground.wait_for_long_connections(NEVER)
    last = reasons(ground)
    new, long, stalls = ground.end_traffic()
    lost = max(lost, sum(record.end != ANSWERED for record in long))
    moments = Moments(start, asked, there, ending, over)
    found = judge(new, moments)
    most = {name: max(value, peak.get(name, 0)) for name, value in last.items()}
    moved = {name for name in most if most[name] > usual.get(name, 0) and usual.get(name, 0) == first.get(name, 0)}
    return Outcome(
        proxy=ground.proxy.name,
        lost=lost,
        change_right=change_right,
        healed=healed,
        change_after=change_after,
        status=[each for each in status if each not in warned],
        metrics={name: int(most[name] - usual.get(name, 0)) for name in sorted(moved)},
        log=_shortened(ground.proxy.complaints()[len(said) :], said),
        notes="; ".join(ground.notes),
        ending=0.0 if fault.once else round(over - asked_end, 3),
        stalled=round(max((stall.ended - stall.begun for stall in stalls), default=0.0), 3),
        **found,
    )


def judge(records: Iterable[Record], moments: Moments) -> dict[str, Any]:
    """Evaluate new connections: how many, how many failed and how, the rates, and when the last one failed. Pure."""
    known = list(records)
    during = [record for record in known if record.begun >= moments.asked]
    failed = [record for record in during if record.end != ANSWERED]
    early = sum(moments.start <= record.begun < moments.asked and record.end == ANSWERED for record in known)
    answered = sum(moments.there <= record.begun < moments.ending and record.end == ANSWERED for record in known)
    before = early / (moments.asked - moments.start)
    rate = answered / (moments.ending - moments.there)
    how: dict[str, int] = {}
    for record in failed:
        how[record.end] = how.get(record.end, 0) + 1
    return {
        "tried": len(during),
        "failed": len(failed),
        "how": how,
        "before": round(before, 1),
        "rate": round(100 * rate / before, 1) if before else 0.0,
        "traffic_right": round(max((record.begun - moments.over for record in failed), default=0.0), 3)
        if any(record.begun > moments.over for record in failed)
        else 0.0,
    }


def problems(fault: Fault, found: Outcome, beside: Outcome | None) -> list[str]:
    """The broken promises, in words."""
    soon = SOON_API if fault.api else SOON
    said = []
    if found.rate < LEAST_RATE and not (fault.affects_all and beside is not None and beside.rate <= found.rate):
        said.append(f"others kept {found.rate:.0f} % of their rate")
    if found.lost > (beside.lost if beside is not None else 0):
        said.append(f"{found.lost} established connections were lost")
    if found.right > soon:
        said.append(f"right again after {found.right:.1f} s, not {soon:.0f}")
    failed = found.failed and not _is_kernels_own(fault, found, beside)
    if (fault.refuses or failed) and not counters(found):
        said.append("refusals are not counted")
    if (fault.refuses or fault.named or failed) and not found.status:
        said.append("`status` does not name it")
    return said


def _is_kernels_own(fault: Fault, found: Outcome, beside: Outcome | None) -> bool:
    """Whether these failures are the kernel's: of the same kinds as those beside kube-proxy, and not more of them than
    chance allows (two standard deviations of the difference).
    """
    if not fault.kernels_own or beside is None or not found.how.keys() <= beside.how.keys():
        return False
    return found.failed - beside.failed <= 2 * math.sqrt(found.failed + beside.failed)


def excuses(fault: Fault, found: Outcome, beside: Outcome | None) -> list[str]:
    """Why the goals count as met although the numbers alone do not show it."""
    said = []
    if beside is not None and fault.affects_all and found.rate < LEAST_RATE:
        said.append(f"it concerns every new connection, and kube-proxy keeps {beside.rate:.0f} % of the rate")
    if beside is not None and 0 < found.lost <= beside.lost:
        said.append(f"kube-proxy loses {beside.lost}")
    if beside is not None and found.failed and _is_kernels_own(fault, found, beside):
        said.append(f"the kernel refuses them, and {beside.failed} of kube-proxy's")
    if fault.api and found.right > SOON:
        said.append(f"{SOON_API:.0f} s for faults of the API server")
    return said


def counters(found: Outcome) -> list[str]:
    """The counters that changed because of the fault."""
    return [name for name in found.metrics if name not in _CHANCE]


def reasons(ground: Ground) -> dict[str, float]:
    """The agent's counters of refusals and problems; none for kube-proxy."""
    page = ground.proxy.metrics()
    found = {name: float(value) for name, value in _REASON.findall(page)}
    found |= {f"{name}: {label}": float(value) for name, label, value in _LABELLED.findall(page)}
    found |= {name: float(value) for name, value in _PLAIN.findall(page)}
    found["service_over_limit"] = sum(map(float, _OVER_LIMIT.findall(page)))
    if "run_directory_writable" in found:
        found["run_directory_writable is 0"] = 1 - found.pop("run_directory_writable")
    return found


def _seconds_until(condition: Callable[[], bool], since: float, patience: float = NEVER) -> float:
    """Seconds since that moment until the condition held; NEVER, or more: it did not."""
    try:
        wait_until(condition, "right again", patience)
    except TimeoutError:
        return max(NEVER, round(time.monotonic() - since, 3))
    return round(time.monotonic() - since, 3)


def _shortened(lines: Sequence[str], before: Sequence[str]) -> list[str]:
    """Each kind of line once, without its time, and without those from before."""
    known = {_kind(line) for line in before}
    kinds = {_kind(line): _text(line)[:_LONGEST_LINE] for line in reversed(lines)}
    return [kinds[kind] for kind in reversed(kinds) if kind not in known][:8]


def _text(line: str) -> str:
    return line.split(" ", 1)[-1].strip()


def _kind(line: str) -> str:
    return re.sub(r"\d+", "0", _text(line))
