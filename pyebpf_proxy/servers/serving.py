# SPDX-License-Identifier: Apache-2.0
"""The servers of one agent: health and metrics, on the addresses of the configuration."""

from __future__ import annotations

from collections.abc import Callable

from pyebpf_proxy.config.addresses import join_host_port
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.kube.events import About, Recorder
from pyebpf_proxy.log import Logger
from pyebpf_proxy.servers import server
from pyebpf_proxy.servers.http import Handler

#: Connections at a time, of one server.
CONNECTIONS = 128

_log = Logger("servers")


class Servers:
    """Starts what is configured; ``stop`` ends it."""

    def __init__(
        self,
        settings: Effective,
        health: Handler,
        metrics: Handler,
        events: Recorder | None,
        fatal: Callable[[str], None],
    ) -> None:
        """``fatal`` is given the reason, in the servers' thread, when an address is needed and cannot be had."""
        self._settings = settings
        self._health = health
        self._metrics = metrics
        self._events = events
        self._fatal = fatal
        self.server = server.Server()

    def start(self) -> None:
        """Returns at once; what cannot be bound is said, and tried again or fatal (bindAddressHardFail)."""
        self.server.start()
        settings = self._settings
        if settings.healthz_address is not None:
            self._serve("health", settings.healthz_address, self._health)
        if settings.metrics_address is not None:
            self._serve("metrics", settings.metrics_address, self._metrics)

    def stop(self) -> None:
        """Close every socket; requests being answered are given up with the process."""
        self.server.stop()

    def _serve(self, what: str, address: tuple[str, int], handler: Handler) -> None:
        shown = join_host_port(*address)

        def failed(error: str) -> bool:
            if what == "health":
                error = f"failed to start proxy healthz on {shown}: {error}"
            if not self._settings.bind_address_hard_fail:
                seconds = int(server.BIND_RETRY_SECONDS)
                _log.error(f"{what} address cannot be bound, tried again", error=error, seconds=seconds)
                return True
            reason = "FailedToStartMetricServer"
            if what == "health":
                reason, error = "FailedToStartProxierHealthcheck", f"healthz server failed: {error}"
            if self._events is not None:
                node = About("Node", "", self._settings.node_name)
                self._events.event(node, "Warning", reason, "StartKubeProxy", error)
            self._fatal(error)
            return False

        def ready() -> None:
            _log.info(f"{what} is served" if what == "health" else f"{what} are served", address=shown)

        self.server.serve(address, handler, self.server.pool(CONNECTIONS), failed, ready)
