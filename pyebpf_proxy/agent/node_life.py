# SPDX-License-Identifier: Apache-2.0
"""When the agent starts and ends, as far as this depends on its own Node object (spec/configuration §5.3).

It behaves as the NodeManager of kube-proxy v1.36: in detectLocalMode NodeCIDR, nothing starts before the Node has
podCIDRs, and a change of the podCIDRs ends the agent. Changed addresses and a deleted Node are only logged. Changed
addresses are used, but the last one of a family stays if the Node has none: a Node that is created again has no
addresses at first, and without them ``primary`` means every address of this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.kube.objects import Node, NodeAddress, NodeStatus
from pyebpf_proxy.services.addresses import format_address
from pyebpf_proxy.services.nodes import NO_NODE, NodeView, view_node

if TYPE_CHECKING:
    from pyebpf_proxy.kube.source import Change
    from pyebpf_proxy.services.model import IPFamily

#: Seconds to wait for podCIDRs.
POD_CIDRS_SECONDS = 300.0

_log = Logger("node")


class NodeLife:
    """Follows one Node. ``take`` receives changes, ``listed`` marks the end of the first list, ``guard`` waits."""

    def __init__(self, name: str, *, needs_pod_cidrs: bool, seconds: float = POD_CIDRS_SECONDS) -> None:
        """``seconds``: how long ``guard`` waits for podCIDRs if they are needed."""
        self._name = name
        self._needs_pod_cidrs = needs_pod_cidrs
        self._seconds = seconds
        self._view: NodeView | None = None
        self._first: NodeView | None = None
        #: Since the start, the last address of each family.
        self._ips: dict[IPFamily, bytes] = {}
        self._listed = asyncio.Event()
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        self._end_reason = ""

    @property
    def ready(self) -> bool:
        """Whether the Node has everything that a start needs."""
        return self._ready.is_set()

    def take(self, changes: Iterable[Change]) -> list[Change]:
        """Receive changes. The result: those to pass on, which are all but the deletion of this agent's Node. That Node
        has its last address of each family for which it has none any more."""
        seen = []
        for change in changes:
            if change.kind != "Node" or change.name != self._name:
                seen.append(change)
            elif change.object is not None:
                seen.append(change._replace(object=self._changed(change.object)))  # type: ignore[arg-type]
            elif self._first is None:
                seen.append(change)
                self._view = None
            else:
                # As in kube-proxy, the Node's last state remains valid: the deletion does not change NodePorts.
                _log.warning("Node is being deleted", node=self._name)
        if self._listed.is_set():
            self._update_ready()
        return seen

    def listed(self) -> None:
        """Everything that exists has been delivered."""
        self._listed.set()
        self._update_ready()

    async def guard(self) -> None:
        """Wait until cancelled. FatalError if the podCIDRs are not assigned in time, or change later."""
        await self._listed.wait()
        if not self.ready:
            _log.info("waiting for the podCIDRs of this Node", node=self._name, seconds=self._seconds)
            try:
                async with asyncio.timeout(self._seconds):
                    await self._ready.wait()
            except TimeoutError:
                what = (
                    f'node "{self._name}" to exist'
                    if self._view is None
                    else f'PodCIDR allocation on node "{self._name}"'
                )
                raise FatalError(f"timeout waiting for {what}") from None
        await self._ended.wait()
        raise FatalError(self._end_reason)

    def _update_ready(self) -> None:
        has = self._view is not None and bool(self._view.pod_cidrs)
        if self._first is None and (has or not self._needs_pod_cidrs):
            self._first = self._view or NO_NODE
            self._ips = self._first.ips
            self._ready.set()

    def _changed(self, node: Node) -> Node:
        view = view_node(node)
        before, self._view = self._view, view
        first = self._first
        if first is None:
            return node
        if self._needs_pod_cidrs and view.pod_cidrs != first.pod_cidrs:
            now, then = (" ".join(map(str, cidrs)) or "none" for cidrs in (view.pod_cidrs, first.pod_cidrs))
            self._end_reason = f'PodCIDRs changed for the node "{self._name}": now {now}, at the start {then}'
            self._ended.set()
        is_same = before is not None and list(before.ips.values()) == list(view.ips.values())
        if not is_same and list(view.ips.values()) != list(first.ips.values()):
            now, then = (" ".join(map(format_address, ips.values())) or "none" for ips in (view.ips, first.ips))
            _log.info("NodeIPs changed for the node", node=self._name, now=now, at_start=then)
        kept = {family: ip for family, ip in self._ips.items() if family not in view.ips}
        self._ips = {**view.ips, **kept}
        return _with_addresses(node, kept.values()) if kept else node


def _with_addresses(node: Node, more: Iterable[bytes]) -> Node:
    status = node.status or NodeStatus()
    added = (NodeAddress("InternalIP", format_address(ip)) for ip in more)
    return msgspec.structs.replace(
        node, status=msgspec.structs.replace(status, addresses=(*(status.addresses or ()), *added))
    )
