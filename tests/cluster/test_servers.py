# SPDX-License-Identifier: Apache-2.0
"""Answers of the agent's servers compared with kube-proxy's, over the same changes (docs/servers.md)."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.beside import NODE, NODE_IP, Answer, Side, both
from tests.support.apiserver import ApiServer, Object, running

HEALTH_CHECK = 31500
#: Prefixes of kube-proxy's metrics that the agent lacks, because what they count does not exist here.
NOT_HERE = (
    "kubeproxy_iptables_",
    "kubeproxy_sync_proxy_rules_iptables_",
    "kubeproxy_sync_proxy_rules_nftables_",
)

#: What Prometheus 2.42 sends.
ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)

server = pytest.fixture(scope="module")(running)


@pytest.fixture(scope="module", params=["iptables", "nftables"])
def sides(
    server: ApiServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[list[Side]]:
    """kube-proxy, then the agent, with the same configuration."""
    for item in (slice_of(), service()):
        remove(server, item)
    server.apply(node())
    folder = tmp_path_factory.mktemp(request.param)
    config = {
        "mode": request.param,
        "clusterCIDR": "10.244.0.0/16",
        request.param: {"minSyncPeriod": "0.1s", "syncPeriod": "30s"},
        "nodePortAddresses": None if request.param == "iptables" else ["primary"],
    }
    names = ("kube-proxy", "agent")
    for name in names:
        (folder / name).mkdir()
    with Side(names[0], server, folder / names[0]) as real, Side(names[1], server, folder / names[1]) as proxy:
        for side in (real, proxy):
            side.start(config)
        yield [real, proxy]


def node(**spec: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE},
        "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"], **spec},
        "status": {"addresses": [{"type": "InternalIP", "address": NODE_IP}]},
    }


def service(**spec: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "internalTrafficPolicy": "Local",
            "healthCheckNodePort": HEALTH_CHECK,
            "ports": [
                {"name": "http", "port": 80, "protocol": "TCP", "nodePort": 31501},
                {"name": "dns", "port": 53, "protocol": "UDP", "nodePort": 31502},
            ],
            **spec,
        },
    }


def endpoint(address: str, node_name: str = NODE, **conditions: bool) -> Object:
    return {"addresses": [address], "nodeName": node_name, "conditions": {"ready": True, **conditions}}


def slice_of(*endpoints: Object, trigger: str = "") -> Object:
    metadata: Object = {"name": "web-1", "namespace": "default", "labels": {"kubernetes.io/service-name": "web"}}
    if trigger:
        metadata["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": trigger}
    ports = [{"name": "http", "port": 8080, "protocol": "TCP"}, {"name": "dns", "port": 5353, "protocol": "UDP"}]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": list(endpoints),
    }


def remove(server: ApiServer, item: Object) -> None:
    try:
        server.delete(item)
    except Exception:  # it did not exist
        return


def metrics(side: Side) -> dict[str, Metric]:
    page = side.get(10249, "/metrics", accept=ACCEPT).body
    return {family.name: family for family in text_string_to_metric_families(page)}


def value(side: Side, name: str, **labels: str) -> float | None:
    for family in metrics(side).values():
        for sample in family.samples:
            if sample.name == f"kubeproxy_{name}" and labels.items() <= sample.labels.items():
                return sample.value
    return None


def matches(wanted: tuple[int, str], answer: Answer) -> bool:
    return (answer.status, answer.headers.get("X-Load-Balancing-Endpoint-Weight")) == wanted


def check(side: Side) -> Answer:
    return side.get(HEALTH_CHECK, "/any", NODE_IP)


#: The change, then the status and the count that both must show.
STEPS: list[tuple[str, list[Object], int, int]] = [
    ("no endpoints", [service()], 503, 0),
    ("one here", [slice_of(endpoint("10.244.1.5"))], 200, 1),
    (
        "two here, one elsewhere",
        [slice_of(*map(endpoint, ("10.244.1.5", "10.244.1.6")), endpoint("10.244.2.5", "node2"))],
        200,
        2,
    ),
    ("one not ready", [slice_of(endpoint("10.244.1.5"), endpoint("10.244.1.6", ready=False, serving=False))], 200, 1),
    ("terminating", [slice_of(endpoint("10.244.1.5", ready=False, serving=True, terminating=True))], 503, 0),
    (
        "twice, then not ready",
        [slice_of(endpoint("10.244.1.5"), endpoint("10.244.1.5", ready=False, serving=False))],
        503,
        0,
    ),
    (
        "twice, then terminating",
        [slice_of(endpoint("10.244.1.5"), endpoint("10.244.1.5", ready=False, serving=True, terminating=True))],
        200,
        1,
    ),
    ("elsewhere", [slice_of(endpoint("10.244.2.5", "node2"))], 503, 0),
    ("here again", [slice_of(endpoint("10.244.1.7"))], 200, 1),
]


def test_health_check_node_ports_and_values_over_the_same_changes(server: ApiServer, sides: list[Side]) -> None:
    for what, items, status, count in STEPS:
        for item in items:
            server.apply(item)
        wanted = (status, str(count))
        real, proxy = both(sides, check, partial(matches, wanted), what)
        assert proxy == real, what
        if what == "elsewhere":
            for policy in ("internal", "external"):
                for side in sides:
                    name = "sync_proxy_rules_no_local_endpoints_total"
                    side.until(
                        lambda s=side, p=policy, n=name: value(s, n, traffic_policy=p, ip_family="IPv4") == 2,
                        f"two ports without local endpoints by policy {policy}",
                    )
    for item in (service(), slice_of(endpoint("10.244.1.7"))):
        # Nothing that a proxy reads: it counts all the same.
        item["metadata"]["annotations"] = {"tests/note": "changed"}
        server.apply(item)
    for name in (
        "service_changes_total",
        "endpoint_changes_total",
        "service_changes_pending",
        "endpoint_changes_pending",
    ):
        real, proxy = both(sides, lambda s, n=name: value(s, f"sync_proxy_rules_{n}"), lambda v: v is not None, name)
        assert proxy == real, name
    server.delete(service())
    both(sides, check, lambda a: a.status == 0, "no server listens any more")
    server.delete(slice_of())


def test_network_programming_is_measured_once(server: ApiServer, sides: list[Side]) -> None:
    import datetime

    server.apply(service())
    name = "network_programming_duration_seconds_count"
    before = [value(side, name, ip_family="IPv4") or 0 for side in sides]
    # The time is without its fraction; what was before the start is not measured.
    time.sleep(1 - time.time() % 1)
    # Nothing but the time changes with the second slice: it is measured all the same.
    for more, seconds in enumerate(("%SZ", "%S.%fZ"), 1):
        now = datetime.datetime.now(datetime.UTC).strftime(f"%Y-%m-%dT%H:%M:{seconds}")
        server.apply(slice_of(endpoint("10.244.1.5"), trigger=now))
        for side, count in zip(sides, before, strict=True):
            side.until(
                lambda s=side, c=count + more: value(s, name, ip_family="IPv4") == c,  # type: ignore[misc]
                f"one more observation for each time, {more} in all",
            )
    remove(server, service())
    remove(server, slice_of())


def test_another_zone_of_the_node_is_a_full_sync(server: ApiServer, sides: list[Side]) -> None:
    name = "sync_full_proxy_rules_duration_seconds_count"
    before = [value(side, name, ip_family="IPv4") or 0 for side in sides]
    for number, zone in enumerate(("z1", "z2"), 1):
        item = node()
        item["metadata"]["labels"] = {"topology.kubernetes.io/zone": zone}
        server.apply(item)
        for side, count in zip(sides, before, strict=True):
            side.until(
                lambda s=side, c=count + number: value(s, name, ip_family="IPv4") == c,  # type: ignore[misc]
                f"a full sync for zone {zone}",
            )
    server.apply(node())


def shape(answer: Answer) -> tuple[int, dict[str, str], Any]:
    """Status, headers and the body without its times."""
    body = json.loads(answer.body)

    def without(item: Any) -> Any:
        if isinstance(item, dict):
            return {
                key: "time" if key in ("lastUpdated", "currentTime") else without(part) for key, part in item.items()
            }
        return item

    headers = {name: text for name, text in answer.headers.items() if name != "Content-Length"}
    return answer.status, headers, list(without(body).items())


def test_healthz_and_livez(server: ApiServer, sides: list[Side]) -> None:
    def look(path: str, status: int) -> None:
        real, proxy = both(
            sides, lambda s: s.get(10256, path), lambda a: a.status == status, f"{path} answers {status}"
        )
        assert shape(proxy) == shape(real)

    for path in ("/healthz", "/livez"):
        look(path, 200)
    server.apply(node(taints=[{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]))
    look("/healthz", 503)
    look("/livez", 200)
    server.apply(node())
    look("/healthz", 200)
    for path in ("/", "/metrics", "/readyz"):
        real, proxy = (side.get(10256, path) for side in sides)
        assert proxy == real


def test_a_node_without_ipv6(server: ApiServer, tmp_path: Path) -> None:
    """kube-proxy then serves and counts IPv4 only, and does not complain about health checks of the other family."""
    config = {
        "mode": "nftables",
        "clusterCIDR": "10.244.0.0/16",
        "nftables": {"minSyncPeriod": "0.1s"},
        "nodePortAddresses": ["192.0.2.0/24", "2001:db8::/32"],
    }
    for item in (slice_of(), service()):
        remove(server, item)
    server.apply(node())
    answers = []
    for name in ("kube-proxy", "agent"):
        (tmp_path / name).mkdir()
        with Side(name, server, tmp_path / name) as side:
            side.namespace.run("sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=1")
            side.start(config, families=1)
            server.apply(service(ipFamilyPolicy="PreferDualStack"))
            server.apply(slice_of(endpoint("10.244.1.5")))
            side.until(lambda s=side: matches((200, "1"), check(s)), "its health check counts the endpoint")  # type: ignore[misc]
            samples = [sample for family in metrics(side).values() for sample in family.samples]
            families = {sample.labels["ip_family"] for sample in samples if "ip_family" in sample.labels}
            changes = value(side, "sync_proxy_rules_service_changes_total")
            answers.append((shape(side.get(10256, "/healthz")), families, changes, check(side)))
            assert "health check node port cannot be served" not in side.log.read_text()
            for item in (service(), slice_of()):
                remove(server, item)
    assert answers[1] == answers[0]


def test_pages(sides: list[Side]) -> None:
    for path in ("/proxyMode", "/healthz", "/healthz/ping", "/healthz?verbose", "/", "/nothing", "/debug/flags/v"):
        real, proxy = (side.get(10249, path) for side in sides)
        assert proxy == real, path
    real, proxy = (side.get(10249, "/configz") for side in sides)
    documents = [json.loads(answer.body) for answer in (real, proxy)]
    for document in documents:
        document["kubeproxy.config.k8s.io"]["clientConnection"].pop("kubeconfig")
    assert json.dumps(documents[1]) == json.dumps(documents[0])  # the order of the fields too
    for accept in ("application/json", "application/yaml", "text/html"):
        for path in ("/flagz", "/statusz"):
            real, proxy = (side.get(10249, path, accept=accept) for side in sides)
            assert proxy == real
    accept = "application/json;as=Statusz;v=v1alpha1;g=config.k8s.io"
    real, proxy = (side.get(10249, "/statusz", accept=accept) for side in sides)
    own = {"startTime", "uptimeSeconds", "goVersion"}
    fields = [[(k, "" if k in own else v) for k, v in json.loads(a.body).items()] for a in (real, proxy)]
    assert fields[1] == fields[0]
    assert proxy.headers.items() - real.headers.items() <= {("Content-Length", proxy.headers["Content-Length"])}


def test_metrics_have_the_same_names_labels_buckets_and_help(sides: list[Side]) -> None:
    for side in sides:  # so that both have all of them
        side.get(10256, "/healthz")
        side.get(10256, "/livez")
    real, proxy = (metrics(side) for side in sides)
    names = {name for name in real if name.startswith("kubeproxy_") and not name.startswith(NOT_HERE)}
    if sides[0].get(10249, "/proxyMode").body == "iptables":
        # kube-proxy has it if the kernel has nfacct.
        localhost = "kubeproxy_iptables_localhost_nodeports_accepted_packets"
        assert proxy[localhost].type == "counter"
        assert proxy[localhost].documentation.endswith("Number of packets accepted on nodeports of loopback interface")
        assert [sample.labels for sample in proxy.pop(localhost).samples] == [{}]
    assert {name for name in proxy if name.startswith("kubeproxy_")} == names
    clients = {name for name in proxy if name.startswith("rest_client_")}
    assert len(clients) == 5
    for name in sorted(names | clients | {"kubernetes_build_info", "kubernetes_feature_enabled"}):
        assert (proxy[name].type, proxy[name].documentation) == (real[name].type, real[name].documentation)
        assert label_names(proxy[name]) == label_names(real[name]), name
        if proxy[name].type == "histogram":
            assert buckets(proxy[name]) == buckets(real[name]), name
    gates = [
        {(s.labels["name"], s.labels["stage"], s.value) for s in side["kubernetes_feature_enabled"].samples}
        for side in (real, proxy)
    ]
    assert gates[1] == gates[0]


def label_names(family: Metric) -> set[tuple[str, ...]]:
    return {(sample.name, *sorted(sample.labels)) for sample in family.samples}


def buckets(family: Metric) -> set[str]:
    return {sample.labels["le"] for sample in family.samples if "le" in sample.labels}


def test_slis(sides: list[Side]) -> None:
    def rows(side: Side) -> list[str]:
        side.get(10249, "/healthz")
        lines = side.get(10249, "/metrics/slis").body.splitlines()
        return [line.rpartition(" ")[0] if line[0] != "#" else line for line in lines]

    real, proxy = map(rows, sides)
    assert proxy == real
    kinds = [side.get(10249, "/metrics/slis").headers["Content-Type"] for side in sides]
    assert kinds[1] == kinds[0]


def hold(port: int) -> None:
    """Occupy a port on every address until killed."""
    with socket.create_server(("0.0.0.0", port)):
        time.sleep(600)


@contextmanager
def taken(sides: list[Side], port: int) -> Iterator[None]:
    """Another process has the port on both sides."""
    tasks = [side.namespace.start(hold, port) for side in sides]
    try:
        for side in sides:
            side.until(lambda s=side: f"0.0.0.0:{port}" in s.namespace.run("ss", "-ltn"), "the port is taken")  # type: ignore[misc]
        yield
    finally:
        for task in tasks:
            task.stop()


def events(server: ApiServer, reason: str) -> list[Object]:
    found = server.request("GET", "/apis/events.k8s.io/v1/events")["items"]
    return [item for item in found if item["reason"] == reason]


def words(event: Object) -> tuple[object, ...]:
    """The content of an Event, without its reporter and time."""
    regarding = {key: event["regarding"].get(key) for key in ("kind", "namespace", "name")}
    fields = [event.get(key) for key in ("type", "reason", "action", "note")]
    return (*sorted(regarding.items(), key=str), *fields)


def test_a_health_check_node_port_that_is_taken_is_an_event(server: ApiServer, sides: list[Side]) -> None:
    reason, port = "FailedToStartServiceHealthcheck", HEALTH_CHECK + 7
    # The API server keeps the Events of the other mode, which listens on other addresses.
    earlier = {event["metadata"]["uid"] for event in events(server, reason)}
    with taken(sides, port):
        server.apply(service(healthCheckNodePort=port))
        end = time.monotonic() + 60
        while len(found := [e for e in events(server, reason) if e["metadata"]["uid"] not in earlier]) < 2:
            assert time.monotonic() < end, (found, sides[1].log.read_text()[-2000:])
            time.sleep(0.1)
    assert len({words(event) for event in found}) == 1, found
    assert "health check node port cannot be served" in sides[1].log.read_text()
    remove(server, service())


@pytest.mark.parametrize(
    ("field", "reason"),
    [("healthzBindAddress", "FailedToStartProxierHealthcheck"), ("metricsBindAddress", "FailedToStartMetricServer")],
)
def test_an_occupied_required_address_ends_both(server: ApiServer, tmp_path: Path, field: str, reason: str) -> None:
    server.apply(node())
    port = 12345
    config = {"mode": "nftables", "bindAddressHardFail": True, field: f"127.0.0.1:{port}"}
    output = []
    for name in ("kube-proxy", "agent"):
        (tmp_path / name).mkdir()
        for item in events(server, reason):
            server.request("DELETE", f"/apis/events.k8s.io/v1/namespaces/default/events/{item['metadata']['name']}")
        with Side(name, server, tmp_path / name) as side, taken([side], port):
            assert side.run(config) == 1
            end = time.monotonic() + 3
            while not (found := events(server, reason)) and time.monotonic() < end:
                time.sleep(0.1)
        output.append([words(event) for event in found])
        assert "bind: address already in use" in side.log.read_text()
    # kube-proxy ends at once, so its Event is mostly lost; the agent waits until its Event is sent.
    assert len(output[1]) == 1
    if output[0]:
        assert output[1] == output[0]
