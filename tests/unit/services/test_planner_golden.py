# SPDX-License-Identifier: Apache-2.0
"""Objects in, plan out: golden/NAME.yaml is written by hand, golden/NAME.plan is the resulting program.

A changed rule shows as a difference in a .plan file. It is reviewed like any other change and, if intended, written
with ``GOLDEN=write pytest tests/unit/services/test_planner_golden.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.kube.catalogue import Catalogue
from pyebpf_proxy.services.addresses import format_address, format_address_port, format_prefix
from pyebpf_proxy.services.model import Endpoint, FrontendKind, ServicePort
from pyebpf_proxy.services.planner import Planner, PlanSettings

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.yaml"))

KINDS = {
    FrontendKind.CLUSTER_IP: "ClusterIP",
    FrontendKind.EXTERNAL_IP: "externalIP",
    FrontendKind.LOAD_BALANCER: "LoadBalancer",
    FrontendKind.NODE_PORT: "NodePort",
}


def show_endpoints(title: str, endpoints: Iterable[Endpoint]) -> Iterator[str]:
    for endpoint in endpoints:
        where = " (here)" if endpoint.local else ""
        yield f"  {title:<14}{format_address_port(endpoint.address, endpoint.port)}{where}"


def show(port: ServicePort) -> Iterator[str]:
    yield str(port.name)
    for frontend in port.frontends:
        where = f"any:{frontend.port}"
        if frontend.kind is not FrontendKind.NODE_PORT:
            where = format_address_port(frontend.address, frontend.port)
        yield f"  {KINDS[frontend.kind]:<14}{where}"
    yield from show_endpoints("cluster", port.cluster)
    yield from show_endpoints("local", port.local)
    yield from show_endpoints("serving", port.serving)
    for prefix in port.source_ranges:
        yield f"  {'only from':<14}{format_prefix(prefix)}"
    facts = [
        f"affinity {port.affinity_seconds} s" if port.affinity_seconds else "",
        "internal policy Local" if port.internal_local else "",
        "external policy Local" if port.external_local else "",
        "own VIPs may be sources" if port.vip_source_allowed else "",
        "" if port.any_endpoints else "no endpoints: reject",
    ]
    for fact in filter(None, facts):
        yield f"  {fact}"


def plan_of(name: str) -> str:
    lines: list[str] = []
    notes: list[str] = []
    catalogue = Catalogue(lines.append, notes.append)
    catalogue.read(f"{name}.yaml", (GOLDEN / f"{name}.yaml").read_bytes())
    planner = Planner(PlanSettings("node-1"))
    planner.update(catalogue.changes())
    lines = [f"! {line}" for line in lines]
    lines += [f"! {line}" for line in sorted(map(str, planner.conflicts))]
    lines += [f"? {line}" for line in notes]
    if planner.facts.node_ips:
        lines.append(f"this node: {', '.join(map(format_address, planner.facts.node_ips.values()))}")
    for port_name in sorted(planner.names):
        port = planner.get(port_name)
        assert port is not None
        lines.extend(("", *show(port)))
    return "\n".join(lines).lstrip("\n") + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_plan(name: str) -> None:
    plan = plan_of(name)
    path = GOLDEN / f"{name}.plan"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(plan)
    assert plan == path.read_text()


def test_every_plan_has_its_objects() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.plan")) == NAMES
