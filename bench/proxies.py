# SPDX-License-Identifier: Apache-2.0
"""Runs a proxy on a node with the real API server: pyebpf-proxy, or kube-proxy in one of its modes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pyebpf_proxy.lab.agent import SYNCED, _scrape, command
from pyebpf_proxy.lab.namespace import Namespace, die_with_parent
from tests.support.reference import kube_proxy

OURS, NFTABLES, IPTABLES = "ours", "nftables", "iptables"
WORDS = {OURS: "pyebpf-proxy", NFTABLES: "kube-proxy, nftables", IPTABLES: "kube-proxy, iptables"}
#: Time limit until everything is programmed; kube-proxy takes minutes for tens of thousands of services.
START_SECONDS = 900.0
_TOOLS = ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore")


class Proxy:
    """A proxy's process in a node's namespace. ``folder`` is its directory; pyebpf-proxy's state is in ``state``."""

    def __init__(self, kind: str, namespace: Namespace, folder: Path) -> None:
        self.kind = kind
        self._namespace = namespace
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, kubeconfig: Path, node: str, cluster_cidr: str, families: int = 1) -> float:
        """Start the process and wait until all is programmed.

        The result: the seconds that this took, by the timestamps in the metrics of ``families`` IP families.
        """
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(self._configuration(kubeconfig, node, cluster_cidr)))
        state = str(self._folder / "state")
        program = [*command(), "--directory", state] if self.kind == OURS else [str(kube_proxy())]
        self._namespace.call(_scrape)  # start the worker that scrapes before the time is measured
        begin = time.time()
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace.name, *program, "--config", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": f"{_legacy_tools(self._folder)}:{os.environ['PATH']}"},
                preexec_fn=die_with_parent,
            )
        last = [0.0]

        def programmed() -> bool:
            stamps = self.synced()
            last[0] = max(stamps.values(), default=0.0)
            return "IPv4" in stamps and sum(stamp > begin for stamp in stamps.values()) >= families

        self.wait(programmed, "programmed", 0.1, START_SECONDS)
        return last[0] - begin

    def stop(self) -> None:
        """Kill the process; the programmed state stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        """The log of the process."""
        return (self._folder / "log").read_text(errors="replace")

    def synced(self) -> dict[str, float]:
        """Unix time of the last sync by family, from the process's metrics. Families without a sync are left out."""
        text = self._namespace.call(_scrape)
        return {family: float(stamp) for family, stamp in SYNCED.findall(text) if float(stamp)} if text else {}

    def wait(self, condition: Callable[[], Any], what: str, pause: float, seconds: float) -> None:
        """Wait for the condition; RuntimeError with the end of the log if it is not met in time."""
        end = time.monotonic() + seconds
        while not condition():
            if self._process is None or self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{WORDS[self.kind]}: still not {what}; its log ends with:\n{self.log()[-3000:]}")
            time.sleep(pause)

    def check(self, services: int) -> None:
        """Check that kube-proxy has programmed this many IPv4 services, without its metrics."""
        if self.kind == NFTABLES:
            found = self._namespace.run("nft", "list", "map", "ip", "kube-proxy", "service-ips").count(": goto ")
        else:
            text = self._namespace.run("iptables-legacy-save", "-t", "nat")
            found = sum(line.startswith(":KUBE-SVC-") for line in text.splitlines())
        if found < services:
            raise RuntimeError(f"{WORDS[self.kind]} reports {found} of {services} services")

    def memory_mib(self) -> float:
        """The current resident memory of the process, in MiB."""
        return resident_mib(self.pid)

    def cpu_seconds(self) -> float:
        """CPU time used so far by the threads of the process, and by child processes that have ended."""
        tasks = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                tasks += int((task / "schedstat").read_text().split()[0])
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return tasks / 1e9 + (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    def _configuration(self, kubeconfig: Path, node: str, cluster_cidr: str) -> dict[str, Any]:
        # All proxies have the same settings: no deliberate delays, and no periodic work during a measurement.
        timing = {"minSyncPeriod": "1ms", "syncPeriod": "1h"}
        mode = IPTABLES if self.kind == IPTABLES else NFTABLES
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": mode,
            "hostnameOverride": node,
            "clusterCIDR": cluster_cidr,
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            # These sysctls are not per namespace.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            mode: timing,
        }


def resident_mib(pid: int) -> float:
    """The current resident memory of a process, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in its status")


def _legacy_tools(folder: Path) -> Path:
    """A folder with iptables-legacy as iptables: it writes a table at once, and is faster with many rules."""
    tools = folder / "tools"
    if not tools.exists():
        tools.mkdir()
        for tool in _TOOLS:
            family, _, verb = tool.partition("-")
            (tools / tool).symlink_to(f"/usr/sbin/{family}-legacy" + (f"-{verb}" if verb else ""))
    return tools
