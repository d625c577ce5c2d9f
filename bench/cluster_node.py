# SPDX-License-Identifier: Apache-2.0
"""A node for one process, the agent or kube-proxy: a network namespace with a veth to the API server's namespace.

Each process gets a new node, so that it finds no rules or maps of another process.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from pyebpf_proxy.lab.namespace import Namespace, batch, set_network_namespace
from tests.support.apiserver import ADMIN_TOKEN, ApiServer

from . import workload
from .api_load import ADDRESS
from .proxies import OURS, Proxy

#: node1 of the workload.
NODE, NODE_ADDRESS = "node1", "192.0.2.11"
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


@contextmanager
def in_namespace(name: str) -> Iterator[None]:
    """Move this thread, and the processes that it starts, to a new network namespace."""
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
    """``with Node(OURS, server) as node``: the proxy runs; after ``start_seconds``, it has programmed everything."""

    def __init__(self, kind: str, server: ApiServer, services: int) -> None:
        self.kind = kind
        self.services = services
        number = next(_numbers)
        self.namespace = Namespace(f"bench-{kind}-{os.getpid()}-{number}")
        self._link = f"node{number}"
        self._server = server
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
            # Remove the link explicitly: the kernel removes links of an unnamed namespace only after a delay.
            stack.callback(batch, [f"link del {self._link}"])
            self.namespace.ip(
                f"address add {NODE_ADDRESS}/24 dev eth0", "link set eth0 up", f"route add default via {ADDRESS}"
            )
            if self.kind == OURS:
                self._mount_bpffs(stack)
            self.proxy = Proxy(self.kind, self.namespace, self.folder)
            stack.callback(self.proxy.stop)
            self.start_seconds = self.proxy.start(self._kubeconfig(), NODE, workload.POD_CIDR)
            if self.kind != OURS:  # flips.Words reads the agent's maps
                self.proxy.check(self.services)
            self._left = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def _kubeconfig(self) -> Path:
        kubeconfig = self._server.kubeconfig(
            self.folder / "kubeconfig", {"token": ADMIN_TOKEN}, f"https://{ADDRESS}:{self._server.port}"
        )
        text = yaml.safe_load(kubeconfig.read_text())
        # The certificate is for another address of the API server.
        text["clusters"][0]["cluster"]["tls-server-name"] = "localhost"
        kubeconfig.write_text(yaml.safe_dump(text))
        return kubeconfig

    def _mount_bpffs(self, stack: contextlib.ExitStack) -> None:
        point = self.folder / "state" / "bpf"
        point.mkdir(parents=True)
        if _libc.mount(b"bpffs", str(point).encode(), b"bpf", 0, None) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(point))
        stack.callback(_libc.umount2, str(point).encode(), 2)
