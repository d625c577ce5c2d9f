# SPDX-License-Identifier: Apache-2.0
"""The desired state: the planner's result for the agent's source, or for the source on the command line.

The agent's command line shows its source. The agent itself is not contacted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.see.agent import running_agent
from pyebpf_proxy.see.answers import SeeError
from pyebpf_proxy.services import endpoints
from pyebpf_proxy.services.endpoints import (
    FALLBACK,
    LOCAL,
    READY,
    TERMINATING,
    SliceEndpoint,
    Topology,
    cluster_note,
    local_note,
)
from pyebpf_proxy.services.frontends import why_unserved
from pyebpf_proxy.services.model import Protocol, ServicePort, ServicePortName
from pyebpf_proxy.services.planner import Planner, PlanSettings

if TYPE_CHECKING:
    from pyebpf_proxy.config.effective import Effective
    from pyebpf_proxy.kube.objects import EndpointSlice
    from pyebpf_proxy.kube.source import Batch, Source

_SECONDS = 20.0
#: For so long the API server may fail, and, if the objects are only a supplement, send nothing at all.
_FAILING, SILENT = 2.0, 5.0
_STEP = 0.25
_NEEDED = ("", "services", "endpointslices", "nodes")


class Wanted:
    """The planned contents of the source. ``settings``: those of the agent, derived from its command line."""

    def __init__(self, settings: Effective, planner: Planner, batch: Sequence[Batch]) -> None:
        self.settings = settings
        self._planner = planner
        self._views: dict[tuple[str, str], list[endpoints.SliceView]] = {}
        self._services: dict[tuple[str, str], str] = {}
        for change in (change for each in batch for change in each.changes):
            if change.kind == "EndpointSlice" and change.object is not None:
                self._take(change.namespace, change.object)  # type: ignore[arg-type]
            elif change.kind == "Service" and change.object is not None:
                self._services[change.namespace, change.name] = why_unserved(change.object)  # type: ignore[arg-type]

    def _take(self, namespace: str, made: EndpointSlice) -> None:
        service = endpoints.service_of(made)
        view = endpoints.view_slice(made, self.settings.node_name) if service is not None else None
        if service is not None and view is not None:
            self._views.setdefault((namespace, service), []).append(view)

    @property
    def ports(self) -> dict[ServicePortName, ServicePort]:
        """Every desired service port."""
        found = {name: self._planner.get(name) for name in self._planner.names}
        return {name: port for name, port in found.items() if port is not None}

    def get(self, name: ServicePortName) -> ServicePort | None:
        """One service port."""
        return self._planner.get(name)

    @property
    def counts(self) -> dict[str, int]:
        """How many objects of each kind are in use."""
        return self._planner.counts()

    def pods(self, addresses: Collection[bytes]) -> Mapping[bytes, str]:
        """The pods with these addresses, ``namespace/name``."""
        return self._planner.pods(addresses)

    def named(self, name: str) -> dict[tuple[str, str], str]:
        """By namespace and name, why the Services of this name are not served; "" for one that should be."""
        return {key: why for key, why in self._services.items() if key[1] == name}

    def specifying(self, address: bytes, port: int, protocol: Protocol, node_port: bool) -> list[ServicePortName]:
        """The service ports that specify this address and port. ``node_port``: it is one that serves NodePorts."""
        return self._planner.specifying(address, port, protocol, node_port)

    def no_endpoints(self, namespace: str, name: str) -> Mapping[str, str]:
        """By service port of this Service, as text, why it has no usable endpoint."""
        return self._planner.no_endpoints(namespace, name)

    def known(self, name: ServicePortName) -> list[SliceEndpoint]:
        """Every endpoint of a service port in its slices, used or not."""
        views = [v for v in self._views.get((name.namespace, name.name), []) if v.family is name.family]
        return endpoints.merge(views, (name.port, name.protocol))

    def notes(self, name: ServicePortName) -> tuple[str, str]:
        """Why the programs do not use exactly the ready endpoints, by traffic policy: Cluster, Local; "" if they do."""
        port = self.get(name)
        known = self.known(name) if port is not None and port.any_endpoints else []
        topology = Topology(self.settings.node_name, self._planner.zone)
        return (
            cluster_note(known, topology) if port is not None and port.cluster else "",
            local_note(known) if port is not None and port.local else "",
        )

    def left_out(self, name: ServicePortName, used: set[tuple[bytes, int]]) -> list[tuple[SliceEndpoint, str]]:
        """Endpoints of the slices that are not used, and why (spec/service-semantics §3)."""
        known = self.known(name)
        ready = any(entry.flags & READY for entry in known)
        others = (entry for entry in known if (entry.endpoint.address, entry.endpoint.port) not in used)
        return [(entry, _why_left_out(entry, ready)) for entry in others]


def _why_left_out(entry: SliceEndpoint, others_ready: bool) -> str:
    if entry.flags & READY:
        if entry.hints.zones or entry.hints.nodes:
            meant = entry.hints.nodes or entry.hints.zones or ()
            return f"for {', '.join(sorted(meant))} (topology hints)"
        return "remote, and only local endpoints are used" if not entry.flags & LOCAL else "not used"
    if entry.flags & FALLBACK == FALLBACK:
        return "terminating, and others are ready" if others_ready else "terminating, and remote"
    return "terminating, not serving" if entry.flags & TERMINATING else "not ready"


def read_wanted(directory: Path, arguments: Sequence[str], silent: float = _SECONDS) -> Wanted:
    """The desired state. ``arguments``: flags of the agent that name a source; if empty, those of the running agent.

    SeeError if no source is named and no agent runs, if the source fails, or if the API server sends nothing within
    ``silent`` seconds.
    """
    try:
        settings = agent_settings(directory, arguments)
        return asyncio.run(_read(settings, _source(settings), silent))
    except FatalError as error:
        raise SeeError(str(error)) from None


def agent_settings(directory: Path, arguments: Sequence[str]) -> Effective:
    """The settings of the source. ``arguments`` and SeeError: as for :func:`read_wanted`."""
    from pyebpf_proxy.config.flags import UsageError, parse

    # What the API client logs is for the agent's log; here an error says it. Otherwise, Python would print it.
    logging.getLogger("pyebpf_proxy").addHandler(logging.NullHandler())
    folder = os.getcwd()
    if not arguments:
        agent = running_agent(directory)
        if agent is None:
            raise SeeError(
                f"no agent runs on {directory}, so the desired state is unknown: name the source with --manifests or"
                " --config"
            )
        arguments, folder = agent.arguments, agent.folder
    try:
        return _settings(parse(list(_absolute(arguments, folder))))
    except (UsageError, FatalError) as error:
        raise SeeError(str(error)) from None


def check_source(config: str | None, manifests: str | None) -> None:
    """SeeError if what the command line names as the source cannot be read."""
    if config:
        from pyebpf_proxy.config.loader import content

        try:
            content(Path(config))
        except ValueError as error:
            raise SeeError(f"failed complete: {error}") from None
    if manifests:
        _check_folder(Path(manifests))


def _check_folder(manifests: Path) -> None:
    if not manifests.is_dir():
        what = "is not a folder" if manifests.exists() else "does not exist"
        raise SeeError(f"the manifests folder {manifests} {what}")


def _absolute(arguments: Sequence[str], folder: str) -> list[str]:
    """The arguments with paths relative to the agent's working directory made absolute."""
    names = ("--manifests", "--config", "--datapath-config", "--kubeconfig")
    found: list[str] = []
    for word in arguments:
        flag, equals, value = word.partition("=")
        if flag in names and equals:
            word = f"{flag}={os.path.join(folder, value)}"
        elif found and found[-1] in names:
            word = os.path.join(folder, word)
        found.append(word)
    return found


def _settings(flags: object) -> Effective:
    from pyebpf_proxy.config.complete import complete
    from pyebpf_proxy.config.datapath_config import read
    from pyebpf_proxy.config.effective import effective
    from pyebpf_proxy.config.flags import Flags
    from pyebpf_proxy.config.loader import ConfigError

    assert isinstance(flags, Flags)
    try:
        own = read(Path(flags.datapath_config)) if flags.datapath_config else None
        return effective(complete(flags, lambda text, file: None), flags, own)
    except ConfigError as error:
        raise SeeError(f"{error.file + ': ' if error.file else ''}{error}") from None


def _source(settings: Effective) -> Source:
    if settings.manifests is not None:
        from pyebpf_proxy.kube.manifests import ManifestSource

        _check_folder(settings.manifests)
        return ManifestSource(settings.manifests, lambda text: None, lambda text: None)
    from pyebpf_proxy.kube.api.connect import api_server
    from pyebpf_proxy.servers.client_metrics import ClientMetrics

    source = api_server(settings.api, settings.node_name, ClientMetrics(), waits_for_cidrs=True)
    source.start()
    return source


def _trouble(source: Source) -> str:
    """Why the objects that are needed do not arrive from the API server at present; "" if they do."""
    troubles: Mapping[str, str] = getattr(source, "troubles", dict)()
    return next((text for resource in _NEEDED if (text := troubles.get(resource, ""))), "")


async def _read(settings: Effective, source: Source, silent: float) -> Wanted:
    planner = Planner(PlanSettings.of(settings))
    complete = asyncio.Event()
    batches: list[Batch] = []

    def deliver(batch: Batch) -> None:
        batches.append(batch)
        if batch.complete:
            complete.set()

    reading = asyncio.create_task(source.run(deliver))
    waiting = asyncio.create_task(complete.wait())
    try:
        begin, failing = time.monotonic(), 0.0
        while not complete.is_set():
            done, _ = await asyncio.wait({reading, waiting}, timeout=_STEP, return_when=asyncio.FIRST_COMPLETED)
            if reading in done:
                await reading
            trouble = _trouble(source)
            failing = failing + _STEP if trouble else 0.0
            if failing >= _FAILING:
                raise SeeError(f"the objects cannot be read: {trouble}")
            seconds = time.monotonic() - begin
            if seconds >= _SECONDS or (seconds >= silent and not batches and settings.manifests is None):
                raise SeeError(f"the source of objects has not delivered everything after {seconds:.0f} s")
    finally:
        for task in (reading, waiting):
            task.cancel()
        await asyncio.gather(reading, waiting, return_exceptions=True)
    for batch in batches:
        planner.update(batch.changes)
    return Wanted(settings, planner, batches)
