# SPDX-License-Identifier: Apache-2.0
"""Disables Python's cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_cycle_search() -> Iterator[None]:
    """For the creation of many lasting objects: the search for cycles would double its cost.

    For one thread only. The collector is enabled again at the end, unless it was disabled before.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
