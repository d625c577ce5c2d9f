# SPDX-License-Identifier: Apache-2.0
"""Connections that end after they took the fast path, and later packets from their ports."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.cluster import Lab, Pod
from pyebpf_proxy.lab.manifests import Port, service, slices
from pyebpf_proxy.see.maps import Pinned
from tests.netns.tcp_ends import End, exchange_data
from tests.support.fast_lab import FastWorld, build_fast_world
from tests.support.lab_tools import wait_until

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

PORT = 7300
ADDRESS = cluster_ip(12)
_own_ports = itertools.count(20_000)


@dataclass
class Moving:
    """A service with one endpoint, which moves from ``near`` to ``far`` and back."""

    world: FastWorld
    at: Pod

    def serve_at(self, pod: Pod) -> None:
        ports = [Port("tcp", PORT, PORT)]
        endpoints = [(pod.address, pod.node.name)]
        objects = [service("moving", ports, ADDRESS), *slices("moving", ports, endpoints)]
        self.world.node.agent.wait_synced(self.world.lab.write("moving.yaml", objects))
        self.at = pod

    def other(self) -> Pod:
        return self.world.far if self.at is self.world.near else self.world.near

    def begin(self, family: int = 4, own_port: int | None = None, name: str = "it") -> tuple[End, End, int]:
        """A new connection: the client's end, the endpoint's end, and the client's port."""
        own_port = next(_own_ports) if own_port is None else own_port
        client, server = End(self.world.client.namespace, name), End(self.at.namespace, name)
        client.connect(ADDRESS.of(family), PORT, own_port)
        server.accept(PORT)
        return client, server, own_port

    def begin_young(self, family: int) -> tuple[End, End, int]:
        """The same, without an entry in conntrack: the pair has a permit, and no flow has to renew it."""

        def begun() -> tuple[End, End, int] | None:
            client, server, own_port = self.begin(family)
            exchange_data(client, server, 3)
            if not self.conntrack(own_port, family):
                return client, server, own_port
            client.reset()
            return None

        found = wait_until(begun, "a young flow")
        assert found
        return found

    def fast(self, client: End, server: End) -> None:
        """Some rounds; the last ones are on the fast path, the first ones may not be."""

        def by_the_cache() -> bool:
            before = self.world.count("flow_hit")
            exchange_data(client, server, 10)
            return self.world.count("flow_hit") > before + 5

        wait_until(by_the_cache, "packets sent by the cache")

    def conntrack(self, own_port: int, family: int = 4) -> list[str]:
        """conntrack's entries of the connections from this port of the client."""
        text = self.world.node.namespace.run(
            "conntrack", "-L", "-f", f"ipv{family}", "-p", "tcp", "--orig-port-src", str(own_port)
        )
        return [line for line in text.splitlines() if f"dport={PORT}" in line]

    def forget(self) -> None:
        """Delete the flow table's entries, as if other flows had needed the room."""
        pin = str(self.world.node.agent.pin("flows"))
        keys = subprocess.run(["bpftool", "map", "dump", "pinned", pin, "-j"], capture_output=True, check=True)

        for entry in json.loads(keys.stdout):
            subprocess.run(["bpftool", "map", "delete", "pinned", pin, "key", "hex", *entry["key"]], check=False)

    def age(self, own_port: int, client: float, endpoint: float) -> None:
        """Change when the table has last seen the two sides of a connection: so many seconds ago."""
        with Pinned(self.world.node.agent.directory) as maps:
            flows, flow, key = maps.map("flows"), maps.btf.struct("flow"), maps.btf.struct("flow_key")
            for one, value in flows.items():
                ends = key.unpack(one)
                if own_port in (ends["source_port"], ends["destination_port"]):
                    fields = flow.unpack(value)
                    ago = endpoint if fields["reply"] else client
                    fields["last_seen"] = time.monotonic_ns() - int(ago * 1e9)
                    flows.update(one, flow.pack(**fields))

    def seconds_left(self, own_port: int, family: int) -> int:
        """The timeout of conntrack's entry."""
        (line,) = self.conntrack(own_port, family)
        return int(line.split()[2])


@pytest.fixture(scope="module")
def moving() -> Iterator[Moving]:
    with Lab() as lab:
        world = build_fast_world(lab)
        for pod in (world.near, world.far):
            End(pod.namespace).listen(PORT)
        moving = Moving(world, world.near)
        moving.serve_at(world.near)
        yield moving


@pytest.mark.parametrize("forgotten", [False, True], ids=["in the cache", "not in the cache"])
@pytest.mark.parametrize("by", ["client", "endpoint"])
def test_ports_of_a_reset_connection_are_used_again(moving: Moving, by: str, forgotten: bool, family: int) -> None:
    """The next connection from the same port gets the current endpoint, whatever state conntrack has for the
    old one (finding T10).
    """
    client, server, own_port = moving.begin(family)
    moving.fast(client, server)
    if forgotten:
        # Only the flow table knows a young flow.
        wait_until(lambda: moving.conntrack(own_port, family), "the kernel has the flow")
        moving.forget()
    (client if by == "client" else server).reset()
    with pytest.raises(ConnectionResetError):
        (server if by == "client" else client).receive(1)
    (server if by == "client" else client).reset()
    moving.serve_at(moving.other())
    client, server, _ = moving.begin(family, own_port)
    exchange_data(client, server, 10)
    client.reset()


def test_a_connection_whose_client_has_vanished_leaves_conntrack_soon(moving: Moving, family: int) -> None:
    """conntrack has not seen the numbers of all packets, and would keep the connection for a day. An idle one stays."""
    client, server, own_port = moving.begin(family)
    idle, idle_server, idle_port = moving.begin(family, name="idle")
    for ends in ((client, server), (idle, idle_server)):
        moving.fast(*ends)
    wait_until(lambda: moving.conntrack(own_port, family), "the kernel has the flow")
    wait_until(lambda: moving.conntrack(idle_port, family), "the kernel has the idle flow")
    machine = moving.world.client.namespace
    machine.run("nft", "add table inet cut; add chain inet cut in { type filter hook input priority 0; policy drop; }")
    try:
        server.send(bytes(20_000))
        # The endpoint sends the data again and again. Each time, conntrack extends the timeout.
        before = moving.world.count("stack_not_confirmed")
        wait_until(lambda: moving.world.count("stack_not_confirmed") > before + 1, "retransmissions pass netfilter")
        assert moving.seconds_left(own_port, family) > 3600

        def shortened() -> bool:
            # Three minutes later.
            for port in (own_port, idle_port):
                moving.age(port, client=900.0, endpoint=200.0)
            return moving.seconds_left(own_port, family) <= 300

        wait_until(shortened, "conntrack's entry expires soon")
        assert moving.seconds_left(idle_port, family) > 3600
    finally:
        machine.run("nft", "delete table inet cut")
    # The client was only cut off: the connection goes on.
    assert len(client.receive(20_000)) == 20_000
    exchange_data(client, server, 3)
    wait_until(lambda: moving.seconds_left(own_port, family) > 3600, "conntrack keeps it")
    for end in (client, idle):
        end.reset()


def test_ports_of_a_connection_that_was_reset_after_data_are_used_again(moving: Moving, family: int) -> None:
    """The client has not acknowledged the data, so the flow table cannot be sure that the RST is the endpoint's."""
    client, server, own_port = moving.begin_young(family)
    client.option(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
    server.send(b"the end")
    server.reset()
    with pytest.raises(ConnectionResetError):
        client.receive(100)
    client.reset()
    # Longer than a young flow waits for its promotion.
    time.sleep(3)
    assert moving.conntrack(own_port, family) == []
    moving.serve_at(moving.other())
    client, server, _ = moving.begin(family, own_port)
    exchange_data(client, server, 10)
    client.reset()


def test_ports_of_a_reset_connection_to_a_removed_address_are_used_again(moving: Moving, family: int) -> None:
    """No address leads to the old endpoint. conntrack alone would lead there for ten seconds."""
    client, server, own_port = moving.begin(family)
    moving.fast(client, server)
    wait_until(lambda: moving.conntrack(own_port, family), "the kernel has the flow")
    moving.fast(client, server)
    client.reset()
    with pytest.raises(ConnectionResetError):
        server.receive(1)
    server.reset()
    # Within two passes of the agent.
    wait_until(lambda: " CLOSE " in moving.conntrack(own_port, family)[0], "its entry is closed", deadline=8)
    moving.world.node.agent.wait_synced(moving.world.lab.write("moving.yaml", []))
    try:
        client = End(moving.world.client.namespace)
        with pytest.raises(OSError):
            client.connect(ADDRESS.of(family), PORT, own_port)
    finally:
        moving.serve_at(moving.at)


def test_ports_of_a_connection_whose_reset_overtook_a_packet_are_used_again(moving: Moving, family: int) -> None:
    """For conntrack the connection continues for a day: each SYN of the port would be sent to the old endpoint."""
    # Without a permit the flow begins in netfilter, so conntrack knows its sequence numbers.
    time.sleep(1.1)
    client, server, own_port = moving.begin(family)
    assert moving.conntrack(own_port, family)
    moving.fast(client, server)
    # Stopped, so that it closes nothing before the test has looked.
    moving.world.node.agent.signal(signal.SIGSTOP)
    try:
        with silent_after_reset(moving.at):
            client.reset_overtaking()
            with pytest.raises(ConnectionResetError):
                server.receive(1)
            server.reset()
        (line,) = moving.conntrack(own_port, family)
        assert int(line.split()[2]) > 1000, "the late packet has not passed conntrack after the RST"
    finally:
        moving.world.node.agent.signal(signal.SIGCONT)
    wait_until(lambda: is_closed(moving.conntrack(own_port, family)), "its entry is closed", deadline=12)
    moving.serve_at(moving.other())
    client, server, _ = moving.begin(family, own_port)
    exchange_data(client, server, 10)
    client.reset()


def test_an_idle_connection_stays_in_conntrack_as_long_as_without_the_fast_path(moving: Moving, family: int) -> None:
    """conntrack does not see that data is acknowledged, and would forget the connection after five idle minutes."""
    # Without a permit the flow begins in netfilter, so conntrack knows its sequence numbers.
    time.sleep(1.1)
    client, server, own_port = moving.begin(family)
    assert moving.conntrack(own_port, family)
    exchange_data(client, server, 1)
    for _ in range(3):
        # Then netfilter sees the request and the answer, but not the acknowledgement of the answer.
        time.sleep(1.2)
        exchange_data(client, server, 1)
    time.sleep(0.5)
    (line,) = moving.conntrack(own_port, family)
    assert int(line.split()[2]) > 80_000
    client.reset()


@contextmanager
def silent_after_reset(pod: Pod) -> Iterator[None]:
    """The pod does not answer the late packet: its other CPU still handles the RST, and drops the packet with it."""
    table = "table inet silent { chain out { type filter hook output priority 0; tcp flags & rst == rst drop; }; }"
    pod.namespace.run("nft", table)
    try:
        yield
    finally:
        pod.namespace.run("nft", "delete table inet silent")


def is_closed(entries: list[str]) -> bool:
    return all(" CLOSE " in line and int(line.split()[2]) <= 10 for line in entries)


def entry(moving: Moving, own_port: int, family: int, *more: str) -> None:
    """conntrack's entry for this port of the client, translated or not."""
    tuples = ["-s", moving.world.client.address.of(family), "-d", ADDRESS.of(family)]
    tuples += ["--sport", str(own_port), "--dport", str(PORT)]
    moving.world.node.namespace.run("conntrack", "-I", "-p", "tcp", *tuples, "-t", "120", *more)


def without_permit(moving: Moving, family: int) -> None:
    """The pair has no permit: the next connection passes netfilter."""
    time.sleep(1.1)
    before = moving.world.count("slow_no_permit")
    client, server, _ = moving.begin(family)
    assert moving.world.count("slow_no_permit") > before
    client.reset()
    with pytest.raises(ConnectionResetError):
        server.receive(1)
    server.reset()
    time.sleep(1.1)


def test_an_entry_that_was_picked_up_midstream(moving: Moving, family: int) -> None:
    """The kernel created it for a packet that came after the end of a connection: it is not translated."""
    own_port = next(_own_ports)
    without_permit(moving, family)
    reply = ["-r", ADDRESS.of(family), "-q", moving.world.client.address.of(family)]
    reply += ["--reply-port-src", str(PORT), "--reply-port-dst", str(own_port)]
    entry(moving, own_port, family, *reply, "--state", "ESTABLISHED")
    client, server, _ = moving.begin(family, own_port)
    exchange_data(client, server, 10)
    client.reset()


def test_a_packet_of_an_unknown_connection(moving: Moving, family: int) -> None:
    """The packet is answered with a reset, and the kernel keeps no entry that would affect the next connection."""
    own_port = next(_own_ports)
    client = End(moving.world.client.namespace)
    client.resume(ADDRESS.of(family), PORT, own_port)
    with pytest.raises(ConnectionResetError):
        client.send(b"still there?")
        client.receive(1)
    assert moving.conntrack(own_port, family) == []


def test_a_reset_after_more_bytes_than_the_sequence_space(moving: Moving, family: int) -> None:
    """The kernel has seen only the handshake: for it the sequence number is far too low."""
    client, server, _ = moving.begin(family)
    moving.fast(client, server)
    many = 5 << 29
    server.skip_bytes(many, 0)
    client.skip_bytes(0, many)
    server.resume_sending()
    client.resume_sending()
    exchange_data(client, server, 3)
    server.reset()
    with pytest.raises(ConnectionResetError):
        client.receive(1)
