# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.faults [NAME...]``: make the faults, write results.json and docs/reliability.md.

Results of faults that are not named stay. ``--page``: only the page. ``--ours``: without kube-proxy.
"""

from __future__ import annotations

import argparse
import sys
import traceback

import msgspec

from bench import api_load
from bench.measure import commit, machine, say, speed
from bench.proxies import OURS
from tests.faults.contenders import KUBE_PROXY
from tests.faults.faults import FAULTS
from tests.faults.ground import CHANGES, Ground
from tests.faults.measure import Fault, Outcome, problems, run
from tests.faults.page import Entry, read, write
from tests.support.apiserver import ApiServer
from tests.support.damage import CannotBeMadeError

#: The sources that affect an outcome, besides the agent.
_TOOLS = ("tests/faults/*.py", "tests/changes/*.[chp]*", "tests/support/*.py")


def measured(fault: Fault, name: str, scale: float, changes: int) -> Outcome | str:
    """The outcome, or why the fault could not be made."""
    try:
        if name == OURS and not fault.api:
            with Ground(own=fault.own, environment=fault.environment()) as ground:
                return _of_this_commit(run(ground, fault, scale=scale))
        if missing := api_load.missing():
            return f"there is no {missing}"
        with ApiServer() as api, Ground(name, api) as ground:
            ground.changes = changes
            return _of_this_commit(run(ground, fault, scale=scale))
    except CannotBeMadeError as error:
        return f"not made here: {error}"


def _of_this_commit(found: Outcome) -> Outcome:
    return msgspec.structs.replace(found, commit=commit(*_TOOLS))


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(FAULTS)}; default: all")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--ours", action="store_true", help="only pyebpf-proxy; the former results of kube-proxy stay")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the duration of each fault by this")
    parser.add_argument("--changes", type=int, default=CHANGES, help="of the fault api-churn: changes per second")
    parser.add_argument("--dry", action="store_true", help="print the results; write no file")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - FAULTS.keys()
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    known = read()
    bad = 0
    for name in () if arguments.page else arguments.names or FAULTS:
        fault = FAULTS[name]
        former = known.faults.get(name)
        ours: Outcome | str
        beside: Outcome | str = fault.not_beside or (former.beside if former else "not measured")
        try:
            ours = measured(fault, OURS, arguments.scale, arguments.changes)
            if not fault.not_beside and not arguments.ours:
                beside = measured(fault, KUBE_PROXY, arguments.scale, arguments.changes)
        except Exception:
            traceback.print_exc()
            say(f"{name}: the measurement failed")
            bad += 1
            continue
        other = beside if isinstance(beside, Outcome) else None
        found = problems(fault, ours, other) if isinstance(ours, Outcome) else []
        for each in (ours, beside):
            say(f"{name}: {each}")
        say(f"{name}: {'; '.join(found) or 'as promised'}")
        bad += bool(found)
        if not arguments.dry:
            # Another run may have added its own meanwhile.
            known = read()
            known.faults[name] = Entry(ours=ours, beside=beside)
            known.machine = machine(speed())
            write(known)
    if arguments.page:
        write(known)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
