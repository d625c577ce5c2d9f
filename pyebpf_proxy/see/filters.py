# SPDX-License-Identifier: Apache-2.0
"""FILTER words of the commands (FIELD=VALUE), and when a value matches a text. The functions are pure."""

from __future__ import annotations

from collections.abc import Collection

from pyebpf_proxy.see.answers import QuestionError, near


def split(word: str, fields: Collection[str], whose: str) -> tuple[str, str]:
    """Field and value of a word; the field is "" if the word has none. QuestionError if ``whose`` lack the field."""
    field, equals, value = word.partition("=")
    if not equals:
        return "", word
    if field not in fields:
        raise QuestionError(f"{whose} have no field {field}: {', '.join(fields)}{near(field, fields)}")
    return field, value


def means(value: str, text: str) -> bool:
    """Whether ``value`` is ``text``, or ``text`` without its port (an address) or without its namespace (a name)."""
    text = text.lower()
    address, _, _ = text.rpartition(":")
    parts = {text, address, address.strip("[]"), text.partition("/")[2], text.partition("/")[2].partition(":")[0]}
    parts |= {text.partition(":")[0]} if "/" in text else set()
    return value.lower() in parts
