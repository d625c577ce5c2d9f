# SPDX-License-Identifier: Apache-2.0
"""Session affinity in tc and for the node's sockets: for which clients and how long (spec/service-semantics §4.1).

One client may get the same endpoint by chance; so several clients use six services, and all of them are compared.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.node.cgroups import PROGRAMS
from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.cluster import Lab, Pod
from pyebpf_proxy.lab.namespace import Namespace
from pyebpf_proxy.lab.rules import Destination
from tests.support.lab_services import Kind, write_nodes

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

TIMEOUT = 600
STICKY = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": TIMEOUT}}}
KINDS = [Kind(f"sticky-{number}", number, **STICKY) for number in range(60, 66)]
#: More addresses of the outside client.
CLIENTS = {4: [f"198.51.100.{n}" for n in (71, 72, 73)], 6: [f"2001:db8:2::{n}" for n in (71, 72, 73)]}
AFFINITY = struct.Struct("=QII")

#: The answers: (client, its address or nothing, the family, the service) → the pod.
Bound = dict[tuple[str, str | None, int, str], str]


@pytest.fixture(scope="module")
def sticky() -> Iterator[Lab]:
    with Lab() as lab:
        first, second = lab.nodes
        pods = (lab.add_pod("web-1", first), lab.add_pod("web-2", second), lab.add_pod("web-3", first))
        lab.add_pod("toolbox", first)
        lab.client.ip(
            *(f"addr add {address}/24 dev eth0" for address in CLIENTS[4]),
            *(f"addr add {address}/64 dev eth0 nodad" for address in CLIENTS[6]),
        )
        write_nodes(lab)
        rewrite(lab, pods)
        first.agent.start()
        first.agent.wait_synced()
        yield lab


def rewrite(lab: Lab, pods: tuple[Pod, ...], affinity: bool = True) -> float:
    """Write all services with these endpoints into one file, so that the agent reads all of them at once.
    Returns when.
    """
    for kind in KINDS:
        kind.endpoints = pods
        kind.spec = STICKY if affinity else {}
    return lab.write("sticky.yaml", [each for kind in KINDS for each in kind.objects()])


def everybody(lab: Lab) -> list[tuple[str, Namespace, dict[int, list[str | None]], Destination]]:
    """The clients, their addresses, and the kind of address of the services that they use."""
    own: dict[int, list[str | None]] = {4: [None], 6: [None]}
    return [
        ("client", lab.client, {family: [None, *addresses] for family, addresses in CLIENTS.items()}, "LoadBalancer"),
        ("toolbox", lab.pods["toolbox"].namespace, own, "ClusterIP"),
        ("node", lab.nodes[0].namespace, own, "ClusterIP"),
    ]


def bound(lab: Lab, kinds: list[Destination] | None = None, protocol: str = "tcp") -> Bound:
    """Every client asks every service by one address after the other (``kinds``): all must lead to the same
    endpoint.
    """
    found: Bound = {}
    for origin, namespace, addresses, usual in everybody(lab):
        for family, sources in addresses.items():
            for source in sources:
                for kind in KINDS:
                    for destination in kinds or [usual]:
                        target = kind.target(destination, lab.nodes[0])
                        where = target.address.of(family), target.ports[protocol]
                        outcome = namespace.call(ask, *where, protocol, source=source)
                        assert outcome.answer is not None, (origin, family, kind.name, destination, outcome)
                        key = (origin, source, family, kind.name)
                        pod = outcome.answer.pod
                        assert found.setdefault(key, pod) == pod, (key, destination)
    return found


def test_affinity_spans_all_addresses_but_not_another_port(sticky: Lab) -> None:
    tcp = bound(sticky, ["LoadBalancer", "ExternalIP", "NodePort"])
    assert set(tcp.values()) == {"web-1", "web-2", "web-3"}
    udp = bound(sticky, ["LoadBalancer", "NodePort"], "udp")
    assert udp.keys() == tcp.keys()
    assert udp != tcp


def test_affinity_survives_a_kill_and_a_start(sticky: Lab) -> None:
    """Affinity survives the agent's absence and its next start, also if other objects have changed meanwhile."""
    agent = sticky.nodes[0].agent
    before = bound(sticky)
    agent.kill()
    assert bound(sticky) == before
    rewrite(sticky, (*KINDS[0].endpoints, sticky.add_pod("late", sticky.nodes[1])))
    agent.start()
    agent.wait_synced()
    assert bound(sticky) == before


def test_affinity_is_lost_only_with_its_endpoint(sticky: Lab) -> None:
    agent = sticky.nodes[0].agent
    before = bound(sticky)
    all_of_them = KINDS[0].endpoints
    agent.wait_synced(rewrite(sticky, all_of_them[1:]))
    agent.wait_synced(rewrite(sticky, all_of_them))
    after = bound(sticky)
    lost = {key for key, pod in before.items() if pod == all_of_them[0].name}
    assert {key: pod for key, pod in after.items() if key not in lost} == {
        key: pod for key, pod in before.items() if key not in lost
    }
    # All of its clients could choose it again by chance: once in 3^so many times.
    if len(lost) >= 8:
        assert {after[key] for key in lost} != {all_of_them[0].name}


def test_affinity_turned_off_and_on_begins_without_clients(sticky: Lab) -> None:
    agent = sticky.nodes[0].agent
    before = bound(sticky)
    agent.wait_synced(rewrite(sticky, KINDS[0].endpoints, affinity=False))
    agent.wait_synced(rewrite(sticky, KINDS[0].endpoints))
    after = bound(sticky)
    assert after != before
    assert bound(sticky) == after


@pytest.mark.parametrize("origin", ["client", "toolbox", "node"])
def test_affinity_timeout_and_refresh(sticky: Lab, origin: str, family: int) -> None:
    """The newest connection counts: just before the timeout the endpoint stays, and the timeout starts again; after it,
    any endpoint is possible.
    """
    namespace, usual = next((n, usual) for name, n, _, usual in everybody(sticky) if name == origin)
    target = KINDS[0].target(usual, sticky.nodes[0])
    where = target.address.of(family), target.ports["tcp"]
    table = Map.open_pinned(Path(sticky.nodes[0].agent.pin("affinities")))
    try:

        def asked(seconds_ago: float) -> str:
            """The pods that answer if every client's newest connection was so long ago."""
            # The time may be before the machine's start: the programs compute with unsigned 64-bit numbers.
            then = (time.clock_gettime_ns(time.CLOCK_MONOTONIC) - int(seconds_ago * 1e9)) % 2**64
            for key, value in table.items():
                _, backend, position = AFFINITY.unpack(value)
                table.update(key, AFFINITY.pack(then, backend, position))
            outcome = namespace.call(ask, *where)
            assert outcome.answer is not None
            newest = [AFFINITY.unpack(value)[0] for _, value in table.items()]
            # Only the entry of this client, at the time of this connection.
            assert sum(moment != then for moment in newest) == 1
            return outcome.answer.pod

        first = asked(1)
        assert {asked(TIMEOUT - 60) for _ in range(12)} == {first}
        assert len({asked(TIMEOUT + 1) for _ in range(40)}) > 1
    finally:
        table.close()


def test_affinity_survives_maps_of_another_size(sticky: Lab) -> None:
    """An agent with maps of other sizes takes over the old ones' entries."""
    agent = sticky.nodes[0].agent
    before = bound(sticky)
    agent.kill()
    agent.start(own={"maps": {"affinities": 4096, "backends4": 4096}})
    agent.wait_synced()
    assert bound(sticky) == before


def test_affinity_survives_maps_of_another_layout(sticky: Lab) -> None:
    """An agent of another version left its maps: clients keep their endpoints, and the old maps are removed."""
    node = sticky.nodes[0]
    before = bound(sticky)
    node.agent.kill()
    pins = node.agent.pin("affinities").parents[1]
    former = pins.with_name("v0")
    pins.rename(former)
    node.agent.start()
    node.agent.wait_synced()
    assert bound(sticky) == before
    assert not former.exists()
    # With tcx, the pins of its links are next to those of every layout.
    assert {path.name for path in pins.parent.iterdir()} - {"tcx"} == {pins.name}
    assert sorted(path.name for path in (pins / "links").iterdir()) == sorted(PROGRAMS)
