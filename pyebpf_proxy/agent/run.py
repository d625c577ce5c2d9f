# SPDX-License-Identifier: Apache-2.0
"""The agent: connects the packages and runs them."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from contextlib import suppress

from pyebpf_proxy import __version__
from pyebpf_proxy.agent import node_checks
from pyebpf_proxy.agent.cluster_connection import ClusterConnection
from pyebpf_proxy.agent.config_watch import ConfigWatch
from pyebpf_proxy.agent.proxy import Proxy
from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.run_directory import RunDirectory
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.config.shown import Shown
from pyebpf_proxy.datapath import preflight
from pyebpf_proxy.datapath.datapath import Datapath
from pyebpf_proxy.datapath.node import sysctls
from pyebpf_proxy.datapath.preparation import Preparation
from pyebpf_proxy.kube.events import ObjectReference, Recorder
from pyebpf_proxy.kube.source import Source
from pyebpf_proxy.servers.health import Health
from pyebpf_proxy.servers.local import Local
from pyebpf_proxy.servers.metrics import DatapathNumbers, Metrics
from pyebpf_proxy.servers.observer import Observer
from pyebpf_proxy.servers.serving import Servers
from pyebpf_proxy.services.node_facts import NodeFacts
from pyebpf_proxy.services.planner import Planner, PlanSettings

#: Descriptors for the agent. There are at most 2768 NodePorts by default, and a health check node port has a listener
#: for each family.
OPEN_FILES = 65536
#: The note of the Event in mode ipvs. kube-proxy's note speaks of its proxier, which does not exist here.
IPVS_DEPRECATED = (
    "Mode ipvs of kube-proxy is deprecated and may be removed in a future release. Please use mode nftables instead."
)

_log = Logger("agent")


def run(settings: Effective, cluster: ClusterConnection, shown: Shown, watch: ConfigWatch | None = None) -> None:
    """Run the agent until SIGTERM or SIGINT; FatalError or DatapathError if it cannot start or continue.

    ``shown``: the configuration that the servers show. ``watch``: watches the configuration files; a change ends the
    agent with a FatalError, and the programs stay attached.
    """
    preflight.check()
    allow_open_files()
    directory = RunDirectory(settings.directory)
    directory.acquire()

    def warn_node(reason: str, note: str) -> None:
        if cluster.events is not None:
            node = ObjectReference("Node", "", settings.node_name)
            cluster.events.event(node, "Warning", reason, "StartKubeProxy", note)

    datapath = Datapath(settings, warn_node)
    sysctls.adjust_oom_score(settings.kernel.oom_score_adj)
    try:
        _log.info(
            "pyebpf-proxy starts",
            version=__version__,
            node=settings.node_name,
            mode="nftables" if settings.nft_mode else "ipvs" if settings.scheduler else "iptables",
            scheduler=settings.scheduler,
            directory=settings.directory,
        )
        asyncio.run(_serve(settings, cluster, datapath, shown, watch))
    finally:
        # A failed start removes its folder; an active instance keeps it.
        directory.release(remove=not datapath.present())


def record_start(settings: Effective, events: Recorder) -> None:
    """Record kube-proxy's Events about a start (cmd/kube-proxy/app/server.go, server_linux.go)."""
    node = ObjectReference("Node", "", settings.node_name)
    if settings.scheduler is not None:
        events.event(node, "Warning", "IPVSDeprecation", "StartKubeProxy", IPVS_DEPRECATED)
    events.event(node, "Normal", "Starting", "StartKubeProxy", "")


def allow_open_files() -> None:
    """Raise the soft limit of open files, as Go's runtime does: often only the hard limit is large."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def prepare(settings: Effective, source: Source) -> None:
    """``--init-only``: the steps of a start that need more capabilities than later starts have; errors as in ``run``.

    As at a start, it reads the objects once, waits for podCIDRs and logs configuration problems.
    """
    preflight.check()
    directory = RunDirectory(settings.directory)
    directory.acquire()
    prepared = False
    try:
        planner = Planner(PlanSettings.of(settings))
        preparation = Preparation(Datapath(settings))
        observer = Observer(Metrics(DatapathNumbers()), Health(2 * settings.sync_period), planner, settings.node_name)
        proxy = Proxy(settings, source, planner, preparation, observer, _facts(planner), _checks(settings), once=True)
        asyncio.run(proxy.run())
        prepared = preparation.done
    finally:
        directory.release(remove=not prepared and not Datapath(settings).present())
    if not prepared:
        raise FatalError("stopped before everything was prepared")
    _log.info("prepared", directory=settings.directory)


def _facts(planner: Planner) -> Callable[[], NodeFacts]:
    return lambda: planner.facts


def _checks(settings: Effective) -> Callable[[NodeFacts], None]:
    return lambda facts: node_checks.check(settings.family_values, facts)


async def _serve(
    settings: Effective, cluster: ClusterConnection, datapath: Datapath, shown: Shown, watch: ConfigWatch | None
) -> None:
    planner = Planner(PlanSettings.of(settings))
    numbers = DatapathNumbers(datapath.reasons, datapath.fill, datapath.xdp_devices, datapath.view)
    local = Local(
        settings.directory,
        planner.pods,
        datapath.refusals,
        datapath.view,
        cluster.troubles,
        planner.over_now,
        planner.messages_now,
        planner.no_endpoints,
        datapath.unwritten,
    )
    families = node_checks.families_of_node()
    servers = Servers(
        settings, shown, planner, numbers, datapath.addresses, cluster.events, cluster.metrics, local, families
    )
    observer = servers.observer
    datapath.on_cleaned = lambda cleaned: observer.reconciled(cleaned.family, cleaned.seconds, cleaned.flows)
    guards = [servers.guard, datapath.guard, *([watch.wait] if watch is not None else [])]
    servers.start()
    if cluster.events is not None:
        record_start(settings, cluster.events)
    try:
        proxy = Proxy(
            settings,
            cluster.source,
            planner,
            datapath,
            observer,
            _facts(planner),
            _checks(settings),
            guards,
            events=cluster.events,
        )
        await proxy.run()
    finally:
        servers.stop()
        datapath.close()
