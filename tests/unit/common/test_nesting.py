# SPDX-License-Identifier: Apache-2.0
"""JSON that is nested too deeply for a parser is cut, and nothing else is."""

from __future__ import annotations

import json

from pyebpf_proxy.common.nesting import DEEPEST, shallow


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
