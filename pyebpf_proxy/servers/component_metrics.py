# SPDX-License-Identifier: Apache-2.0
"""Metrics that every Kubernetes component has: process, build, feature gates (spec/metrics §5)."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Iterable, Mapping

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from pyebpf_proxy import KUBERNETES_VERSION, __version__
from pyebpf_proxy.common.process_age import process_age
from pyebpf_proxy.servers.registry import Labels, Registry

#: The value shown for an unlimited RLIMIT_AS, as in Go's library.
_NO_LIMIT = float(1 << 64)


def start_time() -> float:
    """When this process started, in seconds since 1970; the current time if /proc does not show it."""
    try:
        return time.time() - process_age()
    except (OSError, ValueError, IndexError):
        return time.time()


def add_process(registry: Registry) -> None:
    """Add prometheus_client's metrics of the process and of Python, and the memory limit, which it lacks."""
    own = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=own)
    prometheus_client.PlatformCollector(registry=own)
    prometheus_client.GCCollector(registry=own)
    registry.add_collector(own.collect)
    registry.add_collector(_memory_limit)


def add_slis(registry: Registry, start: float) -> None:
    """Add the start of the process, the metric of ``/metrics/slis`` besides the checks."""
    registry.add_collector(lambda: [_single("process_start_time_seconds", _START, start)])


_START = "[ALPHA] Start time of the process since unix epoch in seconds."


def add_build(registry: Registry, gates: Mapping[str, tuple[str, bool]], alpha: int) -> None:
    """Add build and gates. ``gates``: stage, and whether enabled, by name. ``alpha``: the number of ALPHA metrics."""
    build = _family("kubernetes_build_info", _BUILD, build_info(), [(tuple(build_info().values()), 1.0)])
    features = _family(
        "kubernetes_feature_enabled",
        "[BETA] This metric records the data about the stage and enablement of a k8s feature.",
        ("name", "stage"),
        [((name, "" if stage == "GA" else stage), float(on)) for name, (stage, on) in sorted(gates.items())],
    )
    registered = _family(
        "registered_metrics_total",
        "[BETA] The count of registered metrics broken by stability level and deprecation version.",
        ("deprecated_version", "stability_level"),
        [(("", "ALPHA"), float(alpha)), (("", "BETA"), 5.0)],
        CounterMetricFamily,
    )
    none = [
        _family(f"{which}_metrics_total", f"[BETA] The count of {which} metrics.", (), [((), 0.0)], CounterMetricFamily)
        for which in ("disabled", "hidden")
    ]
    own = _family("pyebpf_proxy_build_info", _OWN_BUILD, own_build(), [(tuple(own_build().values()), 1.0)])
    fixed = [build, features, registered, *none, own]
    registry.add_collector(lambda: fixed)


def build_info() -> dict[str, str]:
    """Labels of ``kubernetes_build_info``: the reference release, and the Python runtime."""
    major, minor = KUBERNETES_VERSION.removeprefix("v").split(".")[:2]
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return {
        "build_date": "",
        "compiler": platform.python_implementation(),
        "git_commit": "",
        "git_tree_state": "",
        "git_version": KUBERNETES_VERSION,
        "go_version": "",
        "major": major,
        "minor": minor,
        "platform": f"{sys.platform}/{machine}",
    }


def own_build() -> dict[str, str]:
    """Labels of ``pyebpf_proxy_build_info``. ``commit`` is "" unless the image contains it (deploy/Dockerfile)."""
    return {
        "version": __version__,
        "commit": os.environ.get(COMMIT, ""),
        "python_version": platform.python_version(),
    }


#: The file with the commit from which the image was built.
COMMIT = "PYEBPF_PROXY_COMMIT"
_OWN_BUILD = "Always 1: the version of pyebpf-proxy, the commit that it was built from, and the version of Python"
_BUILD = (
    "[BETA] A metric with a constant '1' value labeled by major, minor, git version, git commit, git tree state, build"
    " date, Go version, and compiler from which Kubernetes was built, and platform on which it is running."
)


def _memory_limit() -> Iterable[Metric]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = _NO_LIMIT if soft == resource.RLIM_INFINITY else float(soft)
    text = "Maximum amount of virtual memory available in bytes."
    return [_single("process_virtual_memory_max_bytes", text, limit)]


def _single(name: str, text: str, value: float) -> Metric:
    return _family(name, text, (), [((), value)])


def _family(
    name: str,
    text: str,
    labels: Iterable[str],
    values: Iterable[tuple[Labels, float]],
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily] = GaugeMetricFamily,
) -> Metric:
    family = kind(name, text, labels=list(labels))
    for found, value in values:
        family.add_metric(found, value)
    return family
