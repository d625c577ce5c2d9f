# SPDX-License-Identifier: Apache-2.0
"""What the API server of the tests lacks of a cluster: a DaemonSet controller, and kubelets that only report.

The controller follows the real one's rules for node selectors, affinity, OnDelete and RollingUpdate. A kubelet takes
its node's pods through the states that a real one reports: the image is pulled or not, the container runs, its probes
succeed, it ends; and it serves logs at the port that the Node names, where the real API server asks for them. Nothing
runs in the pods. What a proxy's pod stands for is a condition of it that no command reads: ``Programmed``. And
``attached`` has the nodes on which an agent's programs are attached: they outlive its pod, until a clean-up succeeds.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import ssl
import subprocess
import threading
import time
import traceback
import urllib.parse
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.cluster import agent_answers
from tests.support import web_socket
from tests.support.apiserver import ADMIN_TOKEN, MERGE, ApiError, ApiServer, Object

SYSTEM = "/api/v1/namespaces/kube-system/pods"
SETS = "/apis/apps/v1/namespaces/kube-system/daemonsets"
PROXIES = ("kube-proxy", "pyebpf-proxy")
_STEP = 0.1


class Faults:
    """What goes wrong. Names of nodes; tests change them while it runs."""

    def __init__(self) -> None:
        #: (image, node): it cannot be pulled there.
        self.missing: set[tuple[str, str]] = set()
        self.never_ready: set[str] = set()
        #: Nodes, or (image, node).
        self.never_programmed: set[str | tuple[str, str]] = set()
        #: Agents there are ready before they have programmed the node, as far as nothing else holds the health port.
        self.ready_early: set[str] = set()
        #: The DaemonSet controller makes no pods of the agent there.
        self.no_pods: set[str] = set()
        #: Their kubelets report nothing more, and end no pod.
        self.dead: set[str] = set()
        #: What task pods say when they fail, by a word of their name and the node.
        self.tasks: dict[tuple[str, str], str] = {}
        #: Task pods that do not end, by the same.
        self.hanging: set[tuple[str, str]] = set()
        #: What task pods that succeed say besides, by the same.
        self.says: dict[tuple[str, str], str] = {}
        #: (node, "ADDRESS PORT"): what neither proxy serves there.
        self.unreached: set[tuple[str, str]] = set()
        #: What a row of `cluster test` found, by its text.
        self.rows: dict[str, str] = {}


class SimulatedNodes:
    """``with SimulatedNodes(server, ["n1", "n2"], folder) as nodes``."""

    def __init__(self, server: ApiServer, names: list[str], folder: Path) -> None:
        self.server = server
        self.names = names
        self.faults = Faults()
        self.problems: list[str] = []
        #: Nodes on which programs are attached.
        self.attached: set[str] = set()
        #: Task pods that have ended.
        self.ran: list[Object] = []
        self._folder = folder
        self._ended = threading.Event()
        self._since: dict[str, float] = {}
        self._logs: dict[str, str] = {}
        #: What a command in a pod of this node does: its exit status, its output, its errors.
        self.execute: Callable[[str, list[str]], tuple[int, bytes, bytes]] = agent_answers.answer
        self._numbers = 0
        #: Nodes that have been dead: a test may also set the condition itself.
        self._lost: set[str] = set()
        self._connections = threading.local()
        self._listener: ThreadingHTTPServer | None = None
        #: Of each node: nodes of the same name in another test are other machines.
        self._machines = {name: uuid.uuid4().hex for name in names}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SimulatedNodes:
        self._listener = self._kubelet()
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()
        for name in self.names:
            self._ask("POST", "/api/v1/nodes", _node(name))
            address = {"type": "InternalIP", "address": "127.0.0.1"}
            info = {"kernelVersion": "6.1.0-44-amd64", "containerRuntimeVersion": "containerd://1.7.24"}
            info |= {"operatingSystem": "linux", "architecture": "amd64", "kubeletVersion": "v1.36.3"}
            info |= {"kubeProxyVersion": "", "machineID": self._machines[name], "systemUUID": ""}
            info |= {"bootID": "", "osImage": ""}
            ports = {"kubeletEndpoint": {"Port": self._listener.server_address[1]}}
            status = {"addresses": [address], "nodeInfo": info, "daemonEndpoints": ports}
            self._ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, MERGE)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=30)
        assert self._listener is not None
        self._listener.shutdown()
        for name in PROXIES:
            self._ignore("DELETE", f"{SETS}/{name}")
        for pod in self._pods().values():
            self._remove(pod)
        for name in self.names:
            self._ignore("DELETE", f"/api/v1/nodes/{name}")
        assert not self.problems, self.problems

    def until(self, condition: Callable[[dict[str, Object]], Any], what: str, seconds: float = 30.0) -> None:
        """Wait until the pods are so."""
        end = time.monotonic() + seconds
        while not condition(self._pods()):
            assert time.monotonic() < end, f"still not: {what}: {[_short(pod) for pod in self._pods().values()]}"
            time.sleep(0.05)

    def _ask(self, method: str, path: str, body: Object | None = None, content: str = "application/json") -> Object:
        """As ApiServer.request, but on one connection for each thread: a new one costs more than most requests."""
        kept = self._connections
        connection: http.client.HTTPSConnection | None = getattr(kept, "connection", None)
        try:
            if connection is None:
                context = ssl.create_default_context(cafile=str(self.server.ca))
                port = self.server.port
                connection = kept.connection = http.client.HTTPSConnection(
                    "127.0.0.1", port, timeout=30, context=context
                )
            headers = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": content}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException):
            was_kept = getattr(kept, "used", False)
            kept.connection, kept.used = None, False
            if connection is not None:
                connection.close()
            if was_kept:
                return self._ask(method, path, body, content)  # of a server that was killed since
            raise
        kept.used = True
        answer = json.loads(text) if text.startswith(b"{") else {"message": text.decode(errors="replace")}
        if response.status >= 300:
            raise ApiError(response.status, answer.get("message", ""))
        return dict(answer)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.wait(_STEP):
            try:
                pods = self._pods()
                nodes = {each["metadata"]["name"]: each for each in self._ask("GET", "/api/v1/nodes")["items"]}
                self._give_up(nodes)
                for daemon_set in self._ask("GET", SETS)["items"]:
                    self._control(daemon_set, nodes, pods)
                for pod in pods.values():
                    self._report(pod, pods)
                self._finalize()
            except (OSError, http.client.HTTPException, ssl.SSLError):
                continue  # the API server is away, as a test wants it
            except ApiError as error:
                # The object was changed or deleted in between, or the server is still starting.
                if error.code not in (401, 403, 404, 409, 429, 500, 503):
                    self.problems.append(str(error))
            except Exception:
                self.problems.append(traceback.format_exc())
                return

    def _give_up(self, nodes: dict[str, Object]) -> None:
        """The node controller's part: the condition of a node whose kubelet has stopped reporting, or is back."""
        for name, node in nodes.items():
            ready = next(
                (each["status"] for each in node["status"].get("conditions", ()) if each["type"] == "Ready"), ""
            )
            wanted = "Unknown" if name in self.faults.dead else "True" if ready == "Unknown" else ready
            if name in self.names and wanted != ready and (wanted == "Unknown" or name in self._lost):
                self._lost.add(name)
                condition = {"type": "Ready", "status": wanted}
                self._ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": {"conditions": [condition]}}, MERGE)

    def _finalize(self) -> None:
        """The namespace controller's part: one that is being deleted goes once it is empty."""
        for item in self._ask("GET", "/api/v1/namespaces")["items"]:
            name = item["metadata"]["name"]
            if (
                item["status"]["phase"] == "Terminating"
                and not self._ask("GET", f"/api/v1/namespaces/{name}/pods")["items"]
            ):
                item["spec"]["finalizers"] = []
                self._ask("PUT", f"/api/v1/namespaces/{name}/finalize", item)

    def _pods(self) -> dict[str, Object]:
        return {each["metadata"]["name"]: each for each in self._ask("GET", "/api/v1/pods")["items"]}

    def _control(self, daemon_set: Object, nodes: dict[str, Object], pods: dict[str, Object]) -> None:
        name, uid = daemon_set["metadata"]["name"], daemon_set["metadata"]["uid"]
        template = daemon_set["spec"]["template"]
        revision = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
        mine = [pod for pod in pods.values() if _owner(pod) == uid]
        for node_name, node in nodes.items():
            here = [pod for pod in mine if pod["spec"]["nodeName"] == node_name]
            wanted = _fits(template["spec"], node["metadata"].get("labels", {}))
            if wanted and not here and not (name == "pyebpf-proxy" and node_name in self.faults.no_pods):
                self._numbers += 1
                self._create(daemon_set, f"{name}-{revision[:5]}-{self._numbers}", node_name, revision)
            for pod in here:
                if not wanted:
                    self._delete(pod)
        if daemon_set["spec"]["updateStrategy"]["type"] == "RollingUpdate" and all(map(_is_ready, mine)):
            old = [pod for pod in mine if pod["metadata"]["labels"]["controller-revision-hash"] != revision]
            for pod in old[:1]:
                self._delete(pod)
        generation = daemon_set["metadata"]["generation"]
        if daemon_set.get("status", {}).get("observedGeneration") != generation:
            self._ask("PATCH", f"{SETS}/{name}/status", {"status": {"observedGeneration": generation}}, MERGE)

    def _create(self, daemon_set: Object, name: str, node: str, revision: str) -> None:
        template = daemon_set["spec"]["template"]
        owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "controller": True}
        owner |= {key: daemon_set["metadata"][key] for key in ("name", "uid")}
        labels = template["metadata"]["labels"] | {"controller-revision-hash": revision}
        metadata = {"name": name, "namespace": "kube-system", "labels": labels, "ownerReferences": [owner]}
        specification = template["spec"] | {"nodeName": node}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": specification}
        self._ask("POST", SYSTEM, pod)

    def _delete(self, pod: Object) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            self._ask("DELETE", _path(pod))

    def _remove(self, pod: Object) -> None:
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        self._ignore("DELETE", _path(pod), body)

    def _ignore(self, method: str, path: str, body: Object | None = None) -> None:
        try:
            self._ask(method, path, body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def _report(self, pod: Object, pods: dict[str, Object]) -> None:
        """One step of the kubelet."""
        metadata, specification = pod["metadata"], pod["spec"]
        name, node = metadata["name"], specification["nodeName"]
        if node in self.faults.dead:
            return
        if "deletionTimestamp" in metadata:
            self._logs.pop(name, None)
            self._remove(pod)
            return
        age = time.monotonic() - self._since.setdefault(metadata["uid"], time.monotonic())
        (container,) = specification["containers"]
        image, kind = container["image"], metadata.get("labels", {}).get("k8s-app", "task")
        if (image, node) in self.faults.missing and pod["status"]["phase"] == "Pending":
            reason = "ErrImagePull" if age < 0.3 else "ImagePullBackOff"
            waiting = {"reason": reason, "message": f'failed to pull "{image}": not found'}
            self._status(pod, "Pending", {"waiting": waiting}, started=False)
            return
        plan = next((each["value"] for each in container.get("env", ()) if each["name"] == "PEER_PLAN"), None)
        if any(what in name and at == node for what, at in self.faults.hanging):
            return
        if plan is not None:
            # A pod of `cluster test`: what it found is the fault's, or as it should be.
            rows = [row | self._found(row) for row in json.loads(plan)]
            self._logs[name] = "".join(f"{json.dumps(row)}\n" for row in rows) + "done\n"
            self._status(pod, "Running", {"running": {}}, True, True)
            return
        if kind == "task":
            if "pyebpf-proxy/task" in metadata.get("labels", {}):
                self._task(pod, pods, age)
            return
        if age < 0.2:
            return
        programmed, ready = age > 0.4, age > 0.4
        if kind == "pyebpf-proxy":
            programmed = programmed and self.faults.never_programmed.isdisjoint((node, (image, node)))
            self._logs[name] = "2026-01-01T00:00:00.000Z info pyebpf-proxy starts version=1\n"
            if programmed:
                self.attached.add(node)
                self._logs[name] += "2026-01-01T00:00:00.100Z info ready objects=3 service_ports=1 seconds=0.1\n"
            # Another process, kube-proxy, holds the health port.
            kube_proxy_runs = any(
                each["metadata"].get("labels", {}).get("k8s-app") == "kube-proxy" and each["spec"]["nodeName"] == node
                for each in pods.values()
            )
            early = age > 0.4 and node in self.faults.ready_early
            ready = (programmed or early) and not kube_proxy_runs and node not in self.faults.never_ready
        self._status(pod, "Running", {"running": {}}, True, ready, programmed)

    def _task(self, pod: Object, pods: dict[str, Object], age: float) -> None:
        """One step of a task pod."""
        name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
        (container,) = pod["spec"]["containers"]
        what = pod["metadata"]["labels"]["pyebpf-proxy/task"]
        wrong = next((text for (part, at), text in self.faults.tasks.items() if part in name and at == node), "")
        words = container["command"][4:] if what in ("fit", "try", "verify", "connect") else []
        places = [" ".join(pair) for pair in zip(words[::2], words[1::2], strict=True)]
        lacking = [place for place in places if (node, place) in self.faults.unreached]
        if lacking and what in ("verify", "connect"):
            wrong = f"no connection to the Service at {lacking[0]}: timed out"
        said = "".join(f"reached {place}\n" for place in places if place not in lacking)
        said += next((text for (part, at), text in self.faults.says.items() if part in name and at == node), "")
        self._logs[name] = f"{said}{wrong or 'all is well'}\n"
        # These two wait for a kube-proxy that has programmed the node.
        waits = what in ("await", "clean") and not any(
            each["metadata"].get("labels", {}).get("k8s-app") == "kube-proxy"
            and each["spec"]["nodeName"] == node
            and _conditions(each).get("Programmed") == "True"
            for each in pods.values()
        )
        if age <= 0.3 or waits or pod["status"]["phase"] in ("Failed", "Succeeded"):
            return
        if what == "clean" and not wrong:
            self.attached.discard(node)
        self.ran.append(pod)
        ended = {"exitCode": 1 if wrong else 0, "message": wrong, "reason": "Error" if wrong else "Completed"}
        self._status(pod, "Failed" if wrong else "Succeeded", {"terminated": ended}, started=False)

    def _found(self, row: Object) -> Object:
        wrong = self.faults.rows.get(row["to"])
        return {"ok": wrong is None, "detail": wrong or "n1"}

    def _status(
        self, pod: Object, phase: str, state: Object, started: bool, ready: bool = False, programmed: bool = False
    ) -> None:
        (container,) = pod["spec"]["containers"]
        shown = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        shown |= {"state": state, "started": started, "ready": ready}
        conditions = [{"type": kind, "status": str(on)} for kind, on in (("Ready", ready), ("Programmed", programmed))]
        status = {"phase": phase, "containerStatuses": [shown], "conditions": conditions}
        known = pod.get("status", {})
        same = known.get("phase") == phase and _conditions(pod) == {each["type"]: each["status"] for each in conditions}
        if same and list(known["containerStatuses"][0]["state"]) == list(state) and _reason(known) == _reason(status):
            return
        self._ask("PATCH", f"{_path(pod)}/status", {"status": status}, MERGE)

    def _kubelet(self) -> ThreadingHTTPServer:
        """The port of every node: logs only."""
        certificate, key = self._folder / "kubelet.crt", self._folder / "kubelet.key"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=kubelet"]
        subprocess.run(command, check=True, capture_output=True)
        logs, nodes = self._logs, self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                place, _, query = self.path.partition("?")
                _, what, _, pod, _ = place.split("/")
                if what == "exec":
                    self._execute(pod, urllib.parse.parse_qs(query)["command"])
                    return
                body = logs.get(pod, "").encode()
                self.send_response(200 if what == "containerLogs" and pod in logs else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _execute(self, pod: str, command: list[str]) -> None:
                """A command in a pod: a WebSocket with a channel for its output, its errors, and its end."""
                web_socket.accept(self)
                status, output, errors = nodes.execute(nodes._pods()[pod]["spec"]["nodeName"], command)
                end: Object = {"status": "Success"}
                if status:
                    cause = {"reason": "ExitCode", "message": str(status)}
                    end = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
                with contextlib.suppress(OSError):  # the command that asked may have ended
                    for channel, data in ((1, output), (2, errors), (3, json.dumps(end).encode())):
                        for start in range(0, len(data), 4096):
                            web_socket.send(self, web_socket.BINARY, bytes([channel]) + data[start : start + 4096])
                    web_socket.send(self, web_socket.CLOSE, b"")
                self.close_connection = True

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
                pass

        listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        listener.socket = context.wrap_socket(listener.socket, server_side=True)
        return listener


class Recorder:
    """Watches the pods of both DaemonSets, and notes each moment at which a node had no proxy.

    A proxy is a pod that has programmed its node and is not terminating. Nodes count from their first proxy on.
    """

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._ended = threading.Event()
        self.served: set[str] = set()
        self._pods: dict[str, Object] = {}
        self._listed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.gaps: list[str] = []

    def __enter__(self) -> Recorder:
        self._thread.start()
        assert self._listed.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._follow()
            except (OSError, http.client.HTTPException, ApiError, ValueError):
                time.sleep(0.1)

    def _follow(self) -> None:
        path = f"{SYSTEM}?labelSelector=k8s-app+in+(kube-proxy,pyebpf-proxy)"
        listed = self._server.request("GET", path)
        self._pods = {each["metadata"]["uid"]: each for each in listed["items"]}
        self._look("listed")
        self._listed.set()
        context = ssl.create_default_context(cafile=str(self._server.ca))
        connection = http.client.HTTPSConnection("127.0.0.1", self._server.port, timeout=1, context=context)
        version = listed["metadata"]["resourceVersion"]
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        connection.request("GET", f"{path}&watch=true&resourceVersion={version}&timeoutSeconds=60", headers=headers)
        answer = connection.getresponse()
        while not self._ended.is_set():
            try:
                line = answer.readline()
            except TimeoutError:
                connection.close()
                return  # nothing for a second; list again, which shows what was missed
            if not line:
                return
            event = json.loads(line)
            if event["type"] == "ERROR":
                return
            pod = event["object"]
            if event["type"] == "DELETED":
                self._pods.pop(pod["metadata"]["uid"], None)
            else:
                self._pods[pod["metadata"]["uid"]] = pod
            self._look(f"{event['type']} {_short(pod)}")

    def _look(self, what: str) -> None:
        served = {
            pod["spec"]["nodeName"]
            for pod in self._pods.values()
            if _conditions(pod).get("Programmed") == "True" and "deletionTimestamp" not in pod["metadata"]
        }
        for node in sorted(self.served - served):
            self.gaps.append(f"{node} has no proxy after {what}: {[_short(pod) for pod in self._pods.values()]}")
        self.served |= served


def _node(name: str) -> Object:
    labels = {"kubernetes.io/os": "linux", "kubernetes.io/hostname": name}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _owner(pod: Object) -> str:
    return str(next((each["uid"] for each in pod["metadata"].get("ownerReferences", ())), ""))


def _conditions(pod: Object) -> dict[str, str]:
    return {each["type"]: each["status"] for each in pod.get("status", {}).get("conditions", ())}


def _is_ready(pod: Object) -> bool:
    return _conditions(pod).get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def _reason(status: Object) -> str:
    states = status.get("containerStatuses") or [{"state": {}}]
    return str((states[0]["state"].get("waiting") or {}).get("reason", ""))


def _short(pod: Object) -> str:
    metadata = pod["metadata"]
    going = " ends" if "deletionTimestamp" in metadata else ""
    phase = pod.get("status", {}).get("phase", "")
    return f"{metadata['name']} on {pod['spec'].get('nodeName')} {phase} {_conditions(pod)}{going}"


def _fits(specification: Object, labels: dict[str, str]) -> bool:
    """Node selector and required affinity, as the scheduler and the controller read them."""
    if any(labels.get(key) != value for key, value in (specification.get("nodeSelector") or {}).items()):
        return False
    affinity = ((specification.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if affinity is None:
        return True

    def matches(each: Object) -> bool:
        key, values = each["key"], each.get("values", ())
        return {
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
        }[each["operator"]]

    return any(all(map(matches, term.get("matchExpressions", ()))) for term in affinity["nodeSelectorTerms"])
