# SPDX-License-Identifier: Apache-2.0
"""Removes leftovers of kube-proxy once the agent serves, and warns if a kube-proxy is still running.

The work is done in a thread: with the rules of 10 000 services the tools take seconds, or a minute. The agent does not
wait for it when it ends: the tools work in transactions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.threads import in_daemon_thread
from pyebpf_proxy.config.addresses import Network
from pyebpf_proxy.datapath.migration import leftovers

_log = Logger("kube-proxy")


class KubeProxyMonitor:
    """Watches for a kube-proxy that was on this node before, or still is."""

    def __init__(self, exclude_cidrs: Sequence[Network]) -> None:
        self._exclude_cidrs = exclude_cidrs
        self._task: asyncio.Task[None] | None = None
        self._logged: set[str] = set()

    def replaced(self) -> None:
        """Remove kube-proxy's leftovers: the proxy's programs are attached and complete. Errors are only logged."""
        self._task = asyncio.get_running_loop().create_task(self._remove(), name="leftovers")

    def look(self) -> None:
        """Check whether kube-proxy's rules are back; a warning names its mode, once. The rules are left alone."""
        if self._task is not None and self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._look(), name="kube-proxy")

    def close(self) -> None:
        """Stop checking."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
        self._task = None

    async def _remove(self) -> None:
        try:
            report = await in_daemon_thread("leftovers", lambda: leftovers.remove(self._exclude_cidrs, at_start=True))
            # Leftovers that could not be removed do not show that a kube-proxy is running.
            self._logged = await in_daemon_thread("leftovers", leftovers.running)
        except Exception as error:  # whatever it is, services work without the removal
            _log.warning("leftovers of kube-proxy were not removed", error=str(error))
            return
        if report.removed:
            _log.info("removed what kube-proxy left behind", what="; ".join(report.removed))
        if report.problems:
            _log.warning("some leftovers of kube-proxy could not be removed", why="; ".join(report.problems))
        for text in report.warnings:
            _log.warning(text)

    async def _look(self) -> None:
        try:
            modes = await in_daemon_thread("leftovers", leftovers.running)
        except Exception as error:
            _log.debug("could not check whether a kube-proxy is running", error=str(error))
            return
        for mode in sorted(modes - self._logged):
            _log.warning(
                f"a kube-proxy in mode {mode} runs alongside this agent: its rules are back after they were removed;"
                " stop it, then start this agent again to remove them"
            )
        # A mode whose rules are gone, and come back later, is reported again.
        self._logged = modes
