# SPDX-License-Identifier: Apache-2.0
"""The metrics of kube-proxy that apply here, by its names, labels, buckets and words (spec/metrics), and our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pyebpf_proxy.servers.health import FAMILIES
from pyebpf_proxy.servers.numbers import EXP15, NETPROG, Counter, Gauge, Histogram, Labels, Read, Registry

_ALPHA = "[ALPHA] "
_FAMILY = ("ip_family",)
#: The reasons that say which way a new flow went, by the value of the label ``lane``.
_LANES = {"new_flow_direct": "direct", "new_flow_netfilter": "netfilter", "new_flow_socket": "socket"}


class DatapathNumbers(NamedTuple):
    """What is read from the data plane at a scrape; each function is quick and safe in any thread.

    ``reasons``: packets and socket calls by reason. ``maps``: entries used and room, by map. ``xdp_devices``: mode of
    XDP, by device.
    """

    reasons: Callable[[], Mapping[str, int]] = dict
    maps: Callable[[], Mapping[str, tuple[int, int]]] = dict
    xdp_devices: Callable[[], Mapping[str, str]] = dict


class Metrics:
    """Every number that our own code writes. The fields are written by one thread each."""

    def __init__(self, datapath: DatapathNumbers) -> None:
        self.duration = _histogram("sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds", EXP15)
        self.full_duration = _histogram(
            "sync_full_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for full resyncs", EXP15
        )
        self.partial_duration = _histogram(
            "sync_partial_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for partial resyncs", EXP15
        )
        self.last_synced = _gauge(
            "sync_proxy_rules_last_timestamp_seconds", "The last time proxy rules were successfully synced", _FAMILY
        )
        self.last_queued = _gauge(
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "The last time a sync of proxy rules was queued",
            _FAMILY,
        )
        self.programming = _histogram(
            "network_programming_duration_seconds", "In Cluster Network Programming Latency in seconds", NETPROG
        )
        self.endpoint_pending = _gauge(
            "sync_proxy_rules_endpoint_changes_pending", "Pending proxy rules Endpoint changes"
        )
        self.endpoint_total = _counter(
            "sync_proxy_rules_endpoint_changes_total", "Cumulative proxy rules Endpoint changes"
        )
        self.service_pending = _gauge("sync_proxy_rules_service_changes_pending", "Pending proxy rules Service changes")
        self.service_total = _counter(
            "sync_proxy_rules_service_changes_total", "Cumulative proxy rules Service changes"
        )
        self.no_local = _gauge(
            "sync_proxy_rules_no_local_endpoints_total",
            "Number of services with a Local traffic policy and no endpoints",
            ("traffic_policy", "ip_family"),
        )
        self.reconciled = _histogram(
            "conntrack_reconciler_sync_duration_seconds", "ReconcileConntrackFlowsLatency latency in seconds", EXP15
        )
        self.reconciler_deleted = _counter(
            "conntrack_reconciler_deleted_entries_total",
            "Cumulative conntrack flows deleted by conntrack reconciler",
            _FAMILY,
        )
        self.healthz = _counter("proxy_healthz_total", "Cumulative proxy healthz HTTP status", ("code",))
        self.livez = _counter("proxy_livez_total", "Cumulative proxy livez HTTP status", ("code",))
        self.synced_ports = Counter("pyebpf_proxy_synced_service_ports_total", "Service ports that syncs had to change")
        self.failed_syncs = Counter("pyebpf_proxy_failed_syncs_total", "Syncs that the kernel refused")
        self.problems = Gauge(
            "pyebpf_proxy_service_port_problems", "Service ports or addresses that cannot be served as they say, now"
        )
        self.overlaps = Gauge(
            "pyebpf_proxy_service_addresses_of_nodes", "Service addresses that are also an address of a Node, now"
        )
        self.source_complete = Gauge(
            "pyebpf_proxy_source_complete", "1 when everything that exists has been delivered once"
        )
        self.source_delivered = Gauge(
            "pyebpf_proxy_source_last_delivery_timestamp_seconds", "When the source last delivered something"
        )
        self.objects = Gauge("pyebpf_proxy_objects", "Kubernetes objects in use, by kind", ("kind",))
        for family in FAMILIES.values():
            self.last_synced.set(family, value=0)
            self.last_queued.set(family, value=0)
        self.registry = Registry()
        self.registry.add(*(family for family in vars(self).values() if isinstance(family, Counter | Histogram)))
        self.kubernetes_count = sum(name.startswith("kubeproxy_") for name in self.registry.names)
        self.registry.add(*_read(datapath))

    def count(self, path: str, code: int) -> None:
        """An answer of the health server."""
        (self.healthz if path == "/healthz" else self.livez).add(str(code))


def _read(datapath: DatapathNumbers) -> Iterable[Read]:
    last: Mapping[str, int] = {}

    def reasons() -> Iterable[tuple[Labels, float]]:
        nonlocal last
        last = datapath.reasons()
        return [((name,), number) for name, number in last.items()]

    def lanes() -> Iterable[tuple[Labels, float]]:
        # Of the same reading: it comes first, below.
        return [((_LANES[name],), number) for name, number in last.items() if name in _LANES]

    yield Read(
        CounterMetricFamily,
        "pyebpf_proxy_reasons_total",
        "Packets and socket calls by why they were treated as they were",
        ("reason",),
        reasons,
    )
    yield Read(CounterMetricFamily, "pyebpf_proxy_flows_total", "New flows by the lane they took", ("lane",), lanes)

    def flow_cache() -> Iterable[tuple[Labels, float]]:
        if "flows" not in datapath.maps():
            return []
        _, room = datapath.maps()["flows"]
        made = last.get("flow_learned", 0) - last.get("flow_forgotten", 0)
        found = {word: last.get(f"flow_{word}", 0) for word in ("hit", "miss", "stale")}
        found["hit"] += last.get("xdp_flow_hit", 0)
        # The kernel takes out the oldest for each that comes when all places are taken, and tells nobody.
        found["evicted"] = max(0, made - room)
        return [((word,), number) for word, number in found.items()]

    yield Read(
        CounterMetricFamily,
        "pyebpf_proxy_flow_cache_total",
        "The fast path: packets sent by the flow cache (hit), those it had to learn for (miss) or ask again about"
        " (stale), entries that made room for others (evicted)",
        ("result",),
        flow_cache,
    )
    yield Read(
        GaugeMetricFamily,
        "pyebpf_proxy_xdp_device",
        "Devices that carry the XDP program: always 1",
        ("device", "mode"),
        lambda: [(labels, 1) for labels in sorted(datapath.xdp_devices().items())],
    )
    yield Read(
        GaugeMetricFamily,
        "pyebpf_proxy_map_entries",
        "Entries of a BPF map that the control plane has written",
        ("map",),
        lambda: [((name,), used) for name, (used, _) in datapath.maps().items()],
    )
    yield Read(
        GaugeMetricFamily,
        "pyebpf_proxy_map_max_entries",
        "Entries that a BPF map has room for",
        ("map",),
        lambda: [((name,), room) for name, (_, room) in datapath.maps().items()],
    )


def _histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
    return Histogram(f"kubeproxy_{name}", _ALPHA + text, _FAMILY, bounds)


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(f"kubeproxy_{name}", _ALPHA + text, labels)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(f"kubeproxy_{name}", _ALPHA + text, labels)
