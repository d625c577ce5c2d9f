# SPDX-License-Identifier: Apache-2.0
"""When Python's collector need not look for cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_cycle_search() -> Iterator[None]:
    """For making a hundred thousand objects that all stay: looking for cycles among them costs as much again.

    Of one thread. The search is on again at the end, however that comes, unless it was off at the beginning.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
