# SPDX-License-Identifier: Apache-2.0
"""The agent: puts the rooms together and runs them."""

from __future__ import annotations

import asyncio

from pyebpf_proxy import __version__
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath import preflight
from pyebpf_proxy.datapath.datapath import Datapath
from pyebpf_proxy.kube.source import Source
from pyebpf_proxy.log import Logger
from pyebpf_proxy.node_facts import NodeFacts
from pyebpf_proxy.proxy import Proxy
from pyebpf_proxy.run_directory import RunDirectory
from pyebpf_proxy.servers.metrics import Metrics, MetricsServer
from pyebpf_proxy.services.planner import Planner, PlanSettings

_log = Logger("agent")


def run(settings: Effective, source: Source) -> None:
    """Be the agent until SIGTERM or SIGINT; FatalError or DatapathError if that is impossible."""
    preflight.check()
    directory = RunDirectory(settings.directory)
    directory.acquire()
    datapath = Datapath(settings)
    try:
        _log.info(
            "pyebpf-proxy starts",
            version=__version__,
            node=settings.node_name,
            mode="nftables" if settings.nft_mode else "iptables",
            directory=settings.directory,
        )
        asyncio.run(_serve(settings, source, datapath))
    finally:
        # A start that came to nothing takes its folder away; an instance that serves keeps it.
        directory.release(remove=not datapath.present())


async def _serve(settings: Effective, source: Source, datapath: Datapath) -> None:
    bind_address = settings.bind_address.packed if settings.bind_address is not None else None
    planner = Planner(PlanSettings(node_name=settings.node_name, node_ip=bind_address))
    metrics = Metrics(datapath.reasons)
    server = MetricsServer(settings.metrics_address, metrics.registry) if settings.metrics_address else None

    def facts() -> NodeFacts:
        return NodeFacts(planner.node_ips, planner.pod_cidrs, planner.node_addresses, planner.node_cidrs)

    if server is not None:
        server.start()
    try:
        await Proxy(settings, source, planner, datapath, metrics, facts).run()
    finally:
        if server is not None:
            server.stop()
        datapath.close()
