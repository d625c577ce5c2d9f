# SPDX-License-Identifier: Apache-2.0
"""FILTER words of the commands: FIELD=VALUE, and when a value matches a text. Pure."""

from __future__ import annotations

from collections.abc import Collection

from pyebpf_proxy.see.answers import QuestionError, near


def split(word: str, fields: Collection[str], whose: str) -> tuple[str, str]:
    """Field and value of a word; field "" for a word without one. QuestionError: ``whose`` have no such field."""
    field, equals, value = word.partition("=")
    if not equals:
        return "", word
    if field not in fields:
        raise QuestionError(f"{whose} have no field {field}: {', '.join(fields)}{near(field, fields)}")
    return field, value


def means(value: str, text: str) -> bool:
    """Whether ``value`` matches ``text``: all of it, an address without its port, or a name without its namespace."""
    text = text.lower()
    address, _, _ = text.rpartition(":")
    parts = {text, address, address.strip("[]"), text.partition("/")[2], text.partition("/")[2].partition(":")[0]}
    parts |= {text.partition(":")[0]} if "/" in text else set()
    return value.lower() in parts
