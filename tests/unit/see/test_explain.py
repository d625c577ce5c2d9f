# SPDX-License-Identifier: Apache-2.0
"""``explain`` detects a program that does not follow the rules."""

from __future__ import annotations

import pytest

from pyebpf_proxy.see.answers import QuestionError
from pyebpf_proxy.see.decide import Decision
from pyebpf_proxy.see.explain import disagreements, parse_packet
from pyebpf_proxy.see.explain_text import text
from pyebpf_proxy.see.model import ChoiceView, Explanation, ProgramView
from pyebpf_proxy.see.state import Backend
from pyebpf_proxy.see.text import Terminal
from pyebpf_proxy.services.model import IPFamily, Protocol

BACKEND = Backend(7, IPFamily.IPV4, b"\x0a\xf4\x01\x0a", 8080, Protocol.TCP, 1, True)


def answer(verdict: str = "served", reason: str = "", **program: object) -> Explanation:
    known = {"verdict": "served", "backend": 7, "masquerade": True}
    choice = ChoiceView(
        address=BACKEND.text,
        backend=7,
        local=True,
        masquerade=True,
        masquerade_as="192.0.2.11",
        egress="pod0",
    )
    return Explanation(
        source="198.51.100.2:49152",
        destination="203.0.113.10:80",
        protocol="TCP",
        device="eth0",
        service="default/web:http",
        frontend="LoadBalancer",
        verdict=verdict,
        reason=reason,
        steps=[],
        endpoints=[choice] if verdict == "served" else [],
        left_out=[],
        program=ProgramView(ran=True, **(known | program)),  # type: ignore[arg-type]
        disagreements=[],
    )


DECISION = Decision(verdict="served", eligible=[BACKEND])


def found(view: Explanation) -> list[str]:
    return list(disagreements(view, DECISION, view.program))


def test_agreement_causes_no_message() -> None:
    assert found(answer()) == []


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (
            answer("dropped", "drop_source_range"),
            "verdict: dropped by the rules, served by the program",
        ),
        (answer(backend=8), "the program selected backend 8, which is not among the endpoints"),
        (answer(masquerade=False), "masquerade: masqueraded by the rules, not masqueraded by the program"),
    ],
)
def test_differences_are_shown(view: Explanation, text: str) -> None:
    assert found(view) == [text]


def test_another_reason_is_shown() -> None:
    view = answer("dropped", "drop_source_range")
    view.program = ProgramView(ran=True, verdict="dropped", counted=["drop_conntrack_full"])
    (output,) = disagreements(view, Decision(verdict="dropped", reason="drop_source_range"), view.program)
    assert output == "reason: drop_source_range by the rules, the program counted drop_conntrack_full"
    view.disagreements = [output]
    assert f"disagreement: {output}" in text(view, Terminal())
    assert not any("It agrees" in line for line in text(view, Terminal()))


@pytest.mark.parametrize(
    ("source", "destination", "text"),
    [
        ("192.0.2.1", "203.0.113.10:²", "DST: ² is not a port (1–65535)"),
        ("192.0.2.1", "203.0.113.10:٣", "DST: ٣ is not a port (1–65535)"),
        ("192.0.2.1:" + "9" * 5000, "203.0.113.10:80", f"SRC: {'9' * 5000} is not a port (1–65535)"),
        ("[2001:db8::1", "[::1]:80", "SRC: [2001:db8::1 is not an IP address in brackets, with a port after a colon"),
        ("2001:db8::1", "[::1]80", "DST: [::1]80 is not an IP address in brackets, with a port after a colon"),
    ],
    ids=["a superscript", "another script", "5000 digits", "no second bracket", "no colon"],
)
def test_an_invalid_place_is_one_line_of_error(source: str, destination: str, text: str) -> None:
    with pytest.raises(QuestionError) as caught:
        parse_packet(source, destination, "TCP")
    assert str(caught.value) == text


def test_places_with_and_without_brackets() -> None:
    assert parse_packet("[2001:db8::1]", "[::1]:80", "udp")[1:4] == (49152, bytes(15) + b"\1", 80)
    assert parse_packet("[192.0.2.1]:1", "127.0.0.1:65535", "tcp")[1:4] == (1, bytes([127, 0, 0, 1]), 65535)
