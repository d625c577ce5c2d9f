# SPDX-License-Identifier: Apache-2.0
"""Packets of fast-path flows that only the kernel can handle: last hop of a TTL, options, extension headers, ICMP
errors.

A young flow is promoted for such a packet. No packet leaves untranslated.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from scapy.layers.inet import ICMP, IP, UDP
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6PacketTooBig,
    ICMPv6ParamProblem,
    ICMPv6TimeExceeded,
    IPv6,
    IPv6ExtHdrFragment,
)
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.manifests import Port, service, slices
from pyebpf_proxy.lab.namespace import Namespace
from tests.netns.tcp_ends import End
from tests.support.conversation import PORT
from tests.support.fast_lab import NEAR, FastWorld
from tests.support.lab_tools import Capture, wait_until
from tests.support.new_flows import entries

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

# include/uapi/linux/in6.h
_IPV6_DSTOPTS = 59
TTL = {4: (socket.IPPROTO_IP, socket.IP_TTL), 6: (socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS)}
DEFAULT_TTL = {4: "net.ipv4.ip_default_ttl", 6: "net.ipv6.conf.eth0.hop_limit"}
#: Padding that routers ignore: no-operations, an extension header with destination options.
OPTIONS = {
    4: (socket.IPPROTO_IP, socket.IP_OPTIONS, bytes([1, 1, 1, 0])),
    6: (socket.IPPROTO_IPV6, _IPV6_DSTOPTS, bytes([0, 0, 1, 4, 0, 0, 0, 0])),
}
AGES = ("young", "of the kernel's")
OWN_PORT, OWN = 7402, cluster_ip(33)
_own_ports = itertools.count(32_000, -1)
_sockets: dict[int, socket.socket] = {}


# ---- one flow ------------------------------------------------------------------------------------------------


@dataclass
class Flow:
    """A client's socket with a flow to a Service. The endpoint answers each request with as many bytes."""

    namespace: Namespace
    protocol: str
    family: int
    own_port: int

    def ask(self, seconds: float = 5.0) -> bool:
        """Whether a request is answered. TCP retransmits by itself."""
        return self.namespace.call(_ask, self.own_port, seconds)

    def send(self) -> None:
        """A request without waiting for the answer."""
        self.namespace.call(_send, self.own_port)

    def option(self, level: int, name: int, value: int | bytes) -> None:
        """Set an option of the socket, for packets that are sent from now on."""
        self.namespace.call(_option, self.own_port, level, name, value)

    def end(self) -> None:
        self.namespace.call(_end, self.own_port)


def _open(address: str, protocol: str, own_port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = _sockets[own_port] = socket.socket(family, socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("", own_port))
    sock.settimeout(20)
    sock.connect((address, PORT))


def _ask(own_port: int, seconds: float) -> bool:
    sock = _sockets[own_port]
    # Earlier requests may still be answered.
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        while sock.recv(65536):
            pass
    sock.settimeout(seconds)
    with contextlib.suppress(OSError):
        sock.send(b"question".ljust(64, b"."))
        return bool(sock.recv(65536).startswith(b"question"))
    return False


def _send(own_port: int) -> None:
    with contextlib.suppress(OSError):
        _sockets[own_port].send(b"question".ljust(64, b"."))


def _option(own_port: int, level: int, name: int, value: int | bytes) -> None:
    _sockets[own_port].setsockopt(level, name, value)


def _end(own_port: int) -> None:
    _sockets.pop(own_port).close()


@contextlib.contextmanager
def flow_of(world: FastWorld, protocol: str, family: int, age: str) -> Iterator[Flow]:
    """From the client's pod to the one on the same node, of this age."""
    namespace, made = world.client.namespace, []

    def young() -> Flow | None:
        before = world.count("new_flow_fast")
        flow = Flow(namespace, protocol, family, next(_own_ports))
        namespace.call(_open, NEAR.of(family), protocol, flow.own_port)
        made.append(flow)
        assert flow.ask()
        return flow if world.count("new_flow_fast") > before else None

    try:
        flow: Flow = wait_until(young, "a flow that is young")
        if age != "young":

            def promoted() -> bool:
                # Datagrams are promoted while there are many.
                assert flow.ask()
                return not is_young(world, flow)

            wait_until(promoted, "it is promoted")
            assert flow.ask()
        yield flow
    finally:
        for each in made:
            each.end()


def is_young(world: FastWorld, flow: Flow) -> bool:
    client = world.client.address.of(flow.family), flow.protocol, flow.own_port
    return any(e["young"] and e["client"] == client for e in entries(world))


# ---- what must not be seen -----------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_stray(world: FastWorld, family: int) -> Iterator[None]:
    """Check that no pod and router gets a packet to the Service's address, and the client none from the endpoint's
    address.
    """
    ip = "ip" if family == 4 else "ip6"
    inside, endpoint = f"{ip} daddr {NEAR.of(family)}", f"{ip} saddr {world.near.address.of(family)}"
    places = {
        world.near.namespace: inside,
        world.far.namespace: inside,
        world.lab.core: inside,
        world.client.namespace: f"meta l4proto {{ tcp, udp }} {endpoint}",
    }
    for namespace, rule in places.items():
        lines = [
            "table inet strays {",
            "counter every { }",
            "chain c { type filter hook prerouting priority -400;",
            f"{rule} counter name every",
            "}",
            "}",
        ]
        namespace.run("nft", "-f", "-", stdin="\n".join(lines))
    try:
        yield
        for namespace in places:
            listed = json.loads(namespace.run("nft", "-j", "list", "counters", "table", "inet", "strays"))
            found = [each["counter"]["packets"] for each in listed["nftables"] if "counter" in each]
            assert found == [0], f"{namespace.name} has received untranslated packets"
    finally:
        for namespace in places:
            namespace.run("nft", "delete table inet strays")


def is_expired(frame: bytes, source: tuple[str, int], destination: tuple[str, int]) -> bool:
    """ICMP time exceeded about a packet between these."""
    packet = Ether(frame)
    if ICMP in packet and packet[ICMP].type == 11:
        quoted = IP(bytes(packet[ICMP].payload))
    elif ICMPv6TimeExceeded in packet:
        quoted = IPv6(bytes(packet[ICMPv6TimeExceeded].payload))
    else:
        return False
    return ((quoted.src, quoted.sport), (quoted.dst, quoted.dport)) == (source, destination)


# ---- the last hop --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("age", AGES)
def test_a_request_at_its_last_hop(fast_world: FastWorld, family: int, protocol: str, age: str) -> None:
    """The client gets the kernel's ICMP error, about the address that it asked."""
    with nothing_stray(fast_world, family), flow_of(fast_world, protocol, family, age) as flow:
        client = fast_world.client.address.of(family), flow.own_port
        expired = partial(is_expired, source=client, destination=(NEAR.of(family), PORT))
        seen = Capture(flow.namespace, "eth0", expired, 20.0)
        before = fast_world.count("stack_hops")
        flow.option(*TTL[family], 1)

        def sent() -> bool:
            flow.send()
            return seen.done()

        wait_until(sent, "the ICMP error comes")
        assert seen.frame() is not None, "no error names the Service's address"
        assert age != "young" or fast_world.count("stack_hops") > before
        flow.option(*TTL[family], 64)
        wait_until(flow.ask, "the flow continues")


@pytest.mark.parametrize("age", AGES)
def test_an_answer_at_its_last_hop(fast_world: FastWorld, family: int, protocol: str, age: str) -> None:
    """The endpoint gets the error, about the client. The client gets no packet from the endpoint's own address."""
    near = fast_world.near.namespace
    usual = near.run("sysctl", "-n", DEFAULT_TTL[family]).strip()
    with nothing_stray(fast_world, family), flow_of(fast_world, protocol, family, age) as flow:
        endpoint = fast_world.near.address.of(family), PORT
        client = fast_world.client.address.of(family), flow.own_port
        seen = Capture(near, "eth0", partial(is_expired, source=endpoint, destination=client), 20.0)
        before = fast_world.count("stack_hops")
        near.sysctl({DEFAULT_TTL[family]: 1})
        try:
            assert not flow.ask(0.2)

            def sent() -> bool:
                flow.send()
                return seen.done()

            wait_until(sent, "the ICMP error comes")
        finally:
            near.sysctl({DEFAULT_TTL[family]: usual})
        assert seen.frame() is not None, "no error names the client"
        assert age != "young" or fast_world.count("stack_hops") > before
        wait_until(flow.ask, "the flow continues")


# ---- errors of others --------------------------------------------------------------------------------------------

ERRORS = {
    (4, "unreachable"): ICMP(type=3, code=3),
    (4, "time exceeded"): ICMP(type=11),
    (4, "parameter problem"): ICMP(type=12),
    (6, "unreachable"): ICMPv6DestUnreach(code=4),
    (6, "packet too big"): ICMPv6PacketTooBig(mtu=1400),
    (6, "packet too big, a fragment"): ICMPv6PacketTooBig(mtu=1400),
    (6, "time exceeded"): ICMPv6TimeExceeded(),
    (6, "parameter problem"): ICMPv6ParamProblem(),
}


def _send_raw(packet: bytes, destination: str) -> None:
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    with socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        raw.sendto(packet, (destination, 0))


def _names(frame: bytes, port: int, service: str) -> bool:
    """An ICMP error about a datagram from this port to the Service."""
    packet = Ether(frame)
    if IPv6 in packet:
        errors = (ICMPv6DestUnreach, ICMPv6PacketTooBig, ICMPv6TimeExceeded, ICMPv6ParamProblem)
        quoted = next((IPv6(bytes(packet[each].payload)) for each in errors if each in packet), None)
    else:
        quoted = IP(bytes(packet[ICMP].payload)) if ICMP in packet else None
    return quoted is not None and UDP in quoted and (quoted.dst, quoted[UDP].sport) == (service, port)


@pytest.mark.parametrize(("version", "name"), ERRORS, ids=[f"IPv{version} {name}" for version, name in ERRORS])
def test_an_error_about_a_young_flow(fast_world: FastWorld, version: int, name: str) -> None:
    """The first one has the flow promoted. The kernel translates the next one for the client."""
    client, endpoint = fast_world.client.address.of(version), fast_world.near.address.of(version)
    with nothing_stray(fast_world, version), flow_of(fast_world, "udp", version, "young") as flow:
        layer = IPv6 if version == 6 else IP
        quoted: Packet = layer(src=client, dst=endpoint)
        if name.endswith("a fragment"):
            quoted = quoted / IPv6ExtHdrFragment(id=7, m=1, offset=0)
        quoted = quoted / UDP(sport=flow.own_port, dport=PORT) / b"question"
        error = bytes(layer(src=endpoint, dst=client) / ERRORS[version, name] / quoted)
        named = partial(_names, port=flow.own_port, service=NEAR.of(version))
        seen = Capture(flow.namespace, "eth0", named, 20.0)

        def sent() -> bool:
            fast_world.near.namespace.call(_send_raw, error, client)
            return seen.done()

        wait_until(sent, "the error comes")
        assert seen.frame() is not None, "no error names the Service's address"
        wait_until(flow.ask, "the flow continues")


# ---- options -------------------------------------------------------------------------------------------------


def test_a_flow_that_begins_with_options(fast_world: FastWorld, family: int, protocol: str) -> None:
    """Its pair has a permit, but the flow takes the slow path."""
    namespace = fast_world.client.namespace
    with nothing_stray(fast_world, family), flow_of(fast_world, protocol, family, "young"):
        before, fast = fast_world.count("stack_options"), fast_world.count("new_flow_fast")
        flow = Flow(namespace, protocol, family, next(_own_ports))
        namespace.call(_open_with_options, NEAR.of(family), protocol, flow.own_port, OPTIONS[family])
        for _ in range(10):
            assert flow.ask()
        flow.end()
        assert fast_world.count("stack_options") > before
        assert fast_world.count("new_flow_fast") == fast


def _open_with_options(address: str, protocol: str, own_port: int, options: tuple[int, int, bytes]) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = _sockets[own_port] = socket.socket(family, socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM)
    sock.bind(("", own_port))
    sock.setsockopt(*options)
    sock.settimeout(20)
    sock.connect((address, PORT))


@pytest.mark.parametrize("age", AGES)
def test_requests_with_options(fast_world: FastWorld, family: int, protocol: str, age: str) -> None:
    with nothing_stray(fast_world, family), flow_of(fast_world, protocol, family, age) as flow:
        before = fast_world.count("stack_options")
        flow.option(*OPTIONS[family])
        for _ in range(20):
            assert flow.ask()
        wait_until(lambda: flow.ask() and fast_world.count("stack_options") > before, "they come with options")
        wait_until(lambda: flow.ask() and not is_young(fast_world, flow), "it is the kernel's")


@pytest.fixture(scope="module")
def own(fast_world: FastWorld) -> FastWorld:
    """With a Service whose endpoint is a socket of the test."""
    ports, near = [Port("own", OWN_PORT, OWN_PORT)], fast_world.near
    End(near.namespace).listen(OWN_PORT)
    objects = [service("own", ports, OWN), *slices("own", ports, [(near.address, near.node.name)])]
    fast_world.node.agent.wait_synced(fast_world.lab.write("own.yaml", objects))
    return fast_world


@pytest.mark.parametrize("age", AGES)
def test_answers_with_options(own: FastWorld, family: int, age: str) -> None:
    """Replies of a young flow wait until the flow is promoted."""
    client, server = End(own.client.namespace), End(own.near.namespace)

    def young() -> bool:
        before = own.count("new_flow_fast")
        client.connect(OWN.of(family), OWN_PORT, next(_own_ports))
        server.accept(OWN_PORT)
        client.send(b"question")
        assert server.receive(8) == b"question"
        if own.count("new_flow_fast") > before:
            return True
        client.reset()
        return False

    with nothing_stray(own, family):
        wait_until(young, "a flow that is young")
        if age != "young":
            before = own.count("flow_promoted")
            wait_until(lambda: own.count("flow_promoted") > before, "it is promoted")
        before = own.count("stack_options")
        server.option(*OPTIONS[family])
        for number in range(20):
            server.send(b"answer %02d" % number)
            assert client.receive(9) == b"answer %02d" % number
            client.send(b"more")
            assert server.receive(4) == b"more"
        wait_until(lambda: own.count("stack_options") > before or age != "young", "they come with options")
        client.reset()
