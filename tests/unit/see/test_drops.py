# SPDX-License-Identifier: Apache-2.0
"""``drops`` as text: the meaning of a reason, and the remedy."""

from __future__ import annotations

from struct import Struct
from typing import cast

from pyebpf_proxy.see import drops, model
from pyebpf_proxy.see.maps import Pinned
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


class Maps:
    """The maps after one packet to 127.0.0.1 that is not of TCP, UDP or SCTP: it has no ports."""

    names = frozenset({"last_refused"})
    max_entries = 15

    def counts(self) -> dict[str, int]:
        return {"drop_loopback_destination": 1}

    def enum(self, name: str) -> dict[str, int]:
        return {"DROP_LOOPBACK_DESTINATION": 14}

    def packer(self, struct: str, *fields: str) -> Struct:
        return {"refused": Struct("=Q16s16sHHBBI"), "frontend": Struct("=I")}.get(struct, Struct("=16sHB"))

    def map(self, name: str) -> Maps:
        return self

    def lookup_cpus(self, key: bytes) -> list[bytes]:
        source, destination = (bytes(each).ljust(16, b"\0") for each in ([192, 0, 2, 1], [127, 0, 0, 1]))
        return [self.packer("refused").pack(1, source, destination, 0, 0, 0, 0, 0)] if key[0] == 14 else []


def test_a_packet_to_loopback_may_have_any_protocol() -> None:
    maps = cast(Pinned, Maps())
    (found,) = drops.read(maps)
    assert (found.source, found.destination, found.protocol) == ("192.0.2.1", "127.0.0.1", "other")
    drops.fill_services([found], maps)
    assert found.service == ""
    assert " 192.0.2.1 > 127.0.0.1 other " in drops.text([found], Terminal(200))[1]
