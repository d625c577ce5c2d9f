# SPDX-License-Identifier: Apache-2.0
"""The listeners of health check node ports (spec/service-semantics §11.1)."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.addresses import Address
from pyebpf_proxy.datapath.node.plan import NodeConfig, accepted_networks
from pyebpf_proxy.kube.events import ObjectReference, Recorder
from pyebpf_proxy.servers.health import JSON_HEADERS, Health, Moment
from pyebpf_proxy.servers.http import Handler, Request, Response
from pyebpf_proxy.servers.server import BindError, Network, Open, Server
from pyebpf_proxy.services.health_checks import HealthCheck, HealthCheckName, holders
from pyebpf_proxy.services.model import IPFamily

#: Concurrent connections of all health check node ports together.
CONNECTIONS = 256

Addresses = Mapping[IPFamily, tuple[str, ...]]

_EVERYWHERE = {IPFamily.IPV4: "0.0.0.0", IPFamily.IPV6: "::"}

_log = Logger("servers")


def listen_addresses(configured: Iterable[str], node_ips: Iterable[bytes], local: Iterable[Address]) -> Addresses:
    """The listening addresses. ``configured``: nodePortAddresses; ``local``: the addresses of this node's interfaces.

    A family for which nothing or everything is configured has the unspecified address.
    """
    config = NodeConfig(tuple(configured), tuple(map(ipaddress.ip_address, node_ips)))
    found: dict[IPFamily, tuple[str, ...]] = {}
    for family, everywhere in _EVERYWHERE.items():
        mine = accepted_networks(family, config)
        if mine is None or any(network.prefixlen == 0 for network in mine):
            found[family] = (everywhere,)
        else:
            selected = {ip for ip in local if ip.version == family and any(ip in network for network in mine)}
            found[family] = tuple(str(ip) for ip in sorted(selected, key=lambda ip: ip.packed))
    return found


class HealthCheckPorts:
    """Opens and closes the listeners. The syncing thread calls ``sync``; the rest runs in the servers' thread."""

    def __init__(
        self,
        server: Server,
        health: Health,
        node_name: str,
        events: Recorder | None,
        addresses: Callable[[], Addresses],
        clock: Callable[[], Moment] = Moment.now,
    ) -> None:
        """``addresses`` is called in the syncing thread when a listener may have to be opened."""
        self._server = server
        self._pool = server.pool(CONNECTIONS)
        self._health = health
        self._node_name = node_name
        self._events = events
        self._addresses = addresses
        self._clock = clock
        self._last: Mapping[HealthCheckName, HealthCheck] = {}
        self._failing = False
        self._wanted: Mapping[HealthCheckName, HealthCheck] = {}
        self._open: dict[HealthCheckName, tuple[tuple[int, tuple[str, ...]], list[Open]]] = {}
        #: As of the last call.
        self._listened: Addresses = {}
        self._said: dict[HealthCheckName, str] = {}

    def sync(self, wanted: Mapping[HealthCheckName, HealthCheck]) -> None:
        """Set the wanted listeners after a sync, and retry those that failed to open. Returns at once."""
        if wanted is self._last and not self._failing:
            return
        self._last = wanted
        self._change()

    def retry(self) -> None:
        """Between syncs: open listeners that failed to open, and those of new addresses of this node."""
        if self._last and (self._failing or self._addresses() != self._listened):
            self._change()

    def _change(self) -> None:
        self._listened = self._addresses()
        families = self._health.families
        wanted = {name: check for name, check in self._last.items() if name.family in families}
        self._server.call(self._apply, wanted, self._listened)

    # ---- the servers' thread -----------------------------------------------------------------------------------

    def _apply(self, wanted: Mapping[HealthCheckName, HealthCheck], addresses: Addresses) -> None:
        self._wanted = wanted
        holds = holders(wanted)
        # Close first: a new listener may use a port that becomes free.
        for name, ((port, places), opened) in list(self._open.items()):
            check = wanted.get(name)
            same = check is not None and (check.port, addresses[name.family]) == (port, places)
            if not same or holds[name.family, port] != name:
                self._close(opened)
                del self._open[name]
        for name in [name for name in self._said if name not in wanted]:
            del self._said[name]
        for name, check in wanted.items():
            if name not in self._open:
                holder = holds[name.family, check.port]
                if holder != name:
                    whose = f"{holder.namespace}/{holder.name}"
                    self._log_error(name, check.port, f"it is spec.healthCheckNodePort of Service {whose}, too")
                    continue
                try:
                    places = addresses[name.family]
                    self._open[name] = (check.port, places), self._listen(name, check.port, places)
                    self._said.pop(name, None)
                except BindError as error:
                    self._log_error(name, check.port, str(error))
        self._failing = len(self._open) < len(wanted)

    def _listen(self, name: HealthCheckName, port: int, addresses: tuple[str, ...]) -> list[Open]:
        """Listen on all of the addresses, or raise BindError and listen on none."""
        if not addresses:
            raise BindError("no address of this node is in nodePortAddresses")
        opened: list[Open] = []
        try:
            for address in addresses:
                network: Network = "tcp4" if name.family is IPFamily.IPV4 else "tcp6"
                opened.append(self._server.open(address, port, self._handler(name), self._pool, network))
        except BindError:
            self._close(opened)
            raise
        return opened

    def _close(self, opened: list[Open]) -> None:
        for one in opened:
            self._server.close(one)

    def _log_error(self, name: HealthCheckName, port: int, error: str) -> None:
        """Log each error once, until it is resolved."""
        if self._said.get(name) == error:
            return
        self._said[name] = error
        service = f"{name.namespace}/{name.name}"
        _log.error("health check node port cannot be served, retrying", service=service, port=port, error=error)
        if self._events is not None:
            note = f'node {self._node_name} failed to start healthcheck "{service}" on port {port}: {error}'
            about = ObjectReference("Service", name.namespace, name.name)
            self._events.event(about, "Warning", "FailedToStartServiceHealthcheck", "Listen", note)

    def _handler(self, name: HealthCheckName) -> Handler:
        def answer(request: Request) -> Response:
            check = self._wanted.get(name)
            count = check.local if check is not None else 0
            healthy = self._health.report(self._clock()).healthy
            headers = (*JSON_HEADERS, ("X-Load-Balancing-Endpoint-Weight", str(count)))
            return Response(200 if count and healthy else 503, headers, _body(name, count, healthy))

        return answer


def _body(name: HealthCheckName, count: int, healthy: bool) -> bytes:
    lines = (
        "{",
        '\t"service": {',
        f'\t\t"namespace": "{name.namespace}",',
        f'\t\t"name": "{name.name}"',
        "\t},",
        f'\t"localEndpoints": {count},',
        f'\t"serviceProxyHealthy": {"true" if healthy else "false"}',
        "}",
    )
    return "\n".join(lines).encode()
