# SPDX-License-Identifier: Apache-2.0
"""``--canary``: a number of nodes, or a share."""

from __future__ import annotations

import pytest

from pyebpf_proxy.cluster.canary import canary


@pytest.mark.parametrize(
    ("text", "nodes", "taken"),
    [("1", 300, 1), ("10", 3, 10), ("10%", 300, 30), ("10%", 3, 1), ("1%", 0, 0), ("100%", 7, 7), ("34%", 3, 2)],
)
def test_how_many_nodes(text: str, nodes: int, taken: int) -> None:
    assert canary(text).of(nodes) == taken


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "-1", "1.5", "%", "10%%", "½", "٣", "ten"])
def test_invalid_canaries(text: str) -> None:
    with pytest.raises(ValueError):
        canary(text)
