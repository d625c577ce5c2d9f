# SPDX-License-Identifier: Apache-2.0
"""Ends UDP flows and sockets whose endpoint no longer serves (spec/service-semantics §10).

The next packet of an active flow repairs it: the programs see that its endpoint is gone. This module does the rest, as
kube-proxy does. Idle flows are removed too. A connected socket of the node was translated at connect and would keep
sending to the old address. So it is destroyed, and its owner connects again.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pyebpf_proxy.datapath.connections import ctnetlink, sock_diag
from pyebpf_proxy.datapath.connections.udp_services import Place, UdpServices
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.services.model import IPFamily, Protocol, ServicePort, ServicePortName

#: From a socket's cookie and connected endpoint to the address that its owner connected to; None: not translated.
Peers = Callable[[int, Place], Place | None]


class Cleaned(NamedTuple):
    """The result of one clean-up of a family."""

    family: IPFamily
    seconds: float
    flows: int
    sockets: int


class Outcome(NamedTuple):
    """What one clean-up did, and what the kernel refused, as text: that is to be tried again."""

    cleaned: list[Cleaned]
    refused: list[str]


#: The kernel is built without these functions (CONFIG_INET_UDP_DIAG, CONFIG_INET_DIAG_DESTROY): no retry helps.
_NOT_BUILT = (errno.ENOENT, errno.EOPNOTSUPP)


class UdpCleanup:
    """Follows the plan in the event loop's thread, cleans up in another thread."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        #: Why stale sockets of the node cannot be ended on this kernel, or "".
        self.sockets_stay = ""
        self._services = UdpServices()
        # The index changes in the loop's thread while a clean-up reads it in another.
        self._lock = threading.Lock()

    def apply(self, delta: Mapping[ServicePortName, ServicePort | None], complete: bool = False) -> bool:
        """Apply the plan's changes. True if a UDP service port has other serving endpoints than before.

        ``complete``: there are no other service ports.
        """
        with self._lock:
            return self._services.apply(delta, complete)

    async def clean(self) -> Outcome:
        """End every stale flow and socket. If the kernel refuses one of them, the others are ended all the same."""
        return await asyncio.to_thread(self.clean_now)

    def clean_now(self) -> Outcome:
        """The same, in the caller's thread."""
        outcome = Outcome([], [])
        with self._lock:
            if not self._services:
                return outcome
        sockets = dict.fromkeys(IPFamily, 0)
        try:
            self._end_sockets(sockets)
            self.sockets_stay = ""
        except OSError as error:
            if error.errno in _NOT_BUILT:
                self.sockets_stay = f"this kernel ends no UDP sockets of removed endpoints: {error.strerror}"
            else:
                outcome.refused.append(str(error))
        for family in IPFamily:
            begin, flows = time.monotonic(), 0
            try:
                stale = list(filter(self._is_stale, ctnetlink.udp_flows(family)))
                flows = ctnetlink.delete(stale) if stale else 0
            except OSError as error:
                outcome.refused.append(f"conntrack, {family.name}: {error}")
            outcome.cleaned.append(Cleaned(family, time.monotonic() - begin, flows, sockets[family]))
        return outcome

    def _is_stale(self, flow: ctnetlink.Flow) -> bool:
        with self._lock:
            return self._services.is_stale(
                flow.family, (flow.destination, flow.destination_port), (flow.replier, flow.replier_port)
            )

    def _end_sockets(self, ended: dict[IPFamily, int]) -> None:
        """Adds to ``ended``. OSError, after all of them were tried."""
        refused: OSError | None = None
        for found in list(sock_diag.connected_udp()):
            endpoint = found.peer, found.peer_port
            wanted = self._peers(found.cookie, endpoint)
            if wanted is None:
                continue
            family = IPFamily.IPV4 if len(found.peer) == 4 else IPFamily.IPV6
            with self._lock:
                stale = self._services.is_stale(family, wanted, endpoint)
            try:
                ended[family] += stale and sock_diag.destroy(found)
            except OSError as error:
                refused = error
        if refused is not None:
            raise refused


def peers_in(maps: Mapping[str, Map], btf: Btf) -> Peers:
    """Reads the socket programs' reverse translations (``socket_revnat4``, ``socket_revnat6``)."""
    layouts = {4: btf.struct("socket_revnat4_key"), 16: btf.struct("socket_revnat6_key")}
    values = {4: btf.struct("socket_revnat4_value"), 16: btf.struct("socket_revnat6_value")}
    tables = {4: maps["socket_revnat4"], 16: maps["socket_revnat6"]}

    def look_up(cookie: int, endpoint: Place) -> Place | None:
        address, port = endpoint
        size = len(address)
        key = layouts[size].pack(cookie=cookie, address=address, port=port, protocol=int(Protocol.UDP))
        value = tables[size].lookup(key)
        if value is None:
            return None
        wanted = values[size].unpack(value)
        return bytes(wanted["address"]), int(wanted["port"])

    return look_up
