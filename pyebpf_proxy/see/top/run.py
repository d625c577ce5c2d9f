# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy top``: the command."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import ExitStack
from types import FrameType

from pyebpf_proxy.see.answers import RIGHT
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.see.top.watch import Watch, show


def _end(number: int, frame: FrameType | None) -> None:
    # Raise an exception, so that the terminal is restored.
    raise SystemExit(128 + number)


def run(arguments: argparse.Namespace) -> int:
    """``top``, until it is interrupted or ``--count`` intervals have passed."""
    count = 1 if arguments.once else arguments.count
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    with ExitStack() as stack:
        maps = stack.enter_context(Pinned(arguments.directory))
        watch = Watch(arguments, maps, stack)
        if sys.stdout.isatty() and sys.stdin.isatty() and arguments.output == "table" and not arguments.once:
            from pyebpf_proxy.see.top.screen import live

            live(watch, arguments, count)
            return RIGHT
        due = time.monotonic()
        done = 0
        while count is None or done < count:
            due = max(due + arguments.interval, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            show(arguments, watch.look())
            done += 1
    return RIGHT
