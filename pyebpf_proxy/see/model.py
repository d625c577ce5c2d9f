# SPDX-License-Identifier: Apache-2.0
"""The answers as ``-o json`` gives them. docs/commands.schema.json is made of these types (tools/commands_schema.py).

Fields are added, never renamed and never given another meaning: scripts read them.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Answer(msgspec.Struct, rename="camel", kw_only=True):
    """What all answers have in common."""


class EndpointView(Answer, kw_only=True):
    """``lists``: which traffic it is for. ``leftOut``: why it is in none, "" if it is in one."""

    address: str
    backend: int
    local: bool
    lane: Literal["direct", "netfilter", ""]
    lists: list[Literal["cluster", "local"]]
    serving: bool
    left_out: str = ""


class FrontendView(Answer, kw_only=True):
    """An address that services are reached at. A NodePort's address is 0.0.0.0 or ::."""

    address: str
    port: int
    protocol: str
    kind: str
    service: str


class ServiceView(Answer, kw_only=True):
    """One service port of one IP family. ``differences``: only with --diff, in words."""

    name: str
    namespace: str
    service: str
    port: str
    protocol: str
    family: int
    id: int
    table: int
    frontends: list[FrontendView]
    endpoints: list[EndpointView]
    any_endpoints: bool
    internal_traffic_policy: Literal["Cluster", "Local"]
    external_traffic_policy: Literal["Cluster", "Local"]
    affinity_seconds: int
    source_ranges: list[str]
    differences: list[str] = []


class Services(Answer, kw_only=True, tag_field="kind", tag="Services"):
    """``pyebpf-proxy services``. ``problems``: what in the maps does not fit together."""

    services: list[ServiceView]
    problems: list[str] = []


class BackendView(Answer, kw_only=True):
    """One entry of backends4 or backends6 that is in force."""

    id: int
    address: str
    protocol: str
    service: str
    local: bool
    lane: Literal["direct", "netfilter"]


class Backends(Answer, kw_only=True, tag_field="kind", tag="Backends"):
    """``pyebpf-proxy backends``."""

    backends: list[BackendView]


class Frontends(Answer, kw_only=True, tag_field="kind", tag="Frontends"):
    """``pyebpf-proxy frontends``."""

    frontends: list[FrontendView]


def encode(answer: msgspec.Struct) -> str:
    """The answer as JSON, for scripts."""
    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()


def schema() -> dict[str, object]:
    """JSON schema of all answers, by the word in their field ``kind``."""
    answers = [each for each in Answer.__subclasses__() if each.__struct_config__.tag_field]
    references, definitions = msgspec.json.schema_components(answers, ref_template="#/$defs/{name}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "anyOf": list(references), "$defs": definitions}
