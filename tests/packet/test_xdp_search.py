# SPDX-License-Identifier: Apache-2.0
"""Random packets through XDP and tc, and through tc alone (xdp_search.py). Findings become cases of test_xdp_flows."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.packet.fast_node import REDIRECT
from tests.packet.program_node import SHOT, XDP_DROP, XDP_PASS, XDP_REDIRECT, XDP_TX, ProgramNode
from tests.packet.xdp_search import SETTINGS, Worlds, search

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

STEPS = 750
SEED = int(os.environ.get("FUZZ_SEED", "1000"))


@pytest.fixture(scope="module")
def worlds(node: ProgramNode) -> Iterator[Worlds]:
    both = Worlds(node)
    yield both
    both.close()


def test_packets_have_the_same_outcome_with_and_without_xdp(worlds: Worlds) -> None:
    """Each family has its own settings, because the verifier takes most of the time."""
    print(f"FUZZ_SEED={SEED}")
    for name in list(SETTINGS)[worlds.family // 6 :: 2]:
        search(worlds, name, STEPS, SEED)
    # Otherwise the packets are not as intended.
    counts = worlds.counts
    assert counts[XDP_DROP, SHOT], counts
    assert counts[XDP_PASS, REDIRECT], counts
    assert counts[XDP_TX, REDIRECT] + counts[XDP_REDIRECT, REDIRECT] > counts[XDP_PASS, REDIRECT], counts
