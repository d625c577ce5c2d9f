# SPDX-License-Identifier: Apache-2.0
"""The real kube-proxy's answers as data: the first line names the release, then comes one line for each case."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tests import ROOT
from tests.parity import commands, files, starts
from tests.parity.answer import Answer
from tests.parity.case import Case
from tests.parity.generated import generate

PATH = ROOT / "tests" / "unit" / "recordings" / "configuration.jsonl"
SEED = 1
GENERATED = 500


def all_cases() -> list[Case]:
    """All recorded cases: the fixed ones, and the generated ones of one seed."""
    return [*files.cases(), *commands.cases(), *starts.cases(), *generate(SEED, GENERATED)]


def write(release: str, answers: Iterable[tuple[Case, Answer]]) -> int:
    """Replace the recordings; returns their number."""
    lines = [json.dumps({"kube-proxy": release, "seed": SEED})]
    for case, answer in answers:
        lines.append(json.dumps({**case.to_data(), "answer": answer.to_data()}, ensure_ascii=True))
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text("\n".join(lines) + "\n")
    return len(lines) - 1


def read() -> tuple[str, list[tuple[Case, Answer]]]:
    """The recorded release, and each case with its answer."""
    first, *rest = PATH.read_text().splitlines()
    entries = [json.loads(line) for line in rest]
    return json.loads(first)["kube-proxy"], [
        (Case.from_data(entry), Answer.from_data(entry["answer"])) for entry in entries
    ]
