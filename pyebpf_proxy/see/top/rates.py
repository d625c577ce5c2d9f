# SPDX-License-Identifier: Apache-2.0
"""Computes rates, shares and order of ``top`` from a sample. The functions are pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from pyebpf_proxy.see import model
from pyebpf_proxy.see.services import name_text
from pyebpf_proxy.see.state import Backend, Service
from pyebpf_proxy.see.top.arguments import Order
from pyebpf_proxy.see.top.meter import Amount, Place
from pyebpf_proxy.see.top.service_counters import Sample
from pyebpf_proxy.services.model import ServicePortName

NOTHING = Amount(0, 0)

Part = model.TopService | model.TopBackend


def top(
    services: Mapping[int, Service],
    backends: Mapping[int, Backend],
    sample: Sample,
    before: Mapping[Place, Amount] | None,
    seconds: float,
    named: Collection[ServicePortName] | None = None,
    namespace: str | None = None,
    whole: bool = False,
) -> model.Top:
    """Rates of one interval. ``named``, ``namespace``: only these services. ``whole``: also idle ones."""
    amounts = _difference(sample.amounts, before)
    measured = amounts is not None
    by_service: dict[int, dict[Place, Amount]] = {}
    for place, amount in (amounts or {}).items():
        by_service.setdefault(place.service, {})[place] = amount
    refused: dict[int, int] = {}
    reasons: dict[str, int] = {}
    for (number, reason), count in sample.refused.items():
        refused[number] = refused.get(number, 0) + count
        reasons[reason] = reasons.get(reason, 0) + count
    moved = sample.flows.keys() | by_service.keys() | refused.keys()
    meant = [
        number
        for number, service in services.items()
        if (named is None or service.name in named) and (namespace is None or service.name.namespace == namespace)
    ]
    shown = [
        _service(
            services[number],
            backends,
            sample.flows.get(number, {}),
            by_service.get(number, {}) if measured else None,
            refused.get(number, 0),
            seconds,
            whole,
        )
        for number in meant
        if whole or number in moved
    ]
    return model.Top(
        time=0.0,
        seconds=seconds,
        new_flows=sum(view.new_flows for view in shown),
        packets=sum(view.packets or 0.0 for view in shown) if measured else None,
        bytes=sum(view.bytes or 0.0 for view in shown) if measured else None,
        drops=sum(refused.values()) / seconds,
        reasons=[model.TopDrops(reason=name, drops=count / seconds) for name, count in sorted(reasons.items())],
        services=shown,
        at_rest=len(meant) - len(shown),
        one_in=1,
        notes=[],
    )


def _difference(
    now: Mapping[Place, Amount] | None, before: Mapping[Place, Amount] | None
) -> dict[Place, Amount] | None:
    if now is None or before is None:
        return None
    found = {}
    for place, amount in now.items():
        last = before.get(place, NOTHING)
        if amount != last:
            found[place] = Amount(amount.packets - last.packets, amount.bytes - last.bytes)
    return found


def _service(
    service: Service,
    backends: Mapping[int, Backend],
    flows: Mapping[int, int],
    amounts: Mapping[Place, Amount] | None,
    refused: int,
    seconds: float,
    whole: bool,
) -> model.TopService:
    name = service.name
    total_flows = sum(flows.values())
    total = _sum(amounts.values()) if amounts is not None else None
    views = []
    for number in dict.fromkeys((*service.backends, *flows)):
        backend = backends.get(number)
        if backend is None:
            continue
        amount = amounts.get(Place(service.id, backend.address, backend.port), NOTHING) if amounts is not None else None
        if not whole and not flows.get(number) and amount in (None, NOTHING):
            continue
        share = flows.get(number, 0) / total_flows if total_flows else 0.0
        if not total_flows and amount is not None and total is not None and total.bytes:
            share = amount.bytes / total.bytes
        views.append(
            model.TopBackend(
                address=backend.text,
                local=backend.local,
                new_flows=flows.get(number, 0) / seconds,
                packets=amount.packets / seconds if amount is not None else None,
                bytes=amount.bytes / seconds if amount is not None else None,
                share=share,
            )
        )
    return model.TopService(
        name=name_text(name),
        namespace=name.namespace,
        service=name.name,
        port=name.port,
        protocol=name.protocol.name,
        family=name.family.value,
        new_flows=total_flows / seconds,
        packets=total.packets / seconds if total is not None else None,
        bytes=total.bytes / seconds if total is not None else None,
        drops=refused / seconds,
        backends=sorted(views, key=lambda view: (-view.share, -(view.bytes or 0.0), view.address)),
    )


def _sum(amounts: Collection[Amount]) -> Amount:
    return Amount(sum(each.packets for each in amounts), sum(each.bytes for each in amounts))


_VALUES: Mapping[Order, Callable[[model.TopService], float]] = {
    "flows": lambda view: view.new_flows,
    "packets": lambda view: view.packets or 0.0,
    "bytes": lambda view: view.bytes or 0.0,
    "drops": lambda view: view.drops,
    "name": lambda view: 0.0,
}


def ordered(services: Collection[model.TopService], order: Order) -> list[model.TopService]:
    """Sort services: the busiest first; ties, and with the order ``name`` all, by name."""
    value = _VALUES[order]
    others = (_VALUES["flows"], _VALUES["bytes"], _VALUES["drops"]) if order != "name" else ()
    return sorted(
        services, key=lambda view: (-value(view), *(-other(view) for other in others), view.name, view.family)
    )


def short(number: float | None) -> str:
    """A number with at most three digits: ``0.5``, ``17``, ``1.2k``, ``34M``; "" if not measured, ``-`` for zero."""
    if number is None:
        return ""
    if number < 0.05:
        return "-"
    if number < 9.95:
        return f"{number:.1f}".removesuffix(".0")
    for unit in ("", "k", "M", "G"):
        if number < 9.95 and unit:
            return f"{number:.1f}{unit}"
        if number < 999.5:
            return f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.0f}T"
