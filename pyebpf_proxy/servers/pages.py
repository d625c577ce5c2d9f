# SPDX-License-Identifier: Apache-2.0
"""The paths of the metrics server (spec/service-semantics §11.3)."""

from __future__ import annotations

from pyebpf_proxy.common import log
from pyebpf_proxy.config.shown import Shown
from pyebpf_proxy.servers import component_metrics, zpages
from pyebpf_proxy.servers.health import JSON_HEADERS, NOT_FOUND, TEXT_HEADERS
from pyebpf_proxy.servers.http import Handler, Request, Response
from pyebpf_proxy.servers.metrics import Metrics
from pyebpf_proxy.servers.registry import CONTENT_TYPE, Counter, Gauge, Registry, text


class Mux:
    """Routes exact paths to handlers, for every method, as kube-proxy does."""

    def __init__(self, paths: dict[str, Handler], folders: dict[str, Handler]) -> None:
        """``folders``: handlers by path prefix, for paths that are not in ``paths``."""
        self._paths = paths
        self._folders = folders

    def __call__(self, request: Request) -> Response:
        handler = self._paths.get(request.path)
        if handler is None:
            handler = next((its for folder, its in self._folders.items() if request.path.startswith(folder)), None)
        return NOT_FOUND if handler is None else handler(request)


def fixed(headers: tuple[tuple[str, str], ...], body: str) -> Handler:
    """A constant page."""
    answer = Response(200, headers, body.encode())
    return lambda request: answer


def scrape(registry: Registry, start: float) -> Handler:
    """A page of metrics; ``start``: when the process started, in seconds since 1970."""

    def answer(request: Request) -> Response:
        headers = (("Content-Type", CONTENT_TYPE), ("Process-Start-Time-Unix", str(round(start))))
        return Response(200, headers, text(registry))

    return answer


class Checks:
    """The generic health check of Kubernetes' servers with the only check ``ping``, and its ``/metrics/slis``."""

    def __init__(self, start: float) -> None:
        """``start``: when the process started, in seconds since 1970."""
        registry = Registry()
        self._last = Gauge(
            "kubernetes_healthcheck",
            "[STABLE] This metric records the result of a single healthcheck.",
            ("name", "type"),
        )
        self._all = Counter(
            "kubernetes_healthchecks_total",
            "[STABLE] This metric records the results of all healthcheck.",
            ("name", "status", "type"),
        )
        registry.add(self._last, self._all)
        component_metrics.add_slis(registry, start)
        self._scrape = scrape(registry, start)

    def healthz(self, request: Request) -> Response:
        """``/healthz``; with ``verbose``, each check by name."""
        self._last.set("ping", "healthz", value=1)
        self._all.add("ping", "success", "healthz")
        if "verbose" in request.query.split("&") or request.query.startswith("verbose="):
            return Response(200, TEXT_HEADERS, b"[+]ping ok\nhealthz check passed\n")
        return Response(200, TEXT_HEADERS, b"ok")

    def slis(self, request: Request) -> Response:
        """``/metrics/slis``; DELETE resets the counters."""
        if request.method != "DELETE":
            return self._scrape(request)
        self._last.clear()
        self._all.clear()
        return Response(200, (("Content-Type", "text/plain; charset=utf-8"),), b"metrics reset\n")


def ping(request: Request) -> Response:
    """The page of the check ``ping`` alone."""
    return Response(200, (("Content-Type", "text/plain; charset=utf-8"),), b"ok")


def metrics_pages(shown: Shown, metrics: Metrics, profiling: bool) -> Mux:
    """The metrics server's pages. Adds the standard metrics to ``metrics``."""
    start = component_metrics.start_time()
    component_metrics.add_process(metrics.registry)
    component_metrics.add_build(metrics.registry, shown.gates, metrics.kubernetes_count)
    checks = Checks(start)
    paths: dict[str, Handler] = {
        "/configz": fixed(JSON_HEADERS, shown.configz),
        "/healthz": checks.healthz,
        "/healthz/ping": ping,
        "/metrics": scrape(metrics.registry, start),
        "/metrics/slis": checks.slis,
        "/proxyMode": fixed(TEXT_HEADERS, shown.mode),
    }
    if shown.on("ComponentFlagz"):
        paths["/flagz"] = zpages.flagz(shown.flags)
    if shown.on("ComponentStatusz"):
        paths["/statusz"] = zpages.statusz(list(paths), start)
    if not profiling:
        return Mux(paths, {})
    flags: dict[str, Handler] = {
        "/debug/flags": zpages.debug_flags,
        "/debug/flags/v": zpages.verbosity(log.set_verbosity),
        "/debug/pprof": zpages.no_profiles,
    }
    return Mux(paths | flags, {"/debug/flags/": zpages.debug_flags, "/debug/pprof/": zpages.no_profiles})
