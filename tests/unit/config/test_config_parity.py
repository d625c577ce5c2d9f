# SPDX-License-Identifier: Apache-2.0
"""What kube-proxy answered to files and command lines, as recorded, beside what ours answers now."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from pyebpf_proxy import KUBERNETES_VERSION
from tests import ROOT
from tests.parity import ours, recordings
from tests.parity.answer import Answer
from tests.parity.case import Case
from tests.parity.differences import DIFFERENCES, difference

RELEASE, RECORDED = recordings.read()
DOCUMENT = ROOT / "docs" / "differences.md"


def shown(case: Case, theirs: Answer, answer: Answer) -> str:
    """All that is needed to see why the two differ."""
    file = (case.file or b"").decode(errors="replace")
    return f"{case.name}: {case.arguments}\n{file}\nkube-proxy: {theirs}\nours:       {answer}"


@pytest.mark.parametrize(("case", "theirs"), RECORDED, ids=[case.name for case, _ in RECORDED])
def test_the_answer_is_kube_proxys(case: Case, theirs: Answer) -> None:
    answer = ours.ask(case)
    assert difference(case, theirs, answer) is not None, shown(case, theirs, answer)
    # Whatever differs: who is refused there for a value is refused here for the same ones.
    assert set(theirs.fields()) <= set(answer.fields()) or answer.status == 0, shown(case, theirs, answer)


@pytest.mark.parametrize(("case", "theirs"), RECORDED[::60], ids=[case.name for case, _ in RECORDED[::60]])
def test_the_program_itself_answers_so_too(case: Case, theirs: Answer) -> None:
    answer = ours.ask(case, apart=True)
    assert difference(case, theirs, answer) is not None, shown(case, theirs, answer)


def test_recordings_are_of_the_release_that_is_followed() -> None:
    assert f"Kubernetes {KUBERNETES_VERSION}" == RELEASE


def test_every_case_is_recorded_as_it_stands() -> None:
    """A case that was changed or added asks for `make record`."""
    assert [case for case, _ in RECORDED] == recordings.all_cases()
    assert len(RECORDED) >= 400


def test_names_of_cases_are_their_own() -> None:
    assert [name for name, count in Counter(case.name for case, _ in RECORDED).items() if count > 1] == []


def test_every_difference_is_written_down_with_a_reason_and_is_real() -> None:
    text = DOCUMENT.read_text().partition("\n## In the answers\n")[2].partition("\n## ")[0]
    titles = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert sorted(titles) == sorted(DIFFERENCES)
    found = {difference(case, theirs, ours.ask(case)) for case, theirs in RECORDED}
    assert found == {"", *DIFFERENCES}


def test_a_difference_that_is_not_listed_is_noticed() -> None:
    case, theirs = next((case, theirs) for case, theirs in RECORDED if theirs.document and theirs.status == 0)
    assert theirs.document is not None
    for other in (
        theirs._replace(status=1),
        theirs._replace(error="failed"),
        theirs._replace(document=theirs.document.replace("burst: 10", "burst: 11")),
        theirs._replace(warnings=("something",)),
        theirs._replace(output="something"),
    ):
        assert difference(case, theirs, other) is None
