# SPDX-License-Identifier: Apache-2.0
"""What changes under load: courses of states. The last state of each is the first again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from tests.changes.model import Addresses, Endpoint, State, Target

NODE = "node1"
PODS = {"web-1": "node1", "web-2": "node2", "web-3": "node1", "web-4": "node2"}
ONE, TWO, THREE, FOUR = (Endpoint(pod, node) for pod, node in PODS.items())
USUAL = Addresses(cluster_ip=10, vip=10, external_ip=110, port=80, node_port=30010)
BASE = State(USUAL, (ONE, TWO, THREE))
#: A service that no course changes; its endpoints are the pods whose servers never end.
STEADY = State(Addresses(cluster_ip=20, vip=20, external_ip=120, port=80, node_port=30020), (TWO, THREE, FOUR))

#: The targets of all connections. Some belong to the service only in some states.
TARGETS = (
    Target("external", "LoadBalancer", 4, 10, 80, "shop"),
    Target("external", "LoadBalancer", 6, 10, 80, "shop"),
    Target("external", "ExternalIP", 4, 110, 80, "shop"),
    Target("external", "NodePort", 4, 0, 30010, "shop"),
    Target("external", "NodePort", 6, 0, 30010, "shop"),
    Target("external", "LoadBalancer", 4, 11, 80, "shop"),
    Target("external", "LoadBalancer", 6, 10, 81, "shop"),
    Target("external", "NodePort", 4, 0, 30011, "shop"),
    Target("external", "LoadBalancer", 6, 20, 80, "steady"),
    Target("pod", "ClusterIP", 4, 10, 80, "shop"),
    Target("pod", "ClusterIP", 6, 10, 80, "shop"),
    Target("pod", "LoadBalancer", 4, 10, 80, "shop"),
    Target("pod", "NodePort", 6, 0, 30010, "shop"),
    Target("pod", "ClusterIP", 4, 10, 81, "shop"),
    Target("pod", "ClusterIP", 4, 20, 80, "steady"),
    Target("node", "ClusterIP", 4, 10, 80, "shop"),
    Target("node", "ClusterIP", 6, 10, 80, "shop"),
    Target("node", "NodePort", 4, 0, 30010, "shop"),
    Target("node", "LoadBalancer", 6, 10, 80, "shop"),
    Target("node", "ClusterIP", 6, 10, 81, "shop"),
    Target("node", "ClusterIP", 6, 20, 80, "steady"),
)


class Step(NamedTuple):
    """A change. ``ends``: a pod whose server ends then, and is started again before the next step."""

    name: str
    state: State
    ends: str = ""


def _with(*endpoints: Endpoint, **changes: object) -> State:
    return BASE._replace(endpoints=endpoints, **changes)  # type: ignore[arg-type]


def _rolling() -> Iterator[Step]:
    yield Step("a new one is starting", _with(ONE, TWO, THREE, FOUR.starting()))
    yield Step("it is ready", _with(ONE, TWO, THREE, FOUR))
    yield Step("the first terminates and still serves", _with(ONE.ending(), TWO, THREE, FOUR))
    yield Step("the first is gone", _with(TWO, THREE, FOUR), ends="web-1")
    yield Step("it is back, another terminates", _with(ONE, TWO.ending(), THREE, FOUR))
    yield Step("all terminate and still serve", _with(*(each.ending() for each in (ONE, THREE, FOUR))))
    yield Step("one of them serves no longer", _with(ONE.starting(), THREE.ending(), FOUR.ending()))
    yield Step("a new one is ready while they end", _with(TWO, THREE.ending(), FOUR.ending()))


def _vanishing() -> Iterator[Step]:
    yield Step("all are gone", _with())
    yield Step("others come", _with(THREE, FOUR))
    yield Step("none is ready", _with(THREE.starting(), FOUR.starting()))
    yield Step("one is ready again", _with(THREE.starting(), FOUR))
    yield Step("the slice is empty, and policies are Local", _with(external_local=True, internal_local=True))


def _policies() -> Iterator[Step]:
    yield Step("external Local", _with(ONE, TWO, THREE, external_local=True))
    yield Step("internal Local too", _with(ONE, TWO, THREE, external_local=True, internal_local=True))
    yield Step("the last local one but one goes", _with(TWO, THREE, external_local=True, internal_local=True))
    yield Step("no local one", _with(TWO, FOUR, external_local=True, internal_local=True))
    yield Step("external Cluster", _with(TWO, FOUR, internal_local=True))
    yield Step("one local one, which terminates", _with(ONE.ending(), TWO, external_local=True, internal_local=True))


def _addresses() -> Iterator[Step]:
    other = USUAL._replace(vip=11)
    yield Step("another VIP", BASE._replace(addresses=other))
    yield Step("another NodePort", BASE._replace(addresses=other._replace(node_port=30011)))
    yield Step("the VIP of before", BASE._replace(addresses=USUAL._replace(node_port=30011)))
    yield Step("another port", BASE._replace(addresses=USUAL._replace(port=81)))
    yield Step("another port of the endpoints", BASE._replace(target_port=8081))
    yield Step("other everything", BASE._replace(addresses=other._replace(port=81, node_port=30011), target_port=8081))


def _made_again() -> Iterator[Step]:
    gone = BASE._replace(exists=False)
    yield Step("deleted", gone)
    yield Step("made again with others", _with(FOUR, target_port=8081))
    yield Step("deleted again", gone._replace(endpoints=(FOUR,)))
    yield Step("made again without any", _with())
    yield Step("made anew in one go", _with(TWO, FOUR, target_port=8081, addresses=USUAL._replace(vip=11)))


def _affinity() -> Iterator[Step]:
    sticky = BASE._replace(affinity=True)
    yield Step("affinity on", sticky)
    yield Step("one more endpoint", sticky._replace(endpoints=(ONE, TWO, THREE, FOUR)))
    yield Step("two endpoints less", sticky._replace(endpoints=(ONE, FOUR)))
    yield Step("all are back", sticky)
    yield Step("external Local with affinity", sticky._replace(external_local=True))
    yield Step("another VIP with affinity", sticky._replace(addresses=USUAL._replace(vip=11)))
    yield Step("affinity off", BASE)
    yield Step("affinity on again", sticky._replace(endpoints=(ONE, TWO)))


def _zones() -> Iterator[Step]:
    hinted = tuple(each._replace(zone=zone) for each, zone in zip((ONE, TWO, THREE, FOUR), "abba", strict=True))
    yield Step("hints, but no zone of the node", _with(*hinted))
    yield Step("the node is in zone a", _with(*hinted, zone="a"))
    yield Step("the node is in zone b", _with(*hinted, zone="b"))
    yield Step("one without a hint", _with(*hinted[:3], FOUR, zone="b"))
    yield Step("no endpoint in the zone is ready", _with(hinted[0], hinted[3], zone="b"))
    yield Step("external Local in zone a", _with(*hinted, zone="a", external_local=True))
    yield Step("the label is gone", _with(*hinted))


def _anything(seed: int, steps: int) -> Iterator[Step]:
    """Random states, each with one to three changes to the last one."""
    chance = random.Random(seed)
    state = BASE
    for number in range(steps):
        for _ in range(chance.randint(1, 3)):
            state = _changed(state, chance)
        yield Step(f"{number} of seed {seed}: {state}", state)


def _changed(state: State, chance: random.Random) -> State:
    what = chance.choice(["endpoints"] * 4 + ["policy", "policy", "addresses", "target", "affinity", "exists", "zone"])
    match what:
        case "endpoints":
            found = [each._replace(zone=chance.choice(["", "a", "b", "b"])) for each in (ONE, TWO, THREE, FOUR)]
            made = [chance.choice([each, each, each, each.ending(), each.starting(), None]) for each in found]
            return state._replace(endpoints=tuple(each for each in made if each))
        case "policy":
            return state._replace(external_local=chance.random() < 0.5, internal_local=chance.random() < 0.5)
        case "addresses":
            vip, port, number = chance.choice([10, 11]), chance.choice([80, 81]), chance.choice([30010, 30011])
            return state._replace(addresses=USUAL._replace(vip=vip, port=port, node_port=number))
        case "target":
            return state._replace(target_port=chance.choice([8080, 8081]))
        case "affinity":
            return state._replace(affinity=not state.affinity)
        case "exists":
            return state._replace(exists=not state.exists)
        case _:
            return state._replace(zone=chance.choice(["", "a", "b"]))


def courses(seed: int, steps: int) -> dict[str, list[Step]]:
    """All courses by name. ``steps``: the length of the random one."""
    return {
        "endpoints roll": list(_rolling()),
        "all endpoints vanish and return": list(_vanishing()),
        "policies flip": list(_policies()),
        "ports and VIPs change": list(_addresses()),
        "deleted and made again": list(_made_again()),
        "affinity on and off": list(_affinity()),
        "the node changes its zone": list(_zones()),
        "anything": list(_anything(seed, steps)),
    }
