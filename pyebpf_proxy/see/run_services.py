# SPDX-License-Identifier: Apache-2.0
"""The commands ``services``, ``backends`` and ``frontends``: they read the maps and print the answer."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from pyebpf_proxy.common.cycles import without_cycle_search
from pyebpf_proxy.see import local, no_endpoints, pods, services_text, state
from pyebpf_proxy.see import services as made
from pyebpf_proxy.see.agent import running_agent
from pyebpf_proxy.see.answers import NOT_RIGHT, RIGHT, QuestionError, SeeError, UnknownServiceError
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.see.names import is_exact
from pyebpf_proxy.see.output import show
from pyebpf_proxy.see.text import terminal

if TYPE_CHECKING:
    from pyebpf_proxy.see.wanted import Wanted
    from pyebpf_proxy.services.model import ServicePortName

#: With more service ports than this, the source is read only if the command line names it: this takes seconds.
MOST_PORTS = 2000


def source_flags(arguments: argparse.Namespace) -> list[str]:
    """The source on the command line, as flags of the agent. QuestionError if there is a node name, but no source."""
    node = arguments.hostname_override
    flags = [f"--{name}={value}" for name in ("config", "manifests") if (value := getattr(arguments, name))]
    if node and not flags:
        raise QuestionError("--hostname-override requires --manifests or --config")
    return [*flags, f"--hostname-override={node}"] if node else flags


class Supplement(NamedTuple):
    """The desired state where it only supplements the kernel's. ``missing``: why it cannot be read, else ""."""

    wanted: Wanted | None = None
    missing: str = ""


def maybe_wanted(arguments: argparse.Namespace, service_ports: int) -> Supplement:
    """The desired state, if it is available quickly."""
    flags = source_flags(arguments)
    if not flags and (service_ports > MOST_PORTS or running_agent(arguments.directory) is None):
        return Supplement()
    from pyebpf_proxy.see.wanted import SILENT, read_wanted

    try:
        return Supplement(read_wanted(arguments.directory, flags, SILENT))
    except SeeError as error:
        if flags:
            raise
        return Supplement(missing=str(error))


def _chosen(
    arguments: argparse.Namespace,
    found: state.State,
    wanted: Wanted | None = None,
    others: Iterable[ServicePortName] = (),
) -> list[ServicePortName]:
    """The service ports that the command line selects. QuestionError: a Service of exactly that name is not served.

    Only without such a Service, the name may be the beginning of another one's.
    """
    others = list(others)
    every = (*(service.name for service in found.services.values()), *others)
    in_namespace = (name for name in every if arguments.namespace in (None, name.namespace))
    if arguments.name is not None and not is_exact(arguments.name, in_namespace):
        from pyebpf_proxy.see import unserved

        flags = source_flags(arguments) if hasattr(arguments, "manifests") else []
        why = unserved.why(arguments.directory, flags, wanted, arguments.name, arguments.namespace)
        if why:
            raise QuestionError(why)
        try:
            return made.chosen(found, arguments.name, arguments.namespace, others)
        except UnknownServiceError as error:
            raise QuestionError(f"{error}{unserved.NOTE if why is None else ''}") from None
    return made.chosen(found, arguments.name, arguments.namespace, others)


def services(arguments: argparse.Namespace) -> int:
    """``services [NAME] [--diff]``."""
    with Pinned(arguments.directory) as maps:
        found = state.read(maps)
    wanted = None
    missing = ""
    if arguments.diff:
        from pyebpf_proxy.see.wanted import read_wanted

        wanted = read_wanted(arguments.directory, source_flags(arguments))
    elif arguments.name or source_flags(arguments):
        wanted, missing = maybe_wanted(arguments, len(found.services))
    others = wanted.ports if wanted is not None and arguments.diff else ()
    names = _chosen(arguments, found, wanted, others)
    with without_cycle_search():
        answer = made.services(found, names, wanted, arguments.diff)
        answer.objects_missing = missing
        if arguments.name:
            endpoints = (endpoint for view in answer.services for endpoint in view.endpoints)
            pods.fill_pod_names(endpoints, pods.pod_name_lookup(arguments.directory, wanted))
            known = found.by_name
            empty = [name for name in names if name in known and not known[name].any_endpoints]
            why = no_endpoints.reasons(arguments.directory, wanted, empty)
            made.fill_no_endpoints(answer.services, why)
            named = (f"{view.namespace}/{view.service}" for view in answer.services)
            answer.not_served = local.losses(arguments.directory, named)
        lines = services_text.services_text(answer, terminal(), arguments.name is not None)
    if arguments.diff and not answer.services and not answer.problems:
        lines = ["the kernel has the desired state"]
    show(arguments, answer, lines, (view.name for view in answer.services))
    differs = any(view.differences for view in answer.services)
    return NOT_RIGHT if differs or answer.problems else RIGHT


def backends(arguments: argparse.Namespace) -> int:
    """``backends [NAME]``."""
    with Pinned(arguments.directory) as maps:
        found = state.read(maps)
    answer = made.backends(found, _chosen(arguments, found))
    pods.fill_pod_names(answer.backends, pods.pod_name_lookup(arguments.directory, None))
    show(arguments, answer, services_text.backends_text(answer, terminal()), (view.address for view in answer.backends))
    return RIGHT


def frontends(arguments: argparse.Namespace) -> int:
    """``frontends [NAME] [--address IP]``."""
    with Pinned(arguments.directory) as maps:
        found = state.read(maps)
    names = _chosen(arguments, found)
    answer = made.frontends(found, names, arguments.address)
    show(
        arguments, answer, services_text.frontends_text(answer, terminal()), (view.address for view in answer.frontends)
    )
    return RIGHT
