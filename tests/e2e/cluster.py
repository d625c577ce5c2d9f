# SPDX-License-Identifier: Apache-2.0
"""The whole cluster: up, down, and the leftovers of a killed run."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.e2e import control_plane, images, pki, programs
from tests.e2e.cni import CNIS, DEFAULT_CNI, Cni
from tests.e2e.layout import (
    CONTROL,
    KUBE_PROXY_IMAGE,
    NODES,
    PREFIX,
    PROXY_IMAGE,
    REPOSITORY,
    WORK,
    Network,
    node_name,
)
from tests.e2e.node import CGROUPS, Node, run
from tests.e2e.problem import E2EError
from tests.e2e.processes import State, kill_all, started, wait_for
from tests.support import kubeadm

#: kube-proxy in its default mode, iptables; in mode nftables; the agent.
PROXIES = ("kube-proxy", "kube-proxy-nftables", "pyebpf-proxy")
_HERE = Path(__file__).parent


class Cluster:
    """A cluster in its folder. ``proxy``, ``network`` and ``cni`` are those that it was created with."""

    def __init__(self) -> None:
        self.state = State(WORK)
        found = self.state.read()
        self.proxy = str(found.get("proxy", ""))
        self.network = Network(bool(found.get("dual")))
        self.cni_name = str(found.get("cni", DEFAULT_CNI))

    @property
    def cni(self) -> Cni:
        return CNIS[self.cni_name]

    @property
    def nodes(self) -> list[Node]:
        return [Node(self.state, number, self.network) for number in range(1, NODES + 1)]

    @property
    def kubeconfig(self) -> Path:
        return self.state.folder / "pki/admin.conf"

    def kubectl(self, *arguments: str | Path, text: str = "", check: bool = True) -> str:
        """kubectl's output. E2EError with its last line if it fails."""
        command = [*control_plane.kubectl(self.state), *map(str, arguments)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, input=text or None)
        if check and done.returncode:
            output = (done.stderr.strip() or "no reason given").splitlines()[-1]
            raise E2EError(f"kubectl {' '.join(map(str, arguments))[:160]}: {output}")
        return done.stdout

    # ---- up --------------------------------------------------------------------------------------------------------

    def up(self, proxy: str, dual: bool, cni: str = DEFAULT_CNI, keeper: int = 0) -> None:
        """Create it. ``keeper`` is the process that will remove it; 0: it stays until `cluster-down`."""
        began = time.monotonic()
        if dual and not CNIS[cni].dual:
            raise E2EError(f"{cni} connects only one family here")
        archives = images.prepare()
        remove_leftovers()
        self.state.folder.mkdir(parents=True)
        self.proxy, self.network, self.cni_name = proxy, Network(dual), cni
        self.state.change(proxy=proxy, dual=dual, cni=cni, keeper=[keeper, started(keeper)] if keeper else None)
        pki.make(self.state.folder / "pki", self.network)
        self._write_kubectl()
        control_plane.start(self.state, self.network)
        with ThreadPoolExecutor(NODES) as pool:
            for done in [pool.submit(node.start, archives) for node in self.nodes]:
                done.result()
        self.connect()
        self._add_proxy()
        self.kubectl("apply", "-f", _HERE / "coredns.yaml")
        self._wait_until_ready()
        self.state.change(complete=True)
        print(f"{NODES} nodes are ready after {time.monotonic() - began:.0f} s", flush=True)

    def _write_kubectl(self) -> None:
        """kubectl for users: the API server's address exists only in the cluster's namespaces."""
        path = self.state.folder / "kubectl"
        path.write_text(f'#!/bin/sh\nexec {" ".join(control_plane.kubectl(self.state))} "$@"\n')
        path.chmod(0o755)

    def connect(self) -> None:
        """Add routes and CNI to all nodes, as soon as the controller manager has given every Node its range of pods."""
        ranges: dict[str, list[str]] = {}

        def all_known() -> bool:
            for program in ("kube-controller-manager", "kube-scheduler"):
                self.state.must_run(program)
            for node in self.nodes:
                self.state.must_run(f"{node.name}-kubelet")
            path = "{range .items[*]}{.metadata.name} {.spec.podCIDRs[*]}{'\\n'}{end}"
            for line in self.kubectl("get", "nodes", "-o", f"jsonpath={path}").splitlines():
                name, *found = line.split()
                ranges[name] = found
            return len([each for each in ranges.values() if each]) == NODES

        wait_for("the Nodes have registered", all_known, 120)
        nodes = self.nodes
        for node in nodes:
            others = [(other, ranges[other.name]) for other in nodes if other.number != node.number]
            node.connect_pods(self.cni, ranges[node.name], others)
            zone = f"topology.kubernetes.io/zone=zone-{node.number}"
            self.kubectl("label", "--overwrite", "node", node.name, zone, "topology.kubernetes.io/region=region-1")

    def _add_proxy(self) -> None:
        """kube-proxy as kubeadm leaves it. For pyebpf-proxy: parked, and the DaemonSet of deploy/overlays/kubeadm."""
        for item in self._kube_proxy_objects():
            # create, as kubeadm does
            self.kubectl("create", "-f", "-", text=yaml.safe_dump(item))
        if self.proxy == "pyebpf-proxy":
            park = REPOSITORY / "deploy/kube-proxy/park.yaml"
            self.kubectl("-n", "kube-system", "patch", "daemonset", "kube-proxy", "--patch-file", park)
            with self.overlay("deploy/overlays/kubeadm") as folder:
                self.kubectl("apply", "-k", folder)

    def _kube_proxy_objects(self) -> list[dict[str, Any]]:
        config_map = kubeadm.config_map(self.network.server, "nftables" if self.proxy.endswith("-nftables") else "")
        configuration = yaml.safe_load(config_map["data"]["config.conf"])
        configuration["clusterCIDR"] = self.network.pods
        # conntrack's limits are those of the machine.
        configuration["conntrack"] |= {"maxPerCore": 0, "min": 0}
        config_map["data"]["config.conf"] = yaml.safe_dump(configuration)
        daemon_set = kubeadm.daemon_set()
        daemon_set["spec"]["template"]["spec"]["containers"][0]["image"] = KUBE_PROXY_IMAGE
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _named("kube-proxy", "kube-system")}
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "kubeadm:node-proxier"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node-proxier"},
            "subjects": [{"kind": "ServiceAccount", **_named("kube-proxy", "kube-system")}],
        }
        return [account, binding, config_map, daemon_set]

    def start_load_balancer(self) -> None:
        """Start the controller of load_balancer.py, until the cluster is removed."""
        if not self.state.runs("load-balancer"):
            command = [sys.executable, "-m", "tests.e2e.load_balancer", str(self.kubeconfig)]
            environment = ["env", f"PYTHONPATH={REPOSITORY}"]
            self.state.spawn("load-balancer", [*environment, *control_plane.INSIDE, *command])

    @contextmanager
    def overlay(self, base: str) -> Iterator[Path]:
        """A user's kustomization that names the image, as docs/migrating-from-kube-proxy.md describes it."""
        name, _, tag = PROXY_IMAGE.rpartition(":")
        with tempfile.TemporaryDirectory(prefix="overlay.", dir=self.state.folder) as folder:
            kustomization = {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": [os.path.relpath(REPOSITORY / base, Path(folder).resolve())],
                "images": [{"name": "REGISTRY/pyebpf-proxy", "newName": name, "newTag": tag}],
            }
            Path(folder, "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
            yield Path(folder)

    def _wait_until_ready(self) -> None:
        for kind in (f"daemonset/{self.proxy.removesuffix('-nftables')}", "deployment/coredns"):
            self.kubectl("-n", "kube-system", "rollout", "status", kind, "--timeout=180s")
        self.kubectl("wait", "--for=condition=Ready", "nodes", "--all", "--timeout=60s")
        if self.proxy == "pyebpf-proxy":
            self.require_seccomp()

    def agents(self) -> list[dict[str, Any]]:
        """The agents' pods."""
        chosen = ("-n", "kube-system", "get", "pods", "-l", "k8s-app=pyebpf-proxy", "-o", "json")
        return list(json.loads(self.kubectl(*chosen))["items"])

    def fast_path(self) -> dict[str, Any]:
        """The agents' fast paths: packets that they sent, and the reasons for which IPv4 takes the slow path."""
        sent, closed = 0, set()
        for pod in self.agents():
            command = ("exec", pod["metadata"]["name"], "--", "pyebpf-proxy", "status", "-o", "json")
            # Its exit status is 1 if it has warnings.
            found = json.loads(self.kubectl("-n", "kube-system", *command, check=False))["fastPath"]
            sent += found["sent"]
            closed |= {text for text in (found["closed4"], found["why4"]) if text}
        return {"sent": sent, "closed": sorted(closed)}

    def require_seccomp(self) -> None:
        """E2EError unless the runtime's seccomp profile applies to every agent's pod (2: a filter)."""
        for pod in self.agents():
            name = pod["metadata"]["name"]
            said = self.kubectl("-n", "kube-system", "exec", name, "--", "grep", "^Seccomp:", "/proc/1/status").split()
            if said != ["Seccomp:", "2"]:
                raise E2EError(f"{name} runs without a seccomp filter: {' '.join(said)}")


def _named(name: str, namespace: str) -> dict[str, str]:
    return {"name": name, "namespace": namespace}


# ---- down ----------------------------------------------------------------------------------------------------------


def refuse_if_used() -> None:
    """E2EError if there is a cluster in use. The remains of a killed run are not."""
    found = State(WORK).read()
    keeper = found.get("keeper")
    if keeper and keeper[0] != os.getpid() and started(keeper[0]) == keeper[1]:
        raise E2EError(f"process {keeper[0]} runs the specs in {WORK}: one cluster at a time on a machine")
    if not keeper and found.get("complete") and State(WORK).runs("kube-apiserver"):
        raise E2EError(f"there is a cluster in {WORK}: make cluster-down")


def remove_leftovers() -> None:
    """As ``down``, with a message if there were leftovers."""
    if down():
        print("removed what a former run had left", flush=True)


def down() -> bool:
    """Remove every cluster of this machine: processes, namespaces, cgroups, folder. Returns whether there was one.

    It searches by name, so it does not matter how a run ended. Mounts of nodes disappear with their namespaces.
    """
    found = False
    state = State(WORK)
    spaces = [name for name in _network_namespaces() if name.startswith(f"{PREFIX}-")]
    for name in state.read().get("processes", {}):
        found = found or bool(state.runs(name))
        if name.startswith(("kube-", "etcd")):
            state.stop(name, 3.0)

    def pids() -> list[int]:
        # Pods have separate network namespaces, but are below the PID namespace of a node: they end with it.
        inside = [int(pid) for space in spaces for pid in run("ip", "netns", "pids", space, check=False).split()]
        known = [state.runs(name) for name in state.read().get("processes", {})]
        return [pid for pid in {*inside, *known} if pid and started(pid)]

    kill_all(pids)
    for name in spaces:
        found = True
        run("ip", "netns", "del", name)
    # The kubelet also creates its group in hierarchies that it does not need.
    for folder in [*CGROUPS.glob(f"{PREFIX}-*"), *CGROUPS.glob(f"*/{PREFIX}-*")]:
        found = True
        _remove_cgroup(folder)
    if WORK.exists():
        found = True
        _remove_folder(WORK)
    return found


def _network_namespaces() -> list[str]:
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]


def _remove_cgroup(folder: Path) -> None:
    def processes() -> list[int]:
        files = [folder / "cgroup.procs", *folder.rglob("cgroup.procs")]
        texts = [file.read_text() for file in files if file.exists()]
        return [int(pid) for text in texts for pid in text.split() if int(pid)]

    kill_all(processes)
    deepest_first = sorted((path for path in folder.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts))
    for path in [*deepest_first, folder]:
        # A process leaves its cgroup a moment after it has ended.
        wait_for(f"the cgroup {path} can be removed", functools.partial(_rmdir, path), 10)


def _rmdir(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _remove_folder(folder: Path) -> None:
    """The cluster's folder. Never across a mount point: the machine itself may be below it."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    below = [path for path in mounts if path.startswith(f"{folder}/")]
    for path in sorted(below, reverse=True):
        run("umount", path)
    # The work folder of an overlay has mode 0, which does not stop root.
    shutil.rmtree(folder)


@contextmanager
def exclusive() -> Iterator[None]:
    """Only one command at a time changes clusters of this machine."""
    path = Path("/run/lock/pep-e2e.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise E2EError("another command makes or removes a cluster on this machine") from None
        yield


def prepare(specs: bool = False, cni: str = DEFAULT_CNI) -> None:
    """Check the needed programs; E2EError for the first missing one."""
    programs.prepare(specs, CNIS[cni].programs)


def describe(cluster: Cluster) -> str:
    """How to use it."""
    shell = f"nsenter -t $(pgrep -P {cluster.state.runs(node_name(1))}) -m -u -n -p"
    return (
        f"kubeconfig {cluster.kubeconfig}; its server's address exists in network namespace {CONTROL} only:\n"
        f"  {cluster.state.folder}/kubectl get pods -A -o wide\n"
        f"  nsenter --net=/run/netns/{CONTROL} COMMAND    with KUBECONFIG={cluster.kubeconfig}\n"
        f"  {shell}    a shell in {node_name(1)}\n"
        f"logs in {cluster.state.folder}/logs; make cluster-down removes everything"
    )
