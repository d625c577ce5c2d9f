# SPDX-License-Identifier: Apache-2.0
"""Random packets and Services through every tc and XDP program (fuzz.py). Findings become cases of other tests."""

from __future__ import annotations

import os
import random

import pytest

from tests.packet.fuzz import SETTINGS, fuzz
from tests.packet.program_node import ProgramNode

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

PACKETS = 20_000
#: CI also runs with a random seed (tests/README.md).
SEED = int(os.environ.get("FUZZ_SEED", "1000"))
#: Outcomes that must occur, or the packets are not as intended. Only "fast" and "xdp" send packets.
OCCUR = ("serve", "drop", "reject", "none", "no first packet", "without ports", "odd")
OCCUR_FAST = ("young", "sent", "a young flow's, for the kernel", "ended", "later fragment")


@pytest.mark.parametrize("name", SETTINGS)
def test_random_packets_become_what_the_rules_say(node: ProgramNode, name: str) -> None:
    print(f"FUZZ_SEED={SEED}")
    node.forget_flows()
    node.settings = {}
    counts = fuzz(node, PACKETS, SEED, (name,))
    for what in (*OCCUR, *(OCCUR_FAST if name in ("fast", "xdp") else ())):
        assert counts[what] > 0, (what, counts)
    assert counts["refused by the kernel's test run"] < PACKETS / 10


def test_the_packets_of_a_seed_are_the_same(node: ProgramNode) -> None:
    """Otherwise the printed seed of a finding would not repeat it."""
    first, second = (fuzz(node, 500, 3, ("slow",)) for _ in range(2))
    assert first == second
    assert fuzz(node, 500, random.Random(4).randrange(1 << 30), ("slow",)) != first
