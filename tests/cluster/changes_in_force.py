# SPDX-License-Identifier: Apache-2.0
"""What an API server's watches bring is in force: in the maps, and for clients in a pod and on the node."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.client import REFUSED, ask
from pyebpf_proxy.lab.cluster import Pod
from pyebpf_proxy.lab.inspect import follow
from pyebpf_proxy.lab.manifests import Port, service, slices
from pyebpf_proxy.lab.namespace import LabError
from tests.cluster.world import HTTP, OutageWorld

FAMILIES = (4, 6)
OTHER_PORT = [Port("http", 81, 8080)]


def check_changes(world: OutageWorld) -> None:
    """A Service and its slices are created, changed and deleted; a watch breaks. Nothing is listed again."""
    server, (first, second) = world.server, world.pods
    world.settle()
    lists, begin = world.lists(), len(world.container.log())
    name, address = world.appear()
    until(world, address, 80, [first, second], "a new Service and its slices")
    for item in slices(name, HTTP, [(second.address, world.node.name)]):
        server.apply(item)
    until(world, address, 80, [second], "slices with other endpoints")
    server.apply(service(name, OTHER_PORT, address))
    until(world, address, 81, [second], "a Service with another port")
    until_gone(world, address, 80)
    world.lose_endpoints(name)
    until(world, address, 81, [], "no slices any more")
    world.relay.cut()
    for item in slices(name, HTTP, [(first.address, world.node.name)]):
        server.apply(item)
    until(world, address, 81, [first], "slices that came while no watch was open, or in the next one")
    server.delete(service(name, OTHER_PORT, address))
    until_gone(world, address, 81)
    assert world.lists() == lists, f"listed again:\n{world.container.log()[begin:]}"
    wrong = world.logged(" error ", " warning ", since=begin) + world.traffic.failures()
    assert wrong == [], wrong


def until(world: OutageWorld, address: Dual, port: int, pods: Sequence[Pod], what: str) -> None:
    """Wait until the maps lead from this address to exactly these pods, and so do connections."""
    wanted = [sorted(pod.address.of(family) for pod in pods) for family in FAMILIES]
    world.wait(lambda: [in_maps(world, address.of(family), port) for family in FAMILIES] == wanted, f"in maps: {what}")
    names = {pod.name for pod in pods}
    world.wait(lambda: answered(world, address, port) <= (names or {REFUSED}), f"for clients: {what}")


def until_gone(world: OutageWorld, address: Dual, port: int) -> None:
    """Wait until the maps have nothing at this address."""
    wanted = [None for _ in FAMILIES]
    world.wait(lambda: [in_maps(world, address.of(family), port) for family in FAMILIES] == wanted, "it is gone")


def in_maps(world: OutageWorld, address: str, port: int) -> list[str] | None:
    """The endpoints that the pinned maps have for this address, read by bpftool; None: they do not have it."""
    try:
        steps = list(follow(world.node, world.node.agent.pin("frontends4").parent, address, port))
    except LabError:
        return None  # also while its entries are replaced
    backends = [step.entry["value"]["address"] for step in steps if " backends" in step.command]
    return sorted({str(ip_address(bytes(each))) for each in backends})


def answered(world: OutageWorld, address: Dual, port: int) -> set[str]:
    """Which pods answer a pod and the node itself, in both families; or how their requests end."""
    outcomes = [
        world.namespace(source).call(ask, address.of(family), port) for source in ("pod", "node") for family in FAMILIES
    ]
    return {outcome.answer.pod if outcome.answer else outcome.kind for outcome in outcomes}
