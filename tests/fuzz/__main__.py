# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.fuzz [TARGET...]``: search by atheris, so many seconds for each target.

The corpus grows in build/fuzz, beginning with the committed seeds (seeds.py). A finding is printed with its traceback,
and its input is left in build/fuzz; ``--again FILE TARGET`` runs one input.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from pathlib import Path

from tests import ROOT

PLACE = ROOT / "build" / "fuzz"
#: Most bytes of one input.
LONGEST = 4096


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only this input")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return _search(arguments.targets[0], arguments.seconds)
    from tests.fuzz.seeds import SEEDS
    from tests.fuzz.targets import TARGETS

    unknown = set(arguments.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if arguments.again is not None:
        for name in arguments.targets:
            TARGETS[name](arguments.again.read_bytes())
        return 0
    bad = []
    for name in arguments.targets or TARGETS:
        corpus = PLACE / name
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(SEEDS[name]):
            (corpus / f"seed-{number}").write_bytes(seed)
        # atheris ends the process that it searches in.
        command = [sys.executable, "-m", "tests.fuzz", "--inside", "--seconds", str(arguments.seconds), name]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
        lines = ran.stderr.splitlines()
        done = next((line for line in reversed(lines) if " cov: " in line or "DONE" in line), "nothing was run")
        print(f"{name}: {done.strip()}; {len(list(corpus.iterdir()))} inputs kept", flush=True)
        if ran.returncode:
            bad.append(name)
            print("\n".join(ran.stdout.splitlines()[-30:] + lines[-12:]), flush=True)
    print(f"findings: {', '.join(bad) or 'none'}")
    return min(len(bad), 1)


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
