# SPDX-License-Identifier: Apache-2.0
"""Fragments, ICMP errors, path MTU, tun devices, VLAN tags, SCTP."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from scapy.layers.inet import IP, UDP, fragment
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment, fragment6
from scapy.layers.l2 import Dot1Q, Ether
from scapy.layers.sctp import SCTP, SCTPChunkInit, SCTPChunkInitAck

from pyebpf_proxy.lab.addresses import CLIENT, POD_CIDR, SERVICE_CIDR, VIP_CIDR
from pyebpf_proxy.lab.client import ANSWERED, REFUSED, Outcome, ask
from pyebpf_proxy.lab.cluster import Lab, Pod
from pyebpf_proxy.lab.manifests import Port
from pyebpf_proxy.lab.namespace import LabError, Namespace
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import Capture, counted_between, has_program, reasons, wait_until

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

NEAR = Kind("near", 10)  # web-1 on node1
FAR = Kind("far", 11)  # web-2 on node2
LOCAL = Kind("local", 12, externalTrafficPolicy="Local")  # web-1, sources kept
CLOSED = Kind("closed", 13)  # web-1, closed ports
CLOSED.ports = [Port("http", 80, 9998, "TCP", 30013), Port("dns", 53, 9999, "UDP", 31013)]
LATE = Kind("late", 14)  # web-1, a port on which one test answers
LATE.ports = [Port("late", 53, 5454, "UDP", 31014)]
STREAM = Kind("stream", 15)
STREAM.ports = [Port("sctp", 36412, 3868, "SCTP", 31015)]


@pytest.fixture(scope="module")
def frames() -> Iterator[Lab]:
    with Lab() as lab:
        first, second = lab.nodes
        web1, web2 = lab.add_pod("web-1", first), lab.add_pod("web-2", second)
        lab.add_pod("toolbox", first)
        for kind in (NEAR, LOCAL, CLOSED, LATE, STREAM):
            kind.endpoints = (web1,)
        FAR.endpoints = (web2,)
        write_nodes(lab)
        write_services(lab, NEAR, FAR, LOCAL, CLOSED, LATE, STREAM)
        lab.start_agents()
        yield lab


def askers(lab: Lab, kind: Kind, family: int) -> list[tuple[Namespace, str]]:
    """A pod with the ClusterIP, the outside client with the load balancer VIP."""
    entrance = lab.nodes[0]
    return [
        (lab.pods["toolbox"].namespace, kind.target("ClusterIP", entrance).address.of(family)),
        (lab.client, kind.target("LoadBalancer", entrance).address.of(family)),
    ]


# ---- fragments ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [NEAR, FAR, LOCAL], ids=lambda kind: kind.name)
def test_fragmented_datagrams_in_both_directions(frames: Lab, kind: Kind, family: int) -> None:
    for namespace, address in askers(frames, kind, family):
        outcome = namespace.call(ask, address, 53, "udp", size=7_000, reply_size=11_000, fragment=True)
        assert outcome.answer is not None, outcome
        assert (outcome.answer.received, outcome.size) == (7_000, 11_000)


@pytest.mark.parametrize("order", ["as sent", "last first"])
def test_fragments_in_any_order(frames: Lab, family: int, order: str) -> None:
    """Only the first fragment has ports; the others may arrive earlier."""
    address = LOCAL.target("LoadBalancer", frames.nodes[0]).address.of(family)
    answer = frames.client.call(_send_fragments, family, CLIENT.of(family), address, 53, order == "last first")
    assert b'"received": 4000' in answer, answer


def _send_fragments(family: int, source: str, address: str, port: int, backwards: bool) -> bytes:
    inet = socket.AF_INET if family == 4 else socket.AF_INET6
    with socket.socket(inet, socket.SOCK_DGRAM) as udp, socket.socket(inet, socket.SOCK_RAW, 255) as raw:
        udp.bind((source, 0))
        udp.settimeout(5)
        datagram = UDP(sport=udp.getsockname()[1], dport=port) / (b"who".ljust(4000, b"."))
        if family == 4:
            packets = fragment(IP(src=source, dst=address, id=os.getpid() & 0xFFFF) / datagram, fragsize=1400)
        else:
            packets = fragment6(IPv6(src=source, dst=address) / IPv6ExtHdrFragment(id=os.getpid()) / datagram, 1400)
        assert len(packets) >= 3
        for packet in reversed(packets) if backwards else packets:
            raw.sendto(bytes(packet), (address, 0))
        try:
            return udp.recv(65536)
        except TimeoutError:
            return b"no answer"


# ---- ICMP errors ----------------------------------------------------------------


def test_port_unreachable_of_an_endpoint_reaches_the_client(frames: Lab, family: int, protocol: str) -> None:
    for namespace, address in askers(frames, CLOSED, family):
        port = {"tcp": 80, "udp": 53}[protocol]
        assert namespace.call(ask, address, port, protocol).kind == REFUSED
    # Not the programs' refusal: these services have an endpoint.
    assert reasons(frames.nodes[0])["reject_no_endpoints"] == 0


def test_port_unreachable_of_a_client_reaches_the_endpoint(frames: Lab, family: int) -> None:
    """The client has ended when the answer comes; the endpoint's connected socket must get the error."""
    pod = frames.pods["web-1"]
    for namespace, address in askers(frames, LATE, family):
        server = pod.namespace.start(_answer_late, family)
        wait_until(lambda: _listens(pod, 5454), "the late server listens")
        namespace.call(_send_and_go, address, 53)
        assert server.result() == errno.ECONNREFUSED


def _listens(pod: Pod, port: int) -> bool:
    return f":{port} " in pod.namespace.run("ss", "-Huln")


def _answer_late(family: int) -> int:
    with socket.socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.bind(("", 5454))
        sock.settimeout(10)
        _, peer = sock.recvfrom(100)
        sock.connect(peer)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            try:
                sock.send(b"late")
                sock.settimeout(0.05)
                sock.recv(10)
            except TimeoutError:
                continue
            except OSError as error:
                return error.errno or 0
    return 0


def _send_and_go(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"hello", (address, port))


@pytest.fixture
def narrow_client_link(frames: Lab) -> Iterator[None]:
    """An MTU of 1300 bytes from the core to the client, which the client does not know."""
    frames.core.ip("link set client0 mtu 1300")
    yield
    frames.core.ip("link set client0 mtu 1500")
    _forget_paths(frames)


def _forget_paths(lab: Lab) -> None:
    for namespace in (lab.client, *(pod.namespace for pod in lab.pods.values())):
        namespace.run("ip", "-4", "route", "flush", "cache", check=False)
        namespace.run("ip", "-6", "route", "flush", "cache", check=False)


@pytest.mark.parametrize("kind", [NEAR, FAR, LOCAL], ids=lambda kind: kind.name)
def test_path_mtu_towards_the_client(frames: Lab, narrow_client_link: None, kind: Kind, family: int) -> None:
    """The core's "too big" goes to the VIP; the endpoint must get it, about its own flow's addresses."""
    address = kind.target("LoadBalancer", frames.nodes[0]).address.of(family)
    outcome: Outcome = frames.client.call(ask, address, 80, reply_size=300_000)
    assert outcome.answer is not None, outcome
    assert outcome.size == 300_000
    pod = kind.endpoints[0]
    route = pod.namespace.run("ip", "route", "get", outcome.answer.peer[0])
    assert "mtu 1300" in route, route
    _forget_paths(frames)


def test_path_mtu_towards_the_endpoint(frames: Lab, family: int) -> None:
    """The node's own "too big" must name the VIP that the client knows, not the endpoint."""
    node, pod = frames.nodes[0], frames.pods["web-1"]
    node.namespace.ip(f"link set {pod.device} mtu 1300")
    devices = ("bpftool", "-j", "map", "dump", "pinned", str(node.agent.pin("devices")))
    wait_until(lambda: '"mtu":1300' in node.namespace.run(*devices).replace(" ", ""), "the agent knows the MTU")
    try:
        for kind in (NEAR, LOCAL):
            address = kind.target("LoadBalancer", node).address.of(family)
            outcome = frames.client.call(ask, address, 80, size=60_000)
            assert outcome.answer is not None, outcome
            route = frames.client.run("ip", "route", "get", address)
            assert "mtu 1300" in route, route
    finally:
        node.namespace.ip(f"link set {pod.device} mtu 1500")
        _forget_paths(frames)


# ---- devices without an Ethernet header -------------------------------------------

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
ROAMER = {4: ("10.9.0.2", "10.9.0.1"), 6: ("fd00:9::2", "fd00:9::1")}


def _open_tun() -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", b"tun0", IFF_TUN | IFF_NO_PI))
    return fd


def _bridge_tuns(here: str, there: str) -> None:
    """The tunnel: copy packets between a tun device in one namespace and one in another."""
    from pyebpf_proxy.lab.namespace import set_network_namespace

    fds = []
    for path in (here, there):
        set_network_namespace(path)
        fds.append(_open_tun())
    while True:
        for fd in select.select(fds, [], [])[0]:
            # The other device may not be up yet, as if the cable were loose.
            with contextlib.suppress(OSError):
                os.write(fds[1] if fd == fds[0] else fds[0], os.read(fd, 65536))


@pytest.fixture(scope="module")
def roamer(frames: Lab) -> Iterator[Namespace]:
    """A namespace behind node1's tun0; the device appears while the agent runs."""
    node = frames.nodes[0].namespace
    made = frames._namespace("roamer")
    tunnel = node.start(_bridge_tuns, node.path, made.path)
    for namespace in (node, made):
        wait_until(lambda namespace=namespace: "tun0" in namespace.run("ip", "-br", "link"), "tun0 is there")
    for namespace, mine in ((made, 0), (node, 1)):
        namespace.ip(
            f"addr add {ROAMER[4][mine]}/24 dev tun0",
            f"addr add {ROAMER[6][mine]}/64 dev tun0 nodad",
            "link set tun0 up",
        )
    for cidrs in (SERVICE_CIDR, VIP_CIDR, POD_CIDR):
        for cidr in cidrs:
            made.ip(f"route add {cidr} dev tun0")
    wait_until(lambda: node.call(has_program, "tun0"), "the agent's program is on tun0")
    yield made
    tunnel.stop()


@pytest.mark.parametrize("kind", [NEAR, LOCAL], ids=lambda kind: kind.name)
def test_an_ingress_device_without_ethernet_headers(
    frames: Lab, roamer: Namespace, kind: Kind, family: int, protocol: str
) -> None:
    node, pod = frames.nodes[0], kind.endpoints[0]
    for name in ("ClusterIP", "LoadBalancer"):
        target = kind.target(name, node)  # type: ignore[arg-type]
        outcome = roamer.call(ask, target.address.of(family), target.ports[protocol], protocol)
        assert outcome.answer is not None, outcome
        kept = kind is LOCAL and name == "LoadBalancer"
        source = ROAMER[family][0] if kept else node.source_towards(pod).of(family)
        assert outcome.answer.peer[0] == source


def test_large_packets_through_a_tun_device(frames: Lab, roamer: Namespace, family: int) -> None:
    target = NEAR.target("LoadBalancer", frames.nodes[0])
    outcome = roamer.call(ask, target.address.of(family), 80, size=20_000, reply_size=500_000)
    assert outcome.answer is not None, outcome
    outcome = roamer.call(ask, target.address.of(family), 53, "udp", size=4_000, reply_size=5_000, fragment=True)
    assert outcome.answer is not None, outcome
    assert (outcome.answer.received, outcome.size) == (4_000, 5_000)


# ---- VLAN tags --------------------------------------------------------------------


def _layer3(family: int, source: str, target: str) -> Any:
    return IP(src=source, dst=target) if family == 4 else IPv6(src=source, dst=target)


def _send_frame(device: str, frame: bytes) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((device, 0))
        sock.send(frame)


def _mac(namespace: Namespace, device: str) -> str:
    return namespace.run("ip", "-br", "link", "show", "dev", device).split()[2]


def test_priority_tagged_frames(frames: Lab, family: int) -> None:
    """802.1Q with VLAN 0, which every interface accepts as its own."""
    node, toolbox, pod = frames.nodes[0], frames.pods["toolbox"], frames.pods["web-1"]
    target = NEAR.target("ClusterIP", node).address.of(family)
    marker = f"tagged {family} {os.getpid()}".encode()
    packet = _layer3(family, toolbox.address.of(family), target) / UDP(sport=40000 + family, dport=53) / marker
    macs = {"src": _mac(toolbox.namespace, "eth0"), "dst": _mac(node.namespace, toolbox.device)}
    before = reasons(node)
    capture = Capture(pod.namespace, "eth0", lambda frame: marker in frame)
    toolbox.namespace.call(_send_frame, "eth0", bytes(Ether(**macs) / Dot1Q(vlan=0, prio=5) / packet))
    frame = capture.frame()
    assert frame is not None, counted_between(before, reasons(node))
    seen = Ether(frame)
    assert seen.payload.dst == pod.address.of(family)
    assert seen[UDP].dport == 5353


def test_vlan_device(frames: Lab, family: int) -> None:
    """A VLAN device between a pod and its node."""
    node, toolbox = frames.nodes[0], frames.pods["toolbox"]
    try:
        node.namespace.ip(f"link add link {toolbox.device} name vlan7 type vlan id 7")
    except LabError as error:
        if "Unknown device type" not in str(error):
            raise
        pytest.skip("this kernel has no VLAN devices (CONFIG_VLAN_8021Q)")
    try:
        toolbox.namespace.ip("link add link eth0 name vlan7 type vlan id 7")
        for namespace, mine in ((toolbox.namespace, 0), (node.namespace, 1)):
            address = ROAMER[family][mine].replace("10.9.0", "10.9.7").replace("fd00:9", "fd00:97")
            namespace.ip(f"addr add {address}/{24 if family == 4 else 64} dev vlan7", "link set vlan7 up")
        target = LOCAL.target("LoadBalancer", node).address.of(family)
        gateway = ROAMER[family][1].replace("10.9.0", "10.9.7").replace("fd00:9", "fd00:97")
        toolbox.namespace.ip(f"route add {target} via {gateway} dev vlan7")
        wait_until(lambda: node.namespace.call(has_program, "vlan7"), "the agent's program is on vlan7")
        assert toolbox.namespace.call(ask, target, 80).kind == ANSWERED
    finally:
        node.namespace.ip("link del vlan7")


# ---- SCTP -------------------------------------------------------------------------


def _send_raw(family: int, source: str, target: str, payload: bytes) -> None:
    inet = socket.AF_INET if family == 4 else socket.AF_INET6
    with socket.socket(inet, socket.SOCK_RAW, socket.IPPROTO_SCTP) as sock:
        sock.bind((source, 0))
        sock.sendto(payload, (target, 0))


def _sctp(frame: bytes) -> Any:
    seen = Ether(frame)
    return seen if seen.haslayer(SCTP) else None


@pytest.mark.parametrize("name", ["ClusterIP", "LoadBalancer", "NodePort"])
def test_sctp(frames: Lab, name: Any, family: int) -> None:
    """This kernel may have no SCTP sockets: the test builds an INIT and its answer."""
    node, pod = frames.nodes[0], frames.pods["web-1"]
    from_pod = name == "ClusterIP"
    namespace = frames.pods["toolbox"].namespace if from_pod else frames.client
    source = (frames.pods["toolbox"].address if from_pod else CLIENT).of(family)
    target = STREAM.target(name, node).address.of(family)
    port = 31015 if name == "NodePort" else 36412
    tag = 0x50450000 + os.getpid() % 65536
    before = reasons(node)

    arriving = Capture(pod.namespace, "eth0", lambda f: (p := _sctp(f)) is not None and p[SCTP].dport == 3868)
    init = SCTP(sport=5000 + family, dport=port, tag=0) / SCTPChunkInit(init_tag=tag, init_tsn=1)
    namespace.call(_send_raw, family, source, target, bytes(init))
    frame = arriving.frame()
    assert frame is not None, counted_between(before, reasons(node))
    seen = _sctp(frame)
    assert seen.payload.dst == pod.address.of(family)
    assert seen[SCTPChunkInit].init_tag == tag
    assert seen.payload.src == (source if from_pod else node.source_towards(pod).of(family))

    returning = Capture(
        namespace, "eth0", lambda f: (p := _sctp(f)) is not None and p[SCTP].sport == port and p[SCTP].tag == tag
    )
    answer = SCTP(sport=3868, dport=seen[SCTP].sport, tag=tag) / SCTPChunkInitAck(init_tag=7, init_tsn=1)
    pod.namespace.call(_send_raw, family, pod.address.of(family), seen.payload.src, bytes(answer))
    frame = returning.frame()
    assert frame is not None
    back = _sctp(frame)
    assert (back.payload.src, back.payload.dst) == (target, source)
    assert back[SCTP].dport == 5000 + family
    counted = counted_between(before, reasons(node))
    # Always by netfilter: the flow table cannot track an association.
    assert counted.get("new_flow_netfilter", 0) >= 1, counted
    assert "new_flow_fast" not in counted, counted
