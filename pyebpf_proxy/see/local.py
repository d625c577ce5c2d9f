# SPDX-License-Identifier: Apache-2.0
"""Queries of a running agent through the socket in its run folder (servers/local.py).

The commands may have more rights than the agent's container. So whatever it answers costs them little, and is no error.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyebpf_proxy.services.addresses import format_address, parse_address

_SECONDS = 2.0
_SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
#: More than a page has with 100 000 endpoints.
_MOST_BYTES = 32 << 20
#: The agent accepts requests of up to 64 KiB.
_AT_ONCE = 1000


class _Connection(http.client.HTTPConnection):
    def __init__(self, directory: Path) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._directory = directory

    def connect(self) -> None:
        from pyebpf_proxy.common.run_directory import connected

        self.sock = connected(self._directory, _SECONDS)


def _ask(directory: Path, path: str, body: bytes | None = None) -> bytes:
    """The content of a page; b"" if there is no agent, if its version does not have the page, or if it is too long."""
    connection = _Connection(directory)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        answer = connection.getresponse()
        content = answer.read(_MOST_BYTES + 1) if answer.status == http.client.OK else b""
        return content if len(content) <= _MOST_BYTES else b""
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def samples(directory: Path) -> dict[str, list[float]]:
    """The agent's metrics by name, without labels; empty if it does not answer."""
    values: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(_ask(directory, "/metrics").decode(errors="replace")):
        with contextlib.suppress(ValueError):
            values.setdefault(name, []).append(float(value))
    return values


#: Of agents of earlier versions, and of answers that cannot be read.
_UNKNOWN: Mapping[str, Any] = {"version": "", "refusals": {}, "datapath": {}, "source": {}, "overLimit": {}}


def state(directory: Path) -> Mapping[str, Any] | None:
    """The agent's state, or None if it does not answer.

    It has ``version``, ``refusals`` (configured features that are not available, and why), ``datapath``
    (datapath/view.py), ``source`` (by resource, why objects do not arrive), and ``overLimit`` (servers/local.py).
    """
    data = _ask(directory, "/state")
    return {**_UNKNOWN, **_object(data)} if data else None


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
