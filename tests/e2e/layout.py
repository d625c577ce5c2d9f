# SPDX-License-Identifier: Apache-2.0
"""Names, folders and addresses of the cluster. Everything that it creates on the machine has a name of this file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests import CACHE, ROOT

REPOSITORY = ROOT
#: Built programs; unpacked packages and images; the cluster itself, which `cluster-down` removes.
PROGRAMS = CACHE / "go"
STORE = CACHE / "e2e"
WORK = Path(os.environ.get("E2E_WORK") or STORE / "cluster")

RELEASE = "v1.36.3"
#: Network namespaces, cgroups and Nodes: this and a number, or `cp` for the control plane.
PREFIX = "pep-e2e"
CONTROL = f"{PREFIX}-cp"
BRIDGE = "nodes0"
NODES = 3

KUBE_PROXY_IMAGE = f"registry.k8s.io/kube-proxy:{RELEASE}"
PROXY_IMAGE = "docker.io/library/pyebpf-proxy:0.1.0"
#: The same under another name, as the target of an upgrade.
NEXT_IMAGE = "docker.io/library/pyebpf-proxy:next"


@dataclass(frozen=True)
class Network:
    """Addresses: IPv4, or both families."""

    dual: bool = False

    @property
    def api(self) -> str:
        return "192.168.77.1"

    @property
    def api6(self) -> str:
        return "fd00:77::1"

    @property
    def server(self) -> str:
        """The API server's URL inside the namespaces of the control plane and the nodes."""
        return f"https://{self.api}:6443"

    @property
    def pods(self) -> str:
        return "10.244.0.0/16" + (",fd00:10:244::/56" if self.dual else "")

    @property
    def services(self) -> str:
        return "10.96.0.0/16" + (",fd00:10:96::/112" if self.dual else "")

    @property
    def dns(self) -> str:
        return "10.96.0.10"

    def node(self, number: int) -> list[str]:
        """A node's addresses."""
        return [f"192.168.77.1{number}"] + ([f"fd00:77::1{number}"] if self.dual else [])


def node_name(number: int) -> str:
    """The name of a Node, of its network namespace and of its cgroup."""
    return f"{PREFIX}-{number}"
