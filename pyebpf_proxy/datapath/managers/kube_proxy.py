# SPDX-License-Identifier: Apache-2.0
"""A kube-proxy that was on this node, or still runs on it: its leftovers.

They are handled in a thread: with the rules of 10 000 services the tools take seconds, or a minute. The agent does not
wait for it when it ends: the tools work in transactions.
"""

from __future__ import annotations

import asyncio

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.threads import in_daemon_thread
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.migration import leftovers
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("kube-proxy")


class KubeProxy(Manager):
    """Removes the rules of kube-proxy once, and from then on warns if they come back. Errors are only logged."""

    def __init__(self, effective: Effective) -> None:
        super().__init__()
        self._exclude_cidrs = effective.ipvs_exclude_cidrs
        self._due = asyncio.Event()
        #: The modes that the log has named.
        self._logged: set[str] = set()

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        self._run(self._follow(), "kube-proxy's leftovers")

    def refresh(self) -> None:
        self._due.set()

    async def _follow(self) -> None:
        await self._remove()
        while True:
            self._due.clear()
            await self._due.wait()
            await self._look()

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
        """Whether kube-proxy's rules are back; a warning names its mode, once. The rules are left alone."""
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
