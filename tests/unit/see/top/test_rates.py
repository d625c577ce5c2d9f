# SPDX-License-Identifier: Apache-2.0
"""``top`` without a kernel: rates, shares, order, and output that fits its terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from pyebpf_proxy.see import model
from pyebpf_proxy.see.state import Backend, Service
from pyebpf_proxy.see.text import Terminal
from pyebpf_proxy.see.top.meter import Amount, Place
from pyebpf_proxy.see.top.rates import ordered, short, top
from pyebpf_proxy.see.top.screen import Screen
from pyebpf_proxy.see.top.service_counters import Sample
from pyebpf_proxy.see.top.watch import MOST_PACKETS, one_in
from pyebpf_proxy.see.top.watch import text as plain_text
from pyebpf_proxy.services.model import IPFamily, Protocol, ServicePortName


def service(number: int, name: str, backends: tuple[int, ...]) -> Service:
    full = ServicePortName("default", name, "http", Protocol.TCP, IPFamily.IPV4)
    return Service(number, full, number, 0, 0, True, False, False, False, False, cluster=backends)


def backend(number: int, of: int) -> Backend:
    return Backend(number, IPFamily.IPV4, bytes([10, 0, 0, number]), 8080, Protocol.TCP, of, number == 1)


SERVICES = {1: service(1, "web", (1, 2)), 2: service(2, "other", (3,)), 3: service(3, "quiet", (4,))}
BACKENDS = {number: backend(number, of) for number, of in ((1, 1), (2, 1), (3, 2), (4, 3))}
NOWHERE, FIRST = Place(1, b"", 0), Place(1, bytes([10, 0, 0, 1]), 8080)
OTHER = Place(2, bytes([10, 0, 0, 3]), 8080)


def found(**changes: object) -> model.Top:
    sample = Sample(
        {1: {1: 6, 2: 2}},
        {(2, "drop_source_range"): 4, (0, "drop_loopback_destination"): 2},
        {NOWHERE: Amount(8, 480), FIRST: Amount(110, 11000), OTHER: Amount(20, 2000)},
    )
    given = {"before": {FIRST: Amount(100, 10000), OTHER: Amount(10, 1000)}, "seconds": 2.0, **changes}
    return top(SERVICES, BACKENDS, sample, **given)  # type: ignore[arg-type]


def test_rates_are_per_second_and_of_the_last_interval() -> None:
    made = found()
    web, other = ordered(made.services, "flows")
    assert (web.name, web.new_flows, web.packets, web.bytes, web.drops) == ("default/web:http", 4, 9, 740, 0)
    assert [(b.address, b.new_flows, b.packets, b.share, b.local) for b in web.backends] == [
        ("10.0.0.1:8080", 3, 5, 0.75, True),
        ("10.0.0.2:8080", 1, 0, 0.25, False),
    ]
    # No new flow: the share is one of bytes.
    assert (other.drops, [b.share for b in other.backends]) == (2, [1.0])
    assert (made.new_flows, made.packets, made.bytes, made.drops, made.at_rest) == (4, 14, 1240, 3, 1)
    assert [(each.reason, each.drops) for each in made.reasons] == [
        ("drop_loopback_destination", 1),
        ("drop_source_range", 2),
    ]


def test_named_services_are_shown_when_idle() -> None:
    made = found(named={SERVICES[3].name}, whole=True)
    assert [(view.name, [b.share for b in view.backends]) for view in made.services] == [("default/quiet:http", [0])]
    assert found(namespace="elsewhere").services == []


def test_without_a_meter_packets_are_not_zero_but_unknown() -> None:
    made = found(before=None)
    assert (made.packets, made.services[0].bytes, made.services[0].backends[0].packets) == (None, None, None)


def test_orders() -> None:
    services = found().services
    assert [view.service for view in ordered(services, "drops")] == ["other", "web"]
    assert [view.service for view in ordered(services, "name")] == ["other", "web"]
    assert [view.service for view in ordered(services, "bytes")] == ["web", "other"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, ""), (0.0, "-"), (0.04, "-"), (0.3, "0.3"), (1.0, "1"), (9.94, "9.9"), (9.96, "10"), (999.4, "999"),
        (999.6, "1.0k"), (1234.0, "1.2k"), (99_999.0, "100k"), (1.5e9, "1.5G"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_at_most(number: float | None, text: str) -> None:
    assert short(number) == text


def test_of_many_packets_few_are_sampled() -> None:
    assert [one_in(packets) for packets in (0, MOST_PACKETS, MOST_PACKETS + 1, 10 * MOST_PACKETS)] == [1, 1, 2, 16]
    assert one_in(1e12) == 256


@pytest.mark.parametrize("width", [20, 40, 57, 58, 78, 200])
@pytest.mark.parametrize("height", [5, 12])
def test_the_screen_fits_the_terminal(width: int, height: int) -> None:
    screen = Screen("flows", 3, 1.0)
    made = found()
    made.notes = ["packets and bytes are not measured: " + "a reason that is long " * 5]
    closed = {"IPv4": "stack_rules, a rule that is long " * 5}
    made.fast_path = model.TopFastPath(closed=closed, draining=False, young=1, kernel=2, permits=3, new_flows={})
    console = Console(width=width, height=height, file=StringIO(), force_terminal=True)
    lines = console.render_lines(screen.draw(made, width, height), pad=False)
    texts = ["".join(segment.text for segment in line) for line in lines]
    assert max(map(len, texts)) <= width
    assert len(texts) <= height or height == 5
    if width >= 40 and height == 12:
        assert any(text.startswith("default/web:http"[: width - 25]) for text in texts)
    assert [text[:15] for text in texts if text.startswith("fast path")] == ["fast path: clos"]
    assert any("SHARE" in text for text in texts) == (width >= 58)


def test_plain_text_has_the_fast_path_below_the_rates() -> None:
    made = found()
    assert plain_text(made, "flows", 3, Terminal())[1] == "fast path: off"
    made.fast_path = model.TopFastPath(
        closed={}, draining=False, young=12, kernel=3400, permits=20, new_flows={"fast": 40.0, "netfilter": 1.5}
    )
    lines = plain_text(made, "flows", 3, Terminal())
    assert lines[1] == (
        "fast path: open · young 12 · kernel 3400 · permits 20 · new flows a second: 40 fast, 1.5 netfilter"
    )
    assert lines[2].startswith("drops: ")


def test_keys() -> None:
    screen = Screen("flows", 3, 1.0)
    assert not screen.press("x")
    for key in "be+ ":
        assert screen.press(key)
    assert (screen.order, screen.backends, screen.interval, screen.paused) == ("bytes", 0, 2.0, True)
    for key in "e--- ":
        screen.press(key)
    assert (screen.backends, screen.interval, screen.paused) == (3, 0.25, False)
    assert not screen.ended
    screen.press("q")
    assert screen.ended
