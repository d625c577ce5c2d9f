# SPDX-License-Identifier: Apache-2.0
"""Waits until kube-proxy has programmed this node, according to its health server and its metrics.

The state of its pod does not show this: kube-proxy runs long before its rules are complete, and has no readiness probe.
Nor does its health page alone: it names a family, and calls it healthy, as soon as the family's loop runs. A kube-proxy
that cannot list EndpointSlices never writes a rule, and stays healthy. The time of the last sync, among its metrics,
exists only after a sync. But the rules may be gone again: an agent that starts beside kube-proxy removes them, and in
mode nftables kube-proxy does not notice before the next change of a Service. So the caller also reads the rules.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import time
from collections.abc import Callable

from pyebpf_proxy.common.digits import port_number
from pyebpf_proxy.common.printable import printable

#: Host and port of kube-proxy's health server; empty: do not wait.
VARIABLE = "KUBE_PROXY_HEALTH"
DEFAULT = "127.0.0.1:10256"
#: Host and port of kube-proxy's metrics; empty: do not ask.
METRICS_VARIABLE = "KUBE_PROXY_METRICS"
METRICS_DEFAULT = "127.0.0.1:10249"
#: With bindAddress ::, which kubeadm sets where the first family of the nodes is IPv6, kube-proxy serves its metrics
#: only on ::1. On such nodes k3s serves the health page there.
_LOOPBACK, _LOOPBACK6 = "127.0.0.1", "::1"
#: How long the answers must be good if they do not show that both families are programmed: kube-proxy has one family,
#: is an old version, or has its metrics elsewhere. It tries to bind the port of the metrics every 5 s.
SETTLED_SECONDS = 10.0
_PERIOD = 0.5
_BOTH = {"IPv4", "IPv6"}
_MOST_BYTES = 4 << 20
#: An old kube-proxy has one time for both families, without a label, and 0 before the first sync.
_FAMILY = r'\{(?:[^}\n]*,)?ip_family="(\w*)"[^}\n]*\}'
_TIME = re.compile(
    rf"^kubeproxy_sync_proxy_rules_last(_queued)?_timestamp_seconds(?:{_FAMILY})? ([\d.e+]+)$", re.MULTILINE
)


def wait(
    address: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
    metrics: str | None = None,
    serving: Callable[[], set[str]] = lambda: set(_BOTH),
) -> int:
    """Return 0 when kube-proxy has programmed the node, however long that takes; 2 for an invalid address.

    ``serving``: the families in which the kernel has kube-proxy's rules; OSError if that cannot be read.
    """
    address = os.environ.get(VARIABLE, DEFAULT) if address is None else address
    metrics = os.environ.get(METRICS_VARIABLE, METRICS_DEFAULT) if metrics is None else metrics
    if not address:
        print("not waiting for kube-proxy")
        return 0
    place, metrics_place = _place(VARIABLE, address), _place(METRICS_VARIABLE, metrics) if metrics else None
    if place is None or (metrics and metrics_place is None):
        return 2
    logged = ""
    since: float | None = None
    while True:
        families, why = started(*place)
        synced = None
        if families is not None:
            synced = programmed(*metrics_place) if metrics_place else None
            if synced is None:
                why = f"its metrics do not answer at {metrics}" if metrics else "its metrics are not asked for"
            elif missing := _missing(families, synced):
                families, why = None, f"it has not programmed the node yet ({missing})"
            if families is not None and (gone := _gone(families, serving)):
                why = f"its rules are gone ({gone}): an agent that starts removes them; restart kube-proxy"
                families = None
        now = time.monotonic()
        since = None if families is None else now if since is None else since
        if families is not None and ((synced or set()) >= _BOTH or now - (since or now) >= SETTLED_SECONDS):
            names = ", ".join(sorted(families)) or "it is an old one, which names no family"
            print(f"kube-proxy has programmed this node: {printable(names)}")
            return 0
        if why != logged:
            # Before kube-proxy starts, any program of the node may answer there.
            print(f"waiting for kube-proxy at {address}: {printable(why)}", flush=True)
            logged = why
        sleep(_PERIOD)


def _place(variable: str, address: str) -> tuple[str, int] | None:
    """Host and port of an address; None, after a message, if it is none."""
    host, _, port = address.rpartition(":")
    number = port_number(port)
    if not host or number is None:
        print(f"Error: {variable}: {address} is not HOST:PORT", file=sys.stderr)
        return None
    return host.strip("[]"), number


def _missing(families: set[str], synced: set[str]) -> str:
    """The families that kube-proxy has, but has not synced; "" if it has synced all of them."""
    if "" in synced:
        return ""
    return ", ".join(sorted(families - synced)) or ("" if synced else "no family")


def _gone(families: set[str], serving: Callable[[], set[str]]) -> str:
    """The families of kube-proxy without rules; "" if it has rules in each, or if they cannot be read."""
    try:
        found = serving()
    except OSError:
        return ""
    return ", ".join(sorted(families - found)) or ("" if found else "no family has any")


def hosts(host: str) -> tuple[str, ...]:
    """Where to ask: ::1 if 127.0.0.1 does not answer."""
    return (_LOOPBACK, _LOOPBACK6) if host == _LOOPBACK else (host,)


def programmed(host: str, port: int) -> set[str] | None:
    """The families that kube-proxy has synced; "" for those of an old one. None if it does not serve metrics there."""
    answers = (_programmed(each, port) for each in hosts(host))
    return next((families for families in answers if families is not None), None)


def _programmed(host: str, port: int) -> set[str] | None:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read(_MOST_BYTES).decode(errors="replace")
        times = _TIME.findall(text)
        return {family for queued, family, seconds in times if not queued and float(seconds) > 0} if times else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def started(host: str, port: int) -> tuple[set[str] | None, str]:
    """The families that kube-proxy has (empty if it names none), or None, and the reason."""
    reason = ""
    for each in hosts(host):
        families, why = _started(each, port)
        if families is not None:
            return families, why
        reason = reason or why
    return None, reason


def _started(host: str, port: int) -> tuple[set[str] | None, str]:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/livez")
        answer = connection.getresponse()
        body = json.loads(answer.read(64 << 10))
        if answer.status == 404:
            return None, "no page /livez"
        if "healthy" in body or "currentTime" not in body:
            families = set(body.get("status") or ())
            return (families, "only one family so far") if families else (None, "it has not started yet")
        # An older kube-proxy names no family, and answers 200 even before its first sync.
        return (set(), "it answers") if answer.status == 200 else (None, f"status {answer.status}")
    except (OSError, http.client.HTTPException, ValueError, AttributeError, TypeError, RecursionError) as error:
        return None, f"no answer ({error})"
    finally:
        connection.close()
