# SPDX-License-Identifier: Apache-2.0
"""Reduces a failing scenario as far as it still fails, and writes it as code, to be kept as a case."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.flows.objects import Svc
from tests.flows.scenarios import Scenario


def reduce(scenario: Scenario, fails: Callable[[Scenario], bool], seconds: float) -> Scenario:
    """The smallest one that was found within ``seconds``, by leaving out one thing after the other."""
    end = time.monotonic() + seconds
    candidates = smaller(scenario)
    while time.monotonic() < end:
        candidate = next(candidates, None)
        if candidate is None:
            break
        if fails(candidate):
            scenario = candidate
            candidates = smaller(scenario)
    return scenario


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario without one of its things each, the largest first."""
    services = scenario.services
    if len(services) > 2:
        half = len(services) // 2
        yield replace(scenario, services=services[:half])
        yield replace(scenario, services=services[half:])
    for at in range(len(services)):
        if len(services) > 1:
            yield replace(scenario, services=_without(services, at))
    for config in _smaller_dict(scenario.config):
        yield replace(scenario, config=config)
    for at, service in enumerate(services):
        for less in _smaller_service(service):
            yield replace(scenario, services=[*services[:at], less, *services[at + 1 :]])


def _smaller_service(service: Svc) -> Iterator[Svc]:
    yield from _defaults(service, ("ends", "ports", "spec", "name", "number"))
    for spec in _smaller_dict(service.spec):
        yield replace(service, spec=spec)
    if len(service.ports) > 1:
        for at in range(len(service.ports)):
            yield replace(service, ports=_without(service.ports, at))
    for at, port in enumerate(service.ports):
        for less in _defaults(port, ("number", "target", "name", "protocol")):
            yield replace(service, ports=[*service.ports[:at], less, *service.ports[at + 1 :]])
    for at, ends in enumerate(service.ends):
        yield replace(service, ends=_without(service.ends, at))
        for place, one in enumerate(ends):
            for some in (_without(ends, place), *([*ends[:place], d, *ends[place + 1 :]] for d in _defaults(one))):
                yield replace(service, ends=[*service.ends[:at], some, *service.ends[at + 1 :]])


def _smaller_dict(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in value:
        yield {other: kept for other, kept in value.items() if other != name}
        if isinstance(value[name], list) and len(value[name]) > 1:
            for at in range(len(value[name])):
                yield value | {name: _without(value[name], at)}


def _defaults(thing: Any, kept: Sequence[str] = ("pod",)) -> Iterator[Any]:
    """A dataclass with one of its fields at its default; ``external`` and ``load_balancer`` become False."""
    for field in dataclasses.fields(thing):
        if field.name in kept:
            continue
        plain = _default(field)
        if field.name in ("external", "load_balancer"):
            plain = False
        if getattr(thing, field.name) != plain:
            yield replace(thing, **{field.name: plain})


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _without(items: Sequence[Any], at: int) -> list[Any]:
    return [*items[:at], *items[at + 1 :]]


def as_code(thing: Any) -> str:
    """As it would be written in ``scenarios.py``, without default values."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        parts = [
            f"{field.name}={as_code(getattr(thing, field.name))}"
            for field in dataclasses.fields(thing)
            if getattr(thing, field.name) != _default(field)
        ]
        return f"{type(thing).__name__}({', '.join(parts)})"
    if isinstance(thing, list):
        return f"[{', '.join(map(as_code, thing))}]"
    return repr(thing)
