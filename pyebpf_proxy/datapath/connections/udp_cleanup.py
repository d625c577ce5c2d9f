# SPDX-License-Identifier: Apache-2.0
"""Ends UDP flows and sockets whose endpoint no longer serves (spec/service-semantics §10).

A flow that sends is repaired by its next packet: the programs see that its endpoint is gone. This module does the rest,
as kube-proxy does: idle flows are removed too. A connected socket of the node was translated at connect and would keep
sending to the old address: it is ended, so that its owner connects again. So is one that is connected to a service
address itself, from before there were programs, or endpoints: nothing else translates what it sends.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pyebpf_proxy.common.threads import in_thread
from pyebpf_proxy.datapath.connections import ctnetlink, sock_diag
from pyebpf_proxy.datapath.connections.udp_services import UdpServices
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import NETLINK_NETFILTER
from pyebpf_proxy.services.addresses import Place, family_of
from pyebpf_proxy.services.model import FrontendKind, IPFamily, Protocol, ServicePort, ServicePortName

#: From a socket's cookie and connected endpoint to the address that its owner connected to; None: not translated.
Peers = Callable[[int, Place], Place | None]
#: Keeps that translation from being evicted. OSError: the kernel refused.
Keep = Callable[[int, Place], None]
#: Whether an address is one of the node.
IsOwn = Callable[[bytes], bool]


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


#: include/uapi/linux/bpf.h: update only what exists.
_BPF_EXIST = 2
#: The kernel is built without these functions (CONFIG_INET_UDP_DIAG, CONFIG_INET_DIAG_DESTROY): no retry helps.
_NOT_BUILT = (errno.ENOENT, errno.EOPNOTSUPP)


class UdpCleanup:
    """Follows the plan in the event loop's thread, cleans up in another thread."""

    def __init__(
        self, peers: Peers, is_own: IsOwn | None = None, moves_flows: bool = False, keep: Keep | None = None
    ) -> None:
        """``is_own``, ``keep``: None if no sockets are translated. ``moves_flows``: pods' are, and tc cannot expire
        flows.
        """
        self._peers = peers
        self._keep = keep
        self._is_own = is_own
        self._moves_flows = moves_flows
        #: A socket lives from an entry of conntrack, which another proxy or an earlier configuration has made. Or one
        #: may be connected to a service address that had no endpoints then.
        self.waiting = False
        #: Why stale sockets of the node cannot be ended on this kernel, or "".
        self.sockets_stay = ""
        self._services = UdpServices()
        # The index changes in the loop's thread while a clean-up reads it in another.
        self._lock = threading.Lock()

    def start(
        self, former: Mapping[ServicePortName, ServicePort], wanted: Mapping[ServicePortName, ServicePort | None]
    ) -> None:
        """Begin with all service ports. ``former``: those that the programs had before, which flows may still use."""
        with self._lock:
            self._services.apply(former)
            self._services.apply(wanted, complete=True)
            # A former run may have translated no sockets.
            self.waiting = self._is_own is not None and bool(self._services)

    def apply(self, delta: Mapping[ServicePortName, ServicePort | None], complete: bool = False) -> bool:
        """Apply the plan's changes. True if a UDP service port has other serving endpoints than before.

        ``complete``: there are no other service ports.
        """
        with self._lock:
            touched = self._services.apply(delta, complete)
            self.waiting |= self._is_own is not None and self._services.gained
            return touched

    def is_stale(self, destination: Place, endpoint: Place) -> bool:
        """Whether a flow to ``destination`` that ``endpoint`` answers should be ended. Safe in any thread."""
        with self._lock:
            return self._services.is_stale(family_of(destination[0]), destination, endpoint)

    async def clean(self) -> Outcome:
        """End every stale flow and socket. If the kernel refuses one of them, the others are ended all the same."""
        return await in_thread(self.clean_now)

    async def keep(self) -> None:
        """Keep the translations of connected sockets, although other sockets fill the same maps.

        No program reads the entry of a socket whose owner only sends and receives. So it would be the first to be
        evicted, and the socket could not be ended later. OSError: the kernel refused.
        """
        if self._keep is not None:
            await in_thread(self._keep_now, self._keep)

    def _keep_now(self, keep: Keep) -> None:
        for found in list(sock_diag.connected_udp()):
            keep(found.cookie, (found.peer, found.peer_port))

    def clean_now(self) -> Outcome:
        """The same, in the caller's thread."""
        outcome = Outcome([], [])
        with self._lock:
            if not self._services:
                return outcome
            lost = self._services.lost()
        sockets = dict.fromkeys(IPFamily, 0)
        try:
            self._end_sockets(sockets)
            self.sockets_stay = ""
        except OSError as error:
            if error.errno in _NOT_BUILT:
                self.sockets_stay = f"this kernel ends no UDP sockets of removed endpoints: {error.strerror}"
            else:
                outcome.refused.append(str(error))
                # Those that were not looked at may wait, too.
                self.waiting = True
        for family in IPFamily:
            begin, flows = time.monotonic(), 0
            try:
                listed = ctnetlink.udp_flows(family)
                stale = [flow for flow in listed if self._is_stale(flow) or self._is_left(flow, lost)]
                flows = ctnetlink.delete(stale) if stale else 0
            except OSError as error:
                outcome.refused.append(f"conntrack, {family.name}: {error}")
            outcome.cleaned.append(Cleaned(family, time.monotonic() - begin, flows, sockets[family]))
        if not outcome.refused:
            with self._lock:
                self._services.forget_lost(lost)
        return outcome

    def _is_left(self, flow: ctnetlink.Flow, lost: frozenset[Place]) -> bool:
        """Whether this is a flow of a pod's socket, which was translated, to an endpoint that no longer serves.

        Its next datagram becomes a new flow, which tc sends to another endpoint.
        """
        if not self._moves_flows or (flow.replier, flow.replier_port) not in lost:
            return False
        with self._lock:
            return not self._services.is_frontend(flow.family, (flow.destination, flow.destination_port))

    def _is_stale(self, flow: ctnetlink.Flow) -> bool:
        return self.is_stale((flow.destination, flow.destination_port), (flow.replier, flow.replier_port))

    def _end_sockets(self, ended: dict[IPFamily, int]) -> None:
        """Adds to ``ended``. OSError, after all of them were tried."""
        refused: OSError | None = None
        self.waiting = False
        for found in list(sock_diag.connected_udp()):
            endpoint = found.peer, found.peer_port
            wanted = self._peers(found.cookie, endpoint)
            # Equal: a local client of this socket (bpf/socket_maps.h).
            if wanted == endpoint:
                continue
            try:
                stale = self._is_untranslated(found) if wanted is None else self.is_stale(wanted, endpoint)
                ended[family_of(found.peer)] += stale and sock_diag.destroy(found)
            except OSError as error:
                refused = error
        if refused is not None:
            raise refused

    def _is_untranslated(self, found: sock_diag.Socket) -> bool:
        """Whether the socket is connected to a service address itself, and conntrack does not translate its flow.

        Not at a ClusterIP that is also an address of the node, where a cache listens (NodeLocal DNSCache).
        """
        address = found.peer, found.peer_port
        with self._lock:
            kind = self._services.kind_of(address)
        if kind is None or self._is_own is None or (kind is FrontendKind.CLUSTER_IP and self._is_own(found.peer)):
            return False
        with RequestSocket(NETLINK_NETFILTER) as netlink:
            entry = ctnetlink.lookup(netlink, Protocol.UDP, (found.source, found.source_port), address)
        if entry is None or entry.reply is None:
            return True
        stale = self.is_stale(address, entry.reply.ends[0])
        self.waiting |= not stale
        return stale


def addresses_in(maps: Mapping[str, Map]) -> IsOwn:
    """Reads the addresses of the node (``node_addresses4``, ``node_addresses6``)."""
    tables = {4: maps["node_addresses4"], 16: maps["node_addresses6"]}
    return lambda address: tables[len(address)].lookup(address) is not None


class SocketPeers:
    """The socket programs' reverse translations (``socket_revnat4``, ``socket_revnat6``)."""

    def __init__(self, maps: Mapping[str, Map], btf: Btf) -> None:
        names = {4: "socket_revnat4", 16: "socket_revnat6"}
        self._tables = {size: maps[name] for size, name in names.items()}
        self._keys = {size: btf.struct(f"{name}_key") for size, name in names.items()}
        self._values = {size: btf.struct(f"{name}_value") for size, name in names.items()}

    def find(self, cookie: int, endpoint: Place) -> Place | None:
        """See :data:`Peers`."""
        size = len(endpoint[0])
        value = self._tables[size].lookup(self._key(cookie, endpoint))
        if value is None:
            return None
        wanted = self._values[size].unpack(value)
        return bytes(wanted["address"]), int(wanted["port"])

    def keep(self, cookie: int, endpoint: Place) -> None:
        """Make the entry the most recently used one of its map, if there is one."""
        table, key = self._tables[len(endpoint[0])], self._key(cookie, endpoint)
        value = table.lookup(key)
        if value is None:
            return
        try:
            table.update(key, value, _BPF_EXIST)
        except OSError as error:
            # The owner has just sent to the endpoint itself.
            if error.errno != errno.ENOENT:
                raise

    def _key(self, cookie: int, endpoint: Place) -> bytes:
        address, port = endpoint
        return self._keys[len(address)].pack(cookie=cookie, address=address, port=port, protocol=int(Protocol.UDP))
