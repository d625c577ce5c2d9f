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
from pyebpf_proxy.datapath.repairs import Repair, repairs
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
        self._links: cgroups.SocketLinks | None = None
        #: Why programs that others detached are not attached again, or why their pins are missing; empty: neither.
        self._problem = ""

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        if self._off:
            return
        self._links = cgroups.SocketLinks(self._bpffs.pins / "links")
        self._opened.callback(self._links.close)
        self._attach(self._links)
        self._run(self._follow(), "look at socket programs")

    def refresh(self) -> None:
        """Attach again what others have detached, as the kernel does when a cgroup is removed; pin it again."""
        if self._links is None:
            return
        before, self._problem = self._problem, ""
        names = self._links.detached()
        try:
            if names:
                self._attach(self._links)
            pinned = self._links.pin()
        except OSError as error:
            if still := self._links.detached():
                self._problem = f"socket programs are detached ({','.join(still)}): {error}"
            else:
                self._problem = f"socket programs are attached only until the agent ends, their pins are gone: {error}"
            if self._problem != before:
                _log.error(self._problem)
            return
        repairs.note(Repair.SOCKET_PROGRAM, len(names))
        repairs.note(Repair.PINS, len(pinned))
        if names:
            _log.warning("socket programs were detached, they are attached again", programs=",".join(names))
        if pinned:
            _log.warning("pins of socket programs were removed, they are there again", programs=",".join(pinned))

    @property
    def problems(self) -> Collection[str]:
        return [self._problem] if self._problem else []

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.refresh()

    def _attach(self, links: cgroups.SocketLinks) -> None:
        cgroup = mounts.open_cgroup2()
        if cgroup.warning:
            _log.warning(cgroup.warning)
        try:
            links.attach(self._programs.loaded.sock.programs, cgroup.descriptor)
        finally:
            os.close(cgroup.descriptor)
        self.cgroup = cgroup.found

    def detach_former(self) -> None:
        """Detach the socket programs of a former run: everything that replaces them is in place now."""
        if self._off and cgroups.detach(self._bpffs.pins / "links"):
            _log.info("the socket programs of a former run are detached")
