# SPDX-License-Identifier: Apache-2.0
"""The interface of the parts of the data plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import ExitStack
from typing import Any

from pyebpf_proxy.services.model import ServicePort, ServicePortName
from pyebpf_proxy.services.node_facts import NodeFacts

#: Changed service ports; None: removed.
Delta = Mapping[ServicePortName, ServicePort | None]


class Manager:
    """A part of the data plane; the constructor does nothing. A subclass overrides what concerns it.

    Every method is called in the order of the list, ``close`` in reverse, all in the thread of the running loop. What
    ``start`` schedules on the loop runs only when the start of all managers has ended. OSError: the kernel refused.
    """

    def __init__(self) -> None:
        #: What ``start`` has opened: ``close`` calls it in reverse.
        self._opened = ExitStack()
        #: Called with a task of :meth:`_run` that has ended unexpectedly, in the loop's thread.
        self.on_task_ended: Callable[[asyncio.Task[None]], None] = lambda task: None

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        """Bring the kernel to the wanted state; adopt that of a former run."""

    def apply(self, delta: Delta, complete: bool) -> None:
        """Apply the changed service ports; ``complete``: there are no others."""

    def node_changed(self, facts: NodeFacts) -> None:
        """Apply new facts about the Nodes."""

    def refresh(self) -> None:
        """Repair what other programs may have changed."""

    async def collect(self) -> None:
        """Remove what recent changes have left over. Other methods may be called meanwhile."""

    @property
    def problems(self) -> Collection[str]:
        """What differs from the wanted state, as text."""
        return ()

    def _run(self, work: Coroutine[Any, Any, None], name: str, may_end: bool = False) -> None:
        """Run ``work`` in the loop until ``close``. The agent ends if it raises or, unless ``may_end``, returns."""
        task = asyncio.create_task(work, name=name)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (task.exception() is not None or not may_end):
                self.on_task_ended(task)

        task.add_done_callback(ended)
        self._opened.callback(task.cancel)

    def close(self) -> None:
        """Release everything, also after a failed ``start``. What serves packets stays in the kernel."""
        self._opened.close()
