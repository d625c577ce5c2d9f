# SPDX-License-Identifier: Apache-2.0
"""From the guests' results to a table: kernel × path × suite × what passed, failed and was skipped, and why."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from tests.kernels.guest import Outcome
from tests.kernels.image import Kernel
from tests.kernels.suites import REFUSED, SUITES


@dataclass
class Count:
    """The outcome of one suite."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0


@dataclass
class Row:
    """One kernel."""

    release: str
    probe: dict[str, str]
    problem: str
    to_refuse: bool
    suites: dict[str, Count]

    @property
    def failed(self) -> bool:
        """Whether the result differs from the expected one. Some kernels must be refused."""
        refused = bool(self.probe.get("refused"))
        return bool(self.problem) or refused != self.to_refuse or any(count.failed for count in self.suites.values())


def read(kernel: Kernel, outcome: Outcome, folder: Path, asked: Collection[str] = ()) -> Row:
    """The results in a guest's folder. ``asked``: the suites that it had to run; one without results has failed."""
    to_refuse = kernel.series in REFUSED
    try:
        probe = json.loads((folder / "probe.json").read_text())
    except FileNotFoundError:
        return Row(kernel.release, {}, outcome.problem or "it left no results", to_refuse, {})
    suites = {}
    for suite in SUITES:
        status = folder / f"{suite.name}.status"
        if status.exists():
            suites[suite.name] = _count(folder / f"{suite.name}.xml", int(status.read_text()))
        elif suite.name in asked and suite.refused == bool(probe.get("refused")):
            suites[suite.name] = Count(failed=["it was to run and did not"])
    return Row(kernel.release, probe, outcome.problem, to_refuse, suites)


def _count(path: Path, status: int) -> Count:
    count = Count()
    if status not in (0, 1):
        count.failed.append("out of time" if status == -1 else f"pytest: exit status {status}")
    if not path.exists():
        # Status 1 means that tests failed, 0 that none did: without results neither is credible.
        count.failed += [] if count.failed else [f"no results, though pytest ended with exit status {status}"]
        return count
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        count.seconds += float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                count.failed.append(f"{case.get('classname')}::{case.get('name')}")
            elif skipped is not None:
                count.skipped[str(skipped.get("message"))] += 1
            else:
                count.passed += 1
    return count


def table(rows: list[Row]) -> str:
    """In Markdown, as in tests/kernels/README.md; below it the failures, and the reasons for skips."""
    lines = ["", "| kernel | path | suite | passed | failed | skipped | s |", "|---|---|---|---|---|---|---|"]
    failures: list[str] = []
    skips: list[str] = []
    words: list[str] = []
    for row in rows:
        path = row.probe.get("path", "–")
        if refused := row.problem or row.probe.get("refused"):
            lines.append(f"| {row.release} | {path} | – | – | – | – | – |")
            words.append(f"* {row.release}: {refused}")
        for name, count in row.suites.items():
            numbers = f"{count.passed} | {len(count.failed)} | {sum(count.skipped.values())} | {count.seconds:.0f}"
            lines.append(f"| {row.release} | {path} | {name} | {numbers} |")
            failures += [f"* {row.release} {name}: {test}" for test in count.failed]
            skips += [f"* {row.release} {name}: {number} × {why}" for why, number in count.skipped.items()]
        output = {what: why for what, why in row.probe.items() if what not in ("release", "path", "refused")}
        words += [f"* {row.release}: no {what}: {why}" for what, why in output.items()]
    for heading, entries in (("What kernels said", words), ("Failed", failures), ("Skipped", skips)):
        if entries:
            lines += ["", f"{heading}:", "", *entries]
    return "\n".join(lines)


def left_out() -> str:
    """What a run without named suites leaves out."""
    parts = [suite.name for suite in SUITES if suite.quick]
    none = [suite.name for suite in SUITES if suite.quick is None]
    return f"Parts only: {', '.join(parts)}; not run: {', '.join(none)}. SUITES=all runs everything."
