# SPDX-License-Identifier: Apache-2.0
"""The metrics server's pages (spec/service-semantics §11.3); common texts are kube-proxy v1.36.3's."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from pyebpf_proxy.common import log
from pyebpf_proxy.config import flags
from pyebpf_proxy.config.complete import complete
from pyebpf_proxy.config.shown import Shown, shown
from pyebpf_proxy.servers.http import Request, Response
from pyebpf_proxy.servers.metrics import DatapathNumbers, Metrics
from pyebpf_proxy.servers.pages import Mux, metrics_pages
from pyebpf_proxy.servers.zpages import statusz
from tests.support.cpu_time import cpu_limit

NOSNIFF = ("X-Content-Type-Options", "nosniff")
UTF8 = ("Content-Type", "text/plain; charset=utf-8")
ACCEPTED = "only the following media types are accepted: application/json, application/yaml, text/plain"


def look(*arguments: str) -> Shown:
    parsed = flags.parse(arguments)
    return shown(complete(parsed, lambda text, file: None), parsed)


def mux(*arguments: str, profiling: bool = False) -> Mux:
    return metrics_pages(look(*arguments), Metrics(DatapathNumbers()), profiling)


def get(pages: Mux, path: str, accept: str = "", agent: str = "", query: str = "") -> Response:
    return pages(Request("GET", path, query, {"accept": accept, "user-agent": agent}))


@pytest.mark.parametrize("mode", ["iptables", "nftables", "ipvs"])
def test_proxy_mode(mode: str) -> None:
    assert get(mux(f"--proxy-mode={mode}"), "/proxyMode") == Response(200, (UTF8, NOSNIFF), mode.encode())


def test_generic_health() -> None:
    pages = mux()
    assert get(pages, "/healthz") == Response(200, (UTF8, NOSNIFF), b"ok")
    assert get(pages, "/healthz/ping") == Response(200, (UTF8,), b"ok")
    assert get(pages, "/healthz", query="verbose").body == b"[+]ping ok\nhealthz check passed\n"


@pytest.mark.parametrize(
    "path",
    ["/", "/livez", "/healthz/", "/healthz/x", "/metrics/", "/debug/flags/v", "/debug/pprof/", "/debug/pprof/heap"],
)
def test_paths_that_do_not_exist(path: str) -> None:
    assert get(mux(), path) == Response(404, (UTF8, NOSNIFF), b"404 page not found\n")


def test_configz_is_the_configuration_in_kube_proxys_order_and_form() -> None:
    answer = get(mux("--proxy-mode=nftables", "--hostname-override=n1", "--kube-api-qps=7.5"), "/configz")
    assert answer.headers == (("Content-Type", "application/json"), NOSNIFF)
    text = answer.body.decode()
    assert text.startswith(
        '{"kubeproxy.config.k8s.io":{"kind":"KubeProxyConfiguration","apiVersion":"kubeproxy.config.k8s.io/v1alpha1",'
        '"clientConnection":{"kubeconfig":"","acceptContentTypes":"",'
        '"contentType":"application/vnd.kubernetes.protobuf","qps":7.5,"burst":10},"logging":{"format":"text",'
        '"flushFrequency":"5s","verbosity":0,'
    )
    document = json.loads(text)["kubeproxy.config.k8s.io"]
    assert document["nftables"]["syncPeriod"] == "30s"
    assert document["nodePortAddresses"] == ["primary"]
    assert document["ipvs"]["excludeCIDRs"] is None
    assert document["oomScoreAdj"] == -999
    assert "featureGates" not in document
    gated = json.loads(get(mux("--feature-gates=ComponentStatusz=false"), "/configz").body)
    assert gated["kubeproxy.config.k8s.io"]["featureGates"] == {"ComponentStatusz": False}


def test_slis() -> None:
    pages = mux()
    answer = get(pages, "/metrics/slis")
    assert answer.body.decode().splitlines()[:2] == [
        "# HELP process_start_time_seconds [ALPHA] Start time of the process since unix epoch in seconds.",
        "# TYPE process_start_time_seconds gauge",
    ]
    assert answer.headers[0] == ("Content-Type", "text/plain; version=0.0.4; charset=utf-8; escaping=underscores")
    get(pages, "/healthz")
    get(pages, "/healthz", query="verbose")
    get(pages, "/healthz/ping")
    counted = get(pages, "/metrics/slis").body.decode().splitlines()
    assert 'kubernetes_healthcheck{name="ping",type="healthz"} 1.0' in counted
    assert 'kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} 2.0' in counted
    assert pages(Request("DELETE", "/metrics/slis")).body == b"metrics reset\n"
    assert b"kubernetes_healthchecks_total{" not in get(pages, "/metrics/slis").body


def test_standard_metrics() -> None:
    text = get(mux("--feature-gates=ComponentStatusz=false,LoggingAlphaOptions=true"), "/metrics").body.decode()
    assert re.search(r'^kubernetes_build_info\{.*git_version="v1.36.3".*major="1",minor="36".*\} 1.0$', text, re.M)
    for name, stage, on in (
        ("ComponentStatusz", "BETA", 0),
        ("LoggingAlphaOptions", "ALPHA", 1),
        ("NFTablesProxyMode", "", 1),
    ):
        assert f'kubernetes_feature_enabled{{name="{name}",stage="{stage}"}} {on}.0\n' in text
    for name in ("process_virtual_memory_max_bytes", "process_open_fds", "process_start_time_seconds", "python_info"):
        assert re.search(rf"^{name}\b", text, re.M), name


def test_prometheus_gets_the_text_format() -> None:
    """As from kube-proxy: with OpenMetrics, the buckets would have other labels, ``le="1.0"``."""
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    for path in ("/metrics", "/metrics/slis"):
        answer = get(mux(), path, accept)
        assert answer.headers[0] == ("Content-Type", "text/plain; version=0.0.4; charset=utf-8; escaping=underscores")
        assert answer.body.startswith(b"# HELP ")


def test_flagz() -> None:
    pages = mux(
        "--hostname-override=n1", "--feature-gates=ComponentFlagz=true", "--nodeport-addresses=10.0.0.0/8", "-v=2"
    )
    text = get(pages, "/flagz").body.decode()
    assert text.startswith("\nkube-proxy flagz\nWarning: This endpoint is not meant to be machine parseable, ")
    separator = re.search(r"^bind-address(: |:|=| )0\.0\.0\.0$", text, re.M)
    assert separator is not None
    names = [line.split(separator[1])[0] for line in text.splitlines()[3:]]
    assert names == sorted(names)
    found = json.loads(get(pages, "/flagz", "application/json;as=Flagz;v=v1beta1;g=config.k8s.io").body)
    assert (found["kind"], found["apiVersion"]) == ("Flagz", "config.k8s.io/v1beta1")
    assert found["metadata"] == {"name": "kube-proxy"}
    wanted = {
        "hostname-override": "n1",
        "feature-gates": "ComponentFlagz=true",
        "nodeport-addresses": "[10.0.0.0/8]",
        "v": "2",
        "config-sync-period": "15m0s",
        "detect-local-mode": "ClusterCIDR",
        "healthz-port": "10256",
        "ipvs-exclude-cidrs": "[]",
        "kube-api-qps": "5",
        "masquerade-all": "false",
        "master": "",
    }
    assert {name: found["flags"][name] for name in wanted} == wanted
    assert get(mux("--feature-gates=ComponentFlagz=false"), "/flagz").status == 404


START = 1795239500  # 2026-11-21T05:38:20Z


@pytest.fixture
def status_page() -> Mux:
    return Mux(
        {"/s": statusz(["/healthz", "/healthz/ping", "/metrics", "/configz"], START + 0.7, lambda: START + 3725)}, {}
    )


def test_statusz_text(status_page: Mux) -> None:
    body = get(status_page, "/s").body.decode()
    separator = re.search(r"^Started(.*?) Sat Nov 21 05:38:20 UTC 2026$", body, re.M)
    assert separator is not None
    assert separator[1] in (":", ": ", "=", " ")
    names = ("Started", "Up", "Go version", "Binary version", "Emulation version", "Paths")
    rows = dict(zip(names, body.splitlines()[4:], strict=True))
    values = {name: row.removeprefix(f"{name}{separator[1]} ") for name, row in rows.items()}
    assert values["Up"] == "1 hr 02 min 05 sec"
    assert [values[name] for name in names[3:]] == ["1.36.3", "1.36", "/configz /healthz /metrics"]


def test_statusz_structured(status_page: Mux) -> None:
    answer = get(status_page, "/s", "application/json;as=Statusz;v=v1beta1;g=config.k8s.io", agent="curl/8")
    assert answer.headers == (("Content-Type", "application/json;g=config.k8s.io;v=v1beta1;as=Statusz"),)
    assert answer.body.startswith(b'{\n  "kind": "Statusz",\n  "apiVersion": "config.k8s.io/v1beta1",\n')
    found = json.loads(answer.body)
    assert (found["startTime"], found["uptimeSeconds"]) == ("2026-11-21T05:38:20Z", 3725)
    assert (found["binaryVersion"], found["emulationVersion"]) == ("1.36.3", "1.36")
    old = get(status_page, "/s", "application/yaml;as=Statusz;v=v1alpha1;g=config.k8s.io")
    assert ("Content-Type", "application/yaml;g=config.k8s.io;v=v1alpha1;as=Statusz") in old.headers
    warning = '299 - "This version of the statusz endpoint is deprecated. Please use a newer version."'
    assert ("Warning", warning) in old.headers
    assert yaml.safe_load(old.body) == found | {"apiVersion": "config.k8s.io/v1alpha1"}
    assert b'emulationVersion: "1.36"\n' in old.body


@pytest.mark.parametrize(
    ("accept", "outcome"),
    [
        ("", "text"),
        ("*/*", "text"),
        ("text/*", "text"),
        ("text/plain", "text"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "text"),
        ("application/json;q=0.5,text/plain", "text"),
        ("application/json;as=Flagz;v=v1beta1;g=config.k8s.io,text/plain", "text"),
        ("application/json;as=Statusz;v=v1beta1;g=config.k8s.io", "application/json"),
        ("text/plain;q=0.5,application/yaml;as=Statusz;v=v1beta1;g=config.k8s.io", "application/yaml"),
        ("application/json", "406 application/json"),
        ("application/yaml", "406 application/yaml"),
        ("application/json;as=Statusz;v=v9;g=config.k8s.io", "406 application/json"),
        ("application/cbor;as=Statusz;v=v1beta1;g=config.k8s.io", "406 application/json"),
        ("application/*", "406 application/json"),
        ("text/html", "406 application/json"),
        ("garbage", "406 application/json"),
    ],
)
def test_content_negotiation(status_page: Mux, accept: str, outcome: str) -> None:
    answer = get(status_page, "/s", accept)
    media = dict(answer.headers)["Content-Type"].partition(";")[0]
    if outcome.startswith("406"):
        assert (answer.status, media) == (406, outcome[4:])
        assert yaml.safe_load(answer.body)["message"] == ACCEPTED
    else:
        assert (answer.status, media) == (200, "text/plain" if outcome == "text" else outcome)


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("accept", [",", "a/b;q=1,", "a/b;c=d;"])
def test_a_huge_accept_header_takes_little_time(status_page: Mux, accept: str) -> None:
    with cpu_limit(0.1):
        get(status_page, "/s", accept * (1_000_000 // len(accept)))


def test_verbosity_is_set_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pages = mux(profiling=True)
    log.configure("text")

    def put(text: str) -> tuple[int, str]:
        answer = pages(Request("PUT", "/debug/flags/v", body=text.encode()))
        assert answer.headers == (("Content-Type", "text/plain"), NOSNIFF)
        return answer.status, answer.body.decode()

    log.Logger("x").debug("one")
    assert put("3") == (200, "successfully set klog.logging.verbosity to 3\n")
    log.Logger("x").debug("two")
    assert put("0")[0] == 200
    log.Logger("x").debug("three")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["two"]
    assert put("0" * 5000 + "3")[0] == 200
    assert put("xx") == (400, 'strconv.ParseUint: parsing "xx": invalid syntax\n')
    assert put("99999999999") == (400, 'strconv.ParseUint: parsing "99999999999": value out of range\n')
    assert get(pages, "/debug/flags/v") == Response(
        406, (("Content-Type", "text/plain"), NOSNIFF), b"unsupported http method\n"
    )
    assert b"<tr>v<br>" in get(pages, "/debug/flags").body
    assert b"<tr>v<br>" in get(pages, "/debug/flags/").body


def test_profiles_are_reported_as_unavailable() -> None:
    for path in ("/debug/pprof", "/debug/pprof/", "/debug/pprof/heap"):
        answer = get(mux(profiling=True), path)
        assert answer.status == 404
        assert b"py-spy" in answer.body
