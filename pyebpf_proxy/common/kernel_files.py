# SPDX-License-Identifier: Apache-2.0
"""Files of the kernel in /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def kernel_number(path: Path) -> int | None:
    """The number in a file of /proc or /sys; None if it cannot be read."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
