# SPDX-License-Identifier: Apache-2.0
"""The results of a run of upstream's specs: from ginkgo's report to a table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recorded"
#: Written by `python -m tests.e2e switch --record`.
SWITCH = FOLDER / "switch.json"
#: Written by `python -m tests.e2e churn --record`.
CHURN = FOLDER / "churn.json"
STATES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Spec:
    """One spec: ``state`` is passed, skipped or failed, ``why`` the reason of the latter two."""

    group: str
    name: str
    state: str
    seconds: float
    why: str = ""


def read_report(text: str) -> list[Spec]:
    """The specs in a JSON report of ginkgo, without those that the filters left out."""
    found = []
    for suite in json.loads(text) or []:
        for each in suite.get("SpecReports") or []:
            state = each["State"]
            failure = each.get("Failure") or {}
            message = " ".join(str(failure.get("Message") or "").split())
            if each.get("LeafNodeType") != "It":
                if state in ("passed", "skipped"):
                    continue
                # BeforeSuite and the like: no spec ran, or not all.
                found.append(Spec("the suite itself", str(each.get("LeafNodeType")), "failed", 0.0, message))
                continue
            if state == "pending" or (state == "skipped" and not message):
                continue
            texts = [*(each.get("ContainerHierarchyTexts") or []), each["LeafNodeText"]]
            seconds = round(each.get("RunTime", 0) / 1e9, 1)
            outcome = state if state in ("passed", "skipped") else "failed"
            found.append(Spec(_group(texts), " ".join(texts), outcome, seconds, message if outcome != "passed" else ""))
    return sorted(found, key=lambda spec: (spec.group, spec.name))


def _group(texts: list[str]) -> str:
    # Some containers have labels only: "[sig-network] [Feature:IPv6DualStack]".
    first = re.sub(r"\[[^]]*\] *", "", texts[0]).strip() or ("Dual stack" if "IPv6DualStack" in texts[0] else "Others")
    if len(texts) > 2 and texts[1].startswith("Granular Checks"):
        return f"{first} {texts[1].partition('[')[0].strip()}"
    return first


def save(name: str, specs: Iterable[Spec], about: dict[str, Any]) -> Path:
    """recorded/NAME.json, for the page."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(about | {"specs": [asdict(spec) for spec in specs]}, indent=1) + "\n")
    return path


def replaced(name: str, specs: list[Spec], folder: Path | None = None, kept: str = "") -> list[Spec]:
    """The specs of recorded/NAME.json, with these replacing those of the same names.

    ``kept``: only former specs whose names this regular expression matches.
    """
    path = (folder or FOLDER) / f"{name}.json"
    former = load(path)[1] if path.exists() else []
    names = {spec.name for spec in specs}
    others = [spec for spec in former if spec.name not in names and re.search(kept, spec.name)]
    return sorted([*specs, *others], key=lambda each: (each.group, each.name))


def times(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The time in recorded/NAME.json, and how many specs ran at once; None if it has none."""
    path = folder / f"{name}.json"
    former = load(path)[0] if path.exists() else {}
    return {field: former.get(field) for field in ("seconds", "processes")}


def load(path: Path) -> tuple[dict[str, Any], list[Spec]]:
    """Read what ``save`` wrote: the facts about the run, and its specs."""
    about = json.loads(path.read_text())
    specs = [Spec(**each) for each in about.pop("specs")]
    return about, specs


def counts(specs: Iterable[Spec]) -> dict[str, dict[str, int]]:
    """By group: how many passed, failed, were skipped."""
    found: dict[str, dict[str, int]] = {}
    for spec in specs:
        group = found.setdefault(spec.group, dict.fromkeys(STATES, 0))
        group[spec.state] += 1
    return dict(sorted(found.items()))


def total(by_group: dict[str, dict[str, int]]) -> dict[str, int]:
    """Of all groups."""
    return {state: sum(each[state] for each in by_group.values()) for state in STATES}


def table(specs: list[Spec]) -> str:
    """For the terminal."""
    by_group = counts(specs)
    width = max([len(group) for group in by_group] + [5])
    lines = [f"{'group':{width}}  passed  failed  skipped"]
    for group, each in (*by_group.items(), ("total", total(by_group))):
        lines.append(f"{group:{width}}  {each['passed']:6}  {each['failed']:6}  {each['skipped']:7}")
    return "\n".join(lines)


def known_reason(spec: Spec, known: Mapping[str, str]) -> str | None:
    """Why this spec may fail; None: it may not. ``known``: reasons by regular expressions of names."""
    return next((why for pattern, why in known.items() if re.search(pattern, spec.name)), None)


def unexpected(specs: Iterable[Spec], known: Mapping[str, str]) -> list[Spec]:
    """The specs that failed without a known reason."""
    return [spec for spec in specs if spec.state == "failed" and known_reason(spec, known) is None]
