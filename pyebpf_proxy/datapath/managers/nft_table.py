# SPDX-License-Identifier: Apache-2.0
"""The nftables table: its rules and hooks. Other managers fill its maps and sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.loader.programs import fast_path_is_built
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour
from pyebpf_proxy.datapath.netfilter.table_watch import TableWatch
from pyebpf_proxy.datapath.node import mounts, sysctls
from pyebpf_proxy.datapath.node.node_settings import LIBERAL, ROUTE_LOCALNET
from pyebpf_proxy.datapath.repairs import Repair, repairs
from pyebpf_proxy.datapath.settings import conntrack_is_liberal, ports_of_both, with_fast_path_support
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("datapath")


class NftTable(Manager):
    """Creates the table, or adopts that of a former run with all its elements. ``start`` sets ``table``."""

    table: Table

    def __init__(self, effective: Effective) -> None:
        super().__init__()
        #: Every frontend (``nft_rules.port_key``): needed while the table checks destinations.
        self.frontends: Callable[[], Iterable[bytes]] = tuple
        self._effective = effective
        self._behaviour = Behaviour(effective.masquerade_mark, refuse_unknown=effective.nft_mode)
        #: The ports of conntrack's masquerade: those of this run, and those that a former run has left in the table.
        self._conntrack_ports: tuple[int, int] | None = None
        self._former_ports: tuple[int, int] | None = None
        #: Why the last :meth:`restore` failed, or "".
        self._not_restored = ""

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        effective = self._effective
        self.table = Table(mounts.table_name(effective.directory))
        # The value that the proxy itself set for the fast path does not count as the administrator's choice.
        others = conntrack_is_liberal() and not sysctls.held(LIBERAL, effective.directory)
        liberal = effective.kernel.conntrack.tcp_be_liberal or others
        self._behaviour = self._behaviour._replace(
            drop_invalid=not effective.nft_mode and not liberal,
            # A former run may have set it: it stays 1 when the configuration does not ask for it any more.
            guard_loopback=effective.kernel.route_localnet or sysctls.changed(ROUTE_LOCALNET, effective.directory),
            mark_datagrams=effective.socket_lb != "off" and self.table.knows_sockets(),
            # Until all devices are known, as in the former run.
            check_destination=self.table.checks_destination(),
        )
        self._former_ports = self.table.conntrack_ports()
        self.support_fast_path(bool(effective.fast_path) and fast_path_is_built())

    @property
    def mark_datagrams(self) -> bool:
        """Whether the table recognises datagrams of translated sockets by a mark."""
        return self._behaviour.mark_datagrams

    def check_destination(self, enabled: bool) -> None:
        """Check that a packet still goes to a frontend, or no longer: other programs may have translated it.

        With the check the table has every frontend, which costs time and memory. Errors are logged, and :meth:`refresh`
        retries.
        """
        if enabled == self._behaviour.check_destination:
            return
        self._behaviour = self._behaviour._replace(check_destination=enabled)
        try:
            self._ensure()
        except OSError as error:
            _log.error("the nftables table could not be changed, will retry", error=str(error))

    def support_fast_path(self, enabled: bool) -> None:
        """Add or remove what the table does for the fast path.

        Until :meth:`former_flows_gone`, conntrack takes no source port of a former run's young flows.
        """
        supported = with_fast_path_support(self._behaviour, enabled)
        self._conntrack_ports = supported.conntrack_ports
        both = ports_of_both(self._conntrack_ports, self._former_ports)
        self._behaviour = supported._replace(conntrack_ports=both)
        self._ensure()

    def former_flows_gone(self) -> None:
        """No young flow has a source port that only a former run gave to young flows: conntrack may take it."""
        self._former_ports = None
        self._behaviour = self._behaviour._replace(conntrack_ports=self._conntrack_ports)
        self._ensure()

    def _ensure(self) -> bool:
        return self.table.ensure(self._behaviour, self.frontends)

    def refresh(self) -> None:
        """Repair the table. Costs little if no other program has changed it."""
        self._ensure()

    def restore(self) -> bool:
        """Restore the table at once if another program has deleted or flushed it. False: it could not be, as logged."""
        before, self._not_restored = self._not_restored, ""
        try:
            if self._ensure():
                repairs.note(Repair.NFTABLES_TABLE)
                _log.warning(
                    "another program deleted or flushed the nftables table, it is restored:"
                    " let that program flush only its own tables",
                    table=self.table.name,
                )
        except OSError as error:
            self._not_restored = str(error)
            if self._not_restored != before:
                _log.error("the nftables table could not be restored, will retry", error=self._not_restored)
        return not self._not_restored


class NftWatch(Manager):
    """Checks the table after each commit that names it, also one of the proxy itself, and restores it."""

    def __init__(self, nft: NftTable) -> None:
        super().__init__()
        self._nft = nft

    def start(self, facts: NodeFacts, wanted: Delta) -> None:
        watch = TableWatch(self._nft.table.name, self._nft.restore)
        self._opened.callback(watch.close)
        watch.follow(asyncio.get_running_loop())
