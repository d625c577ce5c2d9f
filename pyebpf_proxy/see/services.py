# SPDX-License-Identifier: Apache-2.0
"""``services``, ``backends``, ``frontends``: views of the kernel's state. The functions are pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pyebpf_proxy.see import model
from pyebpf_proxy.see.answers import QuestionError, near
from pyebpf_proxy.see.diff import KINDS, differences, sets
from pyebpf_proxy.see.names import matching
from pyebpf_proxy.see.state import Backend, Service, State
from pyebpf_proxy.services.addresses import format_address, format_address_port, format_prefix, parse_address
from pyebpf_proxy.services.model import Frontend, IPFamily, Protocol, ServicePort, ServicePortName

if TYPE_CHECKING:
    from pyebpf_proxy.see.wanted import Wanted


def name_text(name: ServicePortName) -> str:
    """``namespace/name:port``, without protocol and family."""
    return f"{name.namespace}/{name.name}" + (f":{name.port}" if name.port else "")


# ---- views ------------------------------------------------------------------------------------------------------


def service_view(state: State, service: Service, wanted: Wanted | None = None) -> model.ServiceView:
    """One service port; with ``wanted``, also the endpoints that are not used."""
    name = service.name
    return model.ServiceView(
        name=name_text(name),
        namespace=name.namespace,
        service=name.name,
        port=name.port,
        protocol=name.protocol.name,
        family=name.family.value,
        id=service.id,
        config=service.config,
        frontends=[frontend_view(name, frontend) for frontend in sorted(service.frontends)],
        endpoints=_endpoints(state, service, wanted),
        any_endpoints=service.any_endpoints,
        internal_traffic_policy="Local" if service.internal_local else "Cluster",
        external_traffic_policy="Local" if service.external_local else "Cluster",
        affinity_seconds=service.affinity_seconds,
        source_ranges=[format_prefix(each) for each in sorted(service.ranges)],
        endpoint_notes=[note for note in wanted.notes(name) if note] if wanted is not None else [],
    )


def frontend_view(name: ServicePortName, frontend: Frontend) -> model.FrontendView:
    """One address of a service port."""
    return model.FrontendView(
        address=format_address(frontend.address),
        port=frontend.port,
        protocol=name.protocol.name,
        kind=KINDS[frontend.kind],
        service=name_text(name),
    )


def _endpoints(state: State, service: Service, wanted: Wanted | None) -> list[model.EndpointView]:
    cluster, local = set(service.cluster), set(service.local)
    known = [state.backends[number] for number in service.backends if number in state.backends]
    found = [
        model.EndpointView(
            address=backend.text,
            backend=backend.id,
            local=backend.local,
            lists=[*(["cluster"] if backend.id in cluster else []), *(["local"] if backend.id in local else [])],  # type: ignore[list-item]
            serving=True,
        )
        for backend in known
    ]
    found.sort(key=lambda view: view.address)
    used = {(backend.address, backend.port) for backend in known}
    if wanted is not None:
        for entry, why in wanted.left_out(service.name, used):
            address, port = entry.endpoint.address, entry.endpoint.port
            found.append(
                model.EndpointView(
                    address=format_address_port(address, port),
                    backend=0,
                    local=entry.endpoint.local,
                    lists=[],
                    serving=(address, port) in service.serving,
                    left_out=why,
                )
            )
        return found
    for address, port in sorted(service.serving - used):
        found.append(
            model.EndpointView(
                address=format_address_port(address, port),
                backend=0,
                local=False,
                lists=[],
                serving=True,
                left_out="serves existing flows, gets no new ones",
            )
        )
    return found


def services(
    state: State, names: Collection[ServicePortName], wanted: Wanted | None = None, diff: bool = False
) -> model.Services:
    """The service ports with these names. ``diff``: only those that differ from ``wanted``, with the differences."""
    known = state.by_name
    views = [service_view(state, known[name], wanted) for name in names if name in known]
    if diff and wanted is not None:
        views = _different(state, known, names, wanted, views)
    return model.Services(services=views, problems=state.problems)


def fill_no_endpoints(views: Iterable[model.ServiceView], why: Mapping[ServicePortName, str]) -> None:
    """Fill in why these service ports have no usable endpoint."""
    for view in views:
        name = ServicePortName(view.namespace, view.service, view.port, Protocol[view.protocol], IPFamily(view.family))
        view.no_endpoints = why.get(name, "")


def _different(
    state: State,
    known: dict[ServicePortName, Service],
    names: Collection[ServicePortName],
    wanted: Wanted,
    views: Sequence[model.ServiceView],
) -> list[model.ServiceView]:
    found = []
    for name, view in zip((name for name in names if name in known), views, strict=True):
        view.differences = differences(state.plan(known[name]), wanted.get(name))
        if name.protocol is Protocol.UDP and (port := wanted.get(name)) is not None:
            serving = {(e.address, e.port) for e in port.serving}
            view.differences += sets(
                "serving endpoint", known[name].serving, serving, lambda e: format_address_port(*e)
            )
        if view.differences:
            found.append(view)
    for name in names:
        port = wanted.get(name)
        if name not in known and port is not None:
            view = service_view(State(), _unwritten(port))
            view.differences = ["desired, but not in the kernel"]
            found.append(view)
    return found


def _place(place: tuple[bytes, int]) -> str:
    return format_address_port(*place)


def _unwritten(port: ServicePort) -> Service:
    return Service(
        0,
        port.name,
        0,
        0,
        port.affinity_seconds,
        port.any_endpoints,
        port.internal_local,
        port.external_local,
        bool(port.source_ranges),
        port.vip_source_allowed,
        frontends=list(port.frontends),
        ranges=list(port.source_ranges),
    )


def chosen(
    state: State, wanted: str | None, namespace: str | None, others: Iterable[ServicePortName] = ()
) -> list[ServicePortName]:
    """The selected names: all, those of a namespace, or those that match ``wanted``. Raises QuestionError."""
    names = sorted({*(service.name for service in state.services.values()), *others})
    if namespace is not None:
        there = [name for name in names if name.namespace == namespace]
        if not there and names:
            raise QuestionError(
                f"no Service of namespace {namespace} is served{near(namespace, {n.namespace for n in names})}"
            )
        names = there
    return matching(wanted, names) if wanted is not None else names


def backends(state: State, names: Collection[ServicePortName]) -> model.Backends:
    """The endpoints of these service ports."""
    known = state.by_name
    every = [(name, backend) for name in names for backend in state.endpoints(known[name])]
    return model.Backends(backends=[_backend_view(name, backend) for name, backend in every])


def _backend_view(name: ServicePortName, backend: Backend) -> model.BackendView:
    return model.BackendView(
        id=backend.id,
        address=backend.text,
        protocol=name.protocol.name,
        service=name_text(name),
        local=backend.local,
    )


def frontends(state: State, names: Collection[ServicePortName], address: str | None) -> model.Frontends:
    """The frontends of these service ports, or those of one address. QuestionError if it is not an address."""
    known = state.by_name
    every = [frontend_view(name, each) for name in names for each in sorted(known[name].frontends)]
    if address is not None:
        packed = parse_address(address)
        if packed is None:
            raise QuestionError(f"{address} is not an IP address")
        every = [view for view in every if view.address == format_address(packed)]
        if not every:
            raise QuestionError(f"no service has the address {format_address(packed)}")
    return model.Frontends(frontends=every)
