# SPDX-License-Identifier: Apache-2.0
"""Health check node ports on real sockets (spec/service-semantics §11.1)."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
from collections.abc import Iterator

import pytest

from pyebpf_proxy.kube.events import ObjectReference
from pyebpf_proxy.servers.health import Health, Moment
from pyebpf_proxy.servers.health_checks import HealthCheckPorts, listen_addresses
from pyebpf_proxy.servers.server import Server
from pyebpf_proxy.services.health_checks import HealthCheck, HealthCheckName
from pyebpf_proxy.services.model import IPFamily
from tests.support.logs import Log, Message
from tests.support.ports import free_port
from tests.unit.servers.http_client import answers, get, until

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
S4, S6 = HealthCheckName("ns", "s", V4), HealthCheckName("ns", "s", V6)
T4 = HealthCheckName("ns", "t", V4)
BODY = """{
\t"service": {
\t\t"namespace": "ns",
\t\t"name": "s"
\t},
\t"localEndpoints": %d,
\t"serviceProxyHealthy": %s
}"""


class HealthCheckNode:
    def __init__(self) -> None:
        self.server = Server()
        self.server.start()
        self.health = Health(60)
        self.now = 0.0
        self.addresses = {V4: ("127.0.0.1",), V6: ("::1",)}
        self.events: list[tuple[object, ...]] = []
        self.ports = HealthCheckPorts(
            self.server, self.health, "node", self, lambda: self.addresses, lambda: Moment(self.now, 0)
        )

    def event(self, about: ObjectReference, type: str, reason: str, action: str, note: str) -> None:  # noqa: A002
        self.events.append((about, type, reason, action, note))


@pytest.fixture
def checks() -> Iterator[HealthCheckNode]:
    checks = HealthCheckNode()
    yield checks
    checks.server.stop()


def served(port: int) -> str:
    """The Service whose health check answers."""
    try:
        return str(json.loads(get(port).body)["service"]["name"])
    except (OSError, http.client.HTTPException):
        return ""  # at that moment one was closed and the other opened


def test_a_node_without_ipv6_has_no_listener_for_it(checks: HealthCheckNode) -> None:
    checks.health.families = (V4,)
    checks.addresses = {V4: ("127.0.0.1",), V6: ()}  # with IPv6 networks in nodePortAddresses
    port = free_port()
    checks.ports.sync({S6: HealthCheck(port, 2), S4: HealthCheck(port, 2)})
    until(lambda: answers(port))
    assert checks.events == []


def test_the_answer(checks: HealthCheckNode) -> None:
    port = free_port()
    checks.ports.sync({S4: HealthCheck(port, 2)})
    until(lambda: answers(port))
    answer = get(port, "/any", "POST", body=b"x")
    assert (answer.status, answer.body.decode()) == (200, BODY % (2, "true"))
    fixed = {name: value for name, value in answer.headers.items() if name != "Date"}
    assert fixed == {
        "Content-Type": "application/json",
        "X-Content-Type-Options": "nosniff",
        "X-Load-Balancing-Endpoint-Weight": "2",
        "Content-Length": str(len(answer.body)),
    }
    checks.ports.sync({S4: HealthCheck(port, 0)})
    until(lambda: get(port).status == 503)
    assert get(port).body.decode() == BODY % (0, "true")
    checks.ports.sync({S4: HealthCheck(port, 1)})
    until(lambda: get(port).status == 200)
    # A proxy that is behind reports that here too.
    checks.health.updated(V6, Moment(0, 0))
    checks.health.queued(V6, Moment(0, 0))
    checks.now = 60
    answer = get(port)
    assert (answer.status, answer.body.decode()) == (503, BODY % (1, "false"))


def test_ports_follow_their_services(checks: HealthCheckNode) -> None:
    one, two = free_port(), free_port()
    checks.ports.sync({S4: HealthCheck(one, 1), S6: HealthCheck(one, 1)})
    until(lambda: answers(one) and answers(one, "::1"))
    with socket.create_connection(("127.0.0.1", one), timeout=20) as held:
        checks.ports.sync({S4: HealthCheck(two, 1)})
        until(lambda: answers(two) and not answers(one) and not answers(one, "::1"))
        with pytest.raises(ConnectionResetError):  # existing connections are closed
            while held.recv(1):
                pass
            raise ConnectionResetError
    checks.ports.sync({})
    until(lambda: not answers(two))
    # A port may move from one Service to another in one sync.
    checks.ports.sync({S4: HealthCheck(two, 1)})
    until(lambda: answers(two))
    checks.ports.sync({T4: HealthCheck(two, 5)})
    until(lambda: served(two) == "t")
    assert checks.events == []


def test_all_addresses_or_none_and_again_at_the_next_sync(
    checks: HealthCheckNode, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    wanted = {S4: HealthCheck(port, 1)}
    checks.addresses = {V4: ("127.0.0.1", "127.0.0.2"), V6: ()}
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))
        other.listen()
        checks.ports.sync(wanted)
        until(lambda: checks.events)
        assert not answers(port)
        note = (
            f'node node failed to start healthcheck "ns/s" on port {port}:'
            f" listen tcp4 127.0.0.2:{port}: bind: address already in use"
        )
        about = ObjectReference("Service", "ns", "s")
        assert checks.events == [(about, "Warning", "FailedToStartServiceHealthcheck", "Listen", note)]
        checks.ports.sync(wanted)

    def again() -> bool:
        checks.ports.sync(wanted)
        return answers(port) and answers(port, "127.0.0.2")

    until(again)
    assert len(checks.events) == 1
    Log(caplog).only(Message.HEALTH_CHECK_PORT_FAILS)


def test_an_occupied_port_affects_no_other(checks: HealthCheckNode) -> None:
    port = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        checks.ports.sync({T4: HealthCheck(other.getsockname()[1], 1), S4: HealthCheck(port, 1)})
        until(lambda: answers(port))
        until(lambda: checks.events)


@pytest.mark.parametrize("first", [S4, T4])
def test_of_two_services_with_one_port_the_older_has_it_whichever_came_first(
    checks: HealthCheckNode, first: HealthCheckName, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    wanted = {S4: HealthCheck(port, 1, "2026-01-02T00:00:00Z"), T4: HealthCheck(port, 1, "2026-01-01T00:00:00Z")}
    checks.ports.sync({first: wanted[first]})
    until(lambda: answers(port))
    checks.ports.sync(wanted)
    until(lambda: checks.events and served(port) == "t")
    (event,) = checks.events
    assert event[0] == ObjectReference("Service", "ns", "s")
    assert str(event[-1]).endswith(f"on port {port}: it is spec.healthCheckNodePort of Service ns/t, too")
    Log(caplog).only(Message.HEALTH_CHECK_PORT_FAILS)
    checks.ports.sync({S4: wanted[S4]})
    until(lambda: served(port) == "s")


LOCAL = [ipaddress.ip_address(text) for text in ("127.0.0.1", "::1", "10.0.0.5", "192.168.1.1", "10.0.0.6", "fd00::5")]


@pytest.mark.parametrize(
    ("configured", "four", "six"),
    [
        ([], ("0.0.0.0",), ("::",)),
        (["primary"], ("10.0.0.5",), ("fd00::5",)),
        (["10.0.0.0/8"], ("10.0.0.5", "10.0.0.6"), ("::",)),
        (["10.0.0.0/8", "fd00::/64"], ("10.0.0.5", "10.0.0.6"), ("fd00::5",)),
        (["10.0.0.0/8", "0.0.0.0/0"], ("0.0.0.0",), ("::",)),
        (["127.0.0.0/8", "::/0"], ("127.0.0.1",), ("::",)),
        (["172.16.0.0/12"], (), ("::",)),
    ],
)
def test_where_they_listen(configured: list[str], four: tuple[str, ...], six: tuple[str, ...]) -> None:
    node_ips = [ipaddress.ip_address(text).packed for text in ("10.0.0.5", "fd00::5")]
    assert listen_addresses(configured, node_ips, LOCAL) == {V4: four, V6: six}


def test_primary_without_a_node_means_all_addresses() -> None:
    assert listen_addresses(["primary"], [], LOCAL) == {V4: ("0.0.0.0",), V6: ("::",)}


def test_between_syncs_a_port_that_was_taken_is_tried_again_and_new_addresses_are_listened_on(
    checks: HealthCheckNode,
) -> None:
    port = free_port()
    checks.addresses = {V4: ("127.0.0.1",), V6: ()}
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        checks.ports.sync({S4: HealthCheck(port, 1)})
        until(lambda: checks.ports._failing)
    checks.ports.retry()
    until(lambda: answers(port))
    assert not answers(port, "127.0.0.2")
    checks.addresses = {V4: ("127.0.0.1", "127.0.0.2"), V6: ()}
    checks.ports.retry()
    until(lambda: answers(port) and answers(port, "127.0.0.2"))
