# SPDX-License-Identifier: Apache-2.0
"""``/healthz`` and ``/livez``: a table of events and results, and the exact bytes (spec/service-semantics §11.2)."""

from __future__ import annotations

import json

import pytest

from pyebpf_proxy.kube.objects import Node, NodeSpec, ObjectMeta, Taint
from pyebpf_proxy.servers.health import Health, HealthPages, Moment
from pyebpf_proxy.servers.http import Request
from pyebpf_proxy.services.model import IPFamily
from pyebpf_proxy.services.nodes import is_eligible

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
#: 2026-11-21T05:38:20Z
EPOCH = 1795239500
TIMEOUT = 60.0


def at(seconds: float) -> Moment:
    return Moment(1000 + seconds, EPOCH * 1_000_000_000 + round(seconds * 1e9))


def text(seconds: float) -> str:
    return at(seconds).text()


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "2026-11-21T05:38:20Z"),
        (0.5, "2026-11-21T05:38:20.5Z"),
        (1.25, "2026-11-21T05:38:21.25Z"),
        (59, "2026-11-21T05:39:19Z"),
    ],
)
def test_times_are_written_as_go_writes_them(seconds: float, shown: str) -> None:
    assert text(seconds) == shown


#: Events ("q4": queued for IPv4, "u6": IPv6 updated), the time of the request, the healthy families.
TABLE = [
    ("starting up is healthy", [], 0, {}),
    ("starting up for ever is healthy too", [("q4", 0)], 1000, {}),
    ("a family that was never synced is not considered", [("q4", 0), ("q6", 0), ("u6", 1)], 1000, {V6: True}),
    ("nothing to do", [("q4", 0), ("u4", 1)], 1000, {V4: True}),
    ("a change, not late yet", [("u4", 0), ("q4", 10)], 69.9, {V4: True}),
    ("a change that is late", [("u4", 0), ("q4", 10)], 70, {V4: False}),
    ("the oldest change counts", [("u4", 0), ("q4", 10), ("q4", 60)], 70, {V4: False}),
    ("late, then written", [("u4", 0), ("q4", 10), ("u4", 100)], 101, {V4: True}),
    ("one family is late", [("u4", 0), ("u6", 0), ("q4", 5), ("q6", 5), ("u6", 6)], 65, {V4: False, V6: True}),
]


@pytest.mark.parametrize(("what", "happened", "when", "healthy"), TABLE, ids=[row[0] for row in TABLE])
def test_health(what: str, happened: list[tuple[str, float]], when: float, healthy: dict[IPFamily, bool]) -> None:
    health = Health(TIMEOUT)
    for event, moment in happened:
        family = IPFamily(int(event[1]))
        (health.queued if event[0] == "q" else health.updated)(family, at(moment))
    report = health.report(at(when))
    assert {family: its.healthy for family, its in report.families.items()} == healthy
    assert report.healthy == all(healthy.values())


class ServedPages:
    def __init__(self) -> None:
        self.health = Health(TIMEOUT)
        self.eligible = True
        self.now = 0.0
        self.counted: list[tuple[str, int]] = []
        self.pages = HealthPages(
            self.health,
            lambda: self.eligible,
            lambda path, code: self.counted.append((path, code)),
            lambda: at(self.now),
        )

    def ask(self, path: str) -> tuple[int, str]:
        answer = self.pages(Request("GET", path))
        assert answer.headers == (("Content-Type", "application/json"), ("X-Content-Type-Options", "nosniff"))
        return answer.status, answer.body.decode()


def test_the_bytes_of_a_good_answer() -> None:
    served = ServedPages()
    served.health.updated(V4, at(1))
    served.health.updated(V6, at(2.5))
    served.now = 10
    status = (
        f'"healthy":true,"status":{{"IPv4":{{"lastUpdated":"{text(1)}","healthy":true}},'
        f'"IPv6":{{"lastUpdated":"{text(2.5)}","healthy":true}}}}}}'
    )
    times = f'{{"lastUpdated":"{text(10)}","currentTime":"{text(10)}",'
    assert served.ask("/healthz") == (200, f'{times}"nodeEligible":true,{status}')
    assert served.ask("/livez") == (200, times + status)
    assert served.counted == [("/healthz", 200), ("/livez", 200)]


def test_the_bytes_before_the_first_sync() -> None:
    served = ServedPages()
    times = f'{{"lastUpdated":"{text(0)}","currentTime":"{text(0)}",'
    assert served.ask("/livez") == (200, times + '"healthy":true}')
    served.eligible = False
    never = f'{{"lastUpdated":"0001-01-01T00:00:00Z","currentTime":"{text(0)}",'
    assert served.ask("/healthz") == (503, never + '"nodeEligible":false,"healthy":true}')


def test_a_node_in_deletion_affects_only_healthz() -> None:
    served = ServedPages()
    served.health.updated(V4, at(1))
    served.now = 5
    served.eligible = False
    status, body = served.ask("/healthz")
    answer = json.loads(body)
    assert (status, answer["healthy"], answer["nodeEligible"]) == (503, True, False)
    assert answer["lastUpdated"] == text(1)
    assert served.ask("/livez")[0] == 200
    assert served.counted == [("/healthz", 503), ("/livez", 200)]


def test_a_late_sync_affects_both() -> None:
    served = ServedPages()
    served.health.updated(V4, at(1))
    served.health.updated(V6, at(3))
    served.health.queued(V4, at(4))
    served.now = 64
    for path in ("/healthz", "/livez"):
        status, body = served.ask(path)
        answer = json.loads(body)
        assert (status, answer["healthy"], answer["lastUpdated"]) == (503, False, text(3))
        assert {family: its["healthy"] for family, its in answer["status"].items()} == {"IPv4": False, "IPv6": True}
    assert served.counted == [("/healthz", 503), ("/livez", 503)]


def test_other_paths_do_not_exist() -> None:
    served = ServedPages()
    for path in ("/", "/healthz/", "/readyz", "/metrics"):
        answer = served.pages(Request("GET", path))
        assert (answer.status, answer.body) == (404, b"404 page not found\n")
    assert served.counted == []


def taint(key: str) -> NodeSpec:
    return NodeSpec(taints=(Taint("other"), Taint(key)))


@pytest.mark.parametrize(
    ("node", "eligible"),
    [
        (None, False),
        (Node(), True),
        (Node(metadata=ObjectMeta(deletion_timestamp="2026-11-21T05:38:20Z")), False),
        (Node(spec=taint("ToBeDeletedByClusterAutoscaler")), False),
        (Node(spec=taint("DeletionCandidateOfClusterAutoscaler")), True),
    ],
)
def test_which_nodes_may_get_traffic(node: Node | None, eligible: bool) -> None:
    assert is_eligible(node) is eligible
