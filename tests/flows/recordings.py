# SPDX-License-Identifier: Apache-2.0
"""The real kube-proxy's result for every flow, as data: written by ``make record``, compared in ``make test``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.flows.flow import Flow, Seen

FOLDER = Path(__file__).with_name("recordings")

#: Request, source, protocols → outcome.
Answers = dict[tuple[str, str, str], Seen]


def path(mode: str) -> Path:
    return FOLDER / f"{mode}.jsonl"


def write(mode: str, release: str, answers: Mapping[str, Iterable[tuple[Flow, Seen]]]) -> int:
    """Write a mode's recording, by scenario; returns the number of flows. One line per destination, so that diffs are
    readable.
    """
    lines = [json.dumps({"release": release})]
    count = 0
    for scenario, flows in answers.items():
        by_destination: dict[str, dict[str, dict[str, list[str]]]] = {}
        for flow, seen in flows:
            what, source, how = flow.key
            by_destination.setdefault(what, {}).setdefault(source, {}).setdefault(str(seen), []).append(how)
            count += 1
        for what, sources in by_destination.items():
            outcomes = {
                source: {" ".join(hows): text for text, hows in seen.items()} for source, seen in sources.items()
            }
            lines.append(json.dumps({"scenario": scenario, "what": what, **outcomes}, ensure_ascii=False))
    FOLDER.mkdir(exist_ok=True)
    path(mode).write_text("\n".join(lines) + "\n")
    return count


def read(mode: str) -> tuple[str, dict[str, Answers]]:
    """The release that was recorded, and its answers by scenario."""
    first, *lines = path(mode).read_text().splitlines()
    answers: dict[str, Answers] = {}
    for line in lines:
        entry = json.loads(line)
        found = answers.setdefault(entry.pop("scenario"), {})
        what = entry.pop("what")
        for source, seen in entry.items():
            for hows, text in seen.items():
                for how in hows.split():
                    found[what, source, how] = Seen(tuple(text.split(" | ")))
    return json.loads(first)["release"], answers
