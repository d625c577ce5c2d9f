# SPDX-License-Identifier: Apache-2.0
"""Troubles are told once: what counts as one outage, and when another look of it is told."""

from __future__ import annotations

import pytest

from pyebpf_proxy.kube.api.trouble import STEADY_SECONDS, GoneError, Log, TroubleError, status_trouble


class Told:
    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.log = Log("host", self.error, self.info, lambda: self.now)

    def error(self, message: str, **fields: object) -> None:
        self.lines.append(f"{fields.get('resource', '')}: {fields['error']}")

    def info(self, message: str, **fields: object) -> None:
        self.lines.append(message)


def test_one_outage_is_one_line_for_all_resources() -> None:
    told = Told()
    for _ in range(3):
        for resource in ("services", "nodes"):
            told.log.failed(resource, TroubleError("refused", shared=True))
    told.log.well("services")
    assert told.lines == [": refused"]
    told.log.well("nodes")
    told.log.well("nodes")
    assert told.lines == [": refused", "the API server is reachable again"]
    told.log.failed("nodes", TroubleError("refused", shared=True))
    assert told.lines[2:] == [": refused"]


def test_what_it_looks_like_now_is_told_when_it_goes_on() -> None:
    told = Told()
    told.log.failed("nodes", TroubleError("refused", shared=True))
    for text in ("reset", "refused", "reset"):
        told.now += STEADY_SECONDS
        told.log.failed("nodes", TroubleError(text, shared=True))
    assert told.lines == [": refused"]
    told.now += STEADY_SECONDS
    told.log.failed("nodes", TroubleError("reset", shared=True))
    told.log.failed("nodes", TroubleError("reset", shared=True))
    assert told.lines == [": refused", ": reset"]


def test_what_concerns_one_resource_is_told_of_it() -> None:
    told = Told()
    for resource in ("services", "nodes", "services"):
        told.log.failed(resource, TroubleError("forbidden"))
    assert told.lines == ["services: forbidden", "nodes: forbidden"]
    told.log.well("services")
    assert told.lines[2:] == ["the resource can be watched again"]


@pytest.mark.parametrize(
    ("code", "shared", "words"),
    [
        (401, True, "rejects the credentials"),
        (403, False, "grant list on x by RBAC"),
        (404, False, "does not serve this"),
        (429, True, "host answers 429: slow down"),
        (500, True, "host answers 500"),
    ],
)
def test_statuses(code: int, shared: bool, words: str) -> None:
    trouble = status_trouble("host", code, "Reason", "slow\ndown", 7.0, "list on x")
    assert (trouble.code, trouble.shared, trouble.lost) == (code, shared, False)
    assert words in str(trouble)
    assert "\n" not in str(trouble)
    assert isinstance(status_trouble("host", 410, "Gone", "", 0, ""), GoneError)
