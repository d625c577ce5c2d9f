# SPDX-License-Identifier: Apache-2.0
"""The proxy is replaced under load, with the commands of docs/cluster.md, in the cluster of `make cluster-up`."""

from __future__ import annotations

import datetime
import functools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyebpf_proxy.cluster.objects import AGENT, CLEANING, ON
from tests.e2e import results
from tests.e2e.cluster import Cluster
from tests.e2e.commands import Fault, run_command, title
from tests.e2e.control_plane import start_api_server
from tests.e2e.layout import NEXT_IMAGE, NODES, PROXY_IMAGE, RELEASE
from tests.e2e.problem import E2EError
from tests.e2e.processes import wait_for

_LOAD = Path(__file__).parent / "load.yaml"
#: From the repository's folder, in which the commands run.
DATAPATH = "tests/e2e/datapath.yaml"
#: The namespace of the load.
LOAD_SPACE = "pep-load"
RATE = 1000
#: No registry has it, and no name server knows the registry.
MISSING_IMAGE = "registry.invalid/pyebpf-proxy:1"
#: How long connections are recorded after a step.
_AFTER = 5.0
#: How long logs may be out of reach: a kubelet or a runtime is being restarted.
LOGS_SECONDS = 60.0
#: How long the API server is away. With its start, less than the 40 s after which nodes count as lost.
_OUTAGE = 10.0
#: How long a command may take until a fault can begin.
_BEGINS = 120.0
_AGENTS = ("-n", "kube-system", "-l", "k8s-app=pyebpf-proxy")


@dataclass(frozen=True)
class Step:
    """A step, and its connections.

    ``status``: the command's exit status; None: no command. ``fault``: what happened in the middle of the command.
    """

    what: str
    status: int | None
    seconds: float
    connections: int
    failed: int
    fault: str = ""


class Load:
    """1 000 connections a second from a pod and from the node on each node. ``with Load(cluster) as load``."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: By pod: how many connections were counted last.
        self._counted: dict[str, int] = {}
        #: The connections of pods that have left, and how many of them failed.
        self._left = (0, 0)

    def __enter__(self) -> Load:
        text = _LOAD.read_text()
        if self._cluster.proxy.endswith("-nftables"):
            # In this mode kube-proxy serves no NodePorts on 127.0.0.1.
            text = text.replace('127.0.0.1, "30080", ', "")
        self._cluster.kubectl("apply", "-f", "-", text=text)
        for kind in ("deployment/web", "daemonset/pod", "daemonset/node"):
            self._cluster.kubectl("-n", LOAD_SPACE, "rollout", "status", kind, "--timeout=120s")
        self.watch()
        wait_for("connections succeed", lambda: self.count()[0] > 2 * RATE, 60)
        return self

    def watch(self) -> None:
        """Each pod of now must be counted from now on."""
        self._counted = dict.fromkeys(self._pods(), 0) | self._counted

    def leave(self, node: str) -> None:
        """Remove the pods of a node that is about to go; their connections so far count."""
        names = [name for name in self._pods(node) if name in self._counted]
        self.count()
        latest = self._latest()
        for name in names:
            self._left = (self._left[0] + latest[name][0], self._left[1] + latest[name][1])
            del self._counted[name]

    def join(self, node: str) -> None:
        """New pods on a node that has come back."""
        self._cluster.kubectl("-n", LOAD_SPACE, "delete", "pod", "--force", *self._pods(node))
        for kind in ("daemonset/pod", "daemonset/node"):
            self._cluster.kubectl("-n", LOAD_SPACE, "rollout", "status", kind, "--timeout=120s")
        self.watch()

    def __exit__(self, *_: object) -> None:
        self._cluster.kubectl("delete", "--ignore-not-found", "-f", _LOAD, check=False)

    def _logs(self) -> str:
        chosen = ("-n", LOAD_SPACE, "logs", "-l", "app=ask", "--tail=-1", "--max-log-requests=20", "--prefix")
        return self._cluster.kubectl(*chosen, check=False)

    def _pods(self, node: str = "") -> dict[str, int]:
        """How often each pod that opens connections, on one node or on all, has been restarted."""
        chosen = ["-n", LOAD_SPACE, "get", "pods", "-l", "app=ask", "-o", "json"]
        chosen += ["--field-selector", f"spec.nodeName={node}"] if node else []
        staying = [
            pod
            for pod in json.loads(self._cluster.kubectl(*chosen))["items"]
            if "deletionTimestamp" not in pod["metadata"]
        ]
        return {
            pod["metadata"]["name"]: sum(each["restartCount"] for each in pod["status"].get("containerStatuses", ()))
            for pod in staying
        }

    def _latest(self) -> dict[str, tuple[int, int]]:
        """By pod: its connections and those that failed, as far as its log can be read now."""
        found = re.findall(r"^\[pod/([^/\s]+)/\S+\] asked (\d+) failed (\d+)$", self._logs(), re.MULTILINE)
        return {pod: (int(asked), int(failed)) for pod, asked, failed in found}

    def count(self) -> tuple[int, int]:
        """How many connections, and how many have failed. E2EError if that is not known of each pod."""
        end = time.monotonic() + LOGS_SECONDS
        latest = self._latest()
        while unknown := [pod for pod, asked in self._counted.items() if latest.get(pod, (-1, 0))[0] < asked]:
            if time.monotonic() > end:
                raise E2EError(f"connections cannot be counted: the log of {', '.join(unknown)} has fewer than before")
            time.sleep(1)
            latest = self._latest()
        restarts = self._pods()
        lost = [pod for pod in self._counted if restarts.get(pod) != 0]
        if lost:
            raise E2EError(f"failures may have been lost: {', '.join(lost)} was restarted or replaced")
        counts = {pod: latest[pod] for pod in self._counted}
        self._counted = {pod: asked for pod, (asked, _) in counts.items()}
        asked, failed = zip(self._left, *counts.values(), strict=True)
        return sum(asked), sum(failed)

    def failures(self) -> list[str]:
        """A line for each failed connection."""
        return [line for line in self._logs().splitlines() if re.search(r"\] \d\d:\d\d:\d\d\.\d", line)]

    def stalls(self) -> list[int]:
        """How long the load itself did not run, in milliseconds, each time. Connections may take so much longer."""
        return [int(found) for found in re.findall(r"\] stalled (\d+) ms$", self._logs(), re.MULTILINE)]


class Run:
    """The steps, and their results."""

    def __init__(self, cluster: Cluster, load: Load) -> None:
        self._cluster = cluster
        self._load = load
        self.steps: list[Step] = []
        #: From the start of a container until its agent was ready, at the latest: one agent at a time, all at once.
        self.ready_seconds: dict[str, float] = {}

    def command(
        self,
        *words: str,
        statuses: Sequence[int] = (0,),
        says: str = "",
        fault: tuple[str, Fault] | None = None,
    ) -> None:
        """Run a command of docs/cluster.md. E2EError if its exit status or its output is not as expected.

        ``fault``: what happens in the middle, in words, and the function that does it.
        """
        shown = title(words)
        print(f"\n$ {shown}", flush=True)
        said = ""
        what, act = fault or ("", None)

        def run() -> int:
            nonlocal said
            show = functools.partial(print, end="", flush=True)
            status, said = run_command(self._cluster.kubeconfig, words, show, act)
            return status

        ended = self._step(shown, run, what)
        if ended not in statuses:
            raise E2EError(f"{shown}: exit status {ended}, not {' or '.join(map(str, statuses))}")
        if says not in said:
            raise E2EError(f"{shown}: does not say {says!r}")

    def action(self, what: str, action: Callable[[], object]) -> None:
        """Another event on the nodes; then wait until the agents are ready again."""

        def run() -> None:
            action()
            wait_for("the agents are ready", lambda: is_ready(self._cluster.agents()), 90)

        self._step(what, run)

    def _step(self, what: str, run: Callable[[], int | None], fault: str = "") -> int | None:
        before, began = self._load.count(), time.monotonic()
        status = run()
        seconds = time.monotonic() - began
        time.sleep(_AFTER)
        asked, failed = (now - then for now, then in zip(self._load.count(), before, strict=True))
        if not asked:
            raise E2EError(f"{what}: no connection was opened meanwhile")
        self.steps.append(Step(what, status, round(seconds, 1), asked, failed, fault))
        ended = "" if status is None else f"exit status {status}, "
        print(f"{what}: {ended}{seconds:.0f} s: {asked} connections, {failed} failed", flush=True)
        return status

    def restarts(self) -> None:
        """Restarts and drains of nodes while the agents serve them."""
        cluster = self._cluster
        agents = ("delete", "pod", *_AGENTS)

        def restart_kubelets() -> None:
            for node in cluster.nodes:
                node.stop_program("kubelet")
                node.start_kubelet()
            time.sleep(10)

        def restart_containerd() -> None:
            for node in cluster.nodes:
                node.stop_program("containerd", "KILL")
                node.start_containerd()
            time.sleep(10)

        def drain() -> None:
            name = cluster.nodes[-1].name
            cluster.kubectl("drain", name, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
            cluster.kubectl("uncordon", name)

        def reboot() -> None:
            # No pod opens connections to the NodePorts of this one.
            node = cluster.nodes[0]
            cluster.kubectl("drain", node.name, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
            self._load.leave(node.name)
            rebooted = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
            node.reboot()
            cluster.connect()

            def is_back() -> bool:
                # Node and pods say Ready until they have been silent for a while.
                (agent,) = (pod for pod in cluster.agents() if pod["spec"]["nodeName"] == node.name)
                return runs_since(agent) >= rebooted

            wait_for("an agent runs on the node again", is_back, 180)
            cluster.kubectl("uncordon", node.name)
            self._load.join(node.name)

        def delete_one_by_one() -> None:
            for pod in cluster.agents():
                cluster.kubectl("-n", "kube-system", "delete", "pod", pod["metadata"]["name"])
                wait_for("the agents are ready", lambda: is_ready(cluster.agents()), 90)

        self.action("agents deleted, one by one", delete_one_by_one)
        self._note_ready("oneByOne")
        self.action("agents deleted", lambda: cluster.kubectl(*agents))
        self._note_ready("atOnce")
        self.action("agents deleted by force", lambda: cluster.kubectl(*agents, "--grace-period=0", "--force"))
        self.action("kubelets restarted", restart_kubelets)
        self.action("containerd killed and started", restart_containerd)
        self.action("a node drained and uncordoned", drain)
        self.action("a node drained and rebooted", reboot)

    def interruptions(self) -> None:
        """Faults in the middle of the commands. After each, the next command continues, and no connection fails."""
        cluster = self._cluster
        # Both commands begin with it.
        node = cluster.nodes[0]

        def with_label(*values: str) -> list[str]:
            chosen = f"{AGENT} in ({','.join(values)})"
            return cluster.kubectl("get", "nodes", "-l", chosen, "-o", "name").split()

        def interrupt(process: subprocess.Popen[str]) -> None:
            wait_for("an agent is started", lambda: bool(with_label(ON)), _BEGINS)
            process.send_signal(signal.SIGINT)

        def outage(_: object) -> None:
            wait_for("the second agent is started", lambda: len(with_label(ON)) == 2, _BEGINS)
            cluster.state.stop("kube-apiserver")
            time.sleep(_OUTAGE)
            start_api_server(cluster.state, cluster.network)

        def kubelet_ends(label: str) -> Fault:
            def end(process: subprocess.Popen[str]) -> None:
                wait_for(f"{node.name} is {label}", lambda: f"node/{node.name}" in with_label(label), _BEGINS)
                node.stop_program("kubelet", "KILL")
                process.wait()
                node.start_kubelet()
                cluster.kubectl("wait", "--for=condition=Ready", f"node/{node.name}", "--timeout=60s")

            return end

        lost = f"{node.name}: the node's kubelet no longer reports"
        died = "the kubelet of a node ends"
        self.command("install", "--image", PROXY_IMAGE, statuses=[130], fault=("Ctrl-C", interrupt))
        self.command("install", fault=(f"no API server for {_OUTAGE:.0f} s", outage))
        self.command("rollback", statuses=[1], says=lost, fault=(died, kubelet_ends(CLEANING)))
        self.command("install", statuses=[1], says=lost, fault=(died, kubelet_ends(ON)))
        self.command("install")
        self.command("status", statuses=[0, 1], says=f"{NODES} of {NODES} nodes served by pyebpf-proxy")
        self.command("rollback")

    def _note_ready(self, how: str) -> None:
        logs = (
            self._cluster.kubectl("-n", "kube-system", "logs", pod["metadata"]["name"])
            for pod in self._cluster.agents()
        )
        self.ready_seconds[how] = max(map(ready_after, logs))
        print(f"an agent is ready {self.ready_seconds[how]:.2f} s after its container has started at the latest")


def is_ready(agents: Sequence[dict[str, Any]]) -> bool:
    """Whether each node has an agent that is ready and stays."""
    staying = [pod for pod in agents if "deletionTimestamp" not in pod["metadata"]]
    conditions = [each for pod in staying for each in pod["status"].get("conditions", ()) if each["type"] == "Ready"]
    return len(staying) == len(agents) == len(conditions) == NODES and all(
        each["status"] == "True" for each in conditions
    )


def runs_since(pod: dict[str, Any]) -> datetime.datetime:
    """When the pod's container has started; the earliest time if it does not run."""
    for container in pod["status"].get("containerStatuses", ()):
        if running := container["state"].get("running"):
            return datetime.datetime.fromisoformat(running["startedAt"])
    return datetime.datetime.min.replace(tzinfo=datetime.UTC)


def ready_after(log: str) -> float:
    """The seconds from the start of the agent's process until it was ready, as its log says."""
    found = re.findall(r"^\S+ info ready .*\bseconds=([\d.]+)$", log, re.MULTILINE)
    if not found:
        raise E2EError("the agent's log does not say when it was ready")
    return float(found[-1])


def run(record: bool) -> int:
    """Takeover and return by the commands, with faults and restarts. 1 if a connection failed."""
    cluster = Cluster()
    if not cluster.proxy.startswith("kube-proxy"):
        raise E2EError("this needs a cluster with kube-proxy: make cluster-up PROXY=kube-proxy")
    with Load(cluster) as load:
        made = Run(cluster, load)
        try:
            _steps(made, cluster)
        except BaseException:
            with suppress(E2EError):
                _show(load)
            raise
        failed = _show(load)
        if record:
            print(f"written: {save(made, cluster.proxy)}")
    return 1 if failed else 0


def _show(load: Load) -> int:
    """Print the connections of the whole run; how many have failed."""
    asked, failed = load.count()
    print(f"\n{asked} connections, {failed} failed")
    show_failures(load)
    return failed


def show_failures(load: Load) -> None:
    """Print a line for each connection that has failed, and whether the machine had too little CPU time."""
    for line in load.failures():
        print(line, file=sys.stderr)
    if stalls := load.stalls():
        print(f"the load itself stalled {len(stalls)} times, for at most {max(stalls)} ms")


def _steps(made: Run, cluster: Cluster) -> None:
    limit = ("--timeout", "60")
    made.command("check", "--image", PROXY_IMAGE)
    # An image that cannot be pulled changes no node.
    pulled = "the image cannot be pulled"
    made.command("install", "--image", MISSING_IMAGE, *limit, statuses=[1], says=pulled)
    made.command("install", "--image", PROXY_IMAGE, "--canary", "1", says=f"{NODES - 1} nodes left to kube-proxy")
    made.command("install")
    made.command("install", "--datapath-config", DATAPATH)
    cluster.require_seccomp()
    # 1: an agent warns, for example about packets that it refused in the last minute.
    made.command("status", statuses=[0, 1], says=f"{NODES} of {NODES} nodes served by pyebpf-proxy")
    made.command("test")
    made.restarts()
    made.command("upgrade", "--image", MISSING_IMAGE, *limit, statuses=[1], says=pulled)
    made.command("upgrade", "--image", NEXT_IMAGE)
    made.command("rollback")
    made.interruptions()


def save(made: Run, proxy: str, path: Path = results.SWITCH) -> Path:
    """recorded/switch.json, for the page."""
    about = {"release": RELEASE, "nodes": NODES, "rate": RATE, "from": proxy, "agentReadySeconds": made.ready_seconds}
    path.write_text(json.dumps(about | {"steps": [asdict(step) for step in made.steps]}, indent=1) + "\n")
    return path


def load_record(path: Path = results.SWITCH) -> tuple[dict[str, Any], Sequence[Step]] | None:
    """Read what ``save`` wrote; None: nothing was recorded."""
    if not path.exists():
        return None
    about = json.loads(path.read_text())
    return about, [Step(**each) for each in about.pop("steps")]
