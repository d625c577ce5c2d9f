# SPDX-License-Identifier: Apache-2.0
"""One command at a time changes a cluster, and one tests it: a Lease, renewed in a thread, asked before each change."""

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
#: Of ``cluster test``, which may run while another command changes the cluster.
TEST = "pyebpf-proxy-test"
_BUSY = {NAME: "another command changes this cluster", TEST: "a test is already running"}
SECONDS = 60
_RENEW = SECONDS / 4
_LOOK_SECONDS = 1.0
_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"


class Lease:
    """``with Lease(api, "install", say)``; ClusterError if another command holds it. ``name``: of the object."""

    def __init__(self, api: Api, what: str, say: Callable[[str], None], name: str = NAME) -> None:
        self._api = api
        self._say = say
        self._name = name
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
            found = self._present()
            if found is not None and _holder(found) == self._holder:
                self._write(found, {"holderIdentity": None})

    def check(self) -> None:
        """StoppedError if this command does not hold the Lease any more.

        No holder: another command has taken it, changed the cluster, and released it.
        """
        found = self._present()
        if found is None:
            raise StoppedError(f"Lease {NAMESPACE}/{self._name} was deleted; this command stops")
        holder = _holder(found)
        if not holder:
            raise StoppedError("another command has changed the cluster meanwhile; this one stops")
        if holder != self._holder:
            raise StoppedError(f"another command has taken over: {holder}; this one stops")

    def _take(self) -> None:
        while True:
            found = self._present()
            if found is None:
                body = {"apiVersion": LEASES.version, "kind": "Lease", "spec": self._taken()}
                found = self._api.create(LEASES, body | {"metadata": {"name": self._name, "namespace": NAMESPACE}})
                if _holder(found) == self._holder:
                    return
            if _holder(found) in (self._holder, "") or self._has_expired(found):
                break
        try:
            self._write(found, self._taken())
        except RefusedError as refused:
            if refused.status != 409:
                raise
            # The request was repeated if its first answer was lost: then the Lease is this command's.
            now = self._present()
            if now is None or _holder(now) != self._holder:
                raise ClusterError(f"{_BUSY[self._name]}: it began at the same time") from None

    def _has_expired(self, found: Object) -> bool:
        """True: the holder has not renewed the Lease for as long as it lasts, by this machine's clock.

        Its time is that of another machine's clock, which may be wrong by any number of hours. Where the Lease does not
        seem to be recent, it is watched. False: it was released meanwhile. ClusterError: the holder renews it.
        """
        since = found["spec"].get("acquireTime") or ""
        since = f", since {since[:19].replace('T', ' ')} UTC" if since.endswith("Z") else ""
        busy = f"{_BUSY[self._name]}: {_holder(found)}{since}; wait until it ends"
        seconds = float(found["spec"].get("leaseDurationSeconds") or SECONDS)
        age = _age(found)
        if 0 <= age <= seconds:
            raise ClusterError(f"{busy}. If it was killed, its Lease expires in {seconds - age:.0f} s")
        self._say(f"waiting {seconds:.0f} s to see whether another command is running: {_holder(found)}")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            now = self._present()
            if now is None or not _holder(now):
                return False
            if now["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
                raise ClusterError(busy)
        return True

    def _write(self, found: Object, specification: Object) -> None:
        """Change the Lease, if no other command has changed it since. RefusedError, status 409."""
        change = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "spec": specification}
        self._api.patch(LEASES, self._name, change, NAMESPACE)

    def _present(self) -> Object | None:
        return self._api.get(LEASES, self._name, NAMESPACE)

    def _taken(self) -> Object:
        specification = self._spec()
        return specification | {"acquireTime": specification["renewTime"]}

    def _spec(self) -> Object:
        now = datetime.datetime.now(datetime.UTC).strftime(_FORMAT)
        return {"holderIdentity": self._holder, "leaseDurationSeconds": SECONDS, "renewTime": now}

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW):
            try:
                found = self._present()
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
