# SPDX-License-Identifier: Apache-2.0
"""The BPF file system with the pins of this instance."""

from __future__ import annotations

from pathlib import Path

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.datapath.loader.layout import LAYOUT_VERSION
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("datapath")


class Bpffs(Manager):
    """Finds or mounts a bpffs. ``start`` sets ``path``, ``pins`` and ``tcx``."""

    #: Where the bpffs is mounted.
    path: Path
    #: The folder of this layout version: maps, programs and links.
    pins: Path
    #: The folder of the tcx links.
    tcx: Path

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        bpffs = mounts.ensure_bpffs(self._directory)
        if bpffs.warning:
            _log.warning(bpffs.warning)
        self.path = bpffs.path
        self.pins = mounts.pin_directory(bpffs.path, self._directory, LAYOUT_VERSION)
        self.tcx = mounts.tcx_directory(bpffs.path, self._directory)
