# SPDX-License-Identifier: Apache-2.0
"""``--cleanup``: everything of this instance is taken away. Needs nothing that the agent needs but rights."""

from __future__ import annotations

from pathlib import Path

from pyebpf_proxy.datapath import preflight
from pyebpf_proxy.datapath.cleanup import cleanup
from pyebpf_proxy.errors import FatalError
from pyebpf_proxy.log import Logger
from pyebpf_proxy.run_directory import RunDirectory

_log = Logger("cleanup")


def run(path: Path) -> None:
    """Clean up the instance of this run folder; FatalError if an agent runs on it, or if something is left."""
    preflight.check_rights()
    directory = RunDirectory(path)
    directory.acquire()
    try:
        report = cleanup(path)
    finally:
        directory.release(remove=True)
    for thing in report.removed:
        _log.info("removed", what=thing)
    if report.problems:
        raise FatalError(f"encountered an error while tearing down rules: {'; '.join(report.problems)}")
    _log.info("clean", directory=path)
