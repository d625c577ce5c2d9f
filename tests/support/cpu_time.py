# SPDX-License-Identifier: Apache-2.0
"""Limits of CPU time that hold on a slow machine, too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.fast_lab import slowness


@contextmanager
def cpu_limit(seconds: float, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
    """The block takes less CPU time than ``seconds`` on an idle machine; ``clock``: of this thread, or of the process.

    The garbage collector is off meanwhile: it takes longer the more tests this process has run.
    """
    slow = slowness()
    gc.disable()
    try:
        before = clock()
        yield
        took = clock() - before
    finally:
        gc.enable()
    slow = max(slow, slowness())
    assert took < seconds * slow, f"{took:.3f} s on a machine that is {slow:.1f} times slower"
