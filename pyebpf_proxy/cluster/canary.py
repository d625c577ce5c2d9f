# SPDX-License-Identifier: Apache-2.0
"""``--canary N`` and ``--canary N%``: with how many nodes an installation stops."""

from __future__ import annotations

from typing import NamedTuple


class Canary(NamedTuple):
    """A number of nodes, or a share of the nodes in per cent."""

    number: int
    is_share: bool = False

    def of(self, nodes: int) -> int:
        """How many nodes, of this number. A share is rounded up: 10% of three nodes is one node."""
        return -(-nodes * self.number // 100) if self.is_share else self.number


def canary(text: str) -> Canary:
    """The option's value. ValueError if it is neither a number from 1 nor a share from 1% to 100%."""
    number = text.removesuffix("%")
    if not number.isascii() or not number.isdecimal() or int(number) < 1:
        raise ValueError(text)
    found = Canary(int(number), number != text)
    if found.is_share and found.number > 100:
        raise ValueError(text)
    return found
