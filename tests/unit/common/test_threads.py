# SPDX-License-Identifier: Apache-2.0
"""Work in a thread: callers retry what the kernel refuses. Anything else is theirs, or a bug."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable

import pytest

from pyebpf_proxy.common.threads import in_daemon_thread, in_thread

Way = Callable[[Callable[[], int]], Awaitable[int]]
WAYS: dict[str, Way] = {"of the loop": in_thread, "of its own": lambda work: in_daemon_thread("work", work)}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def call(way: Way, work: Callable[[], int]) -> int:
    async def main() -> int:
        return await way(work)

    return asyncio.run(main())


@every_way
def test_the_result_of_another_thread(way: Way) -> None:
    result = call(way, threading.get_ident)
    assert isinstance(result, int)
    assert result != threading.get_ident()


@every_way
def test_without_threads_it_is_refused_by_the_kernel(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        with monkeypatch.context() as without:
            without.setattr(threading.Thread, "start", refused)
            with pytest.raises(BlockingIOError, match="no thread could be started: can't start new thread"):
                await way(lambda: 1)

    asyncio.run(main())


@every_way
@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), ValueError()], ids=repr)
def test_an_error_of_the_work_itself_is_not_taken_for_that(way: Way, error: Exception) -> None:
    def broken() -> int:
        raise error

    with pytest.raises(type(error)) as raised:
        call(way, broken)
    assert raised.value is error


def test_the_end_does_not_wait_for_a_daemon(caplog: pytest.LogCaptureFixture) -> None:
    begun, may_end = threading.Event(), threading.Event()
    ended: concurrent.futures.Future[threading.Thread] = concurrent.futures.Future()

    def work() -> None:
        begun.set()
        may_end.wait(60)
        ended.set_result(threading.current_thread())

    async def main() -> None:
        task = asyncio.create_task(in_daemon_thread("work", work))
        while not begun.is_set():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(main())
    assert not ended.done()
    # Its result has no receiver any more.
    may_end.set()
    ended.result(60).join()
    assert not caplog.records
