# SPDX-License-Identifier: Apache-2.0
"""``make test-model``: streams of random events against the agent; ARGS="--streams 1000 --seed 7 --seconds 600"."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import Synchronized

from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.namespace import die_with_parent
from tests.model.stream import SAME_SETTINGS, Model, WrongError, run, shrink

_fork = multiprocessing.get_context("fork")


class Search:
    """What the processes share: the options, the next stream, and what was done."""

    def __init__(self, options: argparse.Namespace, first: int) -> None:
        self.options = options
        self.first = first
        self.begun = time.monotonic()
        self.next: Synchronized[int] = _fork.Value("q", first)
        self.done: Synchronized[int] = _fork.Value("q", 0)
        self.failed: Synchronized[int] = _fork.Value("q", 0)
        self.checks: Synchronized[int] = _fork.Value("q", 0)

    def seeds(self) -> Iterator[int]:
        """The streams of this process: always the next ones that no process has begun."""
        # In a row: streams that begin with the same settings share an agent.
        row = max(1, min(SAME_SETTINGS, self.options.streams // self.options.jobs))
        while True:
            with self.next.get_lock():
                first = self.next.value
                self.next.value += row
            for seed in range(first, first + row):
                late = self.options.seconds and time.monotonic() - self.begun > self.options.seconds
                if late or seed >= self.first + self.options.streams:
                    return
                yield seed

    def record(self, seed: int, failed: bool, checks: int) -> None:
        """A stream has ended."""
        for counter, more in ((self.done, 1), (self.failed, int(failed)), (self.checks, checks)):
            with counter.get_lock():
                counter.value += more
        print(
            f"seed {seed}: {self.done.value} streams, {self.failed.value} failed, "
            f"{time.monotonic() - self.begun:.0f} s",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-model", description=__doc__)
    parser.add_argument("--streams", type=int, default=200, help="number of streams (default: 200)")
    parser.add_argument("--steps", type=int, default=50, help="number of steps of each stream (default: 50)")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the first stream; the next stream has the next number"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="start no stream later than this")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a lab of its own (default: 1)")
    parser.add_argument(
        "--shrink",
        type=float,
        default=600.0,
        help="how many seconds to search for a shorter stream with the same finding",
    )
    parser.add_argument(
        "--only", default="", help="run only the steps with these numbers, as a finding names them: 3,7,12"
    )
    parser.add_argument("--without", default="", help="leave out steps with these names: kill,restart")
    parser.add_argument(
        "--with-all", type=int, default=0, help=f"in how many of {SAME_SETTINGS} streams --without has no effect"
    )
    parser.add_argument("--command", action="store_true", help="start agents by the command, instead of by a fork")
    parser.add_argument("--verbose", action="store_true", help="print every step")
    options = parser.parse_args()
    first = options.seed if options.seed is not None else random.randrange(1 << 31)
    search = Search(options, first)
    if options.jobs == 1:
        streams(search)
        ended = [0]
    else:
        jobs = [_fork.Process(target=streams, args=(search,)) for _ in range(options.jobs)]
        for job in jobs:
            job.start()
        # Ctrl-C reaches all processes; each removes its lab.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for job in jobs:
            job.join()
        ended = [job.exitcode or 0 for job in jobs]
    print(
        f"{search.done.value} streams of {len(steps(options))} steps from seed {first}: {search.failed.value} failed; "
        f"{search.checks.value} comparisons"
    )
    return 1 if search.failed.value or any(ended) else 0


def steps(options: argparse.Namespace) -> list[int]:
    """The numbers of a stream's steps."""
    return [int(number) for number in options.only.split(",")] if options.only else [*range(options.steps)]


def streams(search: Search) -> None:
    """Run streams in a lab of this process until none is left."""
    if multiprocessing.parent_process() is not None:
        die_with_parent()
    options = search.options
    numbers = steps(options)
    say: Callable[[str], None] = print if options.verbose or options.only else lambda text: None
    without = options.without.split(",")
    with Lab(nodes=1) as lab, Model(lab, not options.command) as model:
        for seed in search.seeds():
            model.without = () if seed % SAME_SETTINGS < options.with_all else without
            before = model.checks
            failed = False
            try:
                run(model, seed, numbers, say)
            except WrongError as error:
                failed = True
                print(f"seed {seed}: {error}", flush=True)
                if not options.only:
                    finding(model, seed, [n for n in numbers if error.step < 0 or n <= error.step], options.shrink)
            search.record(seed, failed, model.checks - before)


def finding(model: Model, seed: int, numbers: list[int], seconds: float) -> None:
    """Print the fewest steps that still fail, as far as so many seconds suffice to find them."""
    end = time.monotonic() + seconds

    def fails(fewer: object) -> bool:
        if time.monotonic() > end:
            return False
        try:
            run(model, seed, fewer)  # type: ignore[arg-type]
        except WrongError:
            return True
        return False

    model.patience = 0.5
    kept = shrink(fails, numbers, 40)
    model.patience = 1.0
    left_out = f" --without {','.join(model.without)}" if any(model.without) else ""
    only = ",".join(map(str, kept))
    print(f"seed {seed}: make test-model ARGS='--streams 1 --seed {seed} --only {only}{left_out}'", flush=True)


if __name__ == "__main__":
    sys.exit(main())
