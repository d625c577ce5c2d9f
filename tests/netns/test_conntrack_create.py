# SPDX-License-Identifier: Apache-2.0
"""Conntrack entries that the agent creates for flows unknown to conntrack: real packets pass a real firewall by
them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from itertools import count

import pytest

from pyebpf_proxy.datapath.connections.create import Entry, Outcome, TcpState
from pyebpf_proxy.services.model import Protocol
from tests.netns import tcp_ends
from tests.netns.router import CLIENT, ENDPOINT, FRONTEND, MASQUERADE_SHIFT, PORT, ROUTER, TARGET, Router, entry
from tests.netns.tcp_ends import End, exchange_data

pytestmark = pytest.mark.needs_netns

_ports = count(40000)
_names = count()
FAR_ON = 3_000_000_000


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    with Router().up() as router:
        yield router


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def family(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[False, True], ids=["own source", "masqueraded"])
def masqueraded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[0, 1], ids=["strict", "liberal"], autouse=True)
def liberal(router: Router, request: pytest.FixtureRequest) -> None:
    router.liberal(request.param)


class Connection:
    """An established connection through the router; its entry does not exist any more."""

    def __init__(self, router: Router, family: int, masqueraded: bool) -> None:
        own_port, name = next(_ports), f"connection {next(_names)}"
        self.router = router
        self.client, self.server = End(router.client, name), End(router.server, name)
        self.entry = entry(Protocol.TCP, family, own_port, masqueraded)
        router.opened(self.entry)
        self.server.listen(TARGET)
        self.client.connect(FRONTEND[family], PORT, own_port)
        self.server.accept(TARGET)
        self.invalid = router.invalid()

    def enter(self, state: TcpState = TcpState.ESTABLISHED) -> None:
        """Create the entry again."""
        time.sleep(0.1)  # Acknowledgements of the last data are still on their way.
        self.router.forgotten()
        (result,) = self.router.create(self.entry._replace(state=state))
        assert result.outcome is Outcome.CREATED
        self.invalid = self.router.invalid()

    def continues(self, rounds: int = 20) -> None:
        exchange_data(self.client, self.server, rounds)
        self.nothing_dropped()

    def skip_bytes(self, client: tuple[int, int], server: tuple[int, int]) -> None:
        """Skip so many bytes that the client and the server have (sent, received)."""
        time.sleep(0.1)  # An end that has skipped bytes does not acknowledge earlier ones.
        self.client.skip_bytes(*client)
        self.server.skip_bytes(*server)

    def nothing_dropped(self) -> None:
        assert self.router.invalid() == self.invalid

    def close_silently(self) -> None:
        """Close both ends without a packet."""
        for end in (self.client, self.server):
            end.namespace.call(_vanish, end.name)


@pytest.fixture
def connection(router: Router, family: int, masqueraded: bool) -> Iterator[Connection]:
    made = Connection(router, family, masqueraded)
    yield made
    made.close_silently()


# ---- the entry --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["TCP", "UDP"])
def test_an_entry_is_as_the_kernel_would_create_it(
    router: Router, family: int, masqueraded: bool, protocol: Protocol
) -> None:
    own = next(_ports)
    router.forgotten()
    assert router.create(entry(protocol, family, own, masqueraded))[0].outcome is Outcome.CREATED
    (line,) = router.listed(family)
    seen, port = (ROUTER[family], own - MASQUERADE_SHIFT) if masqueraded else (CLIENT[family], own)
    assert f"src={CLIENT[family]} dst={FRONTEND[family]} sport={own} dport={PORT} " in line
    assert f"src={ENDPOINT[family]} dst={seen} sport={TARGET} dport={port} [ASSURED]" in line
    assert "UNREPLIED" not in line
    words = line.split()
    sysctl = "tcp_timeout_established" if protocol is Protocol.TCP else "udp_timeout_stream"
    wanted = int(router.router.run("sysctl", "-n", f"net.netfilter.nf_conntrack_{sysctl}"))
    assert wanted - 3 <= int(words[2]) <= wanted
    assert ("ESTABLISHED" in words) == (protocol is Protocol.TCP)
    # As rules see it: `ct status dnat`, `ct status snat`.
    translated = router.router.run("conntrack", "-L", "-f", f"ipv{family}", "--dst-nat").splitlines()
    assert len(translated) == 1
    hidden = router.router.run("conntrack", "-L", "-f", f"ipv{family}", "--src-nat").splitlines()
    assert len(hidden) == masqueraded


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["TCP", "UDP"])
def test_a_flow_with_the_same_reply_tuple_is_replaced(router: Router, family: int, protocol: Protocol) -> None:
    """The kernel would choose another source port for a flow that is not masqueraded, and the flow would break."""
    router.forgotten()
    it = entry(protocol, family, next(_ports), False)
    straight = it._replace(frontend=it.endpoint)
    assert [result.outcome for result in router.create(straight, it)] == [Outcome.CREATED, Outcome.REPLACED]
    (line,) = router.listed(family)
    assert f"dst={FRONTEND[family]} sport={it.client[1]} dport={PORT} " in line
    assert f"src={ENDPOINT[family]} dst={CLIENT[family]} sport={TARGET} dport={it.client[1]} " in line


def test_many_entries_in_one_call_each_with_its_result(router: Router, family: int) -> None:
    router.forgotten()
    many = [entry(Protocol.TCP, family, 20001 + n, n % 2 == 1) for n in range(1000)]
    many[500] = many[499]
    many[700] = many[700]._replace(endpoint=entry(Protocol.TCP, 10 - family, 700, False).endpoint)
    results = router.create(*many)
    assert results[500].outcome is Outcome.KNOWN
    assert str(results[700]) == "refused: Address family not supported by protocol"
    assert {r.outcome for r in (*results[:500], *results[501:700], *results[701:])} == {Outcome.CREATED}
    assert len(router.listed(family)) == 998


def test_a_second_creation_reports_a_known_entry(router: Router, family: int, masqueraded: bool) -> None:
    router.forgotten()
    it = entry(Protocol.TCP, family, next(_ports), masqueraded)
    assert [result.outcome for result in router.create(it, it)] == [Outcome.CREATED, Outcome.KNOWN]


def test_an_entry_to_another_endpoint_is_replaced(router: Router, family: int) -> None:
    """The programs send all of its packets to the endpoint of the new entry."""
    router.forgotten()
    it = entry(Protocol.TCP, family, next(_ports), False)
    other = it._replace(endpoint=(it.endpoint[0], 9999))
    assert [result.outcome for result in router.create(other, it)] == [Outcome.CREATED, Outcome.REPLACED]
    (line,) = router.listed(family)
    assert f"sport={TARGET}" in line


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=["TCP", "UDP"])
def test_a_conflicting_entry_in_each_direction_is_replaced(
    router: Router, family: int, masqueraded: bool, protocol: Protocol
) -> None:
    """Forged packets in the names of the frontend and of the endpoint create such entries."""
    router.forgotten()
    it = entry(protocol, family, next(_ports), masqueraded)
    other = it._replace(client=(it.client[0], next(_ports)), source=None)
    forged = [
        it._replace(client=it.frontend, frontend=it.client, endpoint=it.client, source=None),
        it._replace(client=it.endpoint, frontend=it.seen, endpoint=it.seen, source=None),
    ]
    outcomes = [result.outcome for result in router.create(other, *forged, it)]
    assert outcomes == [Outcome.CREATED, Outcome.CREATED, Outcome.CREATED, Outcome.REPLACED]
    lines = router.listed(family)
    assert len(lines) == 2, "no other entry is changed"
    (line,) = (line for line in lines if f"sport={it.client[1]} dport={PORT} " in line)
    assert f"src={ENDPOINT[family]} " in line


@pytest.mark.parametrize("endpoint_port", [TARGET, 9999], ids=["same endpoint", "another endpoint"])
def test_the_entry_of_a_closed_connection_is_replaced(router: Router, family: int, endpoint_port: int) -> None:
    """The client uses its port again while the kernel still has the old connection in TIME_WAIT."""
    router.forgotten()
    it = entry(Protocol.TCP, family, next(_ports), False)
    old = it._replace(endpoint=(it.endpoint[0], endpoint_port))
    router.create(old)
    tuple_ = f"-s {CLIENT[family]} -d {FRONTEND[family]} --sport {it.client[1]} --dport {PORT}"
    router.router.run("conntrack", "-U", "-p", "tcp", "-f", f"ipv{family}", *tuple_.split(), "--state", "TIME_WAIT")
    assert "TIME_WAIT" in router.listed(family)[0]
    assert router.create(it)[0].outcome is Outcome.REPLACED
    (line,) = router.listed(family)
    assert "ESTABLISHED" in line
    assert f"sport={TARGET}" in line


def test_the_entry_of_datagrams_to_another_endpoint_is_replaced(router: Router, family: int) -> None:
    router.forgotten()
    it = entry(Protocol.UDP, family, next(_ports), False)
    outcomes = [r.outcome for r in router.create(it._replace(endpoint=(it.endpoint[0], 9999)), it)]
    assert outcomes == [Outcome.CREATED, Outcome.REPLACED]
    (line,) = router.listed(family)
    assert f"sport={TARGET}" in line


# ---- TCP that continues ----------------------------------------------------------------------------------------------


def test_without_the_entry_nothing_passes(connection: Connection) -> None:
    """The other tests rely on this."""
    connection.continues(1)
    connection.router.forgotten()
    connection.client.send(b"lost")
    connection.router.server.call(_patience, connection.server.name, 0.7)
    with pytest.raises(TimeoutError):
        connection.server.receive(4)
    assert connection.router.invalid() > connection.invalid
    # With the entry, lost data arrives too.
    connection.router.server.call(_patience, connection.server.name, 20.0)
    connection.enter()
    assert connection.server.receive(4) == b"lost"


def test_the_connection_continues(connection: Connection) -> None:
    connection.continues(3)
    connection.enter()
    connection.continues()


def test_much_data_in_both_directions(connection: Connection) -> None:
    connection.enter()
    exchange_data(connection.client, connection.server, 3, size=20_000)
    connection.nothing_dropped()


def test_sequence_numbers_far_ahead(connection: Connection) -> None:
    connection.continues(3)
    connection.skip_bytes((FAR_ON, FAR_ON // 2), (FAR_ON // 2, FAR_ON))
    connection.enter()
    connection.client.resume_sending()
    connection.server.resume_sending()
    connection.continues()


def test_a_known_entry_with_old_sequence_numbers(connection: Connection) -> None:
    """The kernel has seen the beginning; later packets took another path."""
    connection.continues(3)
    connection.skip_bytes((FAR_ON, FAR_ON // 2), (FAR_ON // 2, FAR_ON))
    (result,) = connection.router.create(connection.entry)
    assert result.outcome is Outcome.KNOWN
    connection.client.resume_sending()
    connection.server.resume_sending()
    connection.continues()


def test_an_idle_connection(connection: Connection) -> None:
    connection.enter()
    time.sleep(1.5)
    connection.continues(3)


@pytest.mark.parametrize("far", [0, FAR_ON], ids=["near", "far on"])
def test_only_the_server_sends(connection: Connection, far: int) -> None:
    connection.continues(1)
    connection.skip_bytes((far, far), (far, far))
    connection.enter()
    connection.client.resume_sending()
    connection.server.resume_sending()
    data = b"x" * 60_000
    connection.server.send(data)
    assert connection.client.receive(len(data)) == data
    connection.nothing_dropped()


@pytest.mark.parametrize("state", list(TcpState), ids=lambda state: state.name)
def test_half_closed_by_the_client(connection: Connection, state: TcpState) -> None:
    connection.continues(1)
    connection.router.client.call(_shut, connection.client.name)
    assert connection.server.receive(1) == b""
    connection.enter(state)
    data = b"y" * 60_000
    connection.server.send(data)
    assert connection.client.receive(len(data)) == data
    connection.router.server.call(_shut, connection.server.name)
    assert connection.client.receive(1) == b""
    connection.nothing_dropped()


def test_half_closed_by_the_server(connection: Connection) -> None:
    connection.continues(1)
    connection.router.server.call(_shut, connection.server.name)
    assert connection.client.receive(1) == b""
    connection.enter(TcpState.FIN_WAIT)
    data = b"z" * 60_000
    connection.client.send(data)
    assert connection.server.receive(len(data)) == data
    connection.nothing_dropped()


def test_a_closed_window(connection: Connection) -> None:
    """The client reads nothing and the server has filled the window: then only probes are sent."""
    size = connection.router.server.call(_fill, connection.server.name)
    connection.enter()
    time.sleep(0.5)
    assert len(connection.client.receive(size)) == size
    connection.continues(3)


def test_a_reset_passes_and_ends_the_entry(connection: Connection, family: int) -> None:
    connection.continues(1)
    connection.enter()
    connection.client.reset()
    with pytest.raises(ConnectionResetError):
        connection.server.receive(1)
    assert "CLOSE" in connection.router.listed(family)[0]


# ---- UDP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["client", "server"])
def test_datagrams(router: Router, family: int, masqueraded: bool, first: str) -> None:
    own = next(_ports)
    it: Entry = entry(Protocol.UDP, family, own, masqueraded)
    router.forgotten()
    router.client.call(_datagrams, "udp", CLIENT[family], own)
    router.server.call(_datagrams, "udp", ENDPOINT[family], TARGET)
    assert router.create(it)[0].outcome is Outcome.CREATED
    seen = (ROUTER[family], own - MASQUERADE_SHIFT) if masqueraded else (CLIENT[family], own)
    for number in range(10):
        if first == "client" or number:
            router.client.call(_send, "udp", b"question", (FRONTEND[family], PORT))
            assert router.server.call(_receive, "udp") == (b"question", seen)
        router.server.call(_send, "udp", b"answer", seen)
        assert router.client.call(_receive, "udp") == (b"answer", (FRONTEND[family], PORT))


# ---- in the namespaces -----------------------------------------------------------------------------------------------


def _vanish(name: str) -> None:
    it = tcp_ends.connections.pop(name, None)
    if it is not None:
        it.setsockopt(socket.IPPROTO_TCP, tcp_ends._REPAIR, 1)
        it.close()


def _patience(name: str, seconds: float) -> None:
    tcp_ends.connections[name].settimeout(seconds)


def _shut(name: str) -> None:
    tcp_ends.connections[name].shutdown(socket.SHUT_WR)


def _fill(name: str) -> int:
    """Send until no more data fits."""
    it = tcp_ends.connections[name]
    size = 0
    it.settimeout(0.3)
    try:
        while True:
            size += it.send(b"w" * 65536)
    except TimeoutError:
        it.settimeout(20.0)
        return size


def _datagrams(name: str, address: str, port: int) -> None:
    it = tcp_ends.connections.pop(name, None)
    if it is not None:
        it.close()
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((address, port))
    made.settimeout(5.0)
    tcp_ends.connections[name] = made


def _send(name: str, data: bytes, to: tuple[str, int]) -> None:
    tcp_ends.connections[name].sendto(data, to)


def _receive(name: str) -> tuple[bytes, tuple[str, int]]:
    data, peer = tcp_ends.connections[name].recvfrom(1000)
    return data, peer[:2]
