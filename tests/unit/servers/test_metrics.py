# SPDX-License-Identifier: Apache-2.0
"""The metrics: changes of objects in, the page out, as Prometheus reads it (spec/metrics)."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Collection

import pytest
from prometheus_client.parser import text_string_to_metric_families as read_text

from pyebpf_proxy import __version__
from pyebpf_proxy.kube.objects import (
    Annotations,
    Endpoint,
    EndpointConditions,
    EndpointPort,
    EndpointSlice,
    Node,
    ObjectMeta,
    Service,
    ServiceCIDR,
    ServiceCIDRSpec,
    ServicePort,
    ServiceSpec,
)
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.servers.client_metrics import ClientMetrics
from pyebpf_proxy.servers.component_metrics import add_build
from pyebpf_proxy.servers.health import Health, Moment
from pyebpf_proxy.servers.metrics import DatapathNumbers, Metrics
from pyebpf_proxy.servers.observer import Observer
from pyebpf_proxy.servers.registry import NETPROG, Registry, text
from pyebpf_proxy.services.model import IPFamily
from pyebpf_proxy.services.planner import Planner, PlanSettings

REASONS = {
    "new_flow_fast": 7,
    "new_flow_netfilter": 2,
    "slow_quota": 1,
    "stack_hops": 3,
    "reject_no_endpoints": 0,
    "flow_hit": 20,
    "xdp_flow_hit": 4,
    "flow_promoted": 5,
}
VIEW = {
    "closed": {"6": {"reason": "stack_rules", "text": "table ip6 filter, chain FORWARD"}},
    "devices": {"2": {"name": "eth0", "redirect": 1}, "3": {"name": "veth1", "redirect": 0}},
    "promotion": {"failed": {"full": 6}, "young": 11},
    "netlinkOverruns": {"route": 2, "netfilter": 0},
    "repairs": {"total": {"tc_program": 3, "pins": 0}, "lastMinute": {}},
    "runFolder": "it is read-only",
}
MAPS = {"services": (3, 100)}
START = 1795239500_000_000_000
K = "kubeproxy_"
SYNC = f"{K}sync_proxy_rules_"


class ObservedAgent:
    """Observer and planner as in the agent, and a clock that does not run."""

    def __init__(self, *families: IPFamily, external_ips: bool = True) -> None:
        families = families or tuple(IPFamily)
        self.metrics = Metrics(DatapathNumbers(lambda: REASONS, lambda: MAPS, view=lambda: VIEW), families=families)
        self.planner = Planner(PlanSettings(node_name="here", external_ips=external_ips))
        self.seconds = 0.0
        self.health = Health(60, families)
        self.applied = 0
        self.observer = Observer(self.metrics, self.health, self.planner, "here", self.now, self.count)

    def now(self) -> Moment:
        return Moment(self.seconds, START + round(self.seconds * 1e9))

    def count(self) -> None:
        self.applied += 1

    def change(self, *changes: Change) -> None:
        self._changes = [*getattr(self, "_changes", []), *changes]
        self.observer.changed(changes, complete=True)
        self.observer.queued()

    def sync(
        self, ok: bool = True, full: bool = False, problems: int = 0, waiting: Collection[tuple[str, str]] = ()
    ) -> None:
        changes, self._changes = self._changes, []
        self.observer.planned(self.planner.update(changes))
        self.observer.synced(0.003, ok, full, problems, waiting)

    def __getitem__(self, key: str | tuple[str, ...]) -> float | None:
        """The value of a sample, by its name and its label values."""
        name, *labels = (key,) if isinstance(key, str) else key
        return self.page().get((name, *labels))

    def page(self) -> dict[tuple[str, ...], float]:
        body = text(self.metrics.registry)
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in read_text(body.decode())
            for sample in family.samples
        }


@pytest.fixture
def agent() -> ObservedAgent:
    return ObservedAgent()


def service(name: str = "s", gone: bool = False, **spec: str) -> Change:
    ports = (ServicePort(name="p", protocol="TCP", port=80),)
    made = Service(
        ObjectMeta(name, "ns"),
        ServiceSpec(type="ClusterIP", cluster_ip="10.96.0.9", cluster_ips=("10.96.0.9",), ports=ports, **spec),  # type: ignore[arg-type]
    )
    return Change("Service", "ns", name, None if gone else made)


def endpoints(
    *nodes: str,
    name: str = "s-1",
    of: str = "s",
    trigger: str | None = None,
    gone: bool = False,
    kind: str = "IPv4",
    ready: bool = True,
) -> Change:
    made = EndpointSlice(
        ObjectMeta(
            name,
            "ns",
            labels={"kubernetes.io/service-name": of},
            annotations=Annotations(trigger) if trigger else None,
        ),
        address_type=kind,
        ports=(EndpointPort("p", "TCP", 80),),
        endpoints=tuple(
            Endpoint(
                addresses=(f"10.1.0.{number}",),
                node_name=node,
                conditions=EndpointConditions(ready=ready, serving=ready),
            )
            for number, node in enumerate(nodes, 1)
        ),
    )
    return Change("EndpointSlice", "ns", name, None if gone else made)


def test_syncs(agent: ObservedAgent) -> None:
    before = agent.page()
    for family in ("IPv4", "IPv6"):
        assert before[f"{SYNC}last_timestamp_seconds", family] == 0
        assert before[f"{SYNC}last_queued_timestamp_seconds", family] == 0
    agent.seconds = 5
    agent.change(service())
    agent.seconds = 6
    agent.sync(full=True)
    agent.seconds = 7
    agent.change(service(session_affinity="ClientIP"))
    agent.sync(ok=False)
    page = agent.page()
    for family in ("IPv4", "IPv6"):
        assert page[f"{SYNC}last_timestamp_seconds", family] == START / 1e9 + 6
        assert page[f"{SYNC}last_queued_timestamp_seconds", family] == START / 1e9 + 7
        assert page[f"{SYNC}duration_seconds_count", family] == 2
        assert page[f"{SYNC}duration_seconds_bucket", family, "0.002"] == 0
        assert page[f"{SYNC}duration_seconds_bucket", family, "0.004"] == 2
        assert page[f"{K}sync_full_proxy_rules_duration_seconds_count", family] == 1
        assert page[f"{K}sync_partial_proxy_rules_duration_seconds_count", family] == 1
    assert page["pyebpf_proxy_failed_syncs_total",] == 1
    assert page["pyebpf_proxy_synced_service_ports_total",] == 2
    assert agent.applied == 1
    assert all(its.healthy for its in agent.health.report(agent.now()).families.values())


def test_service_changes(agent: ObservedAgent) -> None:
    total, pending = f"{SYNC}service_changes_total", f"{SYNC}service_changes_pending"
    agent.change(service("a"), service("b"))
    assert (agent[total], agent[pending]) == (4, 2)  # both families count
    agent.change(service("b", gone=True))  # undone before a sync saw it
    assert (agent[total], agent[pending]) == (6, 1)
    agent.sync()
    assert agent[pending] == 0
    agent.change(service("a", session_affinity="ClientIP"))
    assert agent[pending] == 1
    agent.change(service("a"))
    assert (agent[total], agent[pending]) == (10, 0)


def test_a_service_that_is_not_served_is_never_pending(agent: ObservedAgent) -> None:
    outside = Change("Service", "ns", "outside", Service(ObjectMeta("outside", "ns"), ServiceSpec(type="ExternalName")))
    agent.change(outside)
    assert (agent[f"{SYNC}service_changes_total"], agent[f"{SYNC}service_changes_pending"]) == (2, 0)


def test_of_many_updates_of_one_service_only_the_last_is_compared(
    agent: ObservedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant may update a Service of 1024 ports a hundred times per second; each comparison takes 10 ms."""
    compared: list[str] = []
    differs = agent.planner.differs

    def counted(namespace: str, name: str, service: Service | None) -> bool:
        compared.append(name)
        return differs(namespace, name, service)

    monkeypatch.setattr(agent.planner, "differs", counted)
    agent.change(*[service("web") for _ in range(100)])
    assert len(compared) == 1
    assert agent[f"{SYNC}service_changes_total"] == 200
    assert agent[f"{SYNC}service_changes_pending"] == 1


def test_comparisons_of_one_namespace_have_a_limited_time(
    agent: ObservedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other Services count as pending. Those of other namespaces are compared."""
    compared: list[tuple[str, str]] = []

    def slow(namespace: str, name: str, service: Service | None) -> bool:
        compared.append((namespace, name))
        agent.seconds += 0.02
        return False

    monkeypatch.setattr(agent.planner, "differs", slow)
    changes = [Change("Service", namespace, f"s{n}", None) for n in range(9) for namespace in ("tenant", "shop")]
    agent.observer.changed(changes)
    assert compared == [(namespace, f"s{n}") for n in range(3) for namespace in ("tenant", "shop")]
    assert agent[f"{SYNC}service_changes_pending"] == 12


def test_endpoint_changes(agent: ObservedAgent) -> None:
    total, pending = f"{SYNC}endpoint_changes_total", f"{SYNC}endpoint_changes_pending"
    agent.change(endpoints("here"), endpoints("there", name="s-2"), endpoints(name="f", kind="FQDN"))
    assert (agent[total], agent[pending]) == (2, 2)  # only the endpoints of a family, by that family
    agent.sync()
    assert (agent[total], agent[pending]) == (2, 0)
    agent.change(endpoints(gone=True), endpoints(name="f", kind="FQDN", gone=True))
    assert (agent[total], agent[pending]) == (3, 1)


def test_events_that_change_nothing_count_but_are_not_pending(agent: ObservedAgent) -> None:
    agent.observer.unchanged([service("a"), endpoints("here"), endpoints(name="f", kind="FQDN")])
    assert (agent[f"{SYNC}service_changes_total"], agent[f"{SYNC}service_changes_pending"]) == (2, 0)
    assert (agent[f"{SYNC}endpoint_changes_total"], agent[f"{SYNC}endpoint_changes_pending"]) == (1, 0)


def test_network_programming(agent: ObservedAgent) -> None:
    count, total = f"{K}network_programming_duration_seconds_count", f"{K}network_programming_duration_seconds_sum"
    assert agent[count, "IPv4"] is None  # absent before the first observation, as in kube-proxy
    agent.seconds = 10
    agent.change(
        endpoints("here", trigger="2026-11-21T05:38:25Z"),  # 5 s after the start
        endpoints("here", name="s-2", of="t", trigger="2026-11-21T05:38:29.5+00:00"),
        endpoints("here", name="old", of="u", trigger="2026-11-21T05:38:19Z"),  # before it
        endpoints("here", name="bad", of="u", trigger="yesterday"),
        endpoints("here", name="local", of="u", trigger="2026-11-21T05:38:25"),  # no zone
        endpoints("here", name="none", of="u"),
        endpoints("here", name="gone", of="v", trigger="2026-11-21T05:38:25Z"),
    )
    agent.change(endpoints(name="gone", of="v", gone=True))
    agent.sync(ok=False)
    assert agent[count, "IPv4"] is None
    agent.seconds = 11
    agent.change()
    agent.sync()
    assert (agent[count, "IPv4"], agent[total, "IPv4"]) == (2, 7.5)
    assert agent[f"{K}network_programming_duration_seconds_bucket", "IPv4", "1"] == 0
    assert agent[f"{K}network_programming_duration_seconds_bucket", "IPv4", "2"] == 1
    agent.change()
    agent.sync()
    assert agent[count, "IPv4"] == 2  # each once
    assert agent[count, "IPv6"] is None


def test_network_programming_ends_with_the_sync_that_applies_the_slice(agent: ObservedAgent) -> None:
    count, total = f"{K}network_programming_duration_seconds_count", f"{K}network_programming_duration_seconds_sum"
    agent.seconds = 10
    agent.change(
        endpoints("here", trigger="2026-11-21T05:38:25Z"),
        endpoints("here", name="later", of="t", trigger="2026-11-21T05:38:25Z"),
    )
    slices = [(change.namespace, change.name) for change in agent._changes]
    agent.sync(waiting=[slices[1], ("ns", "never-seen")])
    assert (agent[count, "IPv4"], agent[total, "IPv4"]) == (1, 5)
    agent.seconds = 12
    agent.change()
    agent.sync()
    assert (agent[count, "IPv4"], agent[total, "IPv4"]) == (2, 12)


def test_a_deleted_slice_affects_the_measurement_of_its_own_family_only(agent: ObservedAgent) -> None:
    count = f"{K}network_programming_duration_seconds_count"
    agent.seconds = 10
    agent.change(endpoints("here", name="six", kind="IPv6"))
    agent.sync()
    agent.change(
        endpoints("here", trigger="2026-11-21T05:38:25Z"),
        endpoints("here", name="six-2", kind="IPv6", trigger="2026-11-21T05:38:25Z"),
    )
    agent.change(endpoints(name="six", kind="IPv6", gone=True))
    agent.sync()
    assert (agent[count, "IPv4"], agent[count, "IPv6"]) == (1, None)


def test_buckets() -> None:
    assert len(NETPROG) == 81
    assert NETPROG[:5] == (0, 0.25, 0.5, 1, 2)
    assert NETPROG[-3:] == (240, 270, 300)


LOCAL = {"internal_traffic_policy": "Local"}
EXTERNAL = {"external_traffic_policy": "Local", "type": "NodePort"}


@pytest.mark.parametrize(
    ("policies", "nodes", "ready", "internal", "external"),
    [
        (LOCAL, ["there"], True, 1, 0),
        (EXTERNAL, ["there"], True, 0, 1),
        (LOCAL | EXTERNAL, ["there"], True, 1, 1),
        (LOCAL | EXTERNAL, ["there", "here"], True, 0, 0),
        (LOCAL | EXTERNAL, [], True, 0, 0),
        (LOCAL | EXTERNAL, ["there"], False, 0, 0),
        ({}, ["there"], True, 0, 0),
    ],
)
def test_no_local_endpoints(
    agent: ObservedAgent, policies: dict[str, str], nodes: list[str], ready: bool, internal: int, external: int
) -> None:
    name = f"{SYNC}no_local_endpoints_total"
    made = service(**{key: value for key, value in policies.items() if key != "type"})
    spec = made.object.spec  # type: ignore[union-attr]
    if "type" in policies:
        spec.type, spec.ports = "NodePort", (ServicePort(name="p", protocol="TCP", port=80, node_port=30080),)  # type: ignore[union-attr]
    agent.change(made, endpoints(*nodes, ready=ready))
    agent.sync()
    assert (agent[name, "IPv4", "internal"], agent[name, "IPv4", "external"]) == (internal, external)
    assert (agent[name, "IPv6", "internal"], agent[name, "IPv6", "external"]) == (0, 0)
    agent.change(service(gone=True))
    agent.sync()
    assert (agent[name, "IPv4", "internal"], agent[name, "IPv4", "external"]) == (0, 0)


@pytest.mark.parametrize(("nodes", "external"), [(["here"], 0), (["here", "there"], 0), (["there"], 1)])
def test_no_local_endpoints_of_external_ips_that_the_gate_does_not_allow(nodes: list[str], external: int) -> None:
    """kube-proxy asks the Service, not the gate, for its external IPs (pkg/proxy/serviceport.go)."""
    agent = ObservedAgent(external_ips=False)
    made = service(external_traffic_policy="Local", external_ips=("203.0.113.1",))
    agent.change(made, endpoints(*nodes))
    agent.sync()
    assert agent[f"{SYNC}no_local_endpoints_total", "IPv4", "external"] == external


def test_the_agents_own_metrics(agent: ObservedAgent) -> None:
    agent.change(service(), endpoints("here"), Change("Node", "", "here", Node()))
    agent.sync(problems=1)
    page = agent.page()
    assert page["pyebpf_proxy_reasons_total", "slow_quota"] == 1
    assert page["pyebpf_proxy_reasons_total", "reject_no_endpoints"] == 0
    assert page["pyebpf_proxy_flows_total", "fast"] == 7
    assert page["pyebpf_proxy_flows_total", "netfilter"] == 2
    assert page["pyebpf_proxy_map_entries", "services"] == 3
    assert page["pyebpf_proxy_map_max_entries", "services"] == 100
    assert page["pyebpf_proxy_service_port_problems",] == 1
    assert page["pyebpf_proxy_source_complete",] == 1
    assert [page["pyebpf_proxy_objects", kind] for kind in ("Service", "EndpointSlice", "Node")] == [1, 1, 1]
    assert agent.observer.node_eligible()
    agent.change(Change("Node", "", "here", None), Change("Node", "", "there", Node()))
    assert not agent.observer.node_eligible()


def test_a_service_cidr_with_the_name_of_the_node_is_not_the_node(agent: ObservedAgent) -> None:
    """The API server calls the first one ``kubernetes``, and a machine may have that name, too."""
    cidr = ServiceCIDR(ObjectMeta("here"), ServiceCIDRSpec(("10.96.0.0/12",)))
    agent.change(Change("Node", "", "here", Node()), Change("ServiceCIDR", "", "here", cidr))
    assert agent.observer.node_eligible()
    agent.change(Change("ServiceCIDR", "", "here", None))
    assert agent.observer.node_eligible()


def test_the_fast_path(agent: ObservedAgent) -> None:
    page = agent.page()
    assert (page["pyebpf_proxy_slow_path_total", "slow_quota"], page["pyebpf_proxy_slow_path_total", "stack_hops"]) == (
        1,
        3,
    )
    packets = "pyebpf_proxy_fast_path_packets_total"
    assert (page[packets, "tc"], page[packets, "xdp"]) == (20, 4)
    assert page["pyebpf_proxy_fast_path_events_total", "promoted"] == 5
    assert page["pyebpf_proxy_young_flows",] == 11
    assert page["pyebpf_proxy_promotion_failures_total", "full"] == 6
    closed = "pyebpf_proxy_fast_path_closed"
    assert [labels for labels in page if labels[0] == closed] == [(closed, "IPv6", "stack_rules")]
    overruns = "pyebpf_proxy_netlink_overruns_total"
    assert (page[overruns, "route"], page[overruns, "netfilter"]) == (2, 0)
    repairs = "pyebpf_proxy_repairs_total"
    assert (page[repairs, "tc_program"], page[repairs, "pins"]) == (3, 0)
    assert page["pyebpf_proxy_run_directory_writable",] == 0
    device = "pyebpf_proxy_device"
    assert (page[device, "eth0", "device"], page[device, "veth1", "none"]) == (1, 1)


def test_counters_of_every_kubernetes_program_have_their_names_in_their_headers() -> None:
    """As in kube-proxy: ``_total`` once."""
    registry = Registry()
    add_build(registry, {}, 3)
    plain = text(registry).decode()
    typed = dict(line.split()[2:] for line in plain.splitlines() if line.startswith("# TYPE"))
    names = {line.partition("{")[0].split()[0] for line in plain.splitlines() if not line.startswith("#")}
    assert set(typed) == names
    counters = {name for name, kind in typed.items() if kind == "counter"}
    assert counters == {f"{which}_metrics_total" for which in ("disabled", "hidden", "registered")}


@pytest.mark.parametrize("commit", ["", "0123abc"])
def test_the_build_info(commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if commit:
        monkeypatch.setenv("PYEBPF_PROXY_COMMIT", commit)
    else:
        monkeypatch.delenv("PYEBPF_PROXY_COMMIT", raising=False)
    registry = Registry()
    add_build(registry, {}, 3)
    families = {each.name: each for each in read_text(text(registry).decode())}
    (sample,) = families["pyebpf_proxy_build_info"].samples
    wanted = {"version": __version__, "commit": commit, "python_version": platform.python_version()}
    assert (sample.labels, sample.value) == (wanted, 1)


def test_the_reconciler(agent: ObservedAgent) -> None:
    agent.observer.reconciled(IPFamily.IPV4, 0.003, 2)
    agent.observer.reconciled(IPFamily.IPV4, 0.001, 0)
    name = f"{K}conntrack_reconciler_"
    assert agent[f"{name}deleted_entries_total", "IPv4"] == 2
    assert agent[f"{name}sync_duration_seconds_count", "IPv4"] == 2
    assert agent[f"{name}deleted_entries_total", "IPv6"] is None


def test_answers_of_the_health_server(agent: ObservedAgent) -> None:
    for path, code in (("/healthz", 200), ("/healthz", 503), ("/healthz", 200), ("/livez", 503)):
        agent.metrics.count(path, code)
    assert (agent[f"{K}proxy_healthz_total", "200"], agent[f"{K}proxy_healthz_total", "503"]) == (2, 1)
    assert (agent[f"{K}proxy_livez_total", "200"], agent[f"{K}proxy_livez_total", "503"]) == (None, 1)


def test_help_texts_and_buckets_are_as_of_gos_library(agent: ObservedAgent) -> None:
    agent.seconds = 10
    agent.change(service(), endpoints("here", trigger="2026-11-21T05:38:25Z"))
    agent.sync()
    plain = text(agent.metrics.registry)
    assert b"# HELP kubeproxy_sync_proxy_rules_duration_seconds [ALPHA] SyncProxyRules latency in seconds\n" in plain
    assert b'_bucket{ip_family="IPv4",le="1"}' in plain


def test_large_bounds_are_written_as_in_go() -> None:
    registry = Registry()
    metrics = ClientMetrics()
    metrics.transferred("GET", "127.0.0.1:6443", 1, 20 << 20)
    registry.add(*metrics.families)
    written = re.findall(r'rest_client_response_size_bytes_bucket.*le="(.*?)"', text(registry).decode())
    assert written[:2] == ["64", "256"]
    assert written[-5:] == ["262144", "1.048576e+06", "4.194304e+06", "1.6777216e+07", "+Inf"]


def test_the_cost_of_a_scrape_does_not_depend_on_the_services(agent: ObservedAgent) -> None:
    """CPU time of the thread: meanwhile the programming thread cannot use the interpreter."""
    for number in range(10_000):
        made = service(f"s{number}", internal_traffic_policy="Local")
        agent.change(made, endpoints("there", name=f"s{number}-1", of=f"s{number}", trigger="2026-11-21T05:38:25Z"))
    agent.seconds = 10
    agent.sync()
    assert agent[f"{SYNC}no_local_endpoints_total", "IPv4", "internal"] == 10_000
    costs = []
    for _ in range(5):
        before = time.thread_time()
        text(agent.metrics.registry)
        costs.append(time.thread_time() - before)
    assert min(costs) < 0.02, costs


def test_a_node_without_ipv6_counts_for_ipv4_only() -> None:
    agent = ObservedAgent(IPFamily.IPV4)
    agent.change(service(), endpoints("here", kind="IPv6"), endpoints("here", name="s-2"))
    agent.sync()
    agent.observer.reconciled(IPFamily.IPV6, 0.1, 0)
    agent.change(endpoints(gone=True, kind="IPv6"))
    agent.sync()
    assert agent[f"{SYNC}service_changes_total"] == agent[f"{SYNC}endpoint_changes_total"] == 1
    page = agent.page()
    assert (f"{SYNC}last_timestamp_seconds", "IPv4") in page
    assert [labels for labels in page if labels[0].startswith(K) and "IPv6" in labels] == []
    assert agent.health.programmed
    assert list(agent.health.report(agent.now()).families) == [IPFamily.IPV4]
