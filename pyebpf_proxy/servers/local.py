# SPDX-License-Identifier: Apache-2.0
"""The Unix socket in the run folder that commands on the node use to query the agent. Only root may use it.

Commands work without the agent: they read the kernel's state, and only lack this additional information.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy import __version__
from pyebpf_proxy.servers.health import JSON_HEADERS
from pyebpf_proxy.servers.http import Handler, Request, Response
from pyebpf_proxy.services.addresses import format_address, parse_address
from pyebpf_proxy.services.losses import LINES, OVER_LIMIT, LossMessage
from pyebpf_proxy.services.model import ServicePortName

_BAD = Response(400, (("Content-Type", "text/plain; charset=utf-8"),), b"expected addresses, one per line\n")


class Local(NamedTuple):
    """Functions that answer queries; all are called in the servers' thread.

    ``pods``: the names of the pods with these addresses. ``refusals``: requested features that are off, and why.
    """

    directory: Path
    pods: Callable[[Collection[bytes]], Mapping[bytes, str]]
    refusals: Callable[[], Mapping[str, str]]
    #: The state of the data plane (datapath/view.py).
    datapath: Callable[[], Mapping[str, object]] = dict
    #: By resource, why its objects do not arrive at present; "" means all resources.
    source: Callable[[], Mapping[str, str]] = dict
    #: Services over a limit (namespace and name), and what is not served of each.
    over: Callable[[], Mapping[tuple[str, str], Sequence[str]]] = dict
    #: By Service (namespace and name), what is not served of it.
    messages: Callable[[], Mapping[tuple[str, str], Collection[LossMessage]]] = dict
    #: By service port of a Service (namespace and name), why it has no usable endpoint.
    no_endpoints: Callable[[str, str], Mapping[str, str]] = lambda namespace, name: {}
    #: Service ports that are not in the maps as wanted, and why.
    unwritten: Callable[[], Mapping[ServicePortName, str]] = dict


def pages(local: Local) -> Mapping[str, Handler]:
    """The pages: ``/state``; for the addresses in the request's body ``/pods``; for the Services in it ``/losses`` and
    ``/no-endpoints``.
    """

    def state(request: Request) -> Response:
        answer = {"version": __version__, "refusals": dict(local.refusals()), "datapath": local.datapath()}
        answer |= {"source": dict(local.source()), "overLimit": _over(local.over())}
        answer |= {"notServed": _not_served(local.messages()), "notWritten": _not_written(local.unwritten())}
        return _json(answer)

    def pods(request: Request) -> Response:
        addresses = [parse_address(line) for line in request.body.decode("ascii", "replace").split()]
        known = [address for address in addresses if address is not None]
        if len(known) < len(addresses):
            return _BAD
        return _json({format_address(address): name for address, name in local.pods(known).items()})

    def losses(request: Request) -> Response:
        known = local.messages()
        unwritten: dict[tuple[str, str], list[str]] = {}
        for port, why in local.unwritten().items():
            unwritten.setdefault((port.namespace, port.name), []).append(_unwritten(port, why))
        found: dict[str, list[str]] = {}
        for name in request.body.decode("utf-8", "replace").split():
            namespace, _, service = name.partition("/")
            texts = [each.text for each in known.get((namespace, service), ())]
            texts += unwritten.get((namespace, service), [])[:LINES]
            if texts:
                found[name] = sorted(texts)
        return _json(found)

    def no_endpoints(request: Request) -> Response:
        found: dict[str, str] = {}
        for name in request.body.decode("utf-8", "replace").split():
            namespace, _, service = name.partition("/")
            found.update(local.no_endpoints(namespace, service))
        return _json(found)

    return {"/state": state, "/pods": pods, "/losses": losses, "/no-endpoints": no_endpoints}


def _over(over: Mapping[tuple[str, str], Sequence[str]]) -> Mapping[str, object]:
    """How many Services are over a limit, and the first one; empty: none."""
    if not over:
        return {}
    (namespace, name), what = next(iter(over.items()))
    return {"services": len(over), "first": f"{namespace}/{name}", "what": what[0]}


def _not_served(messages: Mapping[tuple[str, str], Collection[LossMessage]]) -> Mapping[str, object]:
    """How many Services are refused an address or port, and the first message; empty: none. Limits are in ``_over``."""
    refused = [found for found in messages.values() if any(each.reason != OVER_LIMIT for each in found)]
    if not refused:
        return {}
    return {"services": len(refused), "first": min(each.text for each in refused[0] if each.reason != OVER_LIMIT)}


def _not_written(unwritten: Mapping[ServicePortName, str]) -> Mapping[str, object]:
    """How many service ports are not in the maps as wanted, and the message about the first one; empty: none."""
    if not unwritten:
        return {}
    first = min(unwritten)
    return {"servicePorts": len(unwritten), "first": _unwritten(first, unwritten[first])}


def _unwritten(port: ServicePortName, why: str) -> str:
    text = f"{port.namespace}/{port.name}" + (f":{port.port}" if port.port else "")
    return f"{text} {port.protocol.name} IPv{port.family.value} is not in the kernel as it should be: {why}"


def _json(answer: object) -> Response:
    return Response(200, JSON_HEADERS, json.dumps(answer).encode())
