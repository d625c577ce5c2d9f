# SPDX-License-Identifier: Apache-2.0
"""Matches names on the command line with services. The functions are pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pyebpf_proxy.see.answers import QuestionError, UnknownServiceError, listed, near
from pyebpf_proxy.services.model import ServicePortName


def matching(wanted: str, names: Collection[ServicePortName]) -> list[ServicePortName]:
    """The service ports that ``[NAMESPACE/]NAME[:PORT]`` names; a unique prefix of a Service's name is enough.

    UnknownServiceError if the name is unknown; QuestionError if it matches more than one Service.
    """
    text, colon, port = wanted.partition(":")
    namespace, service = split(text)
    every = {(name.namespace, name.name) for name in names if namespace in (None, name.namespace)}
    found = {key for key in every if key[1] == service}
    if not found:
        found = {key for key in every if service and key[1].startswith(service)}
    if len(found) > 1:
        raise QuestionError(f"{wanted} is ambiguous: it may be {listed(_texts(found))}")
    ports = [name for name in names if (name.namespace, name.name) in found]
    if not found:
        raise UnknownServiceError(f"no Service is called {wanted}{_suggested(text, names)}", wanted)
    if colon:
        chosen = [name for name in ports if port == name.port]
        if not chosen:
            raise QuestionError(
                f"{_texts(found)[0]} has no port {port}: it has {listed(sorted({n.port for n in ports}))}"
            )
        ports = chosen
    return sorted(ports)


def split(wanted: str) -> tuple[str | None, str]:
    """Namespace and name of ``[NAMESPACE/]NAME[:PORT]``; None: no namespace is given."""
    namespace, slash, service = wanted.partition(":")[0].rpartition("/")
    return namespace if slash else None, service


def is_exact(wanted: str, names: Iterable[ServicePortName]) -> bool:
    """Whether a Service has exactly the name ``[NAMESPACE/]NAME[:PORT]``."""
    namespace, service = split(wanted)
    return any(name.name == service and namespace in (None, name.namespace) for name in names)


def _texts(keys: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{namespace}/{name}" for namespace, name in sorted(keys)]


def _suggested(text: str, names: Collection[ServicePortName]) -> str:
    return suggested(text, {(name.namespace, name.name) for name in names}) or (
        "" if names else ": there are no services"
    )


def suggested(text: str, services: Collection[tuple[str, str]]) -> str:
    """A hint for a message: Services with names similar to ``[NAMESPACE/]NAME``."""
    namespace, slash, name = text.rpartition("/")
    there = {each for space, each in services if space == namespace}
    if slash and there:
        alike = near(name, there)
        return alike.replace("mean ", f"mean {namespace}/", 1).replace(" or ", f" or {namespace}/")
    return near(text, _texts(services) if slash else {each for _, each in services})
