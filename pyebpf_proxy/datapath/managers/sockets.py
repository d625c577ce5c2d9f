# SPDX-License-Identifier: Apache-2.0
"""The programs for sockets, on the cgroup hierarchy."""

from __future__ import annotations

import os

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.managers.bpffs import Bpffs
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.node import cgroups, mounts
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("datapath")


class SocketPrograms(Manager):
    """Attaches them, or with ``socketLB: off`` detaches those of a former run when ``detach_former`` is called."""

    def __init__(self, effective: Effective, bpffs: Bpffs, programs: Programs) -> None:
        super().__init__()
        self._off = effective.socket_lb == "off"
        self._bpffs = bpffs
        self._programs = programs
        #: How the cgroup hierarchy was found, for the log.
        self.cgroup = "none"

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        if self._off:
            return
        cgroup = mounts.open_cgroup2()
        if cgroup.warning:
            _log.warning(cgroup.warning)
        try:
            cgroups.attach(self._programs.loaded.sock.programs, cgroup.descriptor, self._bpffs.pins / "links")
        finally:
            os.close(cgroup.descriptor)
        self.cgroup = cgroup.found

    def detach_former(self) -> None:
        """Everything that serves the sockets instead is in place."""
        if self._off and cgroups.detach(self._bpffs.pins / "links"):
            _log.info("the socket programs of a former run are detached")
