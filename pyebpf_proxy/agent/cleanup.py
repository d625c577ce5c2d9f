# SPDX-License-Identifier: Apache-2.0
"""``--cleanup``: removes everything that this instance has set up, and the rules that kube-proxy left behind.

It needs capabilities, but neither an API server nor the BPF objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.run_directory import SOCKET, RunDirectory
from pyebpf_proxy.config.addresses import Network
from pyebpf_proxy.datapath import preflight
from pyebpf_proxy.datapath.cleanup import cleanup
from pyebpf_proxy.datapath.migration import leftovers
from pyebpf_proxy.datapath.report import Report

_log = Logger("cleanup")


def run(path: Path, exclude_cidrs: Sequence[Network] = (), keep_kube_proxy: bool = False) -> None:
    """Clean up the instance of this run folder, then kube-proxy's leftovers (spec/configuration §6).

    ``exclude_cidrs``: IPVS services in these ranges are kept. ``keep_kube_proxy``: kube-proxy runs again, so its rules
    and the node settings that it requires are kept. FatalError if an agent uses the folder, or if something could not
    be removed; everything else is still removed.
    """
    preflight.check_rights(["CAP_NET_ADMIN"])
    directory = RunDirectory(path)
    directory.acquire()
    try:
        report = cleanup(path, (SOCKET,), keep_settings=keep_kube_proxy)
    finally:
        directory.release(remove=True)
    others = Report() if keep_kube_proxy else leftovers.remove(exclude_cidrs)
    for thing in report.removed:
        _log.info("removed", what=thing)
    for thing in others.removed:
        _log.info("removed what kube-proxy left behind", what=thing)
    for text in others.warnings:
        _log.warning(text)
    if problems := [*report.problems, *others.problems]:
        raise FatalError(f"encountered an error while tearing down rules: {'; '.join(problems)}")
    _log.info("clean", directory=path)
