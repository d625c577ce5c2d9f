# SPDX-License-Identifier: Apache-2.0
"""Settings of the node's kernel (docs/node-settings.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.connections.liberal import make_liberal
from pyebpf_proxy.datapath.loader.programs import fast_path_is_built
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.node import sysctls
from pyebpf_proxy.datapath.node.node_settings import FAST_PATH, LIBERAL, Setting
from pyebpf_proxy.datapath.repairs import Repair, repairs
from pyebpf_proxy.datapath.settings import kernel_settings
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("datapath")

#: How often the settings that established connections depend on are read again.
_CHECK_SECONDS = 1.0


class KernelSettings(Manager):
    """The settings that kube-proxy would make: conntrack, route_localnet, ARP."""

    def __init__(self, effective: Effective, warn_node: sysctls.WarnNode | None) -> None:
        super().__init__()
        self._effective = effective
        self._warn_node = warn_node

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        sysctls.apply(kernel_settings(self._effective, facts), self._effective.directory, self._warn_node)


class FastPathSettings(Manager):
    """Settings of conntrack that the fast path needs. They stay when the agent ends, as the fast path's flows do."""

    def __init__(self, effective: Effective) -> None:
        super().__init__()
        self._effective = effective
        #: Why the settings could not be made, so that there is no fast path; or "".
        self.refused = ""
        #: The fast path is on, and needs the settings.
        self._holds = False
        #: Why a setting that another program has changed could not be made again, by setting.
        self._lost: dict[str, str] = {}

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        if self._effective.fast_path and fast_path_is_built():
            self.refused = next(filter(None, map(self._hold, FAST_PATH)), "")
            self._holds = not self.refused
        if self._holds:
            self._run(self._watch(), "conntrack settings of the fast path")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        """Make a setting again that another program has changed: without it, connections of the fast path end."""
        if self._holds:
            for setting in FAST_PATH:
                self._ensure(setting)

    def _hold(self, setting: Setting) -> str:
        return sysctls.hold(setting, self._effective.directory, configured=setting in self._configured)

    @property
    def _configured(self) -> Collection[Setting]:
        """The settings that the configuration asks for, too: they stay when the fast path is off."""
        return (LIBERAL,) if self._effective.kernel.conntrack.tcp_be_liberal else ()

    def _ensure(self, setting: Setting) -> None:
        try:
            if sysctls.is_set(setting):
                self._lost.pop(setting.name, None)
                return
            refused = self._hold(setting)
        except OSError as error:
            refused = f"{setting.name} cannot be read: {error.strerror or error}"
        if not refused:
            _log.warning(
                "another program changed a setting that the fast path needs; it is set again", setting=setting.name
            )
            repairs.note(Repair.SETTING)
            self._lost.pop(setting.name, None)
        elif self._lost.get(setting.name) != refused:
            _log.error("established connections of the fast path may end", error=refused)
            self._lost[setting.name] = refused

    @property
    def problems(self) -> Collection[str]:
        return list(self._lost.values())

    def restore(self) -> None:
        """If the fast path is off now: restore the settings, so that connections that used it continue."""
        self._holds = False
        effective = self._effective
        if not any(sysctls.held(setting, effective.directory) for setting in FAST_PATH):
            return
        try:
            _log.info("the fast path is off", connections=make_liberal())
            # The record may still name the fast path as the holder, if it could not be written.
            _, problems = sysctls.restore(effective.directory, holder=LIBERAL.field, keep=self._configured)
        except OSError as error:
            problems = [str(error)]
        for problem in problems:
            _log.error("a setting of the fast path could not be restored", error=problem)
