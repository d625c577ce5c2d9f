# SPDX-License-Identifier: Apache-2.0
"""A node's agent: the real command, run in the node's namespace by ``ip netns exec``."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from pyebpf_proxy.config.datapath_model import API_VERSION, KIND
from pyebpf_proxy.lab import addresses
from pyebpf_proxy.lab.namespace import LabError, Namespace, die_with_parent

METRICS = ("127.0.0.1", 10249)
_STAMP = r'^kubeproxy_sync_proxy_rules_%s_seconds\{.*?ip_family="(\w+)".*?\} (\S+)$'
SYNCED = re.compile(_STAMP % "last_timestamp", re.MULTILINE)
QUEUED = re.compile(_STAMP % "last_queued_timestamp", re.MULTILINE)
START_DEADLINE = 120.0
#: Environment variable: with 1 or 0, the fast path of every agent is on or off, unless the test sets it.
FAST_PATH = "PEP_FAST_PATH"
#: With 1, every agent has XDP on its node's eth0 (and the fast path on), unless the test sets the devices.
XDP = "PEP_XDP"
#: With 1, every agent has only the DaemonSet's capabilities, unless the test sets ``enter`` of :meth:`Agent.start`.
FEW_RIGHTS = "PEP_FEW_RIGHTS"
_KEPT = "-all,+bpf,+net_admin,+perfmon"
#: Runs the command that follows with only the capabilities that the DaemonSet gives the agent.
THREE_CAPABILITIES = ("setpriv", f"--bounding-set={_KEPT}", f"--inh-caps={_KEPT}")


def command() -> list[str]:
    """The agent's command: the console script in the interpreter's folder, else the module."""
    script = Path(sys.executable).with_name("pyebpf-proxy")
    return [str(script)] if script.exists() else [sys.executable, "-m", "pyebpf_proxy"]


class Process(Protocol):
    """What a lab needs of an agent's process; ``subprocess.Popen`` has it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class Agent:
    """One agent with its configuration, its process and its log. It may be started and stopped repeatedly."""

    def __init__(self, node_name: str, namespace: Namespace, folder: Path, manifests: Path) -> None:
        self.node_name = node_name
        self.namespace = namespace
        self.folder = folder  # configuration and log
        self.directory = folder / "state"  # --directory
        self.manifests = manifests
        self.process: Process | None = None
        #: Starts the process with these arguments and this log file, instead of :func:`command` (tests/model).
        self.launch: Callable[[Sequence[str], Path], Process] | None = None
        #: The folder from which another version of the package is imported.
        self.tree: Path | None = None
        self._ever_started = False
        self._bpffs = False

    @property
    def log_file(self) -> Path:
        return self.folder / "agent.log"

    def log(self) -> str:
        """The log of all runs of this agent."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def mount_bpffs(self) -> None:
        """Mount a bpffs where the agent looks first, so that its pins are removed with the lab."""
        point = self.directory / "bpf"
        point.mkdir(parents=True)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"bpffs", str(point).encode(), b"bpf", 0, None) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(point))
        self._bpffs = True

    def configuration(self, changes: dict[str, Any] | None = None) -> dict[str, Any]:
        """The lab's KubeProxyConfiguration, with top-level fields replaced by ``changes``."""
        base: dict[str, Any] = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "hostnameOverride": self.node_name,
            "clusterCIDR": ",".join(addresses.POD_CIDR),
            "iptables": {"minSyncPeriod": "10ms"},
        }
        return base | (changes or {})

    def start(
        self,
        config: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
        enter: Sequence[str] = (),
    ) -> None:
        """Start the process without waiting (see ``wait_synced``). ``own``: fields of a DatapathConfiguration file.

        ``enter``: the command that runs the agent in the node's network namespace; empty: ``ip netns exec``.
        """
        if self.process is not None:
            raise LabError(f"the agent of {self.node_name} is already running")
        self.folder.mkdir(exist_ok=True, parents=True)
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.configuration(config), sort_keys=False))
        arguments = ["--config", str(path), "--manifests", str(self.manifests), *self._directory()]
        own = _with_run_defaults(own)
        if own is not None:
            path = self.folder / "datapath.yaml"
            path.write_text(yaml.safe_dump({"apiVersion": API_VERSION, "kind": KIND, **own}, sort_keys=False))
            arguments += ["--datapath-config", str(path)]
        self.started = time.time()
        self._ever_started = True
        if self.launch is not None and not enter:
            self.process = self.launch(arguments, self.log_file)
            return
        with open(self.log_file, "ab") as log:
            self.process = subprocess.Popen(
                [*(enter or self._enter()), *self._command(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
                start_new_session=True,  # Ctrl-C reaches only the lab, which ends the agent
            )

    def _enter(self) -> tuple[str, ...]:
        if not _wanted(FEW_RIGHTS):
            return ("ip", "netns", "exec", self.namespace.name)
        # As in a container, /sys is that of the host; ``ip netns exec`` would mount a new one.
        return ("nsenter", f"--net={self.namespace.path}", *THREE_CAPABILITIES)

    def _command(self) -> list[str]:
        return command() if self.tree is None else ["env", f"PYTHONPATH={self.tree}", *command()]

    def _directory(self) -> list[str]:
        return ["--directory", str(self.directory)]

    def wait_synced(self, since: float | None = None, deadline: float = START_DEADLINE) -> None:
        """Wait until both families are synced with files written at ``since`` (``time.time``; default: the start).

        This waits for the end of a sync that was requested after ``since``: a sync that only ends after ``since`` may
        have started before. If several files are written one after the other, wait for each: the agent may read one
        before the next exists.
        """
        threshold = self.started if since is None else since
        end = time.monotonic() + deadline
        while True:
            text = self.metrics()
            stamps, queued = _stamps(SYNCED, text), _stamps(QUEUED, text)
            if stamps and all(stamp >= queued[family] >= threshold for family, stamp in stamps.items()):
                return
            if self.process is None or self.process.poll() is not None:
                raise LabError(f"the agent of {self.node_name} ended:\n{self.log()}")
            if time.monotonic() > end:
                known = f"ended {stamps}, requested {queued}"
                raise LabError(f"no sync on {self.node_name} after {deadline} s ({known}):\n{self.log()}")
            time.sleep(0.02)

    def synced(self) -> dict[str, float]:
        """Time of each family's last sync, from the agent's metrics; empty while it does not answer."""
        return _stamps(SYNCED, self.metrics())

    def metrics(self) -> str:
        """The agent's metrics page, empty while it does not answer."""
        return self.namespace.call(_scrape)

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self.signal(signal.SIGKILL)
        self.wait_ended()

    def wait_ended(self, deadline: float = 30.0) -> int:
        """Wait for the end. The result: the exit status, negative for a signal."""
        if self.process is None:
            return 0
        try:
            status = self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            self.process = None
            raise LabError(f"the agent of {self.node_name} did not end in {deadline} s:\n{self.log()}") from None
        self.process = None
        return status

    def stop(self) -> int:
        """Send SIGTERM and wait."""
        self.terminate()
        return self.wait_ended()

    def cleanup(self, *flags: str) -> str:
        """Run ``--cleanup``; returns its output. Raises LabError if it fails."""
        return self.namespace.run(*self.cleanup_command(*flags))

    def cleanup_command(self, *flags: str) -> list[str]:
        """The command of ``cleanup``."""
        enter = ["ip", "netns", "exec", self.namespace.name]
        return [*enter, *self._command(), "--cleanup", *flags, *self._directory()]

    def close(self) -> None:
        """Stop the agent at the end of the lab. With the lab's own bpffs, no clean-up is needed."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        if self._ever_started and not self._bpffs:
            self.cleanup()

    def pin(self, name: str) -> Path:
        """Path of a pinned map. Raises LabError if there is none."""
        for path in self.directory.glob(f"bpf/**/{name}"):
            return path
        raise LabError(f"no pinned map {name} below {self.directory}/bpf")


def _stamps(which: re.Pattern[str], page: str) -> dict[str, float]:
    """The timestamps of a metric, by family."""
    return {family: float(value) for family, value in which.findall(page)}


def _with_run_defaults(own: dict[str, Any] | None) -> dict[str, Any] | None:
    """The test's fields, with defaults for the whole test run from the environment."""
    options: dict[str, Any] = {}
    if _wanted(XDP):
        options = {"fastPath": True, "xdpDevices": ["eth0"]}
    if (fast := _wanted(FAST_PATH)) is not None:
        options["fastPath"] = fast
    return {**options, **(own or {})} if options else own


def _wanted(variable: str) -> bool | None:
    """Whether the variable is 1; None if it is not set."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise LabError(f"{variable} is {value}: must be 1 (on) or 0 (off)")
    return value == "1" if value else None


def _scrape() -> str:
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(*METRICS, timeout=5)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()
    return ""
