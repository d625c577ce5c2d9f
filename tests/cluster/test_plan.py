# SPDX-License-Identifier: Apache-2.0
"""The plan and kube-proxy's own code (kubernetes/plan) for the same random changes: ports, endpoints, health checks."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.kube.api.inventory import Inventory
from pyebpf_proxy.kube.objects import Node
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services.addresses import format_address, format_address_port, format_prefix
from pyebpf_proxy.services.model import Endpoint, FrontendKind, ServicePort
from pyebpf_proxy.services.planner import Planner, PlanSettings
from tests import CACHE
from tests.cluster.plan_objects import NODE, Objects, Step

#: Set these to repeat a failure, or to search longer.
SEED = int(os.environ.get("PLAN_SEED", secrets.randbelow(1_000_000)))
COUNT = int(os.environ.get("PLAN_COUNT", "300"))
#: Of two endpoints with one address kube-proxy uses one at random.
ATTEMPTS = 30

Plan = dict[str, Any]
Ask = Callable[[Plan], Plan]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """kube-proxy's code."""
    program = CACHE / "go" / "plan"
    if not program.exists():
        pytest.skip("kube-proxy's plan is missing: run tests/cluster/build.sh plan")
    log = tmp_path / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as running,
    ):
        assert running.stdin is not None
        assert running.stdout is not None

        def answer(question: Plan) -> Plan:
            print(json.dumps(question), file=running.stdin, flush=True)  # type: ignore[union-attr]
            line = running.stdout.readline()  # type: ignore[union-attr]
            assert line, log.read_text()[-2000:]
            return json.loads(line)

        yield answer
        running.stdin.close()


def events(steps: list[Step]) -> Iterator[Plan]:
    """The changes for kube-proxy.

    A slice that moves to another Service is first deleted: kube-proxy's own code would keep its endpoints for both.
    """
    for step in steps:
        key = f"{step.namespace}/{step.name}"
        if step.kind == "EndpointSlice":
            yield {"kind": step.kind, "key": key, "object": None, "sync": False}
        yield {"kind": step.kind, "key": key, "object": None if step.hidden else step.item, "sync": step.sync}


def planned(objects: Objects, steps: list[Step]) -> Planner:
    """The agent's plan, by way of the API server's source; changes between two syncs are planned together."""
    planner = Planner(PlanSettings(NODE, check="unchecked"))
    node = Node()
    node.metadata.labels = {"topology.kubernetes.io/zone": objects.zone} if objects.zone else None
    planner.update([Change("Node", "", NODE, node)])
    errors: list[str] = []
    known = {kind: Inventory(kind, errors.append) for kind in ("Service", "EndpointSlice")}  # type: ignore[arg-type]
    waiting: dict[tuple[str, str, str], Change] = {}
    for number, step in enumerate(steps):
        inventory = known[step.kind]
        # Manifests may contain what the API server's selectors exclude.
        if step.item is None or (step.hidden and number % 2):
            changes = inventory.remove(step.namespace, step.name)
        else:
            changes = inventory.change(inventory.read(json.dumps(step.item).encode()))
        waiting |= {(change.kind, change.namespace, change.name): change for change in changes}
        if step.sync or number == len(steps) - 1:
            planner.update(waiting.values())
            waiting = {}
    assert not [line for line in errors if "accepts every source" not in line and "healthCheckNodePort" not in line]
    return planner


def endpoints_of(these: tuple[Endpoint, ...]) -> list[str]:
    return sorted(format_address_port(each.address, each.port) for each in these)


def shown(port: ServicePort) -> Plan:
    def addresses(kind: FrontendKind) -> list[str]:
        return sorted(format_address(each.address) for each in port.frontends if each.kind is kind)

    ports = {each.kind: each.port for each in port.frontends}
    return {
        "cluster_ip": addresses(FrontendKind.CLUSTER_IP)[0],
        "port": ports[FrontendKind.CLUSTER_IP],
        "node_port": ports.get(FrontendKind.NODE_PORT, 0),
        "vips": addresses(FrontendKind.LOAD_BALANCER),
        "external_ips": addresses(FrontendKind.EXTERNAL_IP),
        "ranges": sorted(map(format_prefix, port.source_ranges)),
        "external_local": port.external_local,
        "internal_local": port.internal_local,
        "affinity": port.affinity_seconds,
        "cluster": endpoints_of(port.cluster),
        "local": endpoints_of(port.local),
        "any": port.any_endpoints,
    }


def plan_of(planner: Planner) -> Plan:
    ports = {}
    for name in planner.names:
        port = planner.get(name)
        assert port is not None
        key = f"{name.namespace}/{name.name}:{name.port}/{name.protocol.name}/IPv{name.family.value}"
        ports[key] = shown(port)
    health = {
        f"{name.namespace}/{name.name}/IPv{name.family.value}:{check.port}": check.local
        for name, check in planner.health_checks.items()
    }
    return {"ports": ports, "health": health}


def without_unused_ranges(plan: Plan) -> Plan:
    """Ranges restrict only load balancer addresses, and each counts once."""
    for port in plan["ports"].values():
        port["ranges"] = sorted(set(port["ranges"])) if port["vips"] else []
    return plan


def differences(plan: Plan, expected: Plan) -> list[str]:
    return [
        f"{part} {key}:\n  kube-proxy:   {expected[part].get(key)}\n  pyebpf-proxy: {plan[part].get(key)}"
        for part in plan
        for key in sorted(plan[part].keys() | expected[part].keys())
        if plan[part].get(key) != expected[part].get(key)
    ]


def test_random_changes_give_kube_proxys_plan(ask: Ask) -> None:
    print(f"PLAN_SEED={SEED} PLAN_COUNT={COUNT}")
    compared = 0
    for seed in range(SEED, SEED + COUNT):
        objects = Objects(seed)
        steps = list(objects.steps())
        plan = plan_of(planned(objects, steps))
        compared += len(plan["ports"])
        question = {"node": NODE, "zone": objects.zone, "changes": list(events(steps))}
        for _ in range(ATTEMPTS):
            wrong = differences(plan, without_unused_ranges(ask(question)))
            if not wrong:
                break
        assert not wrong, f"PLAN_SEED={seed} PLAN_COUNT=1\n" + "\n".join(wrong)
    assert compared > COUNT
