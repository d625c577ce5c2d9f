# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's recorded answers to files and command lines, compared with pyebpf-proxy's."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from pyebpf_proxy import KUBERNETES_VERSION
from tests import ROOT
from tests.parity import proxy, recordings
from tests.parity.answer import Answer
from tests.parity.case import Case
from tests.parity.differences import DIFFERENCES, difference

RELEASE, RECORDED = recordings.read()
DOCUMENT = ROOT / "docs" / "differences.md"


def shown(case: Case, expected: Answer, answer: Answer) -> str:
    """Everything that is needed to see why the two differ."""
    file = (case.file or b"").decode(errors="replace")
    return f"{case.name}: {case.arguments}\n{file}\nkube-proxy: {expected}\npyebpf-proxy: {answer}"


@pytest.mark.parametrize(("case", "expected"), RECORDED, ids=[case.name for case, _ in RECORDED])
def test_the_answer_equals_kube_proxys(case: Case, expected: Answer) -> None:
    answer = proxy.ask(case)
    assert difference(case, expected, answer) is not None, shown(case, expected, answer)
    # Whatever differs: a value that kube-proxy rejects is rejected here for the same fields.
    assert set(expected.fields()) <= set(answer.fields()) or answer.status == 0, shown(case, expected, answer)


@pytest.mark.parametrize(("case", "expected"), RECORDED[::60], ids=[case.name for case, _ in RECORDED[::60]])
def test_the_installed_program_gives_the_same_answer(case: Case, expected: Answer) -> None:
    answer = proxy.ask(case, apart=True)
    assert difference(case, expected, answer) is not None, shown(case, expected, answer)


def test_recordings_are_of_the_supported_release() -> None:
    assert f"Kubernetes {KUBERNETES_VERSION}" == RELEASE


def test_every_case_is_recorded_in_its_current_form() -> None:
    """A case that was changed or added needs `make record`."""
    assert [case for case, _ in RECORDED] == recordings.all_cases()
    assert len(RECORDED) >= 400


def test_names_of_cases_are_unique() -> None:
    assert [name for name, count in Counter(case.name for case, _ in RECORDED).items() if count > 1] == []


def test_every_difference_has_a_reason_on_the_page_and_occurs() -> None:
    text = DOCUMENT.read_text().partition("\n## In the answers\n")[2].partition("\n## ")[0]
    titles = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert sorted(titles) == sorted(DIFFERENCES)
    found = {difference(case, expected, proxy.ask(case)) for case, expected in RECORDED}
    assert found == {"", *DIFFERENCES}


def test_t9_a_key_with_a_question_mark_excuses_no_other_answer() -> None:
    """The excuse is for one key, not for the whole document (finding T9)."""
    case, expected = next(each for each in RECORDED if each[0].name == "a key with a question mark, in braces")
    answer = proxy.ask(case)
    assert difference(case, expected, answer) == "flow indicators"
    for other in (
        answer._replace(warnings=()),
        answer._replace(document=None),
        answer._replace(error="failed"),
        answer._replace(status=2),
        Answer(1, "failed complete: failed to decode: yaml: line 3: something else"),
    ):
        assert difference(case, expected, other) != "flow indicators"
    assert difference(case, expected._replace(status=0), answer) is None


def test_a_difference_that_is_not_listed_is_noticed() -> None:
    case, expected = next((case, expected) for case, expected in RECORDED if expected.document and expected.status == 0)
    assert expected.document is not None
    for other in (
        expected._replace(status=1),
        expected._replace(error="failed"),
        expected._replace(document=expected.document.replace("burst: 10", "burst: 11")),
        expected._replace(warnings=("something",)),
        expected._replace(output="something"),
    ):
        assert difference(case, expected, other) is None
