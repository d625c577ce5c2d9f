# SPDX-License-Identifier: Apache-2.0
"""Two nodes of one name, each in a network namespace: on one the real kube-proxy, on the other the agent.

Both read the same API server, which each sees at the same address of its own loopback.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.namespace import Namespace, die_with_parent, set_network_namespace
from tests.support.apiserver import ADMIN_TOKEN, ApiServer, Object
from tests.support.reference import kube_proxy

NODE = "node1"
NODE_IP = "192.0.2.10"
WAIT_SECONDS = 90.0
_numbers = itertools.count()


class Answer(NamedTuple):
    """An answer without its Date; status 0 when no server listens."""

    status: int
    headers: dict[str, str]
    body: str


class Side:
    """One of the two. ``start`` and ``stop`` may follow each other."""

    def __init__(self, name: str, server: ApiServer, folder: Path) -> None:
        self.name = name
        #: A folder of programs that come first.
        self.programs: Path | None = None
        #: What it authenticates with.
        self.token = ADMIN_TOKEN
        self.namespace = Namespace(f"{name}-{os.getpid()}-{next(_numbers)}")
        self._server = server
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: socket.socket | None = None

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    def __enter__(self) -> Side:
        self.namespace.create()
        self.namespace.ip(
            "link add eth0 type veth peer name far0",
            "link set eth0 up",
            "link set far0 up",
            f"address add {NODE_IP}/24 dev eth0",
        )
        self._listener = _listener_in(self.namespace.path, self._server.port)
        threading.Thread(target=_forward, args=(self._listener, self._server.port), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._listener is not None:
            self._listener.close()
        self.namespace.remove()

    def start(self, config: Object, families: int = 2) -> None:
        """Start it with this configuration, and wait until its families are served."""
        self._begin(config)
        count = 1 + families
        self.until(lambda: self.get(10256, "/livez").body.count("lastUpdated") == count, "all families are served")

    def run(self, config: Object) -> int:
        """Start it with a configuration that it cannot live with; its exit status."""
        self._begin(config)
        assert self._process is not None
        return self._process.wait(timeout=WAIT_SECONDS)

    def _begin(self, config: Object) -> None:
        kubeconfig = self._server.kubeconfig(self._folder / "kubeconfig", {"token": self.token})
        document = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "hostnameOverride": NODE,
            # The tables of this machine are not the tests'.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            **config,
        }
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(document))
        program = [str(kube_proxy())]
        if self.name == "agent":
            program = [*command(), "--directory", str(self._folder / "state")]
        environment = dict(os.environ)
        if self.programs is not None:
            environment["PATH"] = f"{self.programs}:{environment['PATH']}"
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace.name, *program, "--config", str(path)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=60)
            self._process = None
        if self.name == "agent":
            cleanup = [*command(), "--cleanup", "--directory", str(self._folder / "state")]
            subprocess.run(["ip", "netns", "exec", self.namespace.name, *cleanup], check=False, capture_output=True)

    def get(self, port: int, path: str, host: str = "127.0.0.1", accept: str = "") -> Answer:
        return self.namespace.call(_get, host, port, path, accept)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition; the log's end if it never comes."""
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            ended = self._process is not None and self._process.poll() is not None
            if ended or time.monotonic() > end:
                tail = self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""
                raise AssertionError(f"{self.name}: still not: {what}; its log ends with:\n{tail}")
            time.sleep(0.05)


def both(sides: Sequence[Side], look: Callable[[Side], Any], wanted: Callable[[Any], bool], what: str) -> list[Any]:
    """What each side shows as soon as it is as wanted."""
    for side in sides:
        side.until(lambda side=side: wanted(look(side)), what)  # type: ignore[misc]
    return [look(side) for side in sides]


def _get(host: str, port: int, path: str, accept: str) -> Answer:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    try:
        connection.request("GET", path, headers={"Accept": accept, "User-Agent": "curl/8"} if accept else {})
        answer = connection.getresponse()
        headers = {name: value for name, value in answer.getheaders() if name != "Date"}
        return Answer(answer.status, headers, answer.read().decode())
    except OSError:
        return Answer(0, {}, "")
    finally:
        connection.close()


def _listener_in(path: str, port: int) -> socket.socket:
    """A socket that listens in another network namespace; each thread has its own namespace."""
    made: list[socket.socket] = []

    def make() -> None:
        set_network_namespace(path)
        made.append(socket.create_server(("127.0.0.1", port)))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def _forward(listener: socket.socket, port: int) -> None:
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        try:
            far = socket.create_connection(("127.0.0.1", port))
        except OSError:
            near.close()
            continue
        for pair in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=pair, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
