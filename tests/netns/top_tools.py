# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy top`` while it runs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.cluster import Node
from pyebpf_proxy.see import model


class Watching:
    """A running ``top -o json``, and the sums of all its intervals."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.flows: dict[str, float] = {}
        self.packets: dict[str, float] = {}
        self.bytes: dict[str, float] = {}
        self.drops: dict[str, float] = {}
        self.reasons: dict[str, float] = {}
        self.backends: dict[str, float] = {}
        self.last = self.next()

    def next(self) -> model.Top:
        """The next interval, as scripts get it; its rates are added."""
        assert self.process.stdout is not None
        found = msgspec.json.decode(self.process.stdout.readline(), type=model.Top)
        for view in found.services:
            name = f"{view.name} {view.family}"
            for sums, rate in (
                (self.flows, view.new_flows),
                (self.packets, view.packets),
                (self.bytes, view.bytes),
                (self.drops, view.drops),
            ):
                sums[name] = sums.get(name, 0) + (rate or 0.0) * found.seconds
            assert view.new_flows == 0 or sum(each.share for each in view.backends) == pytest.approx(1)
            for each in view.backends:
                self.backends[each.address] = self.backends.get(each.address, 0) + each.new_flows * found.seconds
        for drop in found.reasons:
            self.reasons[drop.reason] = self.reasons.get(drop.reason, 0) + drop.drops * found.seconds
        self.last = found
        return found

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Read intervals until the sums satisfy the condition."""
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, f"{what}: {self.flows}, {self.packets}, {self.bytes}, {self.drops}"
            self.next()


def start(node: Node, *words: str, **given: Any) -> subprocess.Popen[str]:
    """A ``top`` that runs until it is stopped."""
    known = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    known["PYEBPF_PROXY_DIRECTORY"] = str(node.agent.directory)
    return subprocess.Popen(
        ["ip", "netns", "exec", node.namespace.name, *command(), "top", *words],
        env={**known, "TERM": "xterm-256color"},
        text=True,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given},
    )


@contextmanager
def watching(node: Node, *words: str) -> Iterator[Watching]:
    with start(node, "-o", "json", "-i", "0.3", *words) as process:
        try:
            yield Watching(process)
        finally:
            process.kill()
