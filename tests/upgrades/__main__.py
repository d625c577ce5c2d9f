# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.upgrades [COMMIT...]``: from builds of these commits to the working tree and back, under load.

Prints a line for each run, and what it has found. The exit status is 1 if it has found something.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from typing import get_args

from bench.measure import say
from pyebpf_proxy.lab.cluster import PodNetwork
from tests import ROOT
from tests.upgrades.builds import PRESENT, Build, BuildError, Repository
from tests.upgrades.scenarios import SCENARIOS, Result, Scenario, run

#: The agents' logs of runs with findings.
LOGS = ROOT / "build" / "upgrades"
RATE = 1000.0
_ROW = "{:<8} {:<8} {:<15} {:>6} {:>5} {:>5} {:>7} {:>7}  {}"


def row(first: Build, second: Build, scenario: Scenario, found: Result) -> str:
    """A line of the table."""
    verdict = f"{len(found.findings)} findings" if found.findings else "ok"
    names = (first.name, second.name, scenario.name)
    return _ROW.format(*names, found.tried, found.lost, found.moved, found.clashes, f"{found.seconds:.1f}", verdict)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.upgrades", description=__doc__)
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="default: by layout version and by date")
    names = [each.name for each in SCENARIOS]
    parser.add_argument("--to", metavar="COMMIT", help="instead of the working tree")
    parser.add_argument("--scenario", action="append", choices=names, help="only this one; may be repeated")
    parser.add_argument("--only", choices=("upgrade", "rollback"), help="only to the working tree, or only back")
    parser.add_argument("--pod-network", choices=get_args(PodNetwork), default="routed", help="see docs/lab.md")
    parser.add_argument("--rate", type=float, default=RATE, help="new connections a second")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments at which starts are killed")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root: it loads programs and makes network namespaces")
    repository = Repository()
    try:
        commits = [repository.commit(each) for each in arguments.commits] or repository.default_commits()
        builds = [repository.build(each) for each in commits]
        to = repository.build(repository.commit(arguments.to)) if arguments.to else PRESENT
    except BuildError as error:
        parser.exit(1, f"tests.upgrades: {error}\n")
    for each in (*builds, to):
        say(f"{each.name}: layout version {each.layout}")
    say(f"--seed {arguments.seed}")
    print(_ROW.format("old", "new", "scenario", "tried", "lost", "moved", "clashes", "seconds", ""), flush=True)
    bad = 0
    for build in builds:
        for scenario in (each for each in SCENARIOS if each.name in (arguments.scenario or names)):
            ways = {"upgrade": (build, to, scenario), "rollback": (to, build, scenario.swapped())}
            for way, what in ways.items():
                if arguments.only in (None, way):
                    rng = random.Random(f"{arguments.seed} {build.name} {scenario.name} {way}")
                    try:
                        found = run(*what, rng, arguments.rate, arguments.pod_network)
                    except Exception:
                        found = Result(findings=[f"the lab failed:\n{traceback.format_exc()}"])
                    bad += _report(*what, found)
    say(f"{bad} runs with findings; --seed {arguments.seed}")
    return min(bad, 1)


def _report(first: Build, second: Build, scenario: Scenario, found: Result) -> bool:
    """Print a run, and keep the log of a bad one."""
    print(row(first, second, scenario, found), flush=True)
    if found.findings:
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"{first.name}-{second.name}-{scenario.name}.log"
        log.write_text(found.log)
        for each in (*found.findings, f"log: {log}"):
            print("    " + each.replace("\n", "\n    "), flush=True)
    return bool(found.findings)


if __name__ == "__main__":
    sys.exit(main())
