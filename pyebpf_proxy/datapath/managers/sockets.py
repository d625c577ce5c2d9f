# SPDX-License-Identifier: Apache-2.0
"""The programs for sockets, on the cgroup hierarchy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.managers.bpffs import Bpffs
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.node import cgroups, mounts
from pyebpf_proxy.services.node_facts import NodeFacts

#: Seconds between two looks at the links. The kernel does not report that one was detached.
LOOK_SECONDS = 0.5

_log = Logger("datapath")


class SocketPrograms(Manager):
    """Attaches the socket programs, and attaches them again if others detach them.

    With ``socketLB: off``, ``detach_former`` detaches those of a former run.
    """

    def __init__(self, effective: Effective, bpffs: Bpffs, programs: Programs) -> None:
        super().__init__()
        self._off = effective.socket_lb == "off"
        self._bpffs = bpffs
        self._programs = programs
        #: How the cgroup hierarchy was found, for the log.
        self.cgroup = "none"
        #: Why programs that others detached are not attached again; empty: they are.
        self._problem = ""

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        if self._off:
            return
        self._attach()
        self._run(self._follow(), "look at socket programs")

    def refresh(self) -> None:
        """Attach again what others have detached, as the kernel does when a cgroup is removed."""
        names = [] if self._off else cgroups.detached(self._bpffs.pins / "links")
        before, self._problem = self._problem, ""
        if not names:
            return
        try:
            self._attach()
        except OSError as error:
            self._problem = str(error)
            if self._problem != before:
                _log.error("socket programs were detached, and cannot be attached again", error=self._problem)
        else:
            _log.warning("socket programs were detached, they are attached again", programs=",".join(names))

    @property
    def problems(self) -> Collection[str]:
        return [f"socket programs are detached: {self._problem}"] if self._problem else []

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.refresh()

    def _attach(self) -> None:
        cgroup = mounts.open_cgroup2()
        if cgroup.warning:
            _log.warning(cgroup.warning)
        try:
            cgroups.attach(self._programs.loaded.sock.programs, cgroup.descriptor, self._bpffs.pins / "links")
        finally:
            os.close(cgroup.descriptor)
        self.cgroup = cgroup.found

    def detach_former(self) -> None:
        """Detach the socket programs of a former run: everything that replaces them is in place now."""
        if self._off and cgroups.detach(self._bpffs.pins / "links"):
            _log.info("the socket programs of a former run are detached")
