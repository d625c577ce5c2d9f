# SPDX-License-Identifier: Apache-2.0
"""A node for one process, our agent or kube-proxy: a network namespace joined to the API server's by a pair of links.

Each process gets a new node, so that none finds rules or maps of another.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from pyebpf_proxy.lab.agent import SYNCED, _scrape, command
from pyebpf_proxy.lab.namespace import Namespace, batch, die_with_parent, set_network_namespace
from tests.cluster.apiserver import ADMIN_TOKEN, ApiServer
from tests.cluster.reference import kube_proxy

from . import workload
from .api_load import ADDRESS

OURS, NFTABLES, IPTABLES = "ours", "nftables", "iptables"
WORDS = {OURS: "pyebpf-proxy", NFTABLES: "kube-proxy, nftables", IPTABLES: "kube-proxy, iptables"}
#: node1 of the workload.
NODE, NODE_ADDRESS = "node1", "192.0.2.11"
START_SECONDS = 900.0
_TOOLS = ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore")
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


@contextmanager
def in_namespace(name: str) -> Iterator[None]:
    """This thread, and what it starts, in a new network namespace."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    namespace = Namespace(name)
    namespace.create()
    try:
        set_network_namespace(namespace.path)
        yield
    finally:
        set_network_namespace(f"/proc/self/fd/{here}")
        os.close(here)
        namespace.remove()


class Node:
    """``with Node(OURS, server) as node``: it runs and has programmed everything; ``start_seconds`` says how soon."""

    def __init__(self, kind: str, server: ApiServer, services: int) -> None:
        self.kind = kind
        self.services = services
        number = next(_numbers)
        self.namespace = Namespace(f"bench-{kind}-{os.getpid()}-{number}")
        self._link = f"node{number}"
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None
        self._left = contextlib.ExitStack()

    def __enter__(self) -> Node:
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-node-")))
            self.namespace.create()
            stack.callback(self.namespace.remove)
            batch(
                [
                    f"link add {self._link} type veth peer name eth0 netns {self.namespace.name}",
                    f"address add {ADDRESS}/24 dev {self._link}",
                    f"link set {self._link} up",
                ]
            )
            # At once: the kernel takes its time to remove what is in a namespace without a name.
            stack.callback(batch, [f"link del {self._link}"])
            self.namespace.ip(
                f"address add {NODE_ADDRESS}/24 dev eth0", "link set eth0 up", f"route add default via {ADDRESS}"
            )
            if self.kind == OURS:
                self._mount_bpffs(stack)
            stack.callback(self._end)
            self.start_seconds = self._start()
            self._left = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        """What it has said."""
        return (self.folder / "log").read_text(errors="replace")

    def synced(self) -> float:
        """When IPv4 was programmed last, Unix time, by the process's own metric; 0 if not yet."""
        text = self.namespace.call(_scrape)
        return float(dict(SYNCED.findall(text)).get("IPv4", 0)) if text else 0.0

    def wait(self, condition: Callable[[], Any], what: str, pause: float, seconds: float) -> None:
        """Until the condition holds; RuntimeError with the log's end if it never does."""
        end = time.monotonic() + seconds
        while not condition():
            if self._process is None or self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{WORDS[self.kind]}: still not {what}; its log ends with:\n{self.log()[-3000:]}")
            time.sleep(pause)

    def memory_mib(self) -> float:
        """Its resident memory now, MiB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("no VmRSS in its status")

    def cpu_seconds(self) -> float:
        """CPU time that its threads and the programs it waited for have used so far."""
        tasks = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                tasks += int((task / "schedstat").read_text().split()[0])
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return tasks / 1e9 + (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    # ---- inside ------------------------------------------------------------------------------------------------

    def _start(self) -> float:
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self._configuration()))
        program = [*command(), "--directory", str(self.folder / "state")] if self.kind == OURS else [str(kube_proxy())]
        self.namespace.call(_scrape)  # the worker that asks is there before the clock starts
        begin = time.time()
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace.name, *program, "--config", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": f"{self._tools()}:{os.environ['PATH']}"},
                preexec_fn=die_with_parent,
            )
        found: list[float] = []
        self.wait(lambda: found.append(self.synced()) or found[-1] > begin, "programmed", 0.1, START_SECONDS)  # type: ignore[func-returns-value]
        self._check()
        return found[-1] - begin

    def _configuration(self) -> dict[str, Any]:
        kubeconfig = self._server.kubeconfig(
            self.folder / "kubeconfig", {"token": ADMIN_TOKEN}, f"https://{ADDRESS}:{self._server.port}"
        )
        text = yaml.safe_load(kubeconfig.read_text())
        # The certificate is for the API server's other address.
        text["clusters"][0]["cluster"]["tls-server-name"] = "localhost"
        kubeconfig.write_text(yaml.safe_dump(text))
        # The same for all: nothing waits on purpose, and nothing that is done by the clock falls into a measurement.
        timing = {"minSyncPeriod": "1ms", "syncPeriod": "1h"}
        mode = IPTABLES if self.kind == IPTABLES else NFTABLES
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": mode,
            "hostnameOverride": NODE,
            "clusterCIDR": workload.POD_CIDR,
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            # Those are not a namespace's.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            mode: timing,
        }

    def _tools(self) -> Path:
        """iptables as its legacy variant, which writes a table in one go, and is the quicker one with many rules."""
        folder = self.folder / "tools"
        folder.mkdir()
        for tool in _TOOLS:
            family, _, verb = tool.partition("-")
            (folder / tool).symlink_to(f"/usr/sbin/{family}-legacy" + (f"-{verb}" if verb else ""))
        return folder

    def _mount_bpffs(self, stack: contextlib.ExitStack) -> None:
        point = self.folder / "state" / "bpf"
        point.mkdir(parents=True)
        if _libc.mount(b"bpffs", str(point).encode(), b"bpf", 0, None) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(point))
        stack.callback(_libc.umount2, str(point).encode(), 2)

    def _check(self) -> None:
        """Everything is there, by another way than its own word."""
        if self.kind == OURS:
            return  # flips.Words reads the maps
        if self.kind == NFTABLES:
            found = self.namespace.run("nft", "list", "map", "ip", "kube-proxy", "service-ips").count(": goto ")
        else:
            text = self.namespace.run("iptables-legacy-save", "-t", "nat")
            found = sum(line.startswith(":KUBE-SVC-") for line in text.splitlines())
        if found < self.services:
            raise RuntimeError(f"{WORDS[self.kind]} says that it is done with {found} of {self.services} services")

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
