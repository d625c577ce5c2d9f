# SPDX-License-Identifier: Apache-2.0
"""The agent's metrics: kube-proxy's, with the same names, labels, buckets and help (spec/metrics), and its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pyebpf_proxy.common.kernel_files import kernel_number
from pyebpf_proxy.datapath.node.plan import REDIRECTS
from pyebpf_proxy.servers.health import FAMILIES
from pyebpf_proxy.servers.registry import EXP15, NETPROG, Counter, Gauge, Histogram, Labels, Read, Registry
from pyebpf_proxy.services.model import IPFamily

_ALPHA = "[ALPHA] "
_FAMILY = ("ip_family",)
_NETFILTER = Path("/proc/sys/net/netfilter")
#: By value of the label ``path``: the reason that counts new flows of this path.
_PATHS = {"new_flow_fast": "fast", "new_flow_netfilter": "netfilter", "new_flow_socket": "socket"}
#: Prefixes of the reasons why a new flow, or a packet, took the slow path.
_SLOW = ("slow_", "stack_")
#: By reason: the value of the label ``event``.
_EVENTS = {
    "permit_granted": "permit_granted",
    "young_ended": "young_ended",
    "flow_promoted": "promoted",
    "flow_learned": "learned",
    "flow_confirmed": "confirmed",
    "flow_changed": "changed",
    "flow_forgotten": "forgotten",
}


class DatapathNumbers(NamedTuple):
    """Functions that each scrape calls for metrics of the data plane. Each is fast and safe in any thread.

    ``reasons``: packets and socket calls by reason. ``maps``: used entries and capacity by map. ``xdp_devices``: mode
    of XDP by interface. ``view``: see datapath/view.py.
    """

    reasons: Callable[[], Mapping[str, int]] = dict
    maps: Callable[[], Mapping[str, tuple[int, int]]] = dict
    xdp_devices: Callable[[], Mapping[str, str]] = dict
    view: Callable[[], Mapping[str, Any]] = dict


class Metrics:
    """All metrics that the agent's code writes. Only one thread writes each field."""

    def __init__(
        self,
        datapath: DatapathNumbers,
        localhost_node_ports: bool = False,
        families: Iterable[IPFamily] = tuple(IPFamily),
    ) -> None:
        """``localhost_node_ports``: add the metric that kube-proxy has only in mode iptables.

        ``families``: those that this node has.
        """
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
        self.synced_ports = Counter("pyebpf_proxy_synced_service_ports_total", "Service ports changed by syncs")
        self.failed_syncs = Counter("pyebpf_proxy_failed_syncs_total", "Failed syncs")
        self.problems = Gauge(
            "pyebpf_proxy_service_port_problems",
            "Current number of service ports or addresses that are not served as specified",
        )
        self.overlaps = Gauge(
            "pyebpf_proxy_service_addresses_of_nodes",
            "Current number of service addresses that are also an address of a Node",
        )
        self.over_limit = Gauge(
            "pyebpf_proxy_service_over_limit",
            "Services over a limit: current number of kinds of items that are left out",
            ("namespace", "service"),
        )
        self.source_complete = Gauge(
            "pyebpf_proxy_source_complete", "1 after the source has delivered all existing objects once"
        )
        self.source_delivered = Gauge(
            "pyebpf_proxy_source_last_delivery_timestamp_seconds", "When the source last delivered something"
        )
        self.objects = Gauge("pyebpf_proxy_objects", "Kubernetes objects in use, by kind", ("kind",))
        for family in (FAMILIES[family] for family in families):
            self.last_synced.set(family, value=0)
            self.last_queued.set(family, value=0)
        self.registry = Registry()
        self.registry.add(*(family for family in vars(self).values() if isinstance(family, Counter | Histogram)))
        self.kubernetes_count = sum(name.startswith("kubeproxy_") for name in self.registry.names)
        self.kubernetes_count += localhost_node_ports
        self.registry.add(*_read(datapath, localhost_node_ports))

    def count(self, path: str, code: int) -> None:
        """Count an answer of the health server."""
        (self.healthz if path == "/healthz" else self.livez).add(str(code))


def _read(datapath: DatapathNumbers, localhost_node_ports: bool) -> Iterable[Read]:
    last: Mapping[str, int] = {}
    view: Mapping[str, Any] = {}

    def reasons() -> Iterable[tuple[Labels, float]]:
        nonlocal last, view
        last, view = datapath.reasons(), datapath.view()
        return [((name,), number) for name, number in last.items()]

    def paths() -> Iterable[tuple[Labels, float]]:
        # These metrics read the same snapshot, which the scrape takes first (below).
        return [((_PATHS[name],), number) for name, number in last.items() if name in _PATHS]

    def slow() -> Iterable[tuple[Labels, float]]:
        return [((name,), number) for name, number in last.items() if name.startswith(_SLOW)]

    yield Read(
        CounterMetricFamily,
        "pyebpf_proxy_reasons_total",
        "Packets and socket calls, by reason for their treatment",
        ("reason",),
        reasons,
    )
    yield Read(
        CounterMetricFamily,
        "pyebpf_proxy_flows_total",
        "New flows by their path: fast (the flow table), netfilter (the slow path), socket",
        ("path",),
        paths,
    )
    yield Read(
        CounterMetricFamily,
        "pyebpf_proxy_slow_path_total",
        "New flows (slow_) and packets (stack_, mostly of known flows) that took the slow path, by reason",
        ("reason",),
        slow,
    )
    if localhost_node_ports:
        yield _localhost_node_ports(lambda: last)
    yield from _read_fast_path(lambda: last, lambda: view)
    yield from _read_node(lambda: view)
    yield Read(
        GaugeMetricFamily,
        "pyebpf_proxy_xdp_device",
        "Interfaces with the XDP program; always 1",
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
        "Capacity of a BPF map, in entries",
        ("map",),
        lambda: [((name,), capacity) for name, (_, capacity) in datapath.maps().items()],
    )
    yield _netfilter("pyebpf_proxy_conntrack_entries", "Entries of the node's conntrack table", "nf_conntrack_count")
    yield _netfilter("pyebpf_proxy_conntrack_max_entries", "Capacity of that table, in entries", "nf_conntrack_max")


def _netfilter(name: str, text: str, file: str) -> Read:
    """A metric with one of netfilter's numbers, read at each scrape; no sample while conntrack is not loaded."""

    def number() -> Iterable[tuple[Labels, float]]:
        found = kernel_number(_NETFILTER / file)
        return [] if found is None else [((), found)]

    return Read(GaugeMetricFamily, name, text, (), number)


def _localhost_node_ports(last: Callable[[], Mapping[str, int]]) -> Read:
    """The first packets of flows to NodePorts on loopback. ``last``: the reasons read at this scrape.

    kube-proxy counts them with an nfacct object; here the socket program does. Without the programs the metric has no
    sample, as kube-proxy's without nfacct.
    """

    def accepted() -> Iterable[tuple[Labels, float]]:
        found = last().get("localhost_node_port")
        return [] if found is None else [((), found)]

    return Read(
        CounterMetricFamily,
        "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
        _ALPHA + "Number of packets accepted on nodeports of loopback interface",
        (),
        accepted,
    )


def _read_fast_path(last: Callable[[], Mapping[str, int]], view: Callable[[], Mapping[str, Any]]) -> Iterable[Read]:
    """Metrics of the fast path. ``last``, ``view``: the reasons and the view read at this scrape."""

    def packets() -> Iterable[tuple[Labels, float]]:
        counts = last()
        return (
            [(("tc",), counts["flow_hit"]), (("xdp",), counts.get("xdp_flow_hit", 0))] if "flow_hit" in counts else []
        )

    def events() -> Iterable[tuple[Labels, float]]:
        return [((_EVENTS[name],), number) for name, number in last().items() if name in _EVENTS]

    def closed() -> Iterable[tuple[Labels, float]]:
        found = view().get("closed", {})
        return [((f"IPv{family}", why["reason"]), 1) for family, why in sorted(found.items())]

    def devices() -> Iterable[tuple[Labels, float]]:
        found = view().get("devices", {}).values()
        return [((each["name"], REDIRECTS[each["redirect"]]), 1) for each in found]

    def failures() -> Iterable[tuple[Labels, float]]:
        failed = view().get("promotion", {}).get("failed", {})
        return [((outcome,), count) for outcome, count in sorted(failed.items())]

    def refusals() -> Iterable[tuple[Labels, float]]:
        total = view().get("conntrackRefusals", {}).get("total", {})
        return [((reason,), count) for reason, count in sorted(total.items())]

    def young() -> Iterable[tuple[Labels, float]]:
        promotion = view().get("promotion")
        return [] if promotion is None else [((), promotion["young"])]

    yield Read(
        CounterMetricFamily,
        "pyebpf_proxy_fast_path_packets_total",
        "Packets forwarded by the flow table",
        ("hook",),
        packets,
    )
    yield Read(
        CounterMetricFamily,
        "pyebpf_proxy_fast_path_events_total",
        "Events of the flow table: permits granted; young flows ended or promoted; the kernel's flows learned,"
        " confirmed, changed, forgotten",
        ("event",),
        events,
    )
    yield Read(
        GaugeMetricFamily,
        "pyebpf_proxy_young_flows",
        "Flows without a conntrack entry, as of the last sweep",
        (),
        young,
    )
    yield Read(
        CounterMetricFamily,
        "pyebpf_proxy_promotion_failures_total",
        "Failed promotions of young flows to conntrack, by reason; each attempt counts",
        ("outcome",),
        failures,
    )
    yield Read(
        CounterMetricFamily,
        "pyebpf_proxy_conntrack_refusals_total",
        "New flows that conntrack refused, as in conntrack -S: insert_failed (no source port is free for masquerading,"
        " or another flow was faster), drop (also a full table), early_drop (a flow gave way), chain_toolong",
        ("reason",),
        refusals,
    )
    yield Read(
        GaugeMetricFamily,
        "pyebpf_proxy_fast_path_closed",
        "1 for a family whose flows all take the slow path, with the reason",
        ("family", "reason"),
        closed,
    )
    yield Read(
        GaugeMetricFamily,
        "pyebpf_proxy_device",
        "Interfaces, by the way in which the fast path redirects to them; always 1",
        ("device", "redirect"),
        devices,
    )


def _read_node(view: Callable[[], Mapping[str, Any]]) -> Iterable[Read]:
    """Metrics of the node. ``view``: the view read at this scrape."""

    def overruns() -> Iterable[tuple[Labels, float]]:
        return [((protocol,), count) for protocol, count in sorted(view().get("netlinkOverruns", {}).items())]

    def restored() -> Iterable[tuple[Labels, float]]:
        return [((what,), count) for what, count in view().get("repairs", {}).get("total", {}).items()]

    def writable() -> Iterable[tuple[Labels, float]]:
        return [((), float(not view()["runFolder"]))] if "runFolder" in view() else []

    yield Read(
        CounterMetricFamily,
        "pyebpf_proxy_netlink_overruns_total",
        "How often the kernel dropped notifications because they came faster than the agent read them, by protocol;"
        " each time the agent listed everything again",
        ("protocol",),
        overruns,
    )
    yield Read(
        CounterMetricFamily,
        "pyebpf_proxy_repairs_total",
        "Objects in the kernel that another program removed or changed, and that the agent restored",
        ("object",),
        restored,
    )
    yield Read(
        GaugeMetricFamily,
        "pyebpf_proxy_run_directory_writable",
        "1 if the run folder can be written to, 0 if it is read-only or its file system is full",
        (),
        writable,
    )


def _histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
    return Histogram(f"kubeproxy_{name}", _ALPHA + text, _FAMILY, bounds)


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(f"kubeproxy_{name}", _ALPHA + text, labels)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(f"kubeproxy_{name}", _ALPHA + text, labels)
