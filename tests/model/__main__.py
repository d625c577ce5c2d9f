# SPDX-License-Identifier: Apache-2.0
"""``make test-model``: streams of random events against the agent; ARGS="--streams 1000 --seed 7 --seconds 600"."""

from __future__ import annotations

import argparse
import random
import sys
import time

from pyebpf_proxy.lab.cluster import Lab
from tests.model.stream import Model, WrongError, run, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-model", description=__doc__)
    parser.add_argument("--streams", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--steps", type=int, default=50, help="steps of each (default: 50)")
    parser.add_argument("--seed", type=int, default=None, help="of the first stream; the next has the next number")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no stream after that time")
    parser.add_argument("--shrink", type=float, default=600.0, help="seconds for making a finding small")
    parser.add_argument("--only", default="", help="numbers of the steps, as a finding names them: 3,7,12")
    parser.add_argument("--without", default="", help="names of steps that are left out: kill,restart")
    parser.add_argument("--verbose", action="store_true", help="print every step")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 31)
    say = print if options.verbose or options.only else lambda text: None
    begun = time.monotonic()
    done = failed = 0
    with Lab(nodes=1) as lab:
        model = Model(lab, options.without.split(","))
        only = [int(number) for number in options.only.split(",")] if options.only else list(range(options.steps))
        for current in range(seed, seed + options.streams):
            if options.seconds and time.monotonic() - begun > options.seconds:
                break
            done += 1
            try:
                run(model, current, only, say)
            except WrongError as error:
                failed += 1
                print(f"seed {current}: {error}", flush=True)
                if not options.only:
                    finding(model, current, [n for n in only if error.step < 0 or n <= error.step], options.shrink)
            print(f"seed {current}: {done} streams, {failed} failed, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{done} streams of {len(only)} steps from seed {seed}: {failed} failed; {model.checks} comparisons")
    return 1 if failed else 0


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
    print(
        f"seed {seed}: make test-model ARGS='--streams 1 --seed {seed} --only {','.join(map(str, kept))}'", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
