# SPDX-License-Identifier: Apache-2.0
"""The helper for logs: what it finds, its message when it finds nothing, and that its messages exist in the package."""

from __future__ import annotations

import ast

import pytest

from pyebpf_proxy.common import log
from tests import ROOT
from tests.support.logs import Line, Log, Message

TEXT = """\
2026-11-21T02:39:29.123Z info programs attached devices=3
2026-11-21T02:39:30.000Z warning Node is being deleted node=here
Traceback (most recent call last):
"""


def test_every_message_is_in_the_package() -> None:
    texts = [
        node.value
        for path in (ROOT / "pyebpf_proxy").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [message.name for message in Message if not any(message in text for text in texts)] == []


def test_lines_are_found_by_level_and_parts() -> None:
    found = Log(TEXT)
    assert found.lines() == [
        Line("info", "programs attached devices=3"),
        Line("warning", "Node is being deleted node=here"),
        Line("", "Traceback (most recent call last):"),
    ]
    assert found.only(Message.NODE_DELETED, "node=here", level="warning") == found.lines()[1]
    assert found.last().text.startswith("Traceback")
    found.none(Message.NODE_DELETED, level="error")


@pytest.mark.parametrize("question", ["only", "some", "wait"])
def test_a_missing_line_is_reported_with_the_existing_ones(question: str) -> None:
    more = {"seconds": 0.0} if question == "wait" else {}
    with pytest.raises(
        AssertionError, match=r"(?s)'NodeIPs.*' of level error; the newest of 3 lines:\n.*info programs"
    ):
        getattr(Log(TEXT), question)(Message.NODE_IPS_CHANGED, level="error", **more)


def test_an_unexpected_or_duplicate_line_is_shown() -> None:
    with pytest.raises(AssertionError, match=r"a line with 'Node is being deleted'"):
        Log(TEXT).none(Message.NODE_DELETED)
    with pytest.raises(AssertionError, match=r"2 lines, not one, with 'Node is being deleted'"):
        Log(TEXT + TEXT).only(Message.NODE_DELETED)


def test_records_of_this_process_and_later_lines(caplog: pytest.LogCaptureFixture) -> None:
    logger = log.Logger("x")
    logger.warning("two words", device="eth0", none=None)
    later = Log(caplog).from_now()
    assert later.lines() == []
    logger.error("more")
    assert later.lines() == [Line("error", "more")]
    assert Log(caplog).lines()[0] == Line("warning", "two words device=eth0")
