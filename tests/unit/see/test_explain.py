# SPDX-License-Identifier: Apache-2.0
"""``explain`` detects a program that does not follow the rules."""

from __future__ import annotations

import pytest

from pyebpf_proxy.see.decide import Decision
from pyebpf_proxy.see.explain import disagreements
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
