# SPDX-License-Identifier: Apache-2.0
"""A node: its own namespaces with containerd and a kubelet."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.e2e import images
from tests.e2e.cni import Cni
from tests.e2e.layout import BRIDGE, CONTROL, STORE, Network, node_name
from tests.e2e.problem import E2EError
from tests.e2e.processes import State, kill_all, wait_for
from tests.e2e.programs import UNPACKED, search_path

CGROUPS = Path("/sys/fs/cgroup")
_HERE = Path(__file__).parent
#: Of 1024 shares; the rest is for everything else on the machine, if cgroups have shares.
_CPU_SHARES = "400"


def run(*command: str | Path, check: bool = True) -> str:
    """A program's output. E2EError with its message if it fails."""
    done = subprocess.run(
        list(map(str, command)), check=False, capture_output=True, text=True, env=os.environ | {"PATH": search_path()}
    )
    if check and done.returncode:
        shown = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise E2EError(f"{' '.join(map(str, command))[:200]}: {shown}")
    return done.stdout


def hierarchies() -> list[Path]:
    """Where a node's cgroup must exist: each hierarchy of cgroup v1, or cgroup v2."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in sorted(CGROUPS.iterdir()) if path.is_dir() and path.name != "unified"]


class Node:
    """Node NUMBER of a cluster."""

    def __init__(self, state: State, number: int, network: Network) -> None:
        self.number = number
        self.name = node_name(number)
        self.network = network
        self.addresses = network.node(number)
        self.folder = state.folder / self.name
        self._state = state
        #: The control plane's end of its link.
        self._port = f"node{number}"
        self._keys = state.folder / "pki"
        #: A kubeconfig with all rights.
        self.admin = self._keys / "admin.conf"

    # ---- life ------------------------------------------------------------------------------------------------------

    def start(self, archives: list[Path]) -> None:
        """Namespaces, containerd with the images, kubelet."""
        self._plug()
        self._begin()
        self._make_cgroups()
        self.start_containerd()
        for archive in archives:
            self.run("ctr", "-n", "k8s.io", "images", "import", "--all-platforms", archive)
        self.start_kubelet()

    def reboot(self) -> None:
        """End everything in the node, as a power failure does, and start it again: only its disk stays.

        Routes and CNI come with ``connect_pods``.
        """
        self._state.stop(self.name, 0.0)
        # With process 1 all others of the PID namespace end. Some of them take a moment.
        kill_all(lambda: [int(pid) for pid in run("ip", "netns", "pids", self.name, check=False).split()])
        # The kernel removes the devices of a namespace later, and this name is needed now.
        run("ip", "-n", CONTROL, "link", "del", self._port)
        run("ip", "netns", "del", self.name)
        self._plug()
        self._begin()
        self.start_containerd()
        self.start_kubelet()

    def run(self, *command: str | Path, check: bool = True) -> str:
        """Run a command in the node."""
        return run(*self._enter(), *command, check=check)

    def start_containerd(self) -> None:
        configuration = self.folder / "containerd.toml"
        configuration.write_text(self._containerd())
        self._spawn("containerd", "containerd", "-c", configuration)
        wait_for(f"{self.name}: containerd answers", lambda: "Server:" in self.run("ctr", "version", check=False), 60)

    def start_kubelet(self) -> None:
        configuration = self.folder / "kubelet.yaml"
        configuration.write_text(yaml.safe_dump(self._kubelet()))
        self._spawn(
            "kubelet",
            "kubelet",
            f"--config={configuration}",
            f"--kubeconfig={self._keys / self.name}.conf",
            f"--node-ip={','.join(self.addresses)}",
            f"--hostname-override={self.name}",
            "--v=2",
        )

    def stop_program(self, program: str, signal: str = "TERM") -> None:
        """End containerd or the kubelet; containers continue."""
        pid = (self.folder / f"{program}.pid").read_text().strip()
        self.run("kill", f"-{signal}", pid, check=False)
        wait_for(f"{self.name}: {program} has ended", lambda: not self._exists(pid), 60)

    def keep_running(self, name: str, *command: str | Path, environment: Mapping[str, str] | None = None) -> None:
        """Start a program in the node unless it runs."""
        if not self._state.runs(f"{self.name}-{name}"):
            values = [f"{variable}={value}" for variable, value in (environment or {}).items()]
            self._spawn(name, *(["env", *values] if values else []), *command)

    def mount_cgroup(self, target: str) -> None:
        """Mount a cgroup of the node, of version 2, in the node."""
        parent = CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "unified"
        group = parent / self.name
        group.mkdir(exist_ok=True)
        self.run("mkdir", "-p", target)
        self.run("mount", "--bind", group, target)

    def _exists(self, pid: str) -> bool:
        done = subprocess.run([*self._enter(), "kill", "-0", pid], check=False, capture_output=True)
        return done.returncode == 0

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _plug(self) -> None:
        """The network namespace, on the control plane's bridge."""
        run("ip", "netns", "add", self.name)
        peer = ["peer", "name", self._port, "netns", CONTROL]
        run("ip", "link", "add", "eth0", "netns", self.name, "type", "veth", *peer)
        run("ip", "-n", CONTROL, "link", "set", self._port, "master", BRIDGE, "up")
        run("ip", "-n", self.name, "link", "set", "lo", "up")
        for address in self.addresses:
            suffix = ["/64", "nodad"] if ":" in address else ["/24"]
            run("ip", "-n", self.name, "addr", "add", address + suffix[0], "dev", "eth0", *suffix[1:])
        run("ip", "-n", self.name, "link", "set", "eth0", "up")
        settings = ["net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv6.conf.all.forwarding=1"]
        run("ip", "netns", "exec", self.name, "sysctl", "-qw", *settings)
        run("ip", "-n", self.name, "route", "add", "default", "via", self.network.api)
        if self.network.dual:
            run("ip", "-n", self.name, "-6", "route", "add", "default", "via", self.network.api6)

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "ready").unlink(missing_ok=True)
        # --kill-child: when this process ends, so does process 1 of the PID namespace, and with it all others there.
        namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        script: list[str | Path] = ["sh", _HERE / "node_init.sh", self.name, self.folder, STORE / "pause"]
        enter: list[str | Path] = ["nsenter", f"--net=/run/netns/{self.name}"]
        self._state.spawn(self.name, [*enter, *namespaces, *script])

        def is_ready() -> bool:
            self._state.must_run(self.name)
            return (self.folder / "ready").exists()

        wait_for(f"{self.name}: its namespaces", is_ready, 30)

    def _enter(self) -> list[str]:
        parent = self._state.runs(self.name)
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:
            children = []
        if not children:
            raise E2EError(f"{self.name} does not run")
        return ["nsenter", "-t", children[0], "--mount", "--uts", "--net", "--pid", "--"]

    def _spawn(self, name: str, *command: str | Path) -> None:
        """Start it in the node; NAME.pid has its pid as the node sees it."""
        script = 'echo $$ >"$0"; exec "$@"'
        self._state.spawn(
            f"{self.name}-{name}", [*self._enter(), "sh", "-c", script, self.folder / f"{name}.pid", *command]
        )

    def _make_cgroups(self) -> None:
        for hierarchy in hierarchies():
            folder = hierarchy / self.name
            folder.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                # On cgroup v1 a new group has neither, and then no process can run in it.
                if (folder / file).exists() and not (folder / file).read_text().strip():
                    (folder / file).write_text((hierarchy / file).read_text() if (hierarchy / file).exists() else "0")
            if (folder / "cpu.shares").exists():
                (folder / "cpu.shares").write_text(_CPU_SHARES)

    def connect_pods(self, cni: Cni, ranges: list[str], others: list[tuple[Node, list[str]]]) -> None:
        """CNI for the pods' ranges, and routes to the other nodes' pods."""
        for node, subnets in others if not cni.routes else ():
            for subnet in subnets:
                run("ip", "-n", self.name, "route", "replace", subnet, "via", node.gateway(subnet))
        for subnet in ranges:
            run("ip", "-n", CONTROL, "route", "replace", subnet, "via", self.gateway(subnet))
        plugins = cni.start(self, ranges)
        folder = self.folder / "root/etc/cni/net.d"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "10-pep-e2e.conflist").write_text(
            json.dumps({"cniVersion": "0.4.0", "name": "pep-e2e", "plugins": plugins}, indent=1)
        )

    def gateway(self, subnet: str) -> str:
        """This node's address in the subnet's family."""
        return self.addresses[1 if ":" in subnet else 0]

    def _containerd(self) -> str:
        # restrict_oom_score_adj: without it runc fails on machines where the score may not be lowered.
        return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{images.PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{UNPACKED}/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{UNPACKED}/usr/sbin/runc"
      SystemdCgroup = false
"""

    def _kubelet(self) -> dict[str, object]:
        resolver = self.folder / "resolv.conf"
        resolver.write_text("nameserver 127.0.0.1\n")
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{self._keys}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "clusterDNS": [self.network.dns],
            "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "resolvConf": str(resolver),
            "tlsCertFile": f"{self._keys / self.name}.crt",
            "tlsPrivateKeyFile": f"{self._keys / self.name}.key",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 99,
            "imageGCLowThresholdPercent": 98,
            "kubeAPIQPS": 100,
            "kubeAPIBurst": 200,
        }
