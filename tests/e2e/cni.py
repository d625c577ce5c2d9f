# SPDX-License-Identifier: Apache-2.0
"""How the pods of the cluster are connected: the CNI plugins, and what else runs on a node for them."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tests.e2e.layout import REPOSITORY
from tests.e2e.processes import wait_for
from tests.e2e.programs import UNPACKED, built, source

if TYPE_CHECKING:
    from tests.e2e.node import Node

_MTU = 1500
_CILIUM_CGROUP = "/run/cilium/cgroupv2"
_PORTMAP = {"type": "portmap", "capabilities": {"portMappings": True}}
_BANDWIDTH = {"type": "bandwidth", "capabilities": {"bandwidth": True}}


class Cni(ABC):
    """One way to connect pods."""

    #: In tables.
    title: ClassVar[str]
    #: What it needs besides Debian's CNI plugins: names for tests/cluster/build.sh.
    programs: ClassVar[tuple[str, ...]] = ()
    #: Whether it enforces NetworkPolicies.
    policies: ClassVar[bool] = False
    #: Whether it can connect both families here.
    dual: ClassVar[bool] = True
    #: Whether it sets the routes to the other nodes' pods itself.
    routes: ClassVar[bool] = False

    @abstractmethod
    def start(self, node: Node, subnets: Sequence[str]) -> list[dict[str, Any]]:
        """Start what the node needs, unless it runs. Returns the list of plugins for the node's ranges of pods."""


def _addresses(subnets: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "host-local",
        "ranges": [[{"subnet": subnet}] for subnet in subnets],
        "routes": [{"dst": "::/0" if ":" in subnet else "0.0.0.0/0"} for subnet in subnets],
    }


def _bridge(subnets: Sequence[str], mtu: int) -> dict[str, Any]:
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipMasq": False}
    return bridge | {"mtu": mtu, "ipam": _addresses(subnets)}


class Ptp(Cni):
    """A route per pod, as with Calico and kindnet."""

    title = "`ptp`, `portmap`"

    def start(self, node: Node, subnets: Sequence[str]) -> list[dict[str, Any]]:
        return [{"type": "ptp", "ipMasq": False, "mtu": _MTU, "ipam": _addresses(subnets)}, _PORTMAP]


class Bridge(Cni):
    """A bridge per node, and limits for pods that ask for them."""

    title = "`bridge`, `portmap`, `bandwidth`"

    def start(self, node: Node, subnets: Sequence[str]) -> list[dict[str, Any]]:
        return [_bridge(subnets, _MTU), _PORTMAP, _BANDWIDTH]


class Flannel(Cni):
    """flanneld with host-gw, and kube-router as controller of NetworkPolicies: the pair that k3s contains.

    flannel's own CNI plugin only calls ``bridge`` with the values of subnet.env. Here the list calls it directly. vxlan
    needs a kernel that has it.
    """

    title = "flannel (host-gw), kube-router's NetworkPolicy controller"
    programs = ("flanneld", "kube-router")
    policies = True
    dual = False
    routes = True

    def start(self, node: Node, subnets: Sequence[str]) -> list[dict[str, Any]]:
        configuration = node.folder / "net-conf.json"
        configuration.write_text(json.dumps({"Network": node.network.pods, "Backend": {"Type": "host-gw"}}))
        node.keep_running(
            *("flanneld", "flanneld", "--kube-subnet-mgr", "--ip-masq", "--iface=eth0"),
            *(f"--kubeconfig-file={node.admin}", f"--net-config-path={configuration}"),
            environment={"NODE_NAME": node.name},
        )
        node.keep_running(
            *("kube-router", "kube-router", "--run-firewall=true", "--run-router=false", "--run-service-proxy=false"),
            *(f"--kubeconfig={node.admin}", f"--hostname-override={node.name}"),
            *(f"--service-cluster-ip-range={node.network.services}", "--service-node-port-range=30000-32767"),
            # Nothing asks its servers, and they listen on the node's addresses.
            *("--metrics-port=0", "--health-port=0"),
        )
        wait_for(f"{node.name}: flanneld has a subnet", lambda: bool(_subnet_file(node)), 60)
        found = _subnet_file(node)
        return [_bridge(subnets, int(found["FLANNEL_MTU"])), _PORTMAP, _BANDWIDTH]


def _subnet_file(node: Node) -> dict[str, str]:
    text = node.run("cat", "/run/flannel/subnet.env", check=False)
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


class Cilium(Cni):
    """Cilium without its kube-proxy replacement and without its L7 proxy, with native routing.

    Its agents compile their BPF programs when they start. Until then cilium-cni fails, and the kubelet tries again.
    Without socket programs of its own, an agent detaches all programs from its root cgroup, and starts no data plane if
    that fails. The proxy's programs are attached to the machine's root cgroup, so Cilium gets another one.
    """

    title = "Cilium (native routing, without kube-proxy replacement), `portmap`"
    programs = ("cilium-agent", "cilium-operator", "cilium-cni")
    policies = True
    dual = False
    routes = True

    def start(self, node: Node, subnets: Sequence[str]) -> list[dict[str, Any]]:
        library = node.folder / "cilium"
        if not library.exists():
            # A copy, because the agent writes headers there.
            sources = source("github.com/cilium/cilium", REPOSITORY / "tests/e2e/cilium")
            shutil.copytree(sources / "bpf", library / "bpf", ignore=shutil.ignore_patterns("tests"))
        environment = {"K8S_NODE_NAME": node.name, "CILIUM_K8S_NAMESPACE": "kube-system"}
        common = {
            "k8s-kubeconfig-path": node.admin,
            "enable-ipv4": "true",
            "enable-ipv6": "false",
            "identity-allocation-mode": "crd",
            "ipam": "kubernetes",
            "kube-proxy-replacement": "false",
            "enable-l7-proxy": "false",
        }
        if node.number == 1:
            # A cluster has one operator. It creates the custom resource definitions that the agents wait for. It must
            # not restart pods because it sees no pod of Cilium.
            operator = common | {"unmanaged-pod-watcher-interval": "0", "set-cilium-is-up-condition": "false"}
            node.keep_running("cilium-operator", "cilium-operator", *_options(operator), environment=environment)
        agent = common | {
            "cluster-name": "default",
            "routing-mode": "native",
            "ipv4-native-routing-cidr": node.network.pods,
            "auto-direct-node-routes": "true",
            "enable-bpf-masquerade": "false",
            # It translates the ClusterIPs of pods all the same. Its defaults ignore these fields of a Service.
            "enable-session-affinity": "true",
            "enable-service-topology": "true",
            "enable-health-checking": "false",
            "enable-endpoint-health-checking": "false",
            "enable-hubble": "false",
            "lib-dir": library,
            "cgroup-root": _CILIUM_CGROUP,
        }
        node.mount_cgroup(_CILIUM_CGROUP)
        node.keep_running("cilium-agent", "cilium-agent", *_options(agent), environment=environment)
        plugin = UNPACKED / "usr/lib/cni/cilium-cni"
        # A former one may lead to another cache.
        plugin.unlink(missing_ok=True)
        plugin.symlink_to(built("cilium-cni"))
        return [{"type": "cilium-cni"}, _PORTMAP]


def _options(values: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


DEFAULT_CNI = "ptp"
CNIS: dict[str, Cni] = {DEFAULT_CNI: Ptp(), "bridge": Bridge(), "flannel": Flannel(), "cilium": Cilium()}
