# SPDX-License-Identifier: Apache-2.0
"""On which machines an agent was started: a ConfigMap that outlives the nodes' objects.

A node whose object was deleted, and that registered again, has no label and no note. Its machine ID shows that it is
the same machine, where the programs of the agent are attached until the clean-up or a reboot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyebpf_proxy.cluster.api import CONFIG_MAPS, Api, Object, RefusedError
from pyebpf_proxy.cluster.objects import NAME, NAMESPACE

CONFIG_MAP = "pyebpf-proxy-machines"
#: Beyond this many, machines whose nodes no longer exist are forgotten: a ConfigMap holds one MiB.
_MANY = 5000


def machine_of(node: Object) -> str:
    """The machine ID that the kubelet has reported; "" if it has not."""
    return str((node["status"].get("nodeInfo") or {}).get("machineID") or "")


def known(api: Api) -> dict[str, str]:
    """The machine IDs by the name of the node. RefusedError if this user may not read them."""
    found = api.get(CONFIG_MAPS, CONFIG_MAP, NAMESPACE)
    return {name: str(machine) for name, machine in ((found or {}).get("data") or {}).items()}


def readable(api: Api) -> tuple[dict[str, str], str]:
    """As :func:`known`, and "". A user who may not read them gets no IDs, and the reason."""
    try:
        return known(api), ""
    except RefusedError as refused:
        if refused.status != 403:
            raise
        return {}, f"this user may not get configmaps in {NAMESPACE}"


def note(api: Api, nodes: Iterable[Object], present: Mapping[str, str]) -> None:
    """Remember these nodes, before an agent is started there. ``present``: what is :func:`known`."""
    machines = {each["metadata"]["name"]: machine for each in nodes if (machine := machine_of(each))}
    _write(api, {name: machine for name, machine in machines.items() if present.get(name) != machine})


def forget(api: Api, names: Iterable[str]) -> None:
    """Once the clean-up of these nodes is done."""
    present = known(api)
    _write(api, {name: None for name in names if name in present})


def forget_gone(api: Api, nodes: Iterable[str], present: Mapping[str, str]) -> None:
    """Forget machines whose nodes no longer exist, if there are very many. ``nodes``: all that exist."""
    if len(present) > _MANY:
        _write(api, dict.fromkeys(present.keys() - set(nodes)))


def _write(api: Api, changes: Mapping[str, str | None]) -> None:
    """Change entries; None removes one. No other command does this at the same time: the caller has the Lease."""
    if not changes:
        return
    try:
        api.patch(CONFIG_MAPS, CONFIG_MAP, {"data": dict(changes)}, NAMESPACE)
    except RefusedError as refused:
        if refused.status != 404:
            raise
        labels = {"app.kubernetes.io/name": NAME}
        metadata = {"name": CONFIG_MAP, "namespace": NAMESPACE, "labels": labels}
        api.create(CONFIG_MAPS, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": changes})
