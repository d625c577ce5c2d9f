# SPDX-License-Identifier: Apache-2.0
"""The real kube-proxy, run now: its answers still equal the recordings, and new random cases."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from pyebpf_proxy import KUBERNETES_VERSION
from tests.parity import proxy, recordings
from tests.parity.differences import difference
from tests.parity.generated import generate
from tests.support import reference

#: Set these to repeat a failure, or to search longer.
SEED = int(os.environ.get("PARITY_SEED", secrets.randbelow(1_000_000)))
COUNT = int(os.environ.get("PARITY_COUNT", "400"))


@pytest.fixture(scope="session")
def kube_proxy() -> Path:
    """The real program. If it is not built, this is an error, not a skip."""
    program = reference.kube_proxy()
    if not program.exists():
        pytest.fail(f"{program} is missing: run tests/cluster/build.sh")
    return program


def test_the_program_is_the_supported_release(kube_proxy: Path) -> None:
    assert reference.version(kube_proxy) == f"Kubernetes {KUBERNETES_VERSION}"


def test_recordings_equal_its_answers(kube_proxy: Path) -> None:
    _, recorded = recordings.read()
    answers = reference.ask_all(kube_proxy, [case for case, _ in recorded])
    changed = [case.name for (case, now), (_, then) in zip(answers, recorded, strict=True) if now != then]
    assert changed == []


def test_random_cases_have_equal_answers(kube_proxy: Path) -> None:
    print(f"PARITY_SEED={SEED} PARITY_COUNT={COUNT}")
    wrong = []
    for case, expected in reference.ask_all(kube_proxy, generate(SEED, COUNT)):
        answer = proxy.ask(case)
        if difference(case, expected, answer) is None:
            file = (case.file or b"").decode(errors="replace")
            wrong.append(f"{case.name} {case.arguments}\n{file}\n  kube-proxy: {expected}\n  pyebpf-proxy: {answer}")
    assert not wrong, f"{len(wrong)} of {COUNT}, PARITY_SEED={SEED}:\n" + "\n\n".join(wrong[:5])
