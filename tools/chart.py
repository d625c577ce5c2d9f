#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the Helm chart from deploy/; `make chart` calls it.

tools/chart.py FOLDER   writes FOLDER/pyebpf-proxy

The manifests of deploy/base become templates. A value replaces each change that an overlay or a component makes. A
change in deploy/ that cannot be expressed in this way is an error. tests/cluster/test_chart.py compares what Helm
renders with what kustomize builds.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pyebpf_proxy import __version__
from pyebpf_proxy.common.kube_proxy_health import DEFAULT, METRICS_DEFAULT, METRICS_VARIABLE, VARIABLE
from pyebpf_proxy.config.datapath_model import API_VERSION, KIND

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
NAME = "pyebpf-proxy"
IMAGE = "REGISTRY/pyebpf-proxy"
CHART = {
    "apiVersion": "v2",
    "name": NAME,
    "version": __version__,
    "appVersion": __version__,
    "description": "eBPF replacement for Kubernetes' kube-proxy",
    "type": "application",
}
_NAMED = (
    'required "image.repository: the image in your registry (deploy/Dockerfile builds it)" .Values.image.repository'
)
_IMAGE = (
    f'"{{{{ {_NAMED} }}}}:{{{{ .Values.image.tag | default .Chart.AppVersion }}}}'
    '{{ with .Values.image.digest }}@{{ . }}{{ end }}"'
)
_LABELS = """  labels:
    app.kubernetes.io/name: pyebpf-proxy
    app.kubernetes.io/version: {{ .Chart.AppVersion }}
"""
_NAMESPACE = "  namespace: {{ .Release.Namespace | quote }}\n"
#: A pod mounts only ConfigMaps of its own namespace.
_NEAR = (
    '{{- if and (eq .Values.kubeProxyConfigMap "kube-proxy") (ne .Release.Namespace "kube-system") }}\n'
    "{{- fail \"kubeProxyConfigMap: kubeadm's ConfigMap kube-proxy is in kube-system; pods elsewhere cannot mount it:"
    ' install with --namespace kube-system, or copy it under another name" }}\n'
    "{{- end }}\n"
)
#: The agent reads its configuration only when it starts: a change of it replaces the pods.
_CHECKSUM = (
    "{{- if or .Values.datapathConfig (not .Values.kubeProxyConfigMap) }}\n"
    "      annotations:\n"
    "{{- if not .Values.kubeProxyConfigMap }}\n"
    '{{- $made := include (print $.Template.BasePath "/configmap.yaml") . | fromYaml }}\n'
    "        checksum/config: {{ $made.data | toYaml | sha256sum }}\n"
    "{{- end }}\n"
    "{{- with .Values.datapathConfig }}\n"
    "        checksum/datapath-config: {{ toYaml . | sha256sum }}\n"
    "{{- end }}\n"
    "{{- end }}\n"
)
#: Values that replace what a list or a map of the pod has.
_BLOCKS = ("tolerations", "resources")
#: Where a component's patch adds to: the last line of that list in deploy/base/daemonset.yaml, and its indentation.
_LISTS = {
    "/spec/template/spec/containers/0/args/-": ("args", 12),
    "/spec/template/spec/containers/0/volumeMounts/-": ("volumeMounts", 12),
    "/spec/template/spec/volumes/-": ("volumes", 8),
}


#: Fields of the pod that a component sets, by path: they are inserted after these lines, with this indentation.
_FIELDS = {
    "/spec/template/spec/securityContext/seLinuxOptions": (
        "      securityContext:\n        seccompProfile:\n          type: RuntimeDefault\n",
        8,
    )
}


#: Fields of the pod that a component replaces, in every DaemonSet.
_REPLACED = {
    "/spec/template/spec/securityContext/seccompProfile": "        seccompProfile:\n          type: RuntimeDefault\n"
}


class ChartError(Exception):
    """Something in deploy/ that this tool cannot express. The text is one line."""


def replaced(text: str, old: str, new: str) -> str:
    """The text with ``old``, which must occur exactly once, replaced."""
    if text.count(old) != 1:
        raise ChartError(f"{old!r} is there {text.count(old)} times, not once")
    return text.replace(old, new)


def base(name: str, namespaced: bool = True) -> str:
    """A manifest of the base, with the namespace and the labels that the kustomization adds."""
    text = (DEPLOY / "base" / f"{name}.yaml").read_text()
    return _described(text, namespaced)


def _described(text: str, namespaced: bool) -> str:
    head = f"\nmetadata:\n  name: {NAME}\n"
    return replaced(text, head, head + (_NAMESPACE if namespaced else "") + _LABELS)


def rbac() -> str:
    """The role, and its binding to the ServiceAccount in the release's namespace."""
    documents = (DEPLOY / "base" / "rbac.yaml").read_text().split("---\n")
    text = "---\n".join(_described(document, namespaced=False) for document in documents)
    return replaced(text, "    namespace: kube-system\n", "    namespace: {{ .Release.Namespace | quote }}\n")


def config_map() -> str:
    """The base's ConfigMap, with values instead of its placeholders."""
    text = base("configmap")
    text = replaced(text, "<10.244.0.0/16>", '{{ required "clusterCIDR: the pod network" .Values.clusterCIDR }}')
    endpoint = 'required "controlPlaneEndpoint: HOST:PORT of the API server" .Values.controlPlaneEndpoint'
    text = replaced(text, "<control-plane-endpoint>:6443", f"{{{{ {endpoint} }}}}")
    return f"{{{{- if not (or .Values.kubeProxyConfigMap .Values.cleanup) }}}}\n{text}{{{{- end }}}}\n"


def datapath_config_map() -> str:
    """The ConfigMap that an overlay generates for components/datapath-config."""
    values = {each["path"].split("/")[-2]: each["value"] for each in component("datapath-config")}
    volume, argument = values["volumes"], values["args"]
    head = f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {volume['configMap']['name']}\n"
    document = (
        f"data:\n  {Path(argument).name}: |\n    apiVersion: {API_VERSION}\n    kind: {KIND}\n"
        '{{- with omit .Values.datapathConfig "apiVersion" "kind" }}\n{{ toYaml . | indent 4 }}\n{{- end }}\n'
    )
    condition = "{{- if and .Values.datapathConfig (not .Values.cleanup) }}\n"
    return f"{condition}{head}{_NAMESPACE}{_LABELS}{document}{{{{- end }}}}\n"


def daemon_set() -> str:
    """The DaemonSet of the agent, with values for the changes of overlays and components; or the one that cleans up."""
    text = base("daemonset")
    labels = f"    metadata:\n      labels:\n        k8s-app: {NAME}\n"
    text = replaced(text, labels, labels + _CHECKSUM)
    text = replaced(text, f"image: {IMAGE}\n", f"image: {_IMAGE}\n")
    text = replaced(text, "imagePullPolicy: IfNotPresent", "imagePullPolicy: {{ .Values.image.pullPolicy }}")
    patch = yaml.safe_load((DEPLOY / "overlays" / "kubeadm" / "daemonset.yaml").read_text())
    changed = {"volumes": [{"name": "config", "configMap": {"name": "kube-proxy"}}]}
    if patch["spec"] != {"template": {"spec": changed}}:
        raise ChartError("overlays/kubeadm changes more than the name of the ConfigMap")
    text = replaced(
        text,
        f"          configMap:\n            name: {NAME}\n",
        f'          configMap:\n            name: {{{{ .Values.kubeProxyConfigMap | default "{NAME}" }}}}\n',
    )
    # Each is added before those that were added earlier.
    values = {"datapath-config": "datapathConfig", "conntrack-lookup": "conntrackLookup", "ipvs": "ipvs"}
    for name, value in values.items():
        for operation in component(name):
            text = added(text, operation, value)
    cleaning = cleanup()
    for operation in component("selinux"):
        text, cleaning = (set_field(each, operation, "selinux") for each in (text, cleaning))
    for operation in component("crio"):
        text, cleaning = (replace_field(each, operation, "crio") for each in (text, cleaning))
    text, cleaning = (for_the_cluster(each) for each in (text, cleaning))
    return f"{{{{- if .Values.cleanup }}}}\n{cleaning}{{{{- else }}}}\n{_NEAR}{text}{{{{- end }}}}\n"


def for_the_cluster(text: str) -> str:
    """A DaemonSet with the values that only a cluster's administrator can know."""
    account = f"      serviceAccountName: {NAME}\n"
    text = replaced(text, account, account + listed(".Values.imagePullSecrets", "      imagePullSecrets:\n"))
    # A key that is there twice is an error for some readers of YAML, such as those of GitOps tools.
    system = "kubernetes.io/os"
    selector = f"      nodeSelector:\n        {system}: linux\n"
    text = replaced(text, selector, selector + listed(f'omit (.Values.nodeSelector | default dict) "{system}"'))
    for key in _BLOCKS:
        pattern = re.compile(rf"^( +){key}:\n((?:\1[ -].*\n)+)", re.MULTILINE)
        found = pattern.search(text)
        if found is None:
            raise ChartError(f"the pod has no {key}")
        value = f"{{{{ toYaml .Values.{key} | indent {len(found[1]) + 2} }}}}"
        block = f"{{{{- if .Values.{key} }}}}\n{value}\n{{{{- else }}}}\n{found[2]}{{{{- end }}}}\n"
        text = text[: found.start(2)] + block + text[found.end(2) :]
    return text


def listed(value: str, head: str = "") -> str:
    """The entries of an expression with a value, in the pod's specification, if it has any."""
    return f"{{{{- with {value} }}}}\n{head}{{{{ toYaml . | indent 8 }}}}\n{{{{- end }}}}\n"


def component(name: str) -> list[dict[str, Any]]:
    """The operations in the only patch of a component."""
    found = yaml.safe_load((DEPLOY / "components" / name / "kustomization.yaml").read_text())
    (patch,) = found["patches"]
    if found.keys() != {"apiVersion", "kind", "patches"} or patch["target"] != {"kind": "DaemonSet", "name": NAME}:
        raise ChartError(f"components/{name} does more than patch the DaemonSet")
    return list(yaml.safe_load(patch["patch"]))


def added(text: str, operation: dict[str, Any], value: str) -> str:
    """The DaemonSet with one more item in a list, if this value is set."""
    path, entry = operation["path"], operation["value"]
    if path == "/spec/template/spec/containers/0/securityContext/capabilities/add/-":
        item = f"{{{{ if .Values.{value} }}}}, {entry}{{{{ end }}}}"
        text, count = re.subn(r"( +add: \[[^]]*)\]", rf"\1{item}]", text, count=1)
        if not count:
            raise ChartError("the container's capabilities have no list to add to")
        return text
    if operation["op"] != "add" or path not in _LISTS:
        raise ChartError(f"{operation['op']} at {path} is not known here")
    key, indent = _LISTS[path]
    lines = text.splitlines(keepends=True)
    first = lines.index(f"{' ' * (indent - 2)}{key}:\n")
    # The list ends before the next line that is indented less.
    end = next((i for i in range(first + 1, len(lines)) if len(lines[i]) - len(lines[i].lstrip()) < indent), len(lines))
    block = textwrap.indent(yaml.safe_dump([entry], sort_keys=False), " " * indent)
    lines.insert(end, f"{{{{- if .Values.{value} }}}}\n{block}{{{{- end }}}}\n")
    return "".join(lines)


def set_field(text: str, operation: dict[str, Any], value: str) -> str:
    """The DaemonSet with one more field of the pod, if this value is set."""
    path = operation["path"]
    if operation["op"] != "add" or path not in _FIELDS:
        raise ChartError(f"{operation['op']} at {path} is not known here")
    before, indent = _FIELDS[path]
    field = yaml.safe_dump({path.rpartition("/")[2]: operation["value"]}, sort_keys=False)
    block = f"{{{{- if .Values.{value} }}}}\n{textwrap.indent(field, ' ' * indent)}{{{{- end }}}}\n"
    return replaced(text, before, before + block)


def replace_field(text: str, operation: dict[str, Any], value: str) -> str:
    """The DaemonSet with another value of a field of the pod, if that value is set."""
    path = operation["path"]
    if operation["op"] != "replace" or path not in _REPLACED:
        raise ChartError(f"{operation['op']} at {path} is not known here")
    old = _REPLACED[path]
    indent = " " * (len(old) - len(old.lstrip()))
    new = textwrap.indent(yaml.safe_dump({path.rpartition("/")[2]: operation["value"]}), indent)
    return replaced(text, old, f"{{{{- if .Values.{value} }}}}\n{new}{{{{- else }}}}\n{old}{{{{- end }}}}\n")


def cleanup() -> str:
    """The DaemonSet that cleans up, as kustomize builds it: the file of tools/cluster_objects.py, without kubectl."""
    built = DEPLOY.parent / "pyebpf_proxy" / "cluster" / "cleanup.yaml"
    (found,) = (each for each in yaml.safe_load_all(built.read_text()) if each["kind"] == "DaemonSet")
    found["metadata"] = {"name": NAME}
    text = yaml.safe_dump(found, sort_keys=False, width=1000)
    text = replaced(text, f"image: {IMAGE}:{__version__}\n", f"image: {_IMAGE}\n")
    text = replaced(text, "imagePullPolicy: IfNotPresent", "imagePullPolicy: {{ .Values.image.pullPolicy }}")
    for variable, default, value in (
        (VARIABLE, DEFAULT, "kubeProxyHealth"),
        (METRICS_VARIABLE, METRICS_DEFAULT, "kubeProxyMetrics"),
    ):
        entry = f"- name: {variable}\n          value: "
        text = replaced(text, f"{entry}{default}\n", f"{entry}{{{{ .Values.{value} | quote }}}}\n")
    return _described(text, namespaced=True)


def prometheus_operator() -> str:
    """PodMonitor and PrometheusRule. Rules contain braces, so their file is inserted without templating."""
    folder = DEPLOY / "components" / "prometheus-operator"
    monitor, rule = ((folder / f"{name}.yaml").read_text() for name in ("podmonitor", "prometheusrule"))
    rule = rule[: rule.index("spec:\n")] + 'spec:\n{{ .Files.Get "rules.yaml" | indent 2 }}'
    namespace = "  namespace: kube-system\n"
    text = "---\n".join(replaced(each, namespace, _NAMESPACE) for each in (monitor, rule))
    return f"{{{{- if .Values.prometheusOperator }}}}\n{text}\n{{{{- end }}}}\n"


def write(folder: Path) -> None:
    """Write the chart into a folder of its own."""
    target = folder / NAME
    shutil.rmtree(target, ignore_errors=True)
    (target / "templates").mkdir(parents=True)
    (target / "Chart.yaml").write_text(yaml.safe_dump(CHART, sort_keys=False))
    for name in ("values.yaml", "values.schema.json"):
        shutil.copy(DEPLOY / "chart" / name, target)
    shutil.copy(DEPLOY / "chart" / "NOTES.txt", target / "templates")
    shutil.copy(DEPLOY / "prometheus" / "pyebpf-proxy.rules.yaml", target / "rules.yaml")
    templates = {
        "serviceaccount": base("serviceaccount"),
        "rbac": rbac(),
        "configmap": config_map(),
        "datapath": datapath_config_map(),
        "daemonset": daemon_set(),
        "prometheus-operator": prometheus_operator(),
    }
    for name, text in templates.items():
        (target / "templates" / f"{name}.yaml").write_text(text)


def main(arguments: list[str]) -> int:
    """Build the chart. The result is the exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(f"usage: {sys.argv[0]} FOLDER", file=sys.stderr)
        return 2
    try:
        write(Path(arguments[0]))
    except ChartError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
