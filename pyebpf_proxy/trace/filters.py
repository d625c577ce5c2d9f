# SPDX-License-Identifier: Apache-2.0
"""FILTER words of ``trace``: they check views, and set a prefilter in the programs. The functions are pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from pyebpf_proxy.common.bpf_constants import TRACED_SERVICES
from pyebpf_proxy.common.digits import port_number
from pyebpf_proxy.see import model
from pyebpf_proxy.see.answers import QuestionError, listed, near
from pyebpf_proxy.see.filters import means, parse_place, split
from pyebpf_proxy.see.names import matching, suggested
from pyebpf_proxy.services.addresses import parse_address
from pyebpf_proxy.services.model import Protocol, ServicePortName
from pyebpf_proxy.trace.events import path_of

FIELDS = (
    *("service", "address", "client", "destination", "endpoint", "port", "protocol", "reason", "path", "device"),
    "process",
)
PATHS = ("fast", "netfilter", "socket")
Check = Callable[[model.Decision], bool]
#: ``[NAMESPACE/]NAME`` of a pod. A word of digits and dots is an address.
_POD = re.compile(r"(?![0-9.]+$)([a-z0-9-]+/)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_PODS: Mapping[str, Callable[[model.Decision], tuple[str, ...]]] = {
    "address": lambda d: (d.source_name, d.endpoint_name),
    "client": lambda d: (d.source_name,),
    "endpoint": lambda d: (d.endpoint_name,),
}


class FilterNames(NamedTuple):
    """The names that a filter may use, with their numbers. Names of ``reasons`` are in lower case."""

    services: Mapping[ServicePortName, int]
    reasons: Mapping[str, int]
    devices: Mapping[str, int]


class Filter:
    """A filter: decisions must match all words. ``wanted``: fields of struct tracing, for the programs' prefilter."""

    def __init__(self, words: Collection[str], known: FilterNames) -> None:
        self.wanted: dict[str, Any] = {"reasons": (1 << 64) - 1}
        self._checks: list[Check] = []
        self._services: set[tuple[str, str, str]] | None = None
        #: Whether the filter names pods; only the agent knows their names.
        self.names_pods = False
        for word in words:
            field, value = split(word, FIELDS, "decisions")
            self._add(field or _field_of(word, known), value, known)

    def fits(self, decision: model.Decision) -> bool:
        """Whether the decision matches."""
        return all(check(decision) for check in self._checks)

    @property
    def names_services(self) -> bool:
        """Whether the filter depends on service ids, which change with the services."""
        return self._services is not None

    def renumber(self, services: Mapping[ServicePortName, int]) -> dict[str, Any]:
        """``wanted`` with the current service ids."""
        if self._services is not None:
            numbers = [
                number
                for name, number in services.items()
                if not self._services.isdisjoint({(name.namespace, name.name, ""), _port_of(name)})
            ]
            # An empty list would match every service; an unused id matches none.
            some = numbers or [0xFFFFFFFF]
            self.wanted["services"] = tuple(some) if len(some) <= TRACED_SERVICES else ()
        return self.wanted

    def _add(self, field: str, value: str, known: FilterNames) -> None:
        if not value:
            raise QuestionError(f"{field}= needs a value")
        if field == "service":
            self._service(value, known)
        elif field in _PODS and _POD.fullmatch(value):
            self.names_pods = True
            names = _PODS[field]
            self._checks.append(lambda d: any(means(value, name) for name in names(d) if name))
        elif field in ("address", "client", "destination", "endpoint"):
            self._address(field, value)
        elif field == "port":
            self._port(value)
        elif field == "protocol":
            protocol = _protocol(value)
            self.wanted["protocol"] = int(protocol)
            self._checks.append(lambda d: d.protocol == protocol.name)
        elif field in ("reason", "path"):
            self._reasons(field, value, known)
        elif field == "device":
            if value not in known.devices:
                raise QuestionError(f"there is no device {value}{near(value, known.devices)}")
            self.wanted["device"] = known.devices[value]
            self._checks.append(lambda d: d.device == value)
        else:
            self._checks.append(lambda d: value in (d.process, str(d.pid)))

    def _service(self, value: str, known: FilterNames) -> None:
        ports = matching(value, known.services)
        exact = ":" in value
        found = {_port_of(name) if exact else (name.namespace, name.name, "") for name in ports}
        self._services = found
        texts = {f"{space}/{name}" + (f":{port}" if port else "") for space, name, port in found}

        def check(decision: model.Decision) -> bool:
            return decision.service in texts or decision.service.partition(":")[0] in texts

        self._checks.append(check)
        self.renumber(known.services)

    def _address(self, field: str, value: str) -> None:
        found = parse_place(value)
        if found is None:
            raise QuestionError(f"{value} is not an ADDRESS or ADDRESS:PORT")
        packed, text = found
        self.wanted |= {"family": 4 if len(packed) == 4 else 6, "address": packed.ljust(16, b"\0")}
        get: dict[str, Callable[[model.Decision], tuple[str, ...]]] = {
            "address": lambda d: (d.source, d.destination, d.endpoint),
            "client": lambda d: (d.source,),
            "destination": lambda d: (d.destination,),
            "endpoint": lambda d: (d.endpoint,),
        }
        self._checks.append(lambda d: any(means(text, place) for place in get[field](d) if place))

    def _port(self, value: str) -> None:
        number = port_number(value)
        if number is None:
            raise QuestionError(f"{value} is not a port (1 to 65535)")
        self.wanted["port"] = number
        end = f":{number}"
        self._checks.append(lambda d: any(place.endswith(end) for place in (d.source, d.destination, d.endpoint)))

    def _reasons(self, field: str, value: str, known: FilterNames) -> None:
        if field == "path":
            if value not in PATHS:
                raise QuestionError(f"there is no path {value}: {', '.join(PATHS)}")
            found = {name for name in known.reasons if path_of(name) == value}
        else:
            found = _reasons(value, known)
            if not found:
                raise QuestionError(f"there is no reason {value}{near(value.lower(), known.reasons)}")
        self.wanted["reasons"] &= sum(1 << known.reasons[name] for name in found)
        self._checks.append(lambda d: d.reason in found)


def _port_of(name: ServicePortName) -> tuple[str, str, str]:
    return name.namespace, name.name, name.port


def _protocol(value: str) -> Protocol:
    try:
        return Protocol[value.upper()]
    except KeyError:
        raise QuestionError(f"there is no protocol {value}: {listed(Protocol.__members__)}") from None


def _reasons(value: str, known: FilterNames) -> set[str]:
    """The reasons with these names (``a,b``) or prefixes: ``drop`` means every reason for a drop."""
    wanted = [each for part in value.lower().split(",") if (each := part.rstrip("_*"))]
    return {name for name in known.reasons if any(name == each or name.startswith(each + "_") for each in wanted)}


def _field_of(word: str, known: FilterNames) -> str:
    """The field to which a word without a field belongs. QuestionError if it is unknown."""
    if parse_address(word.strip("[]")) is not None or parse_address(word.rpartition(":")[0].strip("[]")) is not None:
        return "address"
    if word.upper() in Protocol.__members__:
        return "protocol"
    if word in PATHS:
        return "path"
    if _reasons(word, known):
        return "reason"
    if word in known.devices:
        return "device"
    try:
        matching(word, known.services)
    except QuestionError as error:
        if suggested(word, {(name.namespace, name.name) for name in known.services}) or "may be" in str(error):
            raise
        raise QuestionError(f"{word} is not an address, service, protocol, path, reason or device") from None
    return "service"
