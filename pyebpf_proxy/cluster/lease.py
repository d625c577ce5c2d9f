# SPDX-License-Identifier: Apache-2.0
"""The Lease that lets only one command at a time change a cluster. A thread renews it."""

from __future__ import annotations

import datetime
import getpass
import os
import socket
import threading
from types import TracebackType
from typing import Self

from pyebpf_proxy.cluster.api import LEASES, Api, Object, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.objects import NAMESPACE

NAME = "pyebpf-proxy-cluster"
SECONDS = 60
_RENEW = SECONDS / 4
_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"


class Lease:
    """``with Lease(api, "install")`` takes the Lease; ClusterError if another command holds it."""

    def __init__(self, api: Api, what: str) -> None:
        self._api = api
        self._holder = f"{what} by {_user()}, process {os.getpid()}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self.lost = ""

    def __enter__(self) -> Self:
        self._take()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(timeout=5)
        if not self.lost:
            self._api.patch(LEASES, NAME, {"spec": {"holderIdentity": None}}, NAMESPACE)

    def check(self) -> None:
        """ClusterError if another command has taken the Lease meanwhile."""
        if self.lost:
            raise ClusterError(f"another command has taken over: {self.lost}; this one stops")

    def _take(self) -> None:
        found = self._api.get(LEASES, NAME, NAMESPACE)
        if found is None:
            body = {"apiVersion": LEASES.version, "kind": "Lease", "spec": self._spec()}
            made = self._api.create(LEASES, body | {"metadata": {"name": NAME, "namespace": NAMESPACE}})
            if made["spec"].get("holderIdentity") == self._holder:
                return
            found = made
        holder = found["spec"].get("holderIdentity") or ""
        remaining = _remaining(found)
        if holder and holder != self._holder and remaining > 0:
            raise ClusterError(
                f"another command changes this cluster: {holder}; wait until it ends. If it was killed, its"
                f" Lease expires in {remaining:.0f} s"
            )
        change = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "spec": self._spec()}
        try:
            self._api.patch(LEASES, NAME, change, NAMESPACE)
        except RefusedError as refused:
            if refused.status == 409:
                raise ClusterError("another command began to change this cluster at the same time") from None
            raise

    def _spec(self) -> Object:
        now = datetime.datetime.now(datetime.UTC).strftime(_FORMAT)
        return {"holderIdentity": self._holder, "leaseDurationSeconds": SECONDS, "renewTime": now}

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW):
            try:
                found = self._api.get(LEASES, NAME, NAMESPACE)
                if found is not None and found["spec"].get("holderIdentity") not in (self._holder, None):
                    self.lost = str(found["spec"]["holderIdentity"])
                    return
                self._api.patch(LEASES, NAME, {"spec": self._spec()}, NAMESPACE)
            except (RefusedError, ClusterError):
                continue  # the main thread has the same problem, and reports it


def _remaining(lease: Object) -> float:
    specification = lease["spec"]
    try:
        renewed = datetime.datetime.strptime(specification["renewTime"], _FORMAT).replace(tzinfo=datetime.UTC)
    except (KeyError, ValueError):
        return 0.0
    age = (datetime.datetime.now(datetime.UTC) - renewed).total_seconds()
    return float(specification.get("leaseDurationSeconds", SECONDS)) - age


def _user() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):
        return socket.gethostname()
