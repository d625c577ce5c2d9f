# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.fuzz [TARGET...]``: search with atheris, so many seconds for each target.

The corpus in build/fuzz begins with the seeds (seeds.py) and the kept corpus, and grows. A finding is printed with its
traceback, and its input stays in build/fuzz; ``--again FILE TARGET`` runs one input. ``--keep`` does not search: of the
inputs in build/fuzz and the kept ones it keeps, in tests/fuzz/corpus, those that reach lines of the parsers that
shorter ones do not.
"""

from __future__ import annotations

import argparse
import base64
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests import ROOT

PLACE = ROOT / "build" / "fuzz"
#: The maximum size of one input in bytes.
LONGEST = 4096


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only this input")
    parser.add_argument("--keep", action="store_true", help="rewrite tests/fuzz/corpus from build/fuzz")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return _search(arguments.targets[0], arguments.seconds)
    from tests.fuzz.seeds import SEEDS, corpus
    from tests.fuzz.targets import TARGETS

    unknown = set(arguments.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if arguments.again is not None:
        for name in arguments.targets:
            TARGETS[name](arguments.again.read_bytes())
        return 0
    if arguments.keep:
        for name in arguments.targets or TARGETS:
            _keep(name)
        return 0
    bad = []
    for name in arguments.targets or TARGETS:
        place = PLACE / name
        place.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate([*SEEDS[name], *corpus(name)]):
            (place / f"seed-{number}").write_bytes(seed)
        # atheris ends the process in which it searches.
        command = [sys.executable, "-m", "tests.fuzz", "--inside", "--seconds", str(arguments.seconds), name]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
        lines = ran.stderr.splitlines()
        done = next((line for line in reversed(lines) if " cov: " in line or "DONE" in line), "nothing was run")
        print(f"{name}: {done.strip()}; {len(list(place.iterdir()))} inputs kept", flush=True)
        if ran.returncode:
            bad.append(name)
            print("\n".join(ran.stdout.splitlines()[-30:] + lines[-12:]), flush=True)
    print(f"findings: {', '.join(bad) or 'none'}")
    return min(len(bad), 1)


#: The maximum size of one target's kept corpus in bytes, as text.
MOST_KEPT = 24_000


def _keep(name: str) -> None:
    """Keep the inputs of a target that reach new lines, the shortest first."""
    from tests.fuzz.seeds import CORPUS, SEEDS, corpus
    from tests.fuzz.targets import TARGETS

    logging.disable()
    found = {path.read_bytes() for path in (PLACE / name).iterdir()} if (PLACE / name).exists() else set()
    known: set[tuple[str, int, int]] = set()
    for seed in SEEDS[name]:
        known |= reached(TARGETS[name], seed)
    kept: list[str] = []
    size = 0
    for data in sorted({*found, *corpus(name)} - {*SEEDS[name]}, key=lambda each: (len(each), each)):
        more = reached(TARGETS[name], data) - known
        line = base64.b64encode(data).decode()
        if more and size + len(line) < MOST_KEPT:
            known |= more
            kept.append(line)
            size += len(line) + 1
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.base64").write_text("".join(f"{line}\n" for line in kept))
    print(f"{name}: {len(kept)} of {len(found)} inputs kept, {size} bytes", flush=True)


def reached(target: Callable[[bytes], None], data: bytes) -> set[tuple[str, int, int]]:
    """The package's steps from line to line for an input: file, line before, line."""
    steps: set[tuple[str, int, int]] = set()
    folder = str(ROOT / "pyebpf_proxy")

    def enter(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        name, before = frame.f_code.co_filename.removeprefix(folder), frame.f_lineno

        def line(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            nonlocal before
            steps.add((name, before, frame.f_lineno))
            before = frame.f_lineno
            return line

        return line

    sys.settrace(enter)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return steps


def _search(name: str, seconds: int) -> int:
    sys.path += map(str, (ROOT / "build" / "fuzz-venv" / "lib").glob("python3*/site-packages"))
    import atheris

    with atheris.instrument_imports(include=["pyebpf_proxy", "h11", "yaml"]):
        from tests.fuzz.targets import TARGETS
    logging.disable()
    flags = [f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-timeout=10", "-rss_limit_mb=1024"]
    flags += [f"-artifact_prefix={PLACE}/{name}-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, str(PLACE / name)], TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
