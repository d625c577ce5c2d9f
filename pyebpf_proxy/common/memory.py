# SPDX-License-Identifier: Apache-2.0
"""Returns memory to the kernel after the start."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return free pages of the C library's heap to the kernel. It takes some milliseconds."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        pass  # another C library
