# SPDX-License-Identifier: Apache-2.0
"""A ``trace`` that runs on a node of the lab during a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from types import TracebackType
from typing import Any, Self

from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.cluster import Node
from tests.support.lab_tools import wait_until

Line = dict[str, Any]


class Trace:
    """``trace -o json`` with these arguments, as soon as the programs report. ``kernel``: also the kernel's events."""

    def __init__(self, node: Node, *words: str, output: str = "json", kernel: bool = False, **environment: str) -> None:
        known = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        known["PYEBPF_PROXY_DIRECTORY"] = str(node.agent.directory)
        arguments = ["trace", *words, *(() if kernel else ("--no-kernel",)), "-o", output]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", node.namespace.name, *command(), *arguments],
            env=known | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        #: The messages at its start: what is missing, and that it traces now.
        self.messages: list[str] = []
        self.raw: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.raw.append(line.rstrip("\n"))

    def __enter__(self) -> Self:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.messages.append(line.rstrip("\n"))
            if line.startswith("tracing"):
                break
        else:
            raise AssertionError(f"trace ended: {self.messages}")
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
        self._reader.join(20)
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def lines(self) -> list[Line]:
        return [json.loads(text) for text in list(self.raw)]

    def until(self, count: int = 1, **fields: Any) -> list[Line]:
        """The first ``count`` lines with these fields, as soon as they exist."""

        def found() -> list[Line]:
            fitting = [line for line in self.lines if fields.items() <= line.items()]
            return fitting[:count] if len(fitting) >= count else []

        return wait_until(found, f"{count} lines with {fields}; there are {self.raw}")  # type: ignore[no-any-return]

    def ended(self) -> int:
        """The exit status, as soon as it has ended by itself."""
        status = self.process.wait(20)
        self._reader.join(20)
        return status
