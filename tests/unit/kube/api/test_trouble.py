# SPDX-License-Identifier: Apache-2.0
"""Failures are logged once: what counts as one outage, and when a new cause is logged."""

from __future__ import annotations

import pytest

from pyebpf_proxy.kube.api.trouble import STEADY_SECONDS, GoneError, Log, TroubleError, status_trouble


class Logged:
    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.log = Log("host", self.error, self.info, lambda: self.now)

    def error(self, message: str, **fields: object) -> None:
        self.lines.append(f"{fields.get('resource', '')}: {fields['error']}")

    def info(self, message: str, **fields: object) -> None:
        self.lines.append(message)


def test_one_outage_is_one_line_for_all_resources() -> None:
    logged = Logged()
    for _ in range(3):
        for resource in ("services", "nodes"):
            logged.log.failed(resource, TroubleError("refused", shared=True))
    logged.log.well("services")
    assert logged.lines == [": refused"]
    logged.log.well("nodes")
    logged.log.well("nodes")
    assert logged.lines == [": refused", "the API server is reachable again"]
    logged.log.failed("nodes", TroubleError("refused", shared=True))
    assert logged.lines[2:] == [": refused"]


def test_failures_are_listed_until_they_are_over() -> None:
    logged = Logged()
    assert logged.log.troubles() == {}
    logged.log.failed("services", TroubleError("refused", shared=True))
    logged.log.failed("nodes", TroubleError("forbidden"))
    assert logged.log.troubles() == {"": "refused", "nodes": "forbidden"}
    logged.log.well("services")
    assert logged.log.troubles() == {"nodes": "forbidden"}
    logged.log.well("nodes")
    assert logged.log.troubles() == {}


def test_a_new_cause_of_a_failure_is_logged() -> None:
    logged = Logged()
    logged.log.failed("nodes", TroubleError("refused", shared=True))
    for text in ("reset", "refused", "reset"):
        logged.now += STEADY_SECONDS
        logged.log.failed("nodes", TroubleError(text, shared=True))
    assert logged.lines == [": refused"]
    logged.now += STEADY_SECONDS
    logged.log.failed("nodes", TroubleError("reset", shared=True))
    logged.log.failed("nodes", TroubleError("reset", shared=True))
    assert logged.lines == [": refused", ": reset"]


def test_failures_of_one_resource_are_logged_with_its_name() -> None:
    logged = Logged()
    for resource in ("services", "nodes", "services"):
        logged.log.failed(resource, TroubleError("forbidden"))
    assert logged.lines == ["services: forbidden", "nodes: forbidden"]
    logged.log.well("services")
    assert logged.lines[2:] == ["the resource can be watched again"]


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
