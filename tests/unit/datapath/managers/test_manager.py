# SPDX-License-Identifier: Apache-2.0
"""A task of a manager that ends is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pyebpf_proxy.common.errors import DatapathError, FatalError
from pyebpf_proxy.config.effective import effective
from pyebpf_proxy.config.flags import Flags
from pyebpf_proxy.config.model import KubeProxyConfiguration
from pyebpf_proxy.datapath.datapath import Datapath

Work = Callable[[], Coroutine[Any, Any, None]]


async def returns() -> None:
    """At once."""


async def fails() -> None:
    raise KeyError("flow")


async def is_refused() -> None:
    raise OSError(24, "Too many open files")


async def goes_on() -> None:
    await asyncio.Event().wait()


async def guarded(work: Work, may_end: bool, close: bool) -> bool:
    """Whether the guard goes on waiting."""
    datapath = Datapath(effective(KubeProxyConfiguration(), Flags(), None))
    manager = datapath._managers[-1]
    guard = asyncio.create_task(datapath.guard())
    manager._run(work(), "a task", may_end)
    await asyncio.sleep(0)
    if close:
        manager.close()
    for _ in range(5):
        await asyncio.sleep(0)
    if guard.done():
        guard.result()
        return False
    guard.cancel()
    manager.close()
    return True


@pytest.mark.parametrize(
    ("work", "may_end", "error"),
    [
        (returns, False, FatalError),
        (fails, False, KeyError),
        (fails, True, KeyError),
        (is_refused, True, DatapathError),
    ],
)
def test_a_task_that_ends_unexpectedly_ends_the_agent(work: Work, may_end: bool, error: type[Exception]) -> None:
    with pytest.raises(error):
        asyncio.run(guarded(work, may_end, close=False))


@pytest.mark.parametrize(
    ("work", "may_end", "close"), [(returns, True, False), (goes_on, False, False), (goes_on, False, True)]
)
def test_others_do_not(work: Work, may_end: bool, close: bool) -> None:
    assert asyncio.run(guarded(work, may_end, close))
