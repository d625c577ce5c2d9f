# SPDX-License-Identifier: Apache-2.0
"""Failures of the API server: traffic is not affected, and one line reports the beginning and one the end.

The agent is the pod of deploy/ with exactly the role's rights, and the API server is real. The agent's waits are
shorter (``quick_agent``). ``OUTAGE_SECONDS`` is the length of outages that do not end by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.addresses import cluster_ip
from tests.cluster.account import Account
from tests.cluster.changes_in_force import check_changes
from tests.cluster.world import BEGINNINGS, ENDS, HOSTS, OutageWorld, expired
from tests.deployment.node import wait_ready
from tests.support.spoiling_proxy import Mode

OUTAGE_SECONDS = float(os.environ.get("OUTAGE_SECONDS", "8"))
ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterroles/pyebpf-proxy"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutageWorld]:
    with OutageWorld(tmp_path_factory.mktemp("world")) as world:
        yield world


def test_started_before_its_api_server(world: OutageWorld) -> None:
    """It waits, logs that once, and starts by itself."""
    lines = world.first_log.splitlines()
    begun = [line for line in lines if any(words in line for words in BEGINNINGS)]
    assert len(begun) == 1, lines
    assert "refuses the connection: check that the API server runs" in begun[0]
    assert len([line for line in lines if any(words in line for words in ENDS)]) == 1, lines
    assert not any(world.first_connected.values())
    assert [line for line in lines if " error " in line] == begun


def test_changes_are_in_force(world: OutageWorld) -> None:
    """As with the API servers of other releases (``test_api_versions``), which are not built everywhere."""
    check_changes(world)


def test_killed_for_a_while(world: OutageWorld) -> None:
    name, old = world.appear()
    world.wait(lambda: world.serves(old), "a Service of before")
    with world.outage() as outage:
        world.server.kill()
        world.relay.refuse()
        outage.seen("refuses the connection: check that the API server runs")
        outage.lasts(OUTAGE_SECONDS)
        assert world.serves(old)
        world.server.start()
        world.lose_endpoints(name)
        _, fresh = world.appear()
        world.relay.listen()
        world.wait(lambda: world.serves(fresh) and world.refuses(old), "what has changed meanwhile")


def test_frozen(world: OutageWorld) -> None:
    with world.outage() as outage:
        world.server.freeze()
        try:
            # Watches end every few minutes; end them now.
            world.relay.cut()
            outage.seen("accepts the connection but does not answer")
            outage.lasts(OUTAGE_SECONDS)
        finally:
            world.server.thaw()
        _, fresh = world.appear()
        world.wait(lambda: world.serves(fresh), "what came afterwards")


SPOILT: list[tuple[Mode, str, tuple[str, ...]]] = [
    ("slow", "too slowly", ()),
    ("mute", "no answer within 5 s", ()),
    ("truncated", "ended before its end", ()),
    ("garbage", "cannot be parsed", ("services", "endpointslices", "nodes", "servicecidrs")),
]


@pytest.mark.parametrize(("mode", "words", "resources"), SPOILT, ids=[each[0] for each in SPOILT])
def test_spoilt_answers(world: OutageWorld, mode: Mode, words: str, resources: tuple[str, ...]) -> None:
    name, old = world.appear()
    world.wait(lambda: world.serves(old), "a Service of before")
    with world.outage(*resources) as outage:
        world.proxy.set(mode)
        world.relay.target = world.proxy.port
        world.relay.cut()
        world.lose_endpoints(name)
        _, fresh = world.appear()
        outage.seen(words)
        outage.lasts(OUTAGE_SECONDS)
        assert world.serves(old), "no object of it is used"
        # Requests in progress end by themselves.
        world.relay.target = world.server.port
        world.wait(lambda: world.serves(fresh) and world.refuses(old), "what has changed meanwhile")


def test_history_is_compacted(world: OutageWorld) -> None:
    """The agent's resource versions are too old: the new server refuses to continue from there (410)."""
    name, old = world.appear()
    world.wait(lambda: world.serves(old), "a Service of before")
    # New watches, so that none ends in the next steps: the connection of the next one would wait and fail.
    world.relay.cut()
    world.settle()
    lists, begin = world.lists(), len(world.container.log())
    world.relay.hold()
    try:
        world.lose_endpoints(name)
        _, fresh = world.appear()
        world.server.compact()
        world.server.kill()
        world.server.start()
    finally:
        world.relay.flow()
    world.wait(lambda: world.serves(fresh) and world.refuses(old), "what has changed meanwhile")
    world.wait(world.follows, "everything is followed again")
    assert world.lists() > lists
    assert world.logged(" error ", since=begin) == []
    assert world.traffic.failures() == []


def test_restarted_with_other_objects(world: OutageWorld) -> None:
    """Another cluster at the same address: its Services are served, the old cluster's are removed."""
    _, old = world.appear()
    world.wait(lambda: world.serves(old), "a Service of before")
    with world.outage() as outage:
        world.relay.refuse()
        world.server.clear()
        outage.seen("refuses the connection: check that the API server runs")
        world.server.start()
        world.install()
        _, fresh = world.appear()
        assert world.serves(old)
        world.relay.listen()
        world.wait(lambda: world.serves(fresh) and not world.serves(old), "the other cluster's Services")
    assert world.serves(cluster_ip(11))


def test_the_token_expires_and_is_rotated(world: OutageWorld) -> None:
    with world.outage() as outage:
        world.rotate(expired(world.server))
        world.relay.cut()
        _, fresh = world.appear()
        outage.seen("rejects the credentials (401 Unauthorized): check token or client certificate")
        outage.lasts(OUTAGE_SECONDS)
        assert not world.serves(fresh)
        world.rotate()
        world.wait(lambda: world.serves(fresh), "what came meanwhile")


def test_the_right_to_one_resource_is_removed(world: OutageWorld) -> None:
    """The other resources are still watched; this one is watched again when the right is back."""
    role = world.server.request("GET", ROLE)
    account = Account(world.server)
    slices = "/apis/discovery.k8s.io/v1/endpointslices?labelSelector=!service.kubernetes.io/headless&limit=1"
    rules = [rule for rule in role["rules"] if "endpointslices" not in rule["resources"]]
    with world.outage("endpointslices") as outage:
        world.server.request("PATCH", ROLE, {"rules": rules}, "application/merge-patch+json")
        world.wait(lambda: account.status("GET", slices) == 403, "the server forbids it")
        world.relay.cut()
        outage.seen("grant list and watch on endpointslices")
        _, fresh = world.appear()
        world.wait(lambda: world.refuses(fresh), "a Service whose endpoints are not known")
        outage.lasts(OUTAGE_SECONDS)
        world.server.request("PATCH", ROLE, {"rules": role["rules"]}, "application/merge-patch+json")
        world.wait(lambda: world.serves(fresh), "its endpoints")


def test_its_name_cannot_be_resolved(world: OutageWorld) -> None:
    with world.outage() as outage:
        world.hosts.write_text("127.0.0.1 localhost\n")
        world.relay.cut()
        _, fresh = world.appear()
        outage.seen("the name kubernetes.default.svc cannot be resolved")
        outage.lasts(OUTAGE_SECONDS)
        assert not world.serves(fresh)
        world.hosts.write_text(HOSTS)
        world.wait(lambda: world.serves(fresh), "what came meanwhile")


def test_the_agent_is_killed_while_the_api_server_is_away(world: OutageWorld) -> None:
    """The old agent's Services stay, until the source reports the current objects."""
    name, old = world.appear()
    world.wait(lambda: world.serves(old), "a Service of before")
    world.traffic.failures()
    world.relay.refuse()
    world.container.kill()
    rounds = world.traffic.rounds
    world.container.start()
    world.wait(lambda: world.logged(*BEGINNINGS), "it logs that there is no API server")
    world.wait(lambda: world.traffic.rounds > rounds + 3 and world.serves(old), "traffic continues without")
    assert not any(world.connected().values())
    world.lose_endpoints(name)
    _, fresh = world.appear()
    world.relay.listen()
    wait_ready(world.node, world.container)
    world.wait(lambda: world.serves(fresh) and world.refuses(old), "what has changed meanwhile")
    world.wait(lambda: world.logged(*ENDS), "it logs the end of the outage")
    assert len(world.logged(*BEGINNINGS)) == len(world.logged(*ENDS)) == 1, world.container.log()
    assert world.traffic.failures() == []
