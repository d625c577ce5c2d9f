# SPDX-License-Identifier: Apache-2.0
"""The dashboard's queries, run by a real Prometheus that scrapes a real agent: every panel has data."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from pyebpf_proxy.lab.addresses import Dual, cluster_ip, vip
from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from pyebpf_proxy.lab.namespace import Namespace, die_with_parent
from tests import CACHE
from tests.deployment.manifests import DEPLOY

pytestmark = [
    *(pytest.mark.needs_root, pytest.mark.needs_bpf, pytest.mark.needs_netns),
    *(pytest.mark.needs_prometheus, pytest.mark.slow),
]

PROMETHEUS = CACHE / "bin" / "prometheus"
PORTS = [Port("http", 80, 8080)]
#: Queries with a rate over five minutes use a shorter range here.
RANGE, SHORT = "[5m]", "[10s]"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """An agent with a Service that answers, one without endpoints, and an invalid object."""
    with Lab(nodes=1) as made:
        (only,) = made.nodes
        pod = made.add_pod("web-1", only)
        write(made, [(pod.address, only.name)])
        made.start_agents()
        yield made


def write(lab: Lab, endpoints: list[tuple[Dual, str]]) -> None:
    (only,) = lab.nodes
    web, dead = service("web", PORTS, cluster_ip(1), vip=vip(1)), service("dead", PORTS, cluster_ip(2), vip=vip(2))
    bad = service("bad", [Port("http", 99999, 8080)], cluster_ip(3))
    serving = slices("web", PORTS, endpoints)
    # The controller writes this time, from which the agent knows when the change happened.
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for each in serving:
        each["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": now}
    objects = [node(only.name, only.address, only.pod_cidr), web, *serving, dead, bad]
    lab.write("all.yaml", objects)


@pytest.fixture(scope="module")
def asked(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """The node's namespace, where Prometheus scrapes the agent each second."""
    folder = tmp_path_factory.mktemp("prometheus")
    (only,) = lab.nodes
    target = {"targets": ["127.0.0.1:10249"]}
    job = {"job_name": "kube-proxy", "scrape_interval": "1s", "static_configs": [target]}
    rules = str(DEPLOY / "prometheus" / "pyebpf-proxy.rules.yaml")
    (folder / "prometheus.yaml").write_text(
        yaml.safe_dump({"scrape_configs": [job], "rule_files": [rules]} | {"global": {"evaluation_interval": "1s"}})
    )
    command = [
        *("ip", "netns", "exec", only.namespace.name, PROMETHEUS, f"--config.file={folder}/prometheus.yaml"),
        *(f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:9090"),
    ]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        yield only.namespace
    finally:
        process.terminate()
        process.wait(30)


def query(expression: str) -> list[dict[str, Any]]:
    """Prometheus' answer at this moment, asked in its namespace."""
    url = f"http://127.0.0.1:9090/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])
    except OSError:
        return []


def panels() -> list[tuple[str, str]]:
    """Title and query, with all jobs and nodes chosen, as Grafana does for `All`."""
    found = json.loads((DEPLOY / "grafana" / "pyebpf-proxy.json").read_text())["panels"]
    return [
        (panel["title"], re.sub(r"\$(job|instance)\b", ".+", target["expr"]).replace(RANGE, SHORT))
        for panel in found
        for target in panel["targets"]
    ]


def test_every_panel_has_data(lab: Lab, asked: Namespace) -> None:
    (only,) = lab.nodes
    (pod,) = lab.pods.values()
    end = time.monotonic() + 60
    wanted = panels()
    assert len(wanted) > 10
    more = [(pod.address, only.name), (Dual("10.244.9.9", "fd00:10:244:9::9"), "elsewhere")]
    turn = 0
    while wanted and time.monotonic() < end:
        # Data for the panels: flows that are served and rejected, changes of endpoints.
        for number in (1, 2):
            lab.client.call(ask, vip(number).v4, 80, timeout=0.5)
        turn += 1
        write(lab, more[: 1 + turn % 2])
        time.sleep(1)
        wanted = [(title, text) for title, text in wanted if not asked.call(has_data, text)]
    assert wanted == [], lab.nodes[0].agent.log()[-3000:]


def has_data(expression: str) -> bool:
    """Whether a query has a number as its result."""
    return any(each["value"][1] != "NaN" for each in query(expression))


def test_the_rules_are_evaluated_without_an_error(asked: Namespace) -> None:
    """By the server itself, on an agent's metrics; an alert with an invalid query would be an error."""
    found = asked.call(rules)
    assert {each["type"] for each in found} == {"alerting"}
    assert [each for each in found if each["health"] == "err"] == []
    assert len(found) == len(re.findall(r"- alert:", (DEPLOY / "prometheus" / "pyebpf-proxy.rules.yaml").read_text()))


def rules() -> list[dict[str, Any]]:
    """The server's rules, as soon as all have been evaluated."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + 90
    while True:
        with opener.open("http://127.0.0.1:9090/api/v1/rules", timeout=10) as answer:
            groups = json.load(answer)["data"]["groups"]
        found = [rule for group in groups for rule in group["rules"]]
        if all(each["health"] != "unknown" for each in found) or time.monotonic() > end:
            return found
        time.sleep(1)
