# SPDX-License-Identifier: Apache-2.0
"""deploy/components/prometheus-operator: the same alerts as the rule file, and its selectors match the pods."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.deployment import manifests
from tests.deployment.manifests import DEPLOY, Object, build, one
from tests.support.tool_module import tool

COMPONENT = DEPLOY / "components" / "prometheus-operator"


def test_the_prometheus_rule_is_the_rule_file() -> None:
    rule = yaml.safe_load((COMPONENT / "prometheusrule.yaml").read_text())
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "pyebpf-proxy.rules.yaml").read_text())
    assert (COMPONENT / "prometheusrule.yaml").read_text() == tool("prometheus_rule").text()


@pytest.mark.needs_kubectl
def test_the_component_adds_two_objects_and_changes_nothing(tmp_path: Path) -> None:
    relative = Path("/".join([".."] * (len(tmp_path.parts) - 1))) / str(DEPLOY).lstrip("/")
    text = f"resources: [{relative}/base]\ncomponents: [{relative}/components/prometheus-operator]\n"
    (tmp_path / "kustomization.yaml").write_text(text)
    with_it, without = build(tmp_path), build(DEPLOY / "base")
    added = [each for each in with_it if each not in without]
    assert len(with_it) == len(without) + 2
    assert {(each["kind"], each["metadata"]["namespace"]) for each in added} == {
        ("PodMonitor", "kube-system"),
        ("PrometheusRule", "kube-system"),
    }
    monitor = one(with_it, "PodMonitor")
    selector = monitor["spec"]["selector"]
    (absent,) = selector["matchExpressions"]
    assert absent["operator"] == "DoesNotExist"

    def is_scraped(folder: Path) -> bool:
        labels = one(build(folder), "DaemonSet")["spec"]["template"]["metadata"]["labels"]
        return selector["matchLabels"].items() <= labels.items() and absent["key"] not in labels

    assert is_scraped(DEPLOY / "base")
    # While that runs, kube-proxy has the port: its metrics would come twice.
    assert not is_scraped(DEPLOY / "overlays" / "kubeadm-back" / "cleanup")


def test_pods_of_both_families_are_scraped_as_kube_proxys_job() -> None:
    """The relabelling, evaluated as Prometheus does."""
    (endpoint,) = yaml.safe_load((COMPONENT / "podmonitor.yaml").read_text())["spec"]["podMetricsEndpoints"]

    def labels(address: str) -> Object:
        found: Object = {"__meta_kubernetes_pod_ip": address, "__meta_kubernetes_pod_node_name": "node1"}
        for rule in endpoint["relabelings"]:
            value = ";".join(found.get(name, "") for name in rule.get("sourceLabels", ()))
            match = re.fullmatch(rule.get("regex", "(.*)"), value, re.DOTALL)
            if match:
                found[rule["targetLabel"]] = match.expand(rule.get("replacement", "$1").replace("$1", r"\g<1>"))
        return found

    for address, wanted in (("192.0.2.7", "192.0.2.7:10249"), ("2001:db8::7", "[2001:db8::7]:10249")):
        found = labels(address)
        assert (found["__address__"], found["job"], found["instance"]) == (wanted, "kube-proxy", "node1")


def test_the_pod_declares_no_port() -> None:
    """The scheduler would reserve it on the node, and the pod could not start beside a kube-proxy that declares it."""
    assert "ports" not in manifests.container(manifests.base_daemon_set())
