# SPDX-License-Identifier: Apache-2.0
"""Selects the format of ``/flagz`` and ``/statusz`` by the client's Accept header, as Kubernetes' servers do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from pyebpf_proxy.servers.http import Request, Response

GROUP = "config.k8s.io"
VERSIONS = ("v1alpha1", "v1beta1")
DEPRECATED = "v1alpha1"

#: How many bytes and parts of an Accept header, and how many bytes of a query, are read at most: more of them than any
#: client sends would occupy the servers' thread for seconds.
MOST_BYTES, MOST_CLAUSES = 8192, 100

_JSON, _YAML, _TEXT = _OFFERED = ("application/json", "application/yaml", "text/plain")
_HUMANS = ("curl", "Wget", "Mozilla/5.0")
_BOOLEAN = {"1": True, "t": True, "T": True, "TRUE": True, "true": True, "True": True}


class Clause(NamedTuple):
    """One part of an Accept header."""

    type: str
    subtype: str
    quality: float
    parameters: dict[str, str]

    def fits(self, offered: str) -> bool:
        """Whether this matches ``offered``."""
        kind, _, subtype = offered.partition("/")
        return (self.type, self.subtype) in ((kind, subtype), (kind, "*"), ("*", "*"))


class Form(NamedTuple):
    """The negotiated format: ``version`` is "" for plain text."""

    media: str
    version: str
    pretty: bool


def negotiate(request: Request, kind: str) -> Form | None:
    """The format for an object of ``kind`` (``Flagz``, ``Statusz``); None if no requested format is available."""
    header = request.headers.get("accept", "").strip()
    if not header:
        return Form(_TEXT, "", False)
    for clause in clauses(header):
        for offered in filter(clause.fits, _OFFERED):
            wanted = {key: clause.parameters.get(key, "") for key in ("as", "g", "v")}
            if clause.parameters.get("stream") or clause.parameters.get("sv"):
                continue
            if offered == _TEXT:
                if not clause.parameters.keys() & wanted.keys():
                    return Form(_TEXT, "", False)
            elif wanted["as"] == kind and wanted["g"] == GROUP and wanted["v"] in VERSIONS:
                return Form(offered, wanted["v"], _pretty(request, clause))
    return None


def clauses(header: str) -> list[Clause]:
    """The parts of an Accept header by descending quality, specific types before wildcards."""
    return sorted(_clauses(header), key=lambda c: (-c.quality, c.type == "*", c.subtype == "*"))


def structured(form: Form, kind: str, value: Mapping[str, Any]) -> Response:
    """An object of ``kind`` in a structured form."""
    headers = [("Content-Type", f"{form.media};g={GROUP};v={form.version};as={kind}")]
    if form.version == DEPRECATED:
        text = f"This version of the {kind.lower()} endpoint is deprecated. Please use a newer version."
        headers.append(("Warning", f'299 - "{text}"'))
    document = {"kind": kind, "apiVersion": f"{GROUP}/{form.version}", "metadata": {"name": "kube-proxy"}, **value}
    return Response(200, tuple(headers), _encode(document, form.media, form.pretty))


def not_acceptable(request: Request) -> Response:
    """The answer if no available format is acceptable."""
    found = clauses(request.headers.get("accept", ""))
    plain = [clause for clause in found if not clause.parameters.keys() & {"as", "g", "v"}]
    media = next((offered for c in plain for offered in _OFFERED[:2] if c.fits(offered)), _JSON)
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"only the following media types are accepted: {', '.join(_OFFERED)}",
        "reason": "NotAcceptable",
        "code": 406,
    }
    return Response(406, (("Content-Type", media),), _encode(status, media, _pretty(request, None)))


def _clauses(header: str) -> Iterator[Clause]:
    for part in header[:MOST_BYTES].split(",")[:MOST_CLAUSES]:
        media, *rest = (piece.strip() for piece in part.split(";"))
        kind, slash, subtype = media.partition("/")
        if not slash and kind == "*":
            subtype = "*"
        parameters = dict(_pairs(rest))
        try:
            quality = float(parameters.pop("q", "1"))
        except ValueError:
            quality = 1.0
        yield Clause(kind.strip(), subtype.strip(), quality, parameters)


def _pairs(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        key, equals, value = text.partition("=")
        if equals:
            yield key.strip(), value.strip()


def _pretty(request: Request, clause: Clause | None) -> bool:
    """Whether to indent the answer: on request, and for interactive clients."""
    if clause is not None and clause.parameters.get("pretty") == "1":
        return True
    asked = parse_qs(request.query[:MOST_BYTES]).get("pretty")
    if asked:
        return _BOOLEAN.get(asked[0], False)
    return request.headers.get("user-agent", "").startswith(_HUMANS)


def _encode(document: Mapping[str, Any], media: str, pretty: bool) -> bytes:
    if media == _YAML:
        from pyebpf_proxy.config.writer import yaml_text

        return yaml_text(document).encode()
    if pretty:
        return json.dumps(document, indent=2, ensure_ascii=False).encode()
    return (json.dumps(document, separators=(",", ":"), ensure_ascii=False) + "\n").encode()
