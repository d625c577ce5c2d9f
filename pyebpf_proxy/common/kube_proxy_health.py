# SPDX-License-Identifier: Apache-2.0
"""Waits until kube-proxy has programmed this node, according to its health server.

The state of its pod does not show this: kube-proxy runs long before its rules are complete, and has no readiness probe.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Callable

from pyebpf_proxy.common.printable import printable

#: Host and port of kube-proxy's health server; empty: do not wait.
VARIABLE = "KUBE_PROXY_HEALTH"
DEFAULT = "127.0.0.1:10256"
#: How long the answer must be good if it does not name both families: kube-proxy has one family, or is an old version.
SETTLED_SECONDS = 10.0
_PERIOD = 0.5
_BOTH = {"IPv4", "IPv6"}


def wait(address: str | None = None, sleep: Callable[[float], None] = time.sleep) -> int:
    """Return 0 when kube-proxy has programmed the node, however long that takes; 2 for an invalid address."""
    address = os.environ.get(VARIABLE, DEFAULT) if address is None else address
    if not address:
        print("not waiting for kube-proxy")
        return 0
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        print(f"Error: {VARIABLE}: {address} is not HOST:PORT", file=sys.stderr)
        return 2
    logged = ""
    since: float | None = None
    while True:
        families, why = programmed(host.strip("[]"), int(port))
        now = time.monotonic()
        since = None if families is None else now if since is None else since
        if families is not None and (families >= _BOTH or now - (since or now) >= SETTLED_SECONDS):
            names = ", ".join(sorted(families)) or "it is an old one, which names no family"
            print(f"kube-proxy has programmed this node: {printable(names)}")
            return 0
        if why != logged:
            # Before kube-proxy starts, any program of the node may answer there.
            print(f"waiting for kube-proxy at {address}: {printable(why)}", flush=True)
            logged = why
        sleep(_PERIOD)


def programmed(host: str, port: int) -> tuple[set[str] | None, str]:
    """The families that kube-proxy has programmed (empty if it names none), or None, and the reason."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/livez")
        answer = connection.getresponse()
        body = json.loads(answer.read(64 << 10))
        if answer.status == 404:
            return None, "no page /livez"
        if "healthy" in body or "currentTime" not in body:
            families = set(body.get("status") or ())
            return (families, "only one family so far") if families else (None, "it has not programmed the node yet")
        # An older kube-proxy names no family, and answers 200 even before its first sync.
        return (set(), "it answers") if answer.status == 200 else (None, f"status {answer.status}")
    except (OSError, http.client.HTTPException, ValueError, AttributeError, TypeError, RecursionError) as error:
        return None, f"no answer ({error})"
    finally:
        connection.close()
