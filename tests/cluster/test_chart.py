# SPDX-License-Identifier: Apache-2.0
"""The Helm chart, rendered by Helm: for each of its values the same objects as kustomize builds from deploy/."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pyebpf_proxy import __version__
from pyebpf_proxy.config import datapath_config
from tests import CACHE, ROOT
from tests.deployment import manifests
from tests.deployment.manifests import DEPLOY, Object

pytestmark = [pytest.mark.needs_kubectl, pytest.mark.needs_helm]

HELM = CACHE / "go" / "helm"
IMAGE = "registry.example/team/pyebpf-proxy"
#: The placeholders that the base has too.
BLANKS = {"clusterCIDR": "<10.244.0.0/16>", "controlPlaneEndpoint": "<control-plane-endpoint>:6443"}
Render = Callable[..., str]


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chart")
    subprocess.run([ROOT / ".venv/bin/python", ROOT / "tools" / "chart.py", folder], check=True)
    return folder / "pyebpf-proxy"


@pytest.fixture
def helm(tmp_path: Path) -> Render:
    """Run the real Helm and return its output. ``status``: the expected exit status."""
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}

    def run(*arguments: str | Path, status: int = 0) -> str:
        done = subprocess.run([HELM, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def rendered(helm: Render, chart: Path, values: dict[str, Any]) -> list[Object]:
    file = chart.parent / "values.yaml"
    file.write_text(yaml.safe_dump({"image": {"repository": IMAGE}} | values))
    output = helm("template", "any-name", chart, "--namespace", "kube-system", "--values", file)
    assert_no_key_twice(output)
    return [each for each in yaml.safe_load_all(output) if each]


def assert_no_key_twice(text: str) -> None:
    """PyYAML takes the last one; readers of GitOps tools refuse it."""
    keys = [node for node in _nodes(yaml.compose_all(text)) if isinstance(node, yaml.MappingNode)]
    for mapping in keys:
        names = [name.value for name, _ in mapping.value]
        assert len(names) == len(set(names)), names


def _nodes(documents: Iterable[yaml.Node | None]) -> Iterator[yaml.Node]:
    left = [each for each in documents if each is not None]
    while left:
        node = left.pop()
        yield node
        if isinstance(node, yaml.MappingNode):
            left += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += node.value


#: Of the chart and of the overlay of docs/deploy.md, each with a number that YAML could write as 4.194304e+06.
DATAPATH = {"fastPath": False, "maps": {"slots": 4194304}, "socketLB": "all"}


def kustomized(folder: Path, resource: str, components: list[str], tag: str = "") -> list[Object]:
    """An overlay as docs/deploy.md describes it."""
    up = Path("/".join([".."] * (len(folder.parts) - 1)))
    image = {"name": "REGISTRY/pyebpf-proxy", "newName": IMAGE} | ({"newTag": tag} if tag else {})
    kustomization = {
        "resources": [str(up / str(DEPLOY / resource).lstrip("/"))],
        "components": [str(up / str(DEPLOY / "components" / each).lstrip("/")) for each in components],
        "images": [image],
    }
    if "datapath-config" in components:
        # With the suffix that depends on the content, the name would differ from the chart's.
        head = {"apiVersion": "datapath.pyebpf-proxy.io/v1alpha1", "kind": "DatapathConfiguration"}
        (folder / "datapath.yaml").write_text(yaml.safe_dump(head, sort_keys=False) + yaml.safe_dump(DATAPATH))
        generator = {"name": "pyebpf-proxy-datapath", "namespace": "kube-system", "files": ["datapath.yaml"]}
        labels = {"app.kubernetes.io/name": "pyebpf-proxy", "app.kubernetes.io/version": __version__}
        generator["options"] = {"disableNameSuffixHash": True, "labels": labels}
        kustomization["configMapGenerator"] = [generator]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return list(manifests.build(folder))


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "default": (BLANKS, "base", []),
    "kubeadm": ({"kubeProxyConfigMap": "kube-proxy"}, "overlays/kubeadm", []),
    "cleanup": ({"cleanup": True}, "overlays/kubeadm-back/cleanup", []),
    "conntrack-lookup": (BLANKS | {"conntrackLookup": True}, "base", ["conntrack-lookup"]),
    "ipvs": (BLANKS | {"ipvs": True}, "base", ["ipvs"]),
    "datapath-config": (BLANKS | {"datapathConfig": DATAPATH}, "base", ["datapath-config"]),
    "selinux": (BLANKS | {"selinux": True}, "base", ["selinux"]),
    "crio": (BLANKS | {"crio": True}, "base", ["crio"]),
    "cleanup with selinux and crio": (
        {"cleanup": True, "selinux": True, "crio": True},
        "overlays/kubeadm-back/cleanup",
        ["selinux", "crio"],
    ),
    "prometheus-operator": (BLANKS | {"prometheusOperator": True}, "base", ["prometheus-operator"]),
    "all at once": (
        {
            "kubeProxyConfigMap": "kube-proxy",
            "conntrackLookup": True,
            "ipvs": True,
            "datapathConfig": DATAPATH,
            "selinux": True,
            "crio": True,
            "prometheusOperator": True,
        },
        "overlays/kubeadm",
        ["conntrack-lookup", "ipvs", "datapath-config", "selinux", "crio", "prometheus-operator"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_helm_renders_what_kustomize_builds(case: str, helm: Render, chart: Path, tmp_path: Path) -> None:
    values, resource, components = CASES[case]
    made, expected = by_name(rendered(helm, chart, values)), by_name(kustomized(tmp_path, resource, components))
    assert made.keys() == expected.keys()
    template = made["DaemonSet", "pyebpf-proxy"]["spec"]["template"]
    # Only the chart's, and only where it makes a ConfigMap: with kustomize the agents are restarted by hand, or the
    # name of the ConfigMap changes.
    assert ("annotations" in template["metadata"]) == ("ConfigMap" in {kind for kind, _ in made})
    template["metadata"].pop("annotations", None)
    for name, item in made.items():
        assert item == expected[name], name


def test_another_configuration_is_another_pod(helm: Render, chart: Path) -> None:
    """The agent reads it only when it starts."""

    def template(values: dict[str, Any]) -> Object:
        found: Object = by_name(rendered(helm, chart, BLANKS | values))["DaemonSet", "pyebpf-proxy"]
        return dict(found["spec"]["template"])

    assert template({}) == template({})
    assert template({}) != template({"clusterCIDR": "10.1.0.0/16"}) != template({"controlPlaneEndpoint": "a:6443"})
    fast, slow = (template({"datapathConfig": {"fastPath": each}}) for each in (True, False))
    assert fast != slow
    for each in (fast, slow):
        each["metadata"].pop("annotations")
    assert fast == slow


def test_the_datapath_configuration_is_one_that_the_agent_accepts(helm: Render, chart: Path) -> None:
    """A whole document is accepted as a value, too: its version and kind are not there twice."""
    document = yaml.safe_load((ROOT / "examples" / "datapath-config.yaml").read_text())
    for values in (DATAPATH, document, {"socketLB": False}, {"apiVersion": document["apiVersion"]}):
        made = by_name(rendered(helm, chart, BLANKS | {"datapathConfig": values}))["ConfigMap", "pyebpf-proxy-datapath"]
        ((name, text),) = made["data"].items()
        config = datapath_config.decode_text(text.encode())
        assert config.maps.slots == values.get("maps", {}).get("slots", 524288)
        assert name == "datapath.yaml"
    objects = by_name(rendered(helm, chart, BLANKS | {"datapathConfig": DATAPATH, "cleanup": True}))
    assert ("ConfigMap", "pyebpf-proxy-datapath") not in objects


def test_what_only_the_administrator_knows_is_a_value(helm: Render, chart: Path) -> None:
    """Of both DaemonSets: the clean-up runs on the same nodes."""
    values: dict[str, Any] = {
        "image": {"repository": IMAGE, "digest": f"sha256:{'0' * 64}"},
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"canary": "true", "kubernetes.io/os": "linux"},
        "tolerations": [{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Exists"}],
        "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}},
        "kubeProxyConfigMap": "kube-proxy",
        "kubeProxyHealth": "192.0.2.1:10356",
        "kubeProxyMetrics": "192.0.2.1:10349",
    }
    for cleanup in (False, True):
        daemon_set = by_name(rendered(helm, chart, values | {"cleanup": cleanup}))["DaemonSet", "pyebpf-proxy"]
        specification = daemon_set["spec"]["template"]["spec"]
        container = manifests.container(daemon_set)
        assert container["image"] == f"{IMAGE}:{__version__}@sha256:{'0' * 64}"
        assert specification["nodeSelector"] == {"kubernetes.io/os": "linux", "canary": "true"}
        for name in ("imagePullSecrets", "tolerations"):
            assert specification[name] == values[name]
        assert container["resources"] == values["resources"]
        for name, address in (("HEALTH", "192.0.2.1:10356"), ("METRICS", "192.0.2.1:10349")):
            assert ({"name": f"KUBE_PROXY_{name}", "value": address} in container["env"]) == cleanup


def test_the_notes_describe_what_was_installed(helm: Render, chart: Path) -> None:
    """After an upgrade to the clean-up, no agent starts."""
    for cleanup, text in (("false", "The agents start alongside kube-proxy"), ("true", "a pod waits for kube-proxy")):
        values = f"--set=image.repository={IMAGE},kubeProxyConfigMap=a-copy,cleanup={cleanup}"
        notes = helm("install", "any-name", chart, "--dry-run=client", values).partition("NOTES:")[2]
        assert text in notes
        assert ("agents start" in notes) == (cleanup == "false")


def test_another_chart_includes_it_on_a_condition(helm: Render, chart: Path, tmp_path: Path) -> None:
    """The path in Helm's own examples is `enabled` among the values of the included chart."""
    dependency = {"name": "pyebpf-proxy", "version": __version__, "condition": "pyebpf-proxy.enabled"}
    outer = {"apiVersion": "v2", "name": "outer", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(outer))
    shutil.copytree(chart, tmp_path / "charts" / "pyebpf-proxy")
    for enabled in (True, False):
        inner = {"enabled": enabled, "image": {"repository": IMAGE}, "kubeProxyConfigMap": "a-copy"}
        (tmp_path / "values.yaml").write_text(yaml.safe_dump({"pyebpf-proxy": inner}))
        assert ("kind: DaemonSet" in helm("template", "any-name", tmp_path)) == enabled


def test_every_overlay_and_component_is_a_case() -> None:
    """A new folder of deploy/ needs a new value of the chart."""
    folders = {path.parent.relative_to(DEPLOY) for path in DEPLOY.rglob("kustomization.yaml")}
    covered = {Path(resource) for _, resource, _ in CASES.values()}
    covered |= {Path("components", each) for _, _, components in CASES.values() for each in components}
    assert folders == covered


@pytest.mark.parametrize("namespace", ["elsewhere", "1234"])
def test_the_caller_sets_the_tag_and_the_namespace(helm: Render, chart: Path, namespace: str) -> None:
    """Also a namespace of digits, which is no number."""
    file = chart.parent / "tag.yaml"
    image = {"repository": IMAGE, "tag": "1.2.3", "pullPolicy": "Always"}
    file.write_text(yaml.safe_dump({"image": image, "kubeProxyConfigMap": "a-copy", "prometheusOperator": True}))
    output = helm("template", "any-name", chart, "--namespace", namespace, "--values", file)
    objects = [each for each in yaml.safe_load_all(output) if each]
    namespaces = {each["kind"]: each["metadata"].get("namespace") for each in objects}
    assert namespaces == {
        **dict.fromkeys(("ServiceAccount", "DaemonSet", "PodMonitor", "PrometheusRule"), namespace),
        **dict.fromkeys(("ClusterRole", "ClusterRoleBinding")),
    }
    container = manifests.container(manifests.one(tuple(objects), "DaemonSet"))
    assert (container["image"], container["imagePullPolicy"]) == (f"{IMAGE}:1.2.3", "Always")
    (subject,) = manifests.one(tuple(objects), "ClusterRoleBinding")["subjects"]
    assert subject["namespace"] == namespace


@pytest.mark.parametrize(
    ("values", "output"),
    [
        (["kubeProxyConfigMap=a-copy"], "image.repository: the image in your registry"),
        (["image.repository=a/b"], "clusterCIDR: the pod network"),
        (["image.repository=a/b", "clusterCIDR=10.0.0.0/8"], "controlPlaneEndpoint: HOST:PORT"),
        (["image.repository=a/b", "clustercidr=10.0.0.0/8"], "clustercidr"),
        (["image.repository=a/b", "kubeProxyConfigMap=kube-proxy"], "install with --namespace kube-system"),
        (["image.repository=a/b", "image.digest=latest"], "digest"),
        (["image.repository=a/b", "datapathConfig.kind=KubeProxyConfiguration"], "datapathConfig"),
        (["image.repository=a/b", "nodeSelector.kubernetes\\.io/os=windows"], "nodeSelector"),
    ],
)
def test_missing_or_misspelt_values_are_named(values: list[str], output: str, helm: Render, chart: Path) -> None:
    """Helm renders nothing with a default image, or without a cluster's values."""
    options = [f"--set={each}" for each in values]
    assert output in helm("template", "any-name", chart, *options, status=1)


def test_the_package_has_the_version_of_the_project(helm: Render, chart: Path, tmp_path: Path) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", chart, "--set=image.repository=a/b,kubeProxyConfigMap=c")
    helm("package", "--destination", tmp_path, chart)
    with tarfile.open(tmp_path / f"pyebpf-proxy-{__version__}.tgz") as archive:
        names = {name.removeprefix("pyebpf-proxy/") for name in archive.getnames()}
        described = archive.extractfile("pyebpf-proxy/Chart.yaml")
        assert described is not None
        found = yaml.safe_load(described)
    assert {"values.yaml", "values.schema.json", "templates/daemonset.yaml", "rules.yaml"} <= names
    assert (found["version"], found["appVersion"]) == (__version__, __version__)
