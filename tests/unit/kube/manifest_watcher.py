# SPDX-License-Identifier: Apache-2.0
"""A manifest source on a real folder while a test changes the folder, and what it delivered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pyebpf_proxy.kube.manifests import ManifestSource
from pyebpf_proxy.kube.objects import Service
from pyebpf_proxy.kube.source import Batch

DEADLINE = 60.0


def text(*ports: int, **named: int) -> str:
    named |= {f"s{port}": port for port in ports}
    documents = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": port}]},
        }
        for name, port in named.items()
    ]
    return "\n---\n".join(map(json.dumps, documents)) + "\n"


class Watcher:
    """A running source, and what it delivered."""

    def __init__(self, directory: Path) -> None:
        self.messages: list[str] = []
        self.batches: list[Batch] = []
        self.history: list[tuple[str, int | None]] = []
        self.ports: dict[str, int] = {}
        self.source = ManifestSource(directory, self.messages.append, self.messages.append)
        self.reads: list[str] = []
        read = self.source._read

        def counting(name: str) -> None:
            self.reads.append(name)
            read(name)

        self.source._read = counting  # type: ignore[method-assign]

    def deliver(self, batch: Batch) -> None:
        self.batches.append(batch)
        for change in batch.changes:
            port = None
            if change.object is None:
                del self.ports[change.name]
            else:
                assert isinstance(change.object, Service)
                assert change.object.spec.ports is not None
                port = change.object.spec.ports[0].port
                assert port is not None
                self.ports[change.name] = port
            self.history.append((change.name, port))

    async def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, (self.ports, self.messages)
            await asyncio.sleep(0.002)

    async def shows(self, **ports: int) -> None:
        await self.until(lambda: self.ports == ports)

    async def settled(self, directory: Path) -> None:
        """Wait until the source has seen everything so far: it sees a new change, and deletions are final."""
        marker = directory / "marker.json"
        marker.write_text(text(marker=1))
        await self.until(lambda: self.ports.get("marker") == 1)
        marker.unlink()
        await self.until(lambda: "marker" not in self.ports)


def run(directory: Path, scenario: Callable[[Watcher], Coroutine[Any, Any, None]]) -> Watcher:
    watcher = Watcher(directory)

    async def main() -> None:
        task = asyncio.create_task(watcher.source.run(watcher.deliver))
        body = asyncio.create_task(scenario(watcher))
        try:
            await asyncio.wait({task, body}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task  # its error is the result
            await body
        finally:
            for each in (task, body):
                each.cancel()
            await asyncio.gather(task, body, return_exceptions=True)

    asyncio.run(main())
    return watcher
