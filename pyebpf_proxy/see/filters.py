# SPDX-License-Identifier: Apache-2.0
"""FILTER words of the commands (FIELD=VALUE), and when a value matches a text. The functions are pure."""

from __future__ import annotations

from collections.abc import Collection

from pyebpf_proxy.see.answers import QuestionError, near
from pyebpf_proxy.services.addresses import format_address, parse_address
from pyebpf_proxy.services.pods import OR


def split(word: str, fields: Collection[str], whose: str) -> tuple[str, str]:
    """Field and value of a word; the field is "" if the word has none. QuestionError if ``whose`` lack the field."""
    field, equals, value = word.partition("=")
    if not equals:
        return "", word
    if field not in fields:
        raise QuestionError(f"{whose} have no field {field}: {', '.join(fields)}{near(field, fields)}")
    return field, value


def parse_place(value: str) -> tuple[bytes, str] | None:
    """The packed address of an ADDRESS or ADDRESS:PORT, and the text in which flows show it; None for other values."""
    packed = parse_address(value.strip("[]"))
    if packed is not None:
        return packed, format_address(packed)
    host, _, port = value.rpartition(":")
    packed = parse_address(host.strip("[]"))
    if packed is None or not port.isdecimal():
        return None
    text = format_address(packed)
    return packed, f"[{text}]:{port}" if len(packed) == 16 else f"{text}:{port}"


def means(value: str, text: str) -> bool:
    """Whether ``value`` is ``text``, or ``text`` without its port (an address) or without its namespace (a name).

    ``text`` may be the names of several pods: then one of them is enough.
    """
    return any(_means(value, each) for each in text.lower().split(OR))


def _means(value: str, text: str) -> bool:
    address, _, _ = text.rpartition(":")
    parts = {text, address, address.strip("[]"), text.partition("/")[2], text.partition("/")[2].partition(":")[0]}
    parts |= {text.partition(":")[0]} if "/" in text else set()
    return value.lower() in parts
