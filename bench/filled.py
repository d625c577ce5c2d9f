# SPDX-License-Identifier: Apache-2.0
"""Real maps without pins, filled as the agent fills them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_network
from typing import NamedTuple

from pyebpf_proxy.datapath.loader.programs import Loaded, Settings, load
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.datapath.settings import netns_cookie
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services.planner import Planner, PlanSettings

from . import workload


class Filled(NamedTuple):
    """Maps that contain a cluster, and the seconds for planning and for writing."""

    loaded: Loaded
    writer: Writer
    planning: float
    writing: float


#: IPv6 range of the pods to which some figures give an IPv6 address.
POD_CIDR6 = "fd00:32::/32"


def load_programs(fast_path: bool = False, pod_sockets: bool = False, xdp: bool = False) -> Loaded:
    """The programs with their own maps, as on node1 of the workload."""
    networks = [ip_network(workload.POD_CIDR), ip_network(POD_CIDR6)]
    (cidr4, mask4), (cidr6, mask6) = ((each.network_address.packed, each.netmask.packed) for each in networks)
    settings = Settings(
        netns_cookie=netns_cookie(),
        detector4=1,
        detector6=1,
        fast_path=fast_path,
        pod_sockets=pod_sockets,
        xdp=xdp,
    )
    return load(replace(settings, pod_cidr4=cidr4, pod_mask4=mask4, pod_cidr6=cidr6, pod_mask6=mask6))


def fill(changes: Sequence[Change], fast: bool = False, xdp: bool = False) -> Filled:
    """Plan parsed objects and write the maps. The programs are loaded before the time is measured."""
    loaded = load_programs(fast_path=fast, xdp=xdp)
    planner = Planner(PlanSettings(node_name="node1"))
    writer = Writer(loaded)
    begin = time.perf_counter()
    delta = planner.update(changes)
    planned = time.perf_counter()
    problems = writer.apply(delta)
    written = time.perf_counter()
    if problems:
        raise RuntimeError(f"{len(problems)} service ports could not be written, first: {problems[0]}")
    return Filled(loaded, writer, planned - begin, written - planned)
