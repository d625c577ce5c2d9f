# SPDX-License-Identifier: Apache-2.0
"""All servers of one agent: health, metrics, health check node ports, and their pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.run_directory import SOCKET, listening_socket, remove_socket
from pyebpf_proxy.config.addresses import Address, join_host_port
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.config.shown import Shown
from pyebpf_proxy.kube.events import ObjectReference, Recorder
from pyebpf_proxy.servers import server
from pyebpf_proxy.servers.health import TEXT_HEADERS, Health, HealthPages
from pyebpf_proxy.servers.health_checks import Addresses, HealthCheckPorts, listen_addresses
from pyebpf_proxy.servers.http import Handler, Request, Response
from pyebpf_proxy.servers.local import Local, pages
from pyebpf_proxy.servers.metrics import DatapathNumbers, Metrics
from pyebpf_proxy.servers.observer import Observer, SyncedObjects
from pyebpf_proxy.servers.pages import Mux, metrics_pages
from pyebpf_proxy.servers.registry import MetricFamily
from pyebpf_proxy.services.health_checks import HealthCheck, HealthCheckName
from pyebpf_proxy.services.model import IPFamily
from pyebpf_proxy.services.node_facts import NodeFacts

#: Concurrent connections of one server.
CONNECTIONS = 128
#: Before the agent exits, it waits so long for the last Event to be sent.
EVENT_SECONDS = 2.0
#: Tells ``pyebpf-proxy probe ready`` to wait for the first sync.
RETRY = ("Retry-After", "1")

_log = Logger("servers")


class Planner(SyncedObjects, Protocol):
    """The interface of ``services.planner.Planner``."""

    @property
    def health_checks(self) -> Mapping[HealthCheckName, HealthCheck]:
        """Health check node ports and their answers."""

    @property
    def facts(self) -> NodeFacts:
        """The facts from the Nodes."""


class Servers:
    """All servers. The sync loop creates and starts them, and reports to :attr:`observer`."""

    def __init__(
        self,
        settings: Effective,
        shown: Shown,
        planner: Planner,
        datapath: DatapathNumbers,
        addresses: Callable[[], Iterable[Address]],
        events: Recorder | None = None,
        more: Iterable[MetricFamily] = (),
        local: Local | None = None,
        families: Collection[IPFamily] = tuple(IPFamily),
    ) -> None:
        """``addresses``: all addresses of this node's interfaces. ``more``: metrics of other packages.

        ``local``: the handler of the socket for commands; None: no socket. ``families``: those that this node has.
        """
        self._settings = settings
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._unserved: asyncio.Future[None] = self._loop.create_future()
        self._server = server.Server()
        self._health = health = Health(2 * settings.sync_period, families)
        mode_iptables = not settings.nft_mode and settings.scheduler is None
        self.metrics = Metrics(datapath, mode_iptables and settings.socket_lb != "off", families)
        self.metrics.registry.add(*more)

        def listen() -> Addresses:
            return listen_addresses(settings.node_port_addresses, planner.facts.node_ips.values(), addresses())

        ports = HealthCheckPorts(self._server, health, settings.node_name, events, listen)
        self.observer = Observer(
            self.metrics,
            health,
            planner,
            settings.node_name,
            applied=lambda: ports.sync(planner.health_checks),
            period=ports.retry,
        )
        self._health_pages = HealthPages(health, self.observer.node_eligible, self.metrics.count)
        self._metrics_pages = metrics_pages(shown, self.metrics, settings.enable_profiling)
        self._local = local
        #: Why this agent has not bound the health server's address; "" if it has, or if none is configured.
        self._health_missing = "" if settings.healthz_address is None else "it is not bound yet"

    def start(self) -> None:
        """Start all servers; returns at once. A failed bind is logged and retried, or fatal (bindAddressHardFail)."""
        self._server.start()
        settings = self._settings
        if settings.healthz_address is not None:
            self._serve("health", settings.healthz_address, self._health_pages)
        if settings.metrics_address is not None:
            self._serve("metrics", settings.metrics_address, self._metrics_pages)

        if self._local is not None:
            self._server.call(self._serve_locally, self._local)

    def _serve_locally(self, local: Local) -> None:
        probes: dict[str, Handler] = {"/livez": self._health_pages, "/readyz": self._ready}
        handler = Mux({**pages(local), **probes, "/metrics": self._metrics_pages}, {})
        try:
            listener = listening_socket(local.directory)
        except OSError as error:
            _log.warning("commands on this node cannot query the agent", socket=SOCKET, error=error.strerror)
            return
        self._server.open_socket(listener, handler, self._server.pool(CONNECTIONS))

    def _ready(self, request: Request) -> Response:
        """``/healthz``; 503 until the node is programmed, and while another process serves ``/healthz`` here."""
        if self._health_missing:
            return _not_ready(f"this agent does not serve the health address: {self._health_missing}")
        if not self._health.programmed:
            return _not_ready("this agent has not programmed the node yet: its log says what it waits for", RETRY)
        return self._health_pages(request._replace(path="/healthz"))

    async def guard(self) -> None:
        """Wait forever; FatalError if an address cannot be bound and bindAddressHardFail is set."""
        await self._unserved

    def stop(self) -> None:
        """Close every socket; requests in progress are dropped."""
        self._server.stop()
        if self._local is not None:
            remove_socket(self._local.directory)

    def _serve(self, what: str, address: tuple[str, int], handler: Handler) -> None:
        shown = join_host_port(*address)

        def failed(error: str) -> bool:
            if what == "health":
                self._health_missing = error
                error = f"failed to start proxy healthz on {shown}: {error}"
            if not self._settings.bind_address_hard_fail:
                seconds = int(server.BIND_RETRY_SECONDS)
                _log.error(f"{what} address cannot be bound, retrying", error=error, seconds=seconds)
                return True
            reason = "FailedToStartMetricServer"
            if what == "health":
                reason, error = "FailedToStartProxierHealthcheck", f"healthz server failed: {error}"
            if self._events is not None:
                node = ObjectReference("Node", "", self._settings.node_name)
                self._events.event(node, "Warning", reason, "StartKubeProxy", error)
            wait = 0 if self._events is None else EVENT_SECONDS
            self._loop.call_soon_threadsafe(self._loop.call_later, wait, self._end, error)
            return False

        def ready() -> None:
            if what == "health":
                self._health_missing = ""
            _log.info(f"{what} is served" if what == "health" else f"{what} are served", address=shown)

        self._server.serve(address, handler, self._server.pool(CONNECTIONS), failed, ready)

    def _end(self, error: str) -> None:
        if not self._unserved.done():
            self._unserved.set_exception(FatalError(error))


def _not_ready(reason: str, *more: tuple[str, str]) -> Response:
    return Response(503, (*TEXT_HEADERS, *more), f"{reason}\n".encode())
