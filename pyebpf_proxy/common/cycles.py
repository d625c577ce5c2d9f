# SPDX-License-Identifier: Apache-2.0
"""Disables Python's cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_cycle_search() -> Iterator[None]:
    """Disable the collector while many long-lived objects are created: its searches would double the cost.

    Only one thread may use this. At the end the collector is enabled again, unless it was disabled before.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
