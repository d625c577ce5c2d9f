# SPDX-License-Identifier: Apache-2.0
"""The proxies under test: pyebpf-proxy, with manifests or an API server, and the real kube-proxy."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from bench.proxies import NFTABLES, OURS, Proxy
from pyebpf_proxy.lab import addresses
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Object
from tests.support.apiserver import ApiServer, replace
from tests.support.relay import Relay

KUBE_PROXY = "kube-proxy"
_KLOG = re.compile(r"^[EWF]\d{4} ")
_OWN = re.compile(r" (error|warning) ")


class Contender(Protocol):
    """A proxy on the lab's node."""

    name: str

    @property
    def pid(self) -> int: ...

    def start(self) -> None:
        """Start it, and wait until it has programmed everything."""

    def kill(self) -> None: ...

    def apply(self, file: str, objects: Sequence[Object]) -> None: ...

    def complaints(self) -> list[str]:
        """The lines of its log that are warnings or errors."""

    def metrics(self) -> str: ...


class ByManifests:
    """The agent with a folder of manifests."""

    name = OURS

    def __init__(
        self,
        lab: Lab,
        own: dict[str, Any] | None = None,
        environment: Sequence[str] = (),
        group: Path | None = None,
    ) -> None:
        self._lab = lab
        self._agent = lab.nodes[0].agent
        self._own = own
        # The shell becomes the agent: they have the same process ID. Its mounts are the machine's, unlike with ``ip
        # netns exec``.
        inside = ("sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs")) if group is not None else ()
        self._enter = (*inside, "nsenter", f"--net={lab.nodes[0].namespace.path}", "env", *environment)

    @property
    def pid(self) -> int:
        assert self._agent.process is not None
        return self._agent.process.pid

    def start(self) -> None:
        self._agent.start(own=self._own, enter=self._enter)
        self._agent.wait_synced()

    def kill(self) -> None:
        self._agent.signal(signal.SIGKILL)
        self._agent.wait_ended()

    def apply(self, file: str, objects: Sequence[Object]) -> None:
        self._lab.write(f"{file}.yaml", objects)

    def complaints(self) -> list[str]:
        return [line for line in self._agent.log().splitlines() if _OWN.search(line)]

    def metrics(self) -> str:
        return self._agent.metrics()


class _Usual(Proxy):
    """Uses the default periods of both, and not those of a benchmark."""

    def _configuration(self, kubeconfig: Path, node: str, cluster_cidr: str) -> dict[str, Any]:
        made = super()._configuration(kubeconfig, node, cluster_cidr)
        return made | {made["mode"]: {"minSyncPeriod": "10ms", "syncPeriod": "30s"}}


class ByApi:
    """The agent or kube-proxy with a real API server."""

    def __init__(self, name: str, lab: Lab, api: ApiServer, stack: ExitStack) -> None:
        self.name = name
        self._api = api
        node = lab.nodes[0]
        self._namespace, self._node = node.namespace, node.name
        node.agent.folder.mkdir(exist_ok=True)
        self.relay = stack.enter_context(Relay(node.namespace.path, api.port))
        #: A certificate and its key, without suffixes; and the file of the CA that the proxy trusts.
        self.credentials, self._authority = lab.folder / "proxy", lab.folder / "proxy-ca.crt"
        api.client_certificate(self.credentials)
        self.trust()
        user = {"client-certificate": f"{self.credentials}.crt", "client-key": f"{self.credentials}.key"}
        self._kubeconfig = api.kubeconfig(lab.folder / "kubeconfig", user, authority=self._authority)
        self._proxy = _Usual(OURS if name == OURS else NFTABLES, node.namespace, node.agent.folder)
        self._before = ""
        stack.callback(self._proxy.stop)

    @property
    def pid(self) -> int:
        return self._proxy.pid

    def start(self) -> None:
        self._proxy.start(self._kubeconfig, self._node, ",".join(addresses.POD_CIDR), families=2)

    def trust(self) -> None:
        """Give the proxy the CA of the API server's certificate."""
        replace(self._authority, self._api.authority.read_text())

    def kill(self) -> None:
        self._before += self._proxy.log()  # a start empties the log
        self._proxy.stop()

    def apply(self, file: str, objects: Sequence[Object]) -> None:
        for each in objects:
            if each["kind"] == "Node":
                # Its two addresses have the same type, which server-side apply rejects as duplicates.
                self._api.create(each)
                self._api.patch_status(each)
            else:
                self._api.apply(each)

    def complaints(self) -> list[str]:
        lines = (self._before + self._proxy.log()).splitlines()
        return [line for line in lines if (_OWN if self.name == OURS else _KLOG).search(line)]

    def metrics(self) -> str:
        from pyebpf_proxy.lab.agent import _scrape

        return self._namespace.call(_scrape)
