# SPDX-License-Identifier: Apache-2.0
"""Runs inside a guest: checks what the kernel supports, then runs suite after suite.

The results of each in /results are sent when it has ended: a guest that crashes later does not lose them.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyebpf_proxy.lab.agent import THREE_CAPABILITIES
from tests.kernels.problem import KernelsError
from tests.kernels.suites import MODULES, Suite, chosen

RESULTS = Path("/results")
_OUT = Path(os.environ.get("RESULTS_DEVICE", os.devnull))
# Suites are forks of a process that has imported their common modules, which takes an emulated CPU six seconds.
_READ_ONCE = (
    *("hypothesis", "pyroute2", "scapy.layers.inet", "scapy.layers.inet6", "scapy.layers.sctp", "_pytest.junitxml"),
    *("pyebpf_proxy.lab.scenario", "pyebpf_proxy.see.doctor.loading", "pyebpf_proxy.datapath.maps.writer"),
)
# Seconds for a suite to end after its time is over.
_END = 60
_FORK = multiprocessing.get_context("fork")


def probe() -> dict[str, str]:
    """What the agent detects about this kernel before it serves: with its own functions, never by version.

    With exactly the capabilities of the DaemonSet.
    """
    command = [*THREE_CAPABILITIES, sys.executable, "-m", "tests.kernels.probe"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelsError(f"the probe failed: {done.stderr.strip()}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


def send(*names: str) -> None:
    """Send the files of the results as a separate tar."""
    subprocess.run(["tar", "-C", RESULTS, "-cf", _OUT, *names], check=True)


def _session(arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.exit(int(pytest.main(arguments)))


def run(suite: Suite) -> None:
    """One call of pytest. Its results and its exit status (-1: out of time) are sent; its output goes to the
    console.
    """
    arguments = [
        *suite.arguments,
        f"--junitxml={RESULTS / suite.name}.xml",
        "-v",
        "--color=no",
        "-p",
        "no:cacheprovider",
    ]
    # Assertions in plugins that were imported before are not explained; those in tests are.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning", *shlex.split(os.environ.get("ARGS", ""))]
    began = time.monotonic()
    process = _FORK.Process(target=_session, args=(arguments, suite.environment))
    process.start()
    process.join(suite.limit)
    status = process.exitcode
    if status is None:
        status = -1
        # It tears down its fixtures, and writes the results so far.
        os.kill(process.pid or 0, signal.SIGINT)
        process.join(_END)
        process.kill()
        process.join()
    print(f"{suite.name}: exit status {status}, {time.monotonic() - began:.1f} s", flush=True)
    (RESULTS / f"{suite.name}.status").write_text(str(status))
    send(*(path.name for path in RESULTS.glob(f"{suite.name}.*")))


def main() -> int:
    """0 if everything was tried; the results have the failures."""
    RESULTS.mkdir(exist_ok=True)
    for name in _READ_ONCE:
        importlib.import_module(name)
    wanted = chosen(os.environ.get("SUITES", ""))
    to_refuse = bool(os.environ.get("REFUSED"))
    for suite in wanted:
        if suite.refused if to_refuse else suite.first:
            run(suite)
    found = {"release": os.uname().release} | probe()
    (RESULTS / "probe.json").write_text(json.dumps(found))
    send("probe.json")
    print(found, flush=True)
    if to_refuse or "refused" in found:
        return 0
    for module in MODULES:
        subprocess.run(["modprobe", "-q", module], check=False)
    for suite in wanted:
        if not suite.first and not suite.refused:
            run(suite)
    return 0


if __name__ == "__main__":
    sys.exit(main())
