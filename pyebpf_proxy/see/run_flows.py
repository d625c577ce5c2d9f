# SPDX-License-Identifier: Apache-2.0
"""The command ``flows``. Besides conntrack, it reads names of pods, addresses of the node and the flow table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from struct import Struct

from pyebpf_proxy.datapath.netlink.uapi import IPS_DST_NAT
from pyebpf_proxy.see import flows as made
from pyebpf_proxy.see import model, state, young
from pyebpf_proxy.see.answers import RIGHT
from pyebpf_proxy.see.flows import Flow, Names, text
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.see.output import show
from pyebpf_proxy.see.pods import pod_name_lookup
from pyebpf_proxy.see.text import terminal


def flows(arguments: argparse.Namespace) -> list[model.FlowView]:
    """The service flows that match the filter, the oldest first."""
    with Pinned(arguments.directory) as maps:
        known = state.read(maps)
        own = own_addresses(maps)
        names = Names(known, own)
        every = [*young.flows(maps), *made.dump()]
        served = [flow for flow in every if flow.status & IPS_DST_NAT or names.service(flow)]
        pods = _pods(arguments)(_other_addresses(served, own))
        services = {f"{service.name.namespace}/{service.name.name}" for service in known.services.values()}
        fits = made.parse_filter(arguments.filter, services, pods.values())
        names, cached, now = Names(known, own, pods), _cache(maps), time.time()
        found = [view for flow in served if fits(view := made.view(flow, names, cached, now))]
    return sorted(found, key=lambda view: (view.service, -(view.seconds or 0.0), view.client))


def _pods(arguments: argparse.Namespace) -> Callable[[Collection[bytes]], Mapping[bytes, str]]:
    """The lookup of pod names: in the source on the command line, else in the agent."""
    from pyebpf_proxy.see.run_services import source_flags

    flags = source_flags(arguments)
    if not flags:
        return pod_name_lookup(arguments.directory, None)
    from pyebpf_proxy.see.wanted import read_wanted

    return pod_name_lookup(arguments.directory, read_wanted(arguments.directory, flags))


def _other_addresses(flows: Iterable[Flow], own: Mapping[bytes, bool]) -> set[bytes]:
    return {address for flow in flows for address in (flow.client[0], flow.endpoint[0])} - own.keys()


def own_addresses(maps: Pinned) -> dict[bytes, bool]:
    """Every address of this node in the programs' maps, and whether it serves NodePorts."""
    found: dict[bytes, bool] = {}
    for family in "46":
        key, value = maps.packer(f"address{family}", "address"), Struct("=I")
        found |= {address: bool(serves) for (address,), (serves,) in maps.rows(f"node_addresses{family}", key, value)}
    return found


def _cache(maps: Pinned) -> Callable[[Flow], bool | None]:
    """A function: whether the flow table has a flow, None without a table. It works while the maps are open."""
    if "flows" not in maps.names:
        return lambda flow: None
    key = maps.packer("flow_key", "source", "destination", "source_port", "destination_port", "protocol", "ipv6")
    opened = maps.map("flows")

    def has(flow: Flow) -> bool | None:
        size = len(flow.client[0])
        packed = key.pack(
            *(flow.client[0], flow.frontend[0], flow.client[1], flow.frontend[1], flow.protocol, size == 16)
        )
        return opened.lookup(packed) is not None

    return has


def run(arguments: argparse.Namespace) -> int:
    """``flows [FILTER …]``."""
    found = flows(arguments)
    show(
        arguments,
        model.Flows(flows=found),
        text(found, terminal(), bool(arguments.filter)),
        (flow.client for flow in found),
    )
    return RIGHT
