# SPDX-License-Identifier: Apache-2.0
"""``cluster check``: whether a cluster is fit. Nothing is changed; pods of a moment try the image on each node."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pyebpf_proxy.cluster import model, objects, task_pod
from pyebpf_proxy.cluster.api import BINDINGS, CONFIG_MAPS, DAEMON_SETS, NAMESPACES, PODS, Api, Object, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError, StoppedError
from pyebpf_proxy.cluster.model import View
from pyebpf_proxy.cluster.objects import NAMESPACE
from pyebpf_proxy.cluster.output import Finding
from pyebpf_proxy.common.kernel_versions import OLDEST_KERNEL, TESTED_KERNEL
from pyebpf_proxy.see.answers import NO_ANSWER, QUESTION, listed

#: What ``install`` and ``rollback`` do: verb, group, resource, namespace.
RIGHTS = (
    *(("list", "", "nodes", ""), ("get", "", "nodes", ""), ("patch", "", "nodes", "")),
    *((verb, "", "pods", NAMESPACE) for verb in ("list", "get", "create", "delete")),
    ("get", "", "pods/log", NAMESPACE),
    *((verb, "apps", "daemonsets", NAMESPACE) for verb in ("get", "create", "patch", "delete")),
    *((verb, "", "serviceaccounts", NAMESPACE) for verb in ("create", "patch", "delete")),
    *((verb, "coordination.k8s.io", "leases", NAMESPACE) for verb in ("get", "create", "patch")),
    *((verb, "", "configmaps", NAMESPACE) for verb in ("get", "create", "patch", "delete")),
    *task_pod.RIGHTS,
    ("get", "rbac.authorization.k8s.io", "clusterrolebindings", ""),
    *(
        (verb, "rbac.authorization.k8s.io", resource, "")
        for resource in ("clusterroles", "clusterrolebindings")
        for verb in ("create", "patch", "delete")
    ),
)
#: To which these commands bind the agent's role.
_SUBJECT = ("ServiceAccount", NAMESPACE, objects.NAME)
READ = (
    ("list", "", "nodes", ""),
    ("list", "", "pods", NAMESPACE),
    ("get", "apps", "daemonsets", NAMESPACE),
)
#: Of the API server: this release is made for these.
_VERSIONS = (1, 33), (1, 36)
_ARCHITECTURES = frozenset({"amd64", "arm64"})
_TESTED_ARCHITECTURE = "amd64"
_AT_ONCE = 8
#: DaemonSets of CNIs that serve Services themselves, always or by a setting.
_CNI = {
    "antrea-agent": ("AntreaProxy implements ClusterIPs for pods", "set antreaProxy.enable: false"),
    "ovnkube-node": ("OVN-Kubernetes implements Services itself", "do not install pyebpf-proxy"),
    "kube-router": ("kube-router may implement Services itself", "start it with --run-service-proxy=false"),
}
#: What Go's flags of type bool take for false.
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})

#: Findings about the image: one of each node.
IMAGE = "image"


def rights(api: Api, wanted: Iterable[tuple[str, str, str, str]]) -> None:
    """ClusterError names what this user may not do."""
    if missing := api.missing_rights(wanted):
        raise ClusterError(f"not allowed: this user may not {'; '.join(missing)}", NO_ANSWER)


def selected(api: Api, selector: str) -> View:
    """What runs on the nodes that match the selector. ClusterError if none does."""
    found = model.view(api, selector)
    some_node(found)
    return found


def some_node(found: View) -> None:
    """ClusterError if no node is selected."""
    if not found.nodes:
        raise ClusterError("no node matches --nodes; kubectl get nodes --show-labels lists the labels", QUESTION)


def own_role(api: Api) -> None:
    """ClusterError if the agent's role serves an installation elsewhere: these commands would take it away."""
    found = api.get(BINDINGS, objects.NAME) or {}
    subjects = [(each["kind"], each.get("namespace", ""), each["name"]) for each in found.get("subjects") or ()]
    others = [" ".join(filter(None, each)) for each in subjects if each != _SUBJECT]
    if others:
        raise ClusterError(
            f"ClusterRoleBinding {objects.NAME} is for {listed(others)}: the agent was installed in another way, and"
            " this command would take its rights away; remove that installation, or continue without this command"
        )


def blocking(api: Api, found: View) -> None:
    """ClusterError for what makes an installation pointless."""
    some_node(found)
    if found.kube_proxy_set is None:
        raise ClusterError(
            f"there is no DaemonSet {NAMESPACE}/{objects.KUBE_PROXY}: this command takes nodes over from kube-proxy;"
            " docs/deploy.md describes clusters without it"
        )
    configuration = model.valid_configuration(api)
    if configuration.get("mode") == "ipvs":
        raise ClusterError(
            "kube-proxy runs in mode ipvs, which this command does not support: replacing it ends its connections,"
            " and its settings require deploy/components/ipvs (docs/ipvs-mode.md)"
        )
    if configuration.get("bindAddressHardFail"):
        raise ClusterError(
            "kube-proxy's bindAddressHardFail is true: a proxy then exits while the other one holds the health port, so"
            " they cannot take turns; set it to false in the ConfigMap, and restart kube-proxy"
        )
    model.installed_image(found)
    if not any(found.is_ours(node) or node in found.kube_proxies for node in found.nodes):
        raise ClusterError("kube-proxy runs on none of these nodes: this command takes nodes over from kube-proxy")


def fit_nodes(found: View, nodes: Iterable[str]) -> None:
    """ClusterError names the nodes on which the agent cannot run, as far as their objects tell."""
    unfit = [
        f"{each.where}: {each.text} ({each.remedy})"
        for name in nodes
        for each in _node(name, found.nodes[name])
        if each.state == "bad"
    ]
    if unfit:
        raise ClusterError(f"{'; '.join(unfit)}; nothing was changed; to exclude nodes, use --nodes")


def examine(api: Api, found: View, image: str, seconds: float) -> Iterator[Finding]:
    """Every finding; those of the nodes last. ``image``: "" to leave it out."""
    yield from _server(api)
    yield from _allowed("kube-proxy", _kube_proxy(api, found))
    yield from _allowed("installation", _installation(api))
    yield from _rights(api)
    yield from _allowed("CNI", _cni(api))
    yield from _allowed("admission", _admission(api, image or "pyebpf-proxy", next(iter(found.nodes), "")))
    for name, node in found.nodes.items():
        yield from _node(name, node)
    if image:
        yield from _image(api, found, image, seconds)
    else:
        yield Finding(IMAGE, "warning", "not checked", "to check it, use --image REGISTRY/pyebpf-proxy:TAG")


def _allowed(what: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings; a warning instead of what this user may not look at."""
    try:
        yield from findings
    except RefusedError as refused:
        yield Finding(what, "warning", f"not checked: {refused}", "use an administrator's kubeconfig")


def _kube_proxy(api: Api, found: View) -> Iterator[Finding]:
    try:
        blocking(api, found)
        mode = model.kube_proxy_configuration(api).get("mode") or "iptables"
    except ClusterError as error:
        text, _, remedy = str(error).partition("; ")
        yield Finding("kube-proxy", "bad", text, remedy)
        return
    yield Finding("kube-proxy", "good", f"kubeadm's DaemonSet and ConfigMap, mode {mode}")
    without = [node for node in found.nodes if not found.is_ours(node) and node not in found.kube_proxies]
    if without:
        text = f"it does not run on {listed(without)}"
        yield Finding("kube-proxy", "warning", text, "install skips these nodes")


def _installation(api: Api) -> Iterator[Finding]:
    try:
        own_role(api)
    except ClusterError as error:
        text, _, remedy = str(error).partition("; ")
        yield Finding("installation", "bad", text, remedy)


def _server(api: Api) -> Iterator[Finding]:
    version = api.request("GET", "/version")
    number: tuple[int, ...] = tuple(int(re.sub(r"\D", "", version[part]) or 0) for part in ("major", "minor"))
    text = f"{version['gitVersion']} at {api.url}"
    first, last = _VERSIONS
    if not first <= number <= last:
        text += f": not tested; this release is made for {first[0]}.{first[1]} to {last[0]}.{last[1]}"
        yield Finding("API server", "warning", text, "docs/compatibility.md")
    else:
        yield Finding("API server", "good", text)


def _rights(api: Api) -> Iterator[Finding]:
    if missing := api.missing_rights(RIGHTS):
        yield Finding("rights", "bad", f"this user may not {'; '.join(missing)}", "use an administrator's kubeconfig")
    else:
        yield Finding("rights", "good", "sufficient for install, upgrade and rollback")


def _cni(api: Api) -> Iterator[Finding]:
    sets = {each["metadata"]["name"]: each for each in api.objects(DAEMON_SETS)}
    known = [name for name in sets if name in _CNI or name in ("cilium", "calico-node", "kindnet") or "flannel" in name]
    clashes = [(name, *_CNI[name]) for name in known if name in _CNI]
    if "kube-router" in sets and _is_off(sets["kube-router"], "run-service-proxy"):
        clashes = [each for each in clashes if each[0] != "kube-router"]
    if "cilium" in sets:
        settings = api.get(CONFIG_MAPS, "cilium-config", sets["cilium"]["metadata"]["namespace"]) or {}
        value = (settings.get("data") or {}).get("kube-proxy-replacement", "false")
        if value not in ("false", "disabled"):
            clashes.append(("cilium", "Cilium implements Services itself", "set kubeProxyReplacement: false"))
        else:
            text = "DaemonSet cilium: its agent does not start again beside the socket programs of pyebpf-proxy"
            yield Finding("CNI", "warning", text, "set socketLB: off by install --datapath-config: docs/cnis.md")
    if "calico-node" in sets:
        variables = sets["calico-node"]["spec"]["template"]["spec"]["containers"][0].get("env") or ()
        values = {each["name"]: each.get("value", "") for each in variables}
        if values.get("FELIX_BPFENABLED", "").lower() == "true":
            clashes.append(
                ("calico-node", "Calico's eBPF data plane implements Services", "set linuxDataplane: Iptables")
            )
    for name, text, remedy in clashes:
        yield Finding("CNI", "bad", f"DaemonSet {name}: {text}", remedy)
    if not clashes:
        text = ", ".join(known) or "no known CNI DaemonSet"
        yield Finding("CNI", "good", f"{text}; pyebpf-proxy doctor on a node reads its configuration")


def _is_off(daemon_set: Object, name: str) -> bool:
    """Whether a container of the DaemonSet is started with this flag of Go set to false; the last one counts."""
    values = []
    for container in daemon_set["spec"]["template"]["spec"]["containers"]:
        for word in (*(container.get("command") or ()), *(container.get("args") or ())):
            flag, _, value = word.partition("=")
            if flag == f"--{name}":
                values.append(value)
    return bool(values) and values[-1] in _FALSE


def _admission(api: Api, image: str, node: str) -> Iterator[Finding]:
    """The pod, as the API server takes it or not: quotas, Pod Security, webhooks, policies."""
    template = objects.agent(image)[-1]["spec"]["template"]
    specification = template["spec"] | {"nodeName": node}
    specification.pop("nodeSelector")
    specification.pop("serviceAccountName")  # made by the installation
    metadata = {"name": "pyebpf-proxy-check", "namespace": NAMESPACE, "labels": template["metadata"]["labels"]}
    try:
        api.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": specification}, dry_run=True)
    except RefusedError as refused:
        if "cannot create resource" in str(refused):
            raise  # a right of this user, not admission
        remedy = f"admit pods of {NAMESPACE} with hostNetwork, hostPath and NET_ADMIN, BPF, PERFMON"
        yield Finding("admission", "bad", f"the API server rejects the agent's pod: {refused}", remedy)
        return
    namespace = api.get(NAMESPACES, NAMESPACE) or {"metadata": {}}
    level = (namespace["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce", "none")
    yield Finding("admission", "good", f"the agent's pod is admitted (Pod Security of {NAMESPACE}: {level})")


def _node(name: str, node: Object) -> Iterator[Finding]:
    info = node["status"].get("nodeInfo") or {}
    kernel, runtime = info.get("kernelVersion", ""), info.get("containerRuntimeVersion", "")
    number = tuple(map(int, re.findall(r"\d+", kernel)[:2]))
    if not kernel:
        remedy = "the node is skipped until its kubelet reports"
        yield Finding("node", "warning", "its kubelet has never reported", remedy, name)
        return
    text = f"Linux {kernel}, {info.get('architecture', '?')}, {runtime}, kubelet {info.get('kubeletVersion', '?')}"
    if number < OLDEST_KERNEL:
        yield Finding("node", "bad", f"{text}: the kernel is older than 5.14", "docs/kernels.md", name)
    elif info.get("architecture") not in _ARCHITECTURES:
        remedy = "build an image for that architecture"
        yield Finding("node", "bad", f"{text}: no image for this architecture", remedy, name)
    elif number < TESTED_KERNEL:
        yield Finding("node", "warning", f"{text}: kernels from 6.1 are tested", "docs/kernels.md", name)
    elif info.get("architecture") != _TESTED_ARCHITECTURE:
        yield Finding("node", "warning", f"{text}: tested in emulation only", "docs/compatibility.md", name)
    elif old := _old_runtime(runtime):
        yield Finding("node", "warning", f"{text}: {old}", "docs/deploy.md, seccomp", name)
    else:
        yield Finding("node", "good", text, "", name)


def _old_runtime(runtime: str) -> str:
    """Why this runtime's default seccomp profile may forbid bpf() to holders of CAP_BPF; "" if it does not."""
    name, _, version = runtime.partition("://")
    number = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if name == "containerd" and number < (1, 6, 20):
        return "containerd before 1.6.20 may forbid bpf()"
    if name == "docker" and number < (23,):
        return "Docker before 23.0 forbids bpf()"
    return "CRI-O may forbid bpf()" if name == "cri-o" else ""


def _image(api: Api, found: View, image: str, seconds: float) -> Iterator[Finding]:
    """The image on each node whose kubelet reports: pulled, and run for a moment."""
    of_run, command = secrets.token_hex(4), ["pyebpf-proxy", "cluster", "on-node", "fit"]

    def one(node: str) -> Finding:
        if not found.is_up(node):
            return Finding(IMAGE, "warning", "not checked: the node is not ready", "", node)
        try:
            task_pod.run(api, "check", node, image, command, seconds, None, of_run)
        except StoppedError:
            raise  # each node would wait as long again
        except (ClusterError, RefusedError) as error:
            remedy = "make the image available to the node, or specify another one" if "pull" in str(error) else ""
            return Finding(IMAGE, "bad", str(error), remedy, node)
        return Finding(IMAGE, "good", f"{image} runs, and the kernel has BTF", "", node)

    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        yield from pool.map(one, found.nodes)
    except BaseException:
        # Without their pods the waits end.
        pool.shutdown(wait=False, cancel_futures=True)
        task_pod.stop_checks(api, of_run)
        raise
    pool.shutdown()
