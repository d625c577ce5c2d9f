# SPDX-License-Identifier: Apache-2.0
"""One command at a time changes a cluster: a Lease, renewed in a thread, and asked before each change."""

from __future__ import annotations

import datetime
import getpass
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from pyebpf_proxy.cluster.api import LEASES, Api, Object, RefusedError, unguarded
from pyebpf_proxy.cluster.errors import ClusterError, StoppedError
from pyebpf_proxy.cluster.objects import NAMESPACE

NAME = "pyebpf-proxy-cluster"
SECONDS = 60
_RENEW = SECONDS / 4
_LOOK_SECONDS = 1.0
_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"


class Lease:
    """``with Lease(api, "install", say)``; ClusterError if another command holds it."""

    def __init__(self, api: Api, what: str, say: Callable[[str], None]) -> None:
        self._api = api
        self._say = say
        # The last part tells two containers apart that have the same host name and process number.
        self._holder = f"{what} by {_user()}, process {os.getpid()}-{secrets.token_hex(3)}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Self:
        try:
            self._take()
        except KeyboardInterrupt:
            self._release()  # it may have been taken already
            raise
        self._api.guard = self.check
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Release the Lease, if the API server answers; otherwise it expires."""
        self._ended.set()
        self._api.guard = unguarded
        with self._api.last_words():
            self._thread.join(timeout=1)
        self._release()

    def _release(self) -> None:
        with self._api.last_words():
            found = self._api.get(LEASES, NAME, NAMESPACE)
            if found is not None and _holder(found) == self._holder:
                self._write(found, {"holderIdentity": None})

    def check(self) -> None:
        """StoppedError if this command does not hold the Lease any more.

        No holder: another command has taken it, changed the cluster, and released it.
        """
        found = self._api.get(LEASES, NAME, NAMESPACE)
        if found is None:
            raise StoppedError(f"Lease {NAMESPACE}/{NAME} was deleted; this command stops")
        holder = _holder(found)
        if not holder:
            raise StoppedError("another command has changed the cluster meanwhile; this one stops")
        if holder != self._holder:
            raise StoppedError(f"another command has taken over: {holder}; this one stops")

    def _take(self) -> None:
        while True:
            found = self._api.get(LEASES, NAME, NAMESPACE)
            if found is None:
                body = {"apiVersion": LEASES.version, "kind": "Lease", "spec": self._spec()}
                found = self._api.create(LEASES, body | {"metadata": {"name": NAME, "namespace": NAMESPACE}})
                if _holder(found) == self._holder:
                    return
            if _holder(found) in (self._holder, "") or self._has_expired(found):
                break
        try:
            self._write(found, self._spec())
        except RefusedError as refused:
            if refused.status != 409:
                raise
            # The request was repeated if its first answer was lost: then the Lease is this command's.
            now = self._api.get(LEASES, NAME, NAMESPACE)
            if now is None or _holder(now) != self._holder:
                raise ClusterError("another command began to change this cluster at the same time") from None

    def _has_expired(self, found: Object) -> bool:
        """True: the holder has not renewed the Lease for as long as it lasts, by this machine's clock.

        Its time is that of another machine's clock, which may be wrong by any number of hours. Where the Lease does not
        seem to be recent, it is watched. False: it was released meanwhile. ClusterError: the holder renews it.
        """
        busy = f"another command changes this cluster: {_holder(found)}; wait until it ends"
        seconds = float(found["spec"].get("leaseDurationSeconds") or SECONDS)
        age = _age(found)
        if 0 <= age <= seconds:
            raise ClusterError(f"{busy}. If it was killed, its Lease expires in {seconds - age:.0f} s")
        self._say(f"waiting {seconds:.0f} s to see whether another command is running: {_holder(found)}")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            now = self._api.get(LEASES, NAME, NAMESPACE)
            if now is None or not _holder(now):
                return False
            if now["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
                raise ClusterError(busy)
        return True

    def _write(self, found: Object, specification: Object) -> None:
        """Change the Lease, if no other command has changed it since. RefusedError, status 409."""
        change = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "spec": specification}
        self._api.patch(LEASES, NAME, change, NAMESPACE)

    def _spec(self) -> Object:
        now = datetime.datetime.now(datetime.UTC).strftime(_FORMAT)
        return {"holderIdentity": self._holder, "leaseDurationSeconds": SECONDS, "renewTime": now}

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW):
            try:
                found = self._api.get(LEASES, NAME, NAMESPACE)
                if found is None or _holder(found) != self._holder:
                    return  # check() reports it
                if not self._ended.is_set():
                    self._write(found, self._spec())
            except (RefusedError, ClusterError):
                continue  # the main thread meets the same problem, and reports it


def _holder(lease: Object) -> str:
    return lease["spec"].get("holderIdentity") or ""


def _age(lease: Object) -> float:
    """Seconds since the last renewal, by this machine's clock; infinite if the Lease does not say."""
    try:
        renewed = datetime.datetime.strptime(lease["spec"]["renewTime"], _FORMAT).replace(tzinfo=datetime.UTC)
    except (KeyError, ValueError):
        return float("inf")
    return (datetime.datetime.now(datetime.UTC) - renewed).total_seconds()


def _user() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):
        return socket.gethostname()
