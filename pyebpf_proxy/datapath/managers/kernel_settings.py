# SPDX-License-Identifier: Apache-2.0
"""Settings of the node's kernel (docs/node-settings.md)."""

from __future__ import annotations

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.connections.liberal import make_liberal
from pyebpf_proxy.datapath.loader.programs import fast_path_is_built
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.node import sysctls
from pyebpf_proxy.datapath.node.node_settings import ANY_RESET, LIBERAL
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("datapath")


class KernelSettings(Manager):
    """The settings that kube-proxy would make: conntrack, route_localnet, ARP."""

    def __init__(self, effective: Effective, warn_node: sysctls.WarnNode | None) -> None:
        super().__init__()
        self._effective = effective
        self._warn_node = warn_node

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        sysctls.apply(self._effective.kernel, self._effective.directory, self._warn_node)


class FastPathSettings(Manager):
    """Settings of conntrack that the fast path needs. They stay when the agent ends, as the fast path's flows do."""

    def __init__(self, effective: Effective) -> None:
        super().__init__()
        self._effective = effective
        #: Why the settings could not be made, so that there is no fast path; or "".
        self.refused = ""

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        if self._effective.fast_path and fast_path_is_built():
            directory = self._effective.directory
            self.refused = sysctls.hold(LIBERAL, directory) or sysctls.hold(ANY_RESET, directory)

    def restore(self) -> None:
        """If the fast path is off now: restore the settings, so that connections that used it continue."""
        effective = self._effective
        if not sysctls.held(LIBERAL, effective.directory) and not sysctls.held(ANY_RESET, effective.directory):
            return
        if effective.kernel.conntrack.tcp_be_liberal:
            return
        try:
            _log.info("the fast path is off", connections=make_liberal())
            _, problems = sysctls.restore(effective.directory, holder=LIBERAL.field)
        except OSError as error:
            problems = [str(error)]
        for problem in problems:
            _log.error("a setting of the fast path could not be restored", error=problem)
