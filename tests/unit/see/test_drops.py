# SPDX-License-Identifier: Apache-2.0
"""``drops`` as text: the meaning of a reason, and the remedy."""

from __future__ import annotations

from pyebpf_proxy.see import drops, model
from pyebpf_proxy.see.reasons import MEANINGS
from pyebpf_proxy.see.text import Terminal


def drop(reason: str, **given: object) -> model.Drop:
    meaning = MEANINGS[reason]
    made = model.Drop(reason=reason, count=4031, meaning=meaning.text, remedy=meaning.remedy)
    for name, value in given.items():
        setattr(made, name, value)
    return made


def test_a_packet_that_waits_for_a_promotion() -> None:
    """It is no error: the sender's next attempt succeeds. If it persists, the remedy names conntrack."""
    found = drop(
        "drop_awaiting_promotion",
        last_minute=962,
        seconds_ago=0.2,
        source="198.51.100.2:39634",
        destination="203.0.113.10:80",
        protocol="TCP",
        service="default/web:http",
        device="eth0",
    )
    lines = drops.text([found], Terminal(200))
    assert lines[1].split() == [
        *("drop_awaiting_promotion", "4031", "962", "0", "s", "ago"),
        *("198.51.100.2:39634", ">", "203.0.113.10:80", "TCP", "default/web:http", "eth0"),
    ]
    text = " ".join(" ".join(lines[2:]).split())
    assert "its retransmission gets through" in text
    assert "if it persists, conntrack is full or rejects entries: pyebpf-proxy status" in text
    assert drops.recent([found]) == [found]
    found.seconds_ago = drops.RECENT + 1
    assert drops.recent([found]) == []
