# SPDX-License-Identifier: Apache-2.0
"""Queries of a running agent through the socket in its run folder (servers/local.py).

The commands may have more rights than the agent's container. So whatever it answers costs them little, and is no error.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict, cast, get_type_hints

import msgspec

from pyebpf_proxy.services.addresses import format_address, parse_address

_SECONDS = 2.0
_SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
#: More than a page has with 100 000 endpoints.
_MOST_BYTES = 32 << 20
#: The agent accepts requests of up to 64 KiB.
_AT_ONCE = 1000
_NAMES_AT_ONCE = 400
#: When each family was last synced; 0 before its first sync.
SYNCED = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"


class _Connection(http.client.HTTPConnection):
    def __init__(self, directory: Path) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._directory = directory

    def connect(self) -> None:
        from pyebpf_proxy.common.run_directory import connected

        self.sock = connected(self._directory, _SECONDS)


def _ask(directory: Path, path: str, body: bytes | None = None, statuses: Collection[int] = (http.client.OK,)) -> bytes:
    """The content of a page; b"" if there is no agent, if its version does not have the page, or if it is too long.

    ``statuses``: of an answer with content.
    """
    connection = _Connection(directory)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        answer = connection.getresponse()
        content = answer.read(_MOST_BYTES + 1) if answer.status in statuses else b""
        return content if len(content) <= _MOST_BYTES else b""
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()


def _object(data: bytes) -> dict[str, Any]:
    try:
        # Unlike json, it refuses surrogates, which no output could encode.
        found = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def samples(directory: Path) -> dict[str, list[float]]:
    """The agent's metrics by name, without labels and without NaN and infinities; empty if it does not answer."""
    values: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(_ask(directory, "/metrics").decode(errors="replace")):
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(value)):
                values.setdefault(name, []).append(number)
    return values


class Recent(TypedDict, total=False):
    """Counts by name, of the last minute."""

    lastMinute: dict[str, int]


class Device(TypedDict, total=False):
    """A device: its program, why redirects to it are not the best ones, and programs of others."""

    program: str
    limit: str
    others: list[str]


class Closed(TypedDict):
    """Why the fast path is closed: the reason's name in drops and metrics, and its text."""

    reason: str
    text: str


class Promotion(TypedDict, total=False):
    """Promotions that failed, by outcome, and the last error."""

    failed: dict[str, int]
    lastError: str


class DataPath(TypedDict, total=False):
    """What commands use of the result of ``view`` (datapath/datapath.py). By device index, or by family."""

    settings: dict[str, bool | int | str]
    devices: dict[str, Device]
    closed: dict[str, Closed]
    warnings: dict[str, str]
    promotion: Promotion
    pinsGone: str
    conntrackRefusals: Recent
    repairs: Recent


class FamilyHealth(TypedDict, total=False):
    """What /livez says about a family."""

    healthy: bool


class OverLimit(TypedDict, total=False):
    """How many Services are over a limit, and the first one; empty: none."""

    services: int
    first: str
    what: str


class NotServed(TypedDict, total=False):
    """How many Services are not served at an address or port that they list, and the first message; empty: none."""

    services: int
    first: str


class NotWritten(TypedDict, total=False):
    """How many service ports are not in the kernel as they should be, and the first message; empty: none."""

    servicePorts: int
    first: str


class State(TypedDict):
    """The agent's state. A part is empty if the agent does not send it, as an earlier version, or not in this form."""

    version: str
    #: Configured features that are not available, and why.
    refusals: dict[str, str]
    datapath: DataPath
    #: By resource, why its objects do not arrive; "" means all resources.
    source: dict[str, str]
    overLimit: OverLimit
    notServed: NotServed
    notWritten: NotWritten


#: If the agent does not answer, this is known of it.
NOTHING = State(version="", refusals={}, datapath={}, source={}, overLimit={}, notServed={}, notWritten={})


def state(directory: Path) -> State | None:
    """The agent's state, or None if it does not answer."""
    data = _ask(directory, "/state")
    if not data:
        return None
    found = _object(data)
    return cast(State, {part: _part(found.get(part), kind) for part, kind in get_type_hints(State).items()})


def source_text(trouble: tuple[str, str]) -> str:
    """The text about an item of ``State.source``."""
    resource, why = trouble
    return f"{resource} cannot be watched: {why}" if resource else f"the API server fails: {why}"


def _part(found: object, kind: Callable[[], Any]) -> Any:
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError:
        return kind()


def late(directory: Path) -> list[str]:
    """The families with a change that has waited for more than 2 × syncPeriod, as /livez reports it."""
    statuses = (http.client.OK, http.client.SERVICE_UNAVAILABLE)
    families = _part(_object(_ask(directory, "/livez", statuses=statuses)).get("status"), dict[str, FamilyHealth])
    return [name for name, health in sorted(families.items()) if not health.get("healthy", True)]


def losses(directory: Path, services: Iterable[str]) -> list[str]:
    """What the agent does not serve of these Services (``namespace/name``), as it has logged it."""
    answers = _about(directory, "/losses", services)
    return [str(text) for answer in answers for texts in answer.values() if isinstance(texts, list) for text in texts]


def no_endpoints(directory: Path, services: Iterable[str]) -> dict[str, str]:
    """Why service ports of these Services (``namespace/name``) have no usable endpoint, by their names as text."""
    answers = _about(directory, "/no-endpoints", services)
    return {name: str(why) for answer in answers for name, why in answer.items()}


def _about(directory: Path, page: str, services: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The answers of a page about these Services."""
    wanted = sorted({*services})
    for at in range(0, len(wanted), _NAMES_AT_ONCE):
        yield _object(_ask(directory, page, "\n".join(wanted[at : at + _NAMES_AT_ONCE]).encode()))


def pods(directory: Path, addresses: Iterable[bytes]) -> dict[bytes, str]:
    """``namespace/name`` of the pods with these addresses, if the agent knows them."""
    wanted = sorted({*addresses})
    found: dict[bytes, str] = {}
    for at in range(0, len(wanted), _AT_ONCE):
        body = "\n".join(map(format_address, wanted[at : at + _AT_ONCE])).encode()
        answer = _object(_ask(directory, "/pods", body))
        if not answer:
            continue
        found.update((packed, str(name)) for text, name in answer.items() if (packed := parse_address(text)))
    return found
