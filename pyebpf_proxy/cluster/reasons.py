# SPDX-License-Identifier: Apache-2.0
"""Why a pod does not come or start: what the scheduler, the kubelet and the DaemonSet controller say of it."""

from __future__ import annotations

from pyebpf_proxy.cluster.api import EVENTS, PODS, Api, Object, RefusedError
from pyebpf_proxy.cluster.model import one_line
from pyebpf_proxy.cluster.objects import NAMESPACE


def of_pod(api: Api, name: str) -> str:
    """Why a pod is not scheduled, else its newest Warning event; "" if there is none."""
    pod = api.get(PODS, name, NAMESPACE)
    for each in (pod or {}).get("status", {}).get("conditions") or ():
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return one_line(each.get("message") or each.get("reason") or "")
    return _event(api, "Pod", name)


def of_daemon_set(api: Api, name: str) -> str:
    """Why the controller makes no pod: the DaemonSet's newest Warning event; "" if there is none."""
    return _event(api, "DaemonSet", name)


def _event(api: Api, kind: str, name: str) -> str:
    """Of one object, the newest event of type Warning; "" also if this user may not read events."""
    fields = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
    try:
        events = api.objects(EVENTS, NAMESPACE, fields=fields)
    except RefusedError:
        return ""
    newest = max(events, key=_time, default=None)
    return one_line(f"{newest.get('reason', '')}: {newest.get('message', '')}") if newest is not None else ""


def _time(event: Object) -> str:
    """When it was last seen, in a form that sorts."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")
