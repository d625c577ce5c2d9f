# SPDX-License-Identifier: Apache-2.0
"""A real API server that holds the workload, and many connections that write to it."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import ssl
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import CACHE
from tests.support.apiserver import ADMIN_TOKEN, ApiServer
from tests.support.reference import kube_proxy

from . import workload
from .measure import say

#: The address of the API server that the nodes use.
ADDRESS = "192.0.2.1"
TEAMS = 50
CONNECTIONS = 8
#: Seconds after which an idle connection is replaced: the API server closes it after a few minutes.
IDLE_SECONDS = 30.0
ARGUMENTS = (
    "--bind-address=0.0.0.0",
    # ServiceCIDRs of the workload and of the contenders; the first has the Service ``kubernetes``.
    "--service-cluster-ip-range=172.16.0.0/12,fd00:10:96::/112",
)


#: The kinds' prefixes in etcd.
_REGISTRY = {
    "Namespace": "namespaces",
    "Node": "minions",
    "Service": "services/specs",
    "EndpointSlice": "endpointslices",
}


def missing() -> str:
    """A message about missing requirements of this figure; empty if all are present."""
    server = CACHE / "go" / "kube-apiserver"
    files = [str(path) for path in (kube_proxy(), server) if not path.exists()]
    if files:
        return f"{' and '.join(files)} (tests/cluster/build.sh makes them)"
    programs = {"etcd": "etcd-server", "nft": "nftables", "iptables-legacy": "iptables"}
    packages = [package for program, package in programs.items() if shutil.which(program) is None]
    return f"Debian's {' and '.join(packages)}" if packages else ""


class Connection:
    """A persistent connection with an administrator's rights, for one thread."""

    def __init__(self, server: ApiServer) -> None:
        context = ssl.create_default_context(cafile=str(server.ca))
        self._connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
        self._used = time.monotonic()

    def write(self, method: str, path: str, body: Any, content: str = "application/json") -> None:
        """Send one request; RuntimeError if it is rejected, except for "already exists"."""
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": content}
        if time.monotonic() - self._used > IDLE_SECONDS:
            self._connection.close()  # the request reopens it
        self._connection.request(method, path, json.dumps(body), headers)
        answer = self._connection.getresponse()
        text = answer.read()
        self._used = time.monotonic()
        if answer.status >= 300 and answer.status != 409:
            raise RuntimeError(f"{method} {path}: {answer.status}: {text[:500].decode(errors='replace')}")

    def close(self) -> None:
        self._connection.close()


class Connections:
    """One connection for each thread."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._local = threading.local()
        self._all: list[Connection] = []

    def mine(self) -> Connection:
        if not hasattr(self._local, "connection"):
            self._local.connection = Connection(self._server)
            self._all.append(self._local.connection)
        connection: Connection = self._local.connection
        return connection

    def close(self) -> None:
        for each in self._all:
            each.close()


def slice_path(number: int) -> str:
    """The path of a service's slice at the API server."""
    metadata = workload.endpoint_slice(number)["metadata"]
    return f"/apis/discovery.k8s.io/v1/namespaces/{metadata['namespace']}/endpointslices/{metadata['name']}"


def entries(item: workload.Object, allocated: bool = True) -> Iterator[tuple[str, workload.Object]]:
    """The entries of an object in etcd, with their keys. ``allocated``: a Service also has a record of its address."""
    metadata = item["metadata"]
    whole = {"uid": str(uuid.uuid5(uuid.NAMESPACE_OID, metadata["name"])), "creationTimestamp": "2026-01-01T00:00:00Z"}
    place = f"{metadata.get('namespace', '')}/{metadata['name']}".lstrip("/")
    yield f"/registry/{_REGISTRY[item['kind']]}/{place}", item | {"metadata": metadata | whole}
    if item["kind"] == "Service" and allocated:
        address = item["spec"]["clusterIP"]
        labels = {"ipaddress.kubernetes.io/ip-family": "IPv4"}
        labels["ipaddress.kubernetes.io/managed-by"] = "ipallocator.k8s.io"
        owner = {"resource": "services", "namespace": metadata["namespace"], "name": metadata["name"]}
        yield (
            f"/registry/ipaddresses/{address}",
            {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "IPAddress",
                "metadata": {"name": address, "labels": labels, **whole},
                "spec": {"parentRef": owner},
            },
        )


def _objects(services: int, endpoints: int) -> Iterator[workload.Object]:
    for team in range(TEAMS):
        yield {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"team-{team}"}}
    for _, item in workload.everything(services, endpoints):
        yield item


@contextmanager
def loaded(services: int, endpoints: int = workload.ENDPOINTS) -> Iterator[ApiServer]:
    """An API server with the workload, which is written directly into etcd once; then etcd's data are cached."""
    items = list(_objects(services, endpoints))
    text = json.dumps([ARGUMENTS, items])
    kept = CACHE / "bench" / f"etcd-{services}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not kept.exists():
        with ApiServer(ARGUMENTS) as server:
            say(f"writing {len(items)} objects into etcd, once: its data are kept in {kept.parent}")
            # Through the API server, this takes an hour on a busy machine: 3 ms or more of CPU time for each object.
            server.put(dict(entry for item in items for entry in entries(item)))
            _keep(server, kept)
    server = ApiServer(ARGUMENTS)
    _copy(kept, server.folder / "etcd")
    with server:
        yield server


def _keep(server: ApiServer, kept: Path) -> None:
    server.end()
    kept.parent.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_name(f".{kept.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    _copy(server.folder / "etcd", unfinished)
    unfinished.rename(kept)


def _copy(source: Path, target: Path) -> None:
    # etcd's files are sparse.
    subprocess.run(["cp", "-a", "--sparse=always", source, target], check=True)
