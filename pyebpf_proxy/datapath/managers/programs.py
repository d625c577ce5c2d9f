# SPDX-License-Identifier: Apache-2.0
"""The loaded programs, the settings that they are loaded with, and their counters."""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping
from dataclasses import replace

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.loader.programs import Loaded, load
from pyebpf_proxy.datapath.loader.reasons import reasons
from pyebpf_proxy.datapath.managers.bpffs import Bpffs
from pyebpf_proxy.datapath.managers.kernel_settings import FastPathSettings
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.nft_table import NftTable
from pyebpf_proxy.datapath.maps import excluded_pods
from pyebpf_proxy.datapath.settings import map_sizes, settings
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("datapath")


class Programs(Manager):
    """Loads the programs; pinned maps of a former run are adopted. ``start`` sets ``loaded``."""

    loaded: Loaded

    def __init__(self, effective: Effective, bpffs: Bpffs, nft: NftTable, fast_path_settings: FastPathSettings) -> None:
        super().__init__()
        self._effective = effective
        self._bpffs = bpffs
        self._nft = nft
        self._fast_path_settings = fast_path_settings
        #: The keys of the counters by the names of the reasons, and the map; None: not loaded.
        self._counters: tuple[Mapping[str, bytes], Map] | None = None

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        effective, pins, refused = self._effective, self._bpffs.pins, self._fast_path_settings.refused
        wanted_settings = replace(
            settings(effective, facts),
            fast_path=bool(effective.fast_path) and not refused,
            mark_datagrams=self._nft.mark_datagrams,
        )
        self.loaded = loaded = load(wanted_settings, pins / "maps", map_sizes(effective))
        if why := refused or loaded.why_not_fast:
            loaded.why_not_fast = why
            report = _log.info if effective.fast_path == "auto" else _log.warning
            report("there is no fast path", why=why)
        self._opened.callback(loaded.close)
        for name, (old, new) in loaded.resized.items():
            _log.info("a map was resized", map=name, old=old, new=new)
        numbers = reasons(loaded.tc.btf.enum)
        self._counters = {name: struct.pack("=I", n) for name, n in numbers.items()}, loaded.maps["counters"]
        # The kernel may have refused the programs of the fast path.
        self._nft.support_fast_path(loaded.settings.fast_path)
        if loaded.why_not_pods:
            _log.warning(
                "sockets of pods are not translated; tc translates their packets instead", why=loaded.why_not_pods
            )
        if loaded.why_no_lookup:
            _log.info("the conntrack lookup is not available", why=loaded.why_no_lookup)
        if "excluded_pods" in loaded.maps:
            excluded_pods.write(loaded.maps["excluded_pods"], loaded.sock.btf, effective.socket_lb_exclude)

    def close(self) -> None:
        self._counters = None
        super().close()

    def reasons(self) -> Mapping[str, int]:
        """How many packets and socket calls by reason, summed over all CPUs. Safe in any thread."""
        if self._counters is None:
            return {}
        keys, counters = self._counters
        return {
            name: sum(int.from_bytes(value, sys.byteorder) for value in counters.lookup_cpus(key) or ())
            for name, key in keys.items()
        }
