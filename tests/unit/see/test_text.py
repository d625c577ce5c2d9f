# SPDX-License-Identifier: Apache-2.0
"""Names and tables of the commands, without a kernel."""

from __future__ import annotations

import re

import pytest

from pyebpf_proxy.see.answers import QuestionError
from pyebpf_proxy.see.names import matching
from pyebpf_proxy.see.text import Cell, Terminal, duration, fields, table, wrapped
from pyebpf_proxy.services.model import IPFamily, Protocol, ServicePortName

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def name(text: str, port: str = "http") -> ServicePortName:
    namespace, _, service = text.partition("/")
    return ServicePortName(namespace, service, port, Protocol.TCP, IPFamily.IPV4)


NAMES = [
    name("default/web"),
    name("default/web", "admin"),
    name("default/web-next"),
    name("shop/cart"),
    name("test/web"),
]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("default/web", [NAMES[1], NAMES[0]]),
        ("default/web:http", [NAMES[0]]),
        ("cart", [NAMES[3]]),
        ("ca", [NAMES[3]]),
        ("default/web-", [NAMES[2]]),
        ("web-next:http", [NAMES[2]]),
    ],
)
def test_the_services_that_a_name_matches(wanted: str, found: list[ServicePortName]) -> None:
    assert matching(wanted, NAMES) == found


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("web", "web is ambiguous: it may be default/web, test/web"),
        ("w", "w is ambiguous: it may be default/web, default/web-next, test/web"),
        ("crat", "no Service is called crat; did you mean cart?"),
        ("shop/crat", "no Service is called shop/crat; did you mean shop/cart?"),
        ("zzz", "no Service is called zzz"),
        ("default/web:dns", "default/web has no port dns: it has admin, http"),
        ("", "no Service is called "),
    ],
)
def test_names_that_match_none_or_several(wanted: str, text: str) -> None:
    with pytest.raises(QuestionError) as caught:
        matching(wanted, NAMES)
    assert str(caught.value) == text


def test_without_services_a_name_matches_nothing() -> None:
    with pytest.raises(QuestionError, match="no Service is called web: there are no services"):
        matching("web", [])


HEAD = ["NAME", "ADDRESS", "WHY", "NEVER"]
ROWS = [
    ["default/web:http", "[fd00:10:244:1::10]:8080", "is wanted, and not in the kernel", ""],
    [Cell("shop/cart:http", "red"), "10.96.0.1:80", "", ""],
]


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_a_table_fits_without_losing_text(width: int, colour: bool) -> None:
    lines = table(Terminal(width, colour), HEAD, ROWS)
    shown = [ESCAPE.sub("", line) for line in lines]
    assert max(map(len, shown)) <= width
    if width >= 30:  # an address may be as long
        words = {word for row in ROWS for cell in row for word in _text(cell).split()}
        assert {word for word in words if not any(word in line for line in shown)} == set()
    assert any("\x1b[31m" in line for line in lines) is colour
    assert not any("never" in line.lower() for line in shown)


def _text(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def test_a_wide_table_has_one_line_per_row() -> None:
    assert table(Terminal(), HEAD, ROWS) == [
        "NAME              ADDRESS                   WHY",
        "default/web:http  [fd00:10:244:1::10]:8080  is wanted, and not in the kernel",
        "shop/cart:http    10.96.0.1:80",
    ]


def test_a_narrow_table_is_blocks() -> None:
    assert table(Terminal(36), HEAD, ROWS) == [
        "default/web:http",
        "  address  [fd00:10:244:1::10]:8080",
        "  why      is wanted, and not in the",
        "           kernel",
        "shop/cart:http",
        "  address  10.96.0.1:80",
    ]


def test_sentences_and_fields_fit() -> None:
    text = "the masquerade bit 0x4000 is set by other rules: give this one another with masqueradeBit"
    assert all(len(line) <= 40 for line in wrapped(Terminal(40), text, indent="    "))
    assert " ".join(line.strip() for line in wrapped(Terminal(40), text, indent="    ")) == text
    assert fields(Terminal(20), [("a name of many words", "yes")]) == ["  a name of many", "  words", "    yes"]
    assert fields(Terminal(), [("path", "direct"), ("kernel", "6.18")]) == ["  path    direct", "  kernel  6.18"]


@pytest.mark.parametrize(("seconds", "text"), [(10800, "3h"), (90, "90s"), (86400, "1d"), (60, "1m"), (0, "0s")])
def test_durations(seconds: int, text: str) -> None:
    assert duration(seconds) == text
