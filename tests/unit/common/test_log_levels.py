# SPDX-License-Identifier: Apache-2.0
"""``-v`` and ``--vmodule``: which packages' debug messages are written."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest

from pyebpf_proxy.common import log


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("pyebpf_proxy")
    before = root.handlers[:], root.level, own.level, logging.raiseExceptions
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])
    logging.raiseExceptions = before[3]


@pytest.mark.parametrize(
    ("verbosity", "verbosities", "expected"),
    [
        (0, [], []),
        (1, [], []),
        (2, [], ["datapath", "manifests", ""]),
        (9, [], ["datapath", "manifests", ""]),
        (0, [("datapath", 2)], ["datapath"]),
        (0, [("data*", 2), ("man?fests", 4)], ["datapath", "manifests"]),
        (4, [("datapath", 0)], ["manifests", ""]),
        (0, [("datapath", 0), ("*", 3)], ["manifests", ""]),
        (0, [("absent", 9)], []),
    ],
)
def test_packages_whose_debug_messages_are_written(
    verbosity: int, verbosities: Sequence[tuple[str, int]], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("text", verbosity, verbosities)
    for package in ("datapath", "manifests", ""):
        log.Logger(package).debug(f"from {package}")
        log.Logger(package).info(f"news of {package}")
    lines = capsys.readouterr().err.splitlines()
    assert [
        line.split(" from ")[1].strip() if " from " in line else "" for line in lines if " debug " in line
    ] == expected
    assert sum(" info news of" in line for line in lines) == 3
