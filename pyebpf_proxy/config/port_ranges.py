# SPDX-License-Identifier: Apache-2.0
"""Port ranges of older releases: ``""``, ``0``, ``p``, ``a-b``, ``base+offset`` (spec/configuration §2.1)."""

from __future__ import annotations

import re
from typing import NamedTuple

from pyebpf_proxy.common.digits import bounded_int

_FORM = re.compile(r"([0-9]+)(?:([-+])([0-9]+))?", re.ASCII)
_LAST = 65535


class PortRange(NamedTuple):
    """Ports from ``first`` to ``last``; 0 to 0 means any port."""

    first: int
    last: int


def parse(text: str) -> PortRange:
    """Parse a range; ValueError if it is malformed. ``base+offset`` beyond 65535 ends at the last port."""
    if not text.strip():
        return PortRange(0, 0)
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"unable to parse port range: {text}")
    first = bounded_int(match[1], _LAST + 1)
    last = first
    if match[2] == "-":
        last = bounded_int(match[3], _LAST + 1)
    elif match[2] == "+":
        last = min(first + bounded_int(match[3], _LAST), _LAST)
    if first > _LAST or last > _LAST:
        raise ValueError(f"the port range cannot be greater than {_LAST}: {text}")
    if last < first:
        raise ValueError(f"end port cannot be less than start port: {text}")
    return PortRange(first, last)


def format(ports: PortRange) -> str:  # noqa: A001 - port_ranges.format reads as what it is
    """The canonical text: ``""`` for any, ``p`` or ``a-b``."""
    if ports == (0, 0):
        return ""
    return str(ports.first) if ports.first == ports.last else f"{ports.first}-{ports.last}"
