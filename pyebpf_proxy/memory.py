# SPDX-License-Identifier: Apache-2.0
"""Memory that a start needed and nothing later needs."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Free pages of the C library's heap go back to the kernel; by itself it keeps them. Some milliseconds."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        pass  # another C library
