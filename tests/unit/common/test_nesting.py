# SPDX-License-Identifier: Apache-2.0
"""JSON that is nested too deeply for a parser is cut, halves of surrogate pairs are replaced, and nothing else is."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from pyebpf_proxy.common.nesting import DEEPEST, shallow, whole


def nested(depth: int) -> object:
    value: object = "]}"
    for number in range(depth):
        value = [value, 1] if number % 2 else {'a"{[': value}
    return value


def test_only_what_is_too_deep_is_cut() -> None:
    for value in ("{[", {}, [[]], {"a": ["\\", '"', {"b": '\\"'}]}, nested(DEEPEST)):
        text = json.dumps(value).encode()
        assert shallow(text) == text
    text = json.dumps({"a": nested(500), "b": [nested(DEEPEST + 10), {"c": 1}]}).encode()
    cut = json.loads(shallow(text))
    assert cut["b"][1] == {"c": 1}
    assert json.dumps(cut).count("null") == 2


def test_what_is_no_json_stays_none() -> None:
    for text in (b"[" * 100_000, b"[" * 100_000 + b"]" * 99_999, b'{"a": "' + b"[" * 100_000, b"]" * 100_000):
        try:
            json.loads(shallow(text))
        except ValueError:
            continue
        raise AssertionError(text[:20])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\ud83d\ude00 \uD83D\uDE00", "\U0001f600 \U0001f600"),
        (r"\ud83d", "\ufffd"),
        (r"\uDE00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\\ud83d \\\ud83d", "\\ud83d \\\ufffd"),
        (r"\u00e9\n\"\ud7ff\ue000", 'é\n"\ud7ff\ue000'),
    ],
)
def test_only_halves_of_pairs_are_replaced(text: str, expected: str) -> None:
    mended = whole(f'["{text}"]'.encode())
    assert json.loads(mended) == [expected]
    assert (mended == f'["{text}"]'.encode()) == ("\ufffd" not in expected)


@pytest.mark.parametrize("escape", [b"\\n", b"\\ud800"])
def test_a_text_of_escapes_takes_little_memory(escape: bytes) -> None:
    text = escape * 200_000
    tracemalloc.start()
    try:
        whole(text)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    finally:
        tracemalloc.stop()
