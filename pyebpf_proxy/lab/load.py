# SPDX-License-Identifier: Apache-2.0
"""Load: sends requests one after the other until it is stopped, and records the outcome of each."""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
from collections.abc import Sequence
from typing import Any, NamedTuple

from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.namespace import Namespace, Task


class Sample(NamedTuple):
    """One request under load. Times in seconds of the monotonic clock, which all processes share."""

    begun: float
    took: float
    kind: str
    pod: str
    error: str


class Load:
    """Sends requests from one namespace to one address, in a separate process, until ``stop``.

    ``pause``: seconds between two requests, so that slow machines have time for other work.
    """

    def __init__(
        self,
        namespace: Namespace,
        address: str,
        port: int,
        protocol: str = "tcp",
        timeout: float = 4.0,
        pause: float = 0.0,
    ):
        context = multiprocessing.get_context("fork")
        self._stop = context.Event()
        self._made = context.RawValue("L", 0)
        self._task: Task[list[Sample]] = namespace.start(
            _ask_until, self._stop, self._made, address, port, protocol, timeout, pause
        )
        self.name = f"{protocol} to [{address}]:{port}"

    @property
    def made(self) -> int:
        """The number of finished requests, answered or not."""
        return int(self._made.value)

    def stop(self) -> list[Sample]:
        """Stop the load; returns all samples."""
        self._stop.set()
        return self._task.result(120)


def _ask_until(
    stop: multiprocessing.synchronize.Event,
    made: Any,
    address: str,
    port: int,
    protocol: str,
    timeout: float,
    pause: float,
) -> list[Sample]:
    samples: list[Sample] = []
    while not stop.is_set():
        outcome = ask(address, port, protocol, timeout=timeout)
        pod = outcome.answer.pod if outcome.answer else ""
        samples.append(Sample(outcome.begun, outcome.took, outcome.kind, pod, outcome.error))
        made.value += 1
        if pause:
            stop.wait(pause)
    return samples


def failed(samples: Sequence[Sample]) -> list[Sample]:
    """The requests without an answer."""
    return [sample for sample in samples if sample.kind != ANSWERED]


def first_answer(samples: Sequence[Sample], pod: str, since: float) -> float | None:
    """Seconds from ``since`` until the first answer of ``pod``; None if there was none."""
    answers = [sample.begun + sample.took for sample in samples if sample.pod == pod and sample.begun >= since]
    return min(answers) - since if answers else None


def last_answer(samples: Sequence[Sample], pod: str, since: float) -> float:
    """Seconds from ``since`` until the start of the last request that ``pod`` answered; 0 if there was none."""
    begun = [sample.begun for sample in samples if sample.pod == pod and sample.begun >= since]
    return max(begun) - since if begun else 0.0
