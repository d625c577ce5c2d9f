# SPDX-License-Identifier: Apache-2.0
"""What failed is called again, less and less often, until it succeeds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pyebpf_proxy.common.retry import Retry


class Loop:
    """The timers of a loop; ``tick`` calls the next one and returns its delay in seconds."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, work: Callable[[], None]) -> Any:
        timer = seconds, work
        self.timers.append(timer)

        class Handle:
            def cancel(_) -> None:  # noqa: N805
                if timer in self.timers:
                    self.timers.remove(timer)

        return Handle()

    def tick(self) -> float:
        (timer,) = self.timers
        self.timers.clear()
        timer[1]()
        return timer[0]


def following(retry: Retry) -> Loop:
    loop: Any = Loop()
    retry.follow(loop)
    found: Loop = loop
    return found


def test_the_delay_doubles_up_to_the_longest_and_begins_again_after_a_success() -> None:
    retry = Retry(lambda: retry.failed(), 1.0, 3.0)
    loop = following(retry)
    retry.failed()
    assert [loop.tick() for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
    retry.succeeded()
    assert not loop.timers
    assert not retry.due
    retry.failed()
    assert loop.tick() == 1.0


def test_several_failures_cause_one_call() -> None:
    calls: list[int] = []
    retry = Retry(lambda: calls.append(1), 1.0, 3.0)
    loop = following(retry)
    retry.failed()
    retry.failed()
    loop.tick()
    assert calls == [1]
    assert not loop.timers
    assert not retry.due


def test_a_failure_before_there_is_a_loop_is_not_forgotten_and_one_after_the_end_is() -> None:
    retry = Retry(lambda: None, 1.0, 3.0)
    retry.failed()
    loop = following(retry)
    assert loop.tick() == 1.0
    retry.failed()
    retry.close()
    retry.failed()
    assert not loop.timers


def test_in_a_real_loop() -> None:
    async def main() -> None:
        called = asyncio.Event()
        retry = Retry(called.set, 0.001, 0.001)
        retry.follow(asyncio.get_running_loop())
        retry.failed()
        await asyncio.wait_for(called.wait(), 10)

    asyncio.run(main())
