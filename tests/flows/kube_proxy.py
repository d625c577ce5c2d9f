# SPDX-License-Identifier: Apache-2.0
"""The real kube-proxy on the node of a world, with a real API server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.agent import SYNCED, _scrape
from pyebpf_proxy.lab.manifests import Object
from pyebpf_proxy.lab.namespace import LabError, die_with_parent
from tests.flows.objects import FAMILIES, MARKER, MARKER_POD, address_of, marker, marker_port
from tests.flows.scenarios import Scenario
from tests.flows.world import FlowWorld
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.support.reference import kube_proxy
from tests.support.relay import Relay

DEADLINE = 60.0
#: Starts until kube-proxy has the ServiceCIDRs at its first sync (``_drops_unallocated``).
STARTS = 5
#: Settings that it cannot write outside the machine's first network namespace.
_NO_SYSCTLS = {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
_TOOLS = ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore")


class KubeProxy:
    """One at a time on a world's node. The API server's objects are always those that ``write`` was given."""

    def __init__(self, world: FlowWorld, server: ApiServer) -> None:
        self._world = world
        self._server = server
        self._namespace = world.node.namespace
        self._folder = world.lab.folder / "kube-proxy"
        self._folder.mkdir(exist_ok=True)
        self._relay = Relay(self._namespace.path, server.port)
        self._kubeconfig = server.kubeconfig(self._folder / "kubeconfig", {"token": ADMIN_TOKEN})
        self._objects: dict[tuple[str, str], Object] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._step = 0
        self._mode = ""
        self._path = self._legacy_tools()

    def close(self) -> None:
        self.stop()
        self._relay.__exit__(None, None, None)

    def log(self) -> str:
        """Its log."""
        path = self._folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    # ---- objects ----------------------------------------------------------------------------------------------

    def write(self, objects: list[Object]) -> None:
        """Make these objects the only ones in the API server, in this order."""
        wanted = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        for key, old in list(self._objects.items()):
            if key not in wanted or (key[0] == "Service" and not _may_change(old, wanted[key])):
                self._server.delete(self._objects.pop(key))
        for key, each in wanted.items():
            if self._objects.get(key) != each:
                self._put(each, self._objects.get(key))
                self._objects[key] = each

    def change(self, objects: list[Object]) -> None:
        """The same, and wait until it is programmed.

        The rules show the marker in both families then. It changes twice, because kube-proxy ends a sync with work on
        conntrack: when the rules show the second change, the sync of the first one has ended. The time of the last
        sync would not tell: a sync that ends after a write may have begun before its event arrived.
        """
        for _ in range(2):
            self._step += 1
            self.write([*objects, *marker(self._step)])
            self._wait(self._shows_marker, f"does not program the marker of step {self._step}")

    def _shows_marker(self) -> bool:
        port = marker_port(self._step)
        for family in FAMILIES:
            service, endpoint = (re.escape(of.of(family)) for of in (cluster_ip(MARKER), address_of(MARKER_POD)))
            if self._mode == "nftables":
                rules = self._namespace.run("nft", "list", "table", "ip6" if family == 6 else "ip", "kube-proxy")
                wanted = rf"{service} \. tcp \. {port} ", rf"{endpoint} \. {port}\b"
            else:
                rules = self._namespace.run(f"{'ip6' if family == 6 else 'ip'}tables-legacy-save", "-t", "nat")
                wanted = rf"-d {service}/\d+ .*--dport {port} ", rf"{endpoint}\]?:{port}\b"
            if not all(re.search(pattern, rules) for pattern in wanted):
                return False
        return True

    def _put(self, item: Object, old: Object | None) -> None:
        server = self._server
        if old is None:
            server.create({name: value for name, value in item.items() if name != "status"})
        else:
            server.patch(item, _difference(old, item))
        if "status" in item and (old is None or old.get("status") != item["status"]):
            server.patch_status(item)

    # ---- process ----------------------------------------------------------------------------------------------

    def start(self, mode: str, scenario: Scenario) -> None:
        """Start it with the scenario's objects and wait until they are programmed."""
        self.write(scenario.objects())
        self._mode = mode
        for _ in range(STARTS):
            self._world.give(scenario.node_addresses())
            self._launch(mode, scenario.config)
            self._wait(self._has_synced, "has not programmed both families")
            if mode != "nftables" or self._drops_unallocated():
                return
            self.stop()
        raise LabError(f"kube-proxy had no ServiceCIDRs at its first sync, {STARTS} times:\n{self.log()[-3000:]}")

    def _drops_unallocated(self) -> bool:
        """Whether both families drop what goes to a cluster IP that no Service has.

        kube-proxy does not wait for the ServiceCIDRs before its first sync. If they come later, it adds this rule at
        the next full sync, up to an hour later (``OnServiceCIDRsChanged`` requests none).
        """
        return all(
            "Drop traffic to unallocated ClusterIPs"
            in self._namespace.run("nft", "list", "chain", family, "kube-proxy", "cluster-ips-check")
            for family in ("ip", "ip6")
        )

    def _launch(self, mode: str, config: dict[str, Any]) -> None:
        document = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": mode,
            "hostnameOverride": self._world.node.name,
            "clientConnection": {"kubeconfig": str(self._kubeconfig), "qps": -1.0},
            "conntrack": _NO_SYSCTLS,
            **config,
        }
        document[mode] = {"minSyncPeriod": "1ms"} | config.get(mode, {})
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(document))
        self._started = time.time()
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace.name, kube_proxy(), "--config", path],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": f"{self._path}:{os.environ['PATH']}"},
                preexec_fn=die_with_parent,
                start_new_session=True,
            )

    def _has_synced(self) -> bool:
        stamps = {family: float(value) for family, value in SYNCED.findall(self._namespace.call(_scrape))}
        return len(stamps) == 2 and all(stamp > self._started for stamp in stamps.values())

    def _wait(self, condition: Callable[[], bool], failure: str) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            if self._process is None or self._process.poll() is not None or time.monotonic() > end:
                raise LabError(f"kube-proxy {failure}:\n{self.log()[-3000:]}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it and remove its rules, so that the next one finds none."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        for tool in ("iptables-legacy", "ip6tables-legacy"):
            for table in ("nat", "filter", "mangle"):
                for option in ("-F", "-X"):
                    self._namespace.run(tool, "-t", table, option, check=False)
        self._namespace.run("nft", "flush", "ruleset")
        self._namespace.run("conntrack", "-F", check=False)
        self._world.give([])

    def _legacy_tools(self) -> Path:
        folder = self._folder / "tools"
        folder.mkdir(exist_ok=True)
        for tool in _TOOLS:
            family, _, verb = tool.partition("-")
            (folder / tool).symlink_to(f"/usr/sbin/{family}-legacy" + (f"-{verb}" if verb else ""))
        return folder


def _difference(old: Object, new: Object) -> Object:
    """A merge patch from one to the other."""
    patch: Object = {}
    for name in {**old, **new}:
        if name == "status" or old.get(name) == new.get(name):
            continue
        if isinstance(old.get(name), dict) and isinstance(new.get(name), dict):
            patch[name] = _difference(old[name], new[name])
        else:
            patch[name] = new.get(name)
    return patch


def _may_change(old: Object, new: Object) -> bool:
    """The API server does not allow changes of these."""
    fixed = ("clusterIPs", "ipFamilies", "ipFamilyPolicy", "type")
    return all(old["spec"].get(name) == new["spec"].get(name) for name in fixed)
