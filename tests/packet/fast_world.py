# SPDX-License-Identifier: Apache-2.0
"""A node whose fast path is open: conntrack entries by name, packets of their flows, and what came of them."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw
from world import World

from pyebpf_proxy.datapath.loader.libbpf import RunResult, SkBuff

REDIRECT = 7
TO_NEIGHBOUR = 1
FAR = "02:00:00:00:0f:01"


def open_fast_path(world: World, **changes: int) -> None:
    """As the agent would: the devices may be used, the neighbours are known, somebody watches."""
    world.load(fast_path=1, tcp_established_ms=86_400_000, udp_stream_ms=120_000, **changes)
    passage(world, "nic", "pods")
    say(world)
    for name, device in (("gateway", "nic"), ("pod", "pods"), ("local", "pods")):
        neighbour(world, "replace", name, device)


def say(world: World, generation: int = 1, trust: float = 3600.0, closed: str = "REASON_UNSPECIFIED") -> None:
    """The map that the agent writes."""
    world.say_of_fast_path(generation, trust, closed)


def passage(world: World, *devices: str, how: int = TO_NEIGHBOUR) -> None:
    for name in devices:
        value = world.object.btf.struct("node_device").pack(passage=how)
        world.object.maps["devices"].update(world.devices[name].to_bytes(4, "little"), value)


def neighbour(world: World, verb: str, name: str, device: str, at: str = FAR) -> None:
    address = ["lladdr", at, "nud", "permanent"] if verb == "replace" else []
    command = ["ip", "neigh", verb, world.address(name), *address, "dev", device]
    subprocess.run(command, check=True, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Flow:
    """A connection of a pod with ``cluster_ip``, whose endpoint is ``remote`` unless told otherwise."""

    world: World
    protocol: str = "tcp"
    client: str = "pod"
    frontend: str = "cluster_ip"
    port: int = 80
    endpoint: str = "remote"
    masquerade: str = ""
    sport: int = 40000
    entrance: str = "pods"
    exit: str = "nic"

    def track(self, state: str = "ESTABLISHED", status: str = "SEEN_REPLY,ASSURED", *more: str) -> None:
        """The kernel's entry, as whoever translates would have made it."""
        command = ["conntrack", *self.words(state, status), *more]
        subprocess.run(command, check=True, capture_output=True)

    def words(self, state: str = "ESTABLISHED", status: str = "SEEN_REPLY,ASSURED") -> list[str]:
        """The arguments of ``conntrack`` that make the entry."""
        at = f"[{self.world.address(self.endpoint)}]" if self.world.family == 6 else self.world.address(self.endpoint)
        words = ["-I", "-p", self.protocol, "-s", self.world.address(self.client)]
        words += ["-d", self.world.address(self.frontend), "--sport", str(self.sport), "--dport", str(self.port)]
        words += ["-t", "100", *(["-u", status] if status else []), "--dst-nat", f"{at}:8080"]
        words += ["--state", state] if self.protocol == "tcp" else []
        return words + (["--src-nat", self.world.address(self.masquerade)] if self.masquerade else [])

    def frame(self, reply: bool = False, flags: str = "A", size: int = 100, hops: int = 64) -> Packet:
        sender = self.masquerade or self.client
        ends = (self.endpoint, sender) if reply else (self.client, self.frontend)
        ports = (8080, self.sport) if reply else (self.sport, self.port)
        return self.packet(*ends, *ports, flags, size, hops, self.exit if reply else self.entrance)

    def expected(self, reply: bool = False, flags: str = "A", size: int = 100, hops: int = 64) -> Packet:
        """The packet that ``frame`` of the same arguments must become; its link addresses are nobody's concern."""
        ends = (self.frontend, self.client) if reply else (self.masquerade or self.client, self.endpoint)
        ports = (self.port, self.sport) if reply else (self.sport, 8080)
        return self.packet(*ends, *ports, flags, size, hops - 1, self.exit if reply else self.entrance)

    def packet(
        self, source: str, destination: str, sport: int, dport: int, flags: str, size: int, hops: int, device: str
    ) -> Packet:
        addresses = {"src": self.world.address(source), "dst": self.world.address(destination)}
        layer = IP(**addresses, ttl=hops, id=7) if self.world.family == 4 else IPv6(**addresses, hlim=hops)
        ports = {"sport": sport, "dport": dport}
        transport = TCP(**ports, flags=flags, seq=1000, ack=1) if self.protocol == "tcp" else UDP(**ports)
        # The program gets what came in: a frame for the device's own address.
        return (
            Ether(src=FAR, dst=mac_of(device, self.world.devices[device], id(self.world)))
            / layer
            / transport
            / Raw(bytes(i % 251 for i in range(size)))
        )

    def run(self, reply: bool = False, frame: Packet | bytes | None = None, **skb: int) -> RunResult:
        """One packet through the program of the device it would come in by."""
        device = self.exit if reply else self.entrance
        context = SkBuff(ifindex=self.world.devices[device], **skb)
        data = bytes(self.frame(reply) if frame is None else frame)
        return self.world.object.programs["tc_ethernet"].test_run(data, context)

    def learn(self) -> None:
        """A packet of the endpoint's makes both entries."""
        assert self.run(reply=True).retval == REDIRECT, self.world.reasons()


def fast_node(world: World) -> World:
    """With a service of each protocol, and no flow yet."""
    world.forget_flows()
    open_fast_path(world)
    world.service(["remote", "local"])
    world.service(["remote", "local"], protocol="udp", service=2)
    return world


def flow_of(world: World, protocol: str = "tcp") -> Flow:
    """One that the kernel knows."""
    flow = Flow(world, protocol)
    flow.track()
    return flow


def beyond_the_link(frame: bytes) -> bytes:
    """Without the Ethernet header."""
    return frame[14:]


@functools.cache
def mac_of(device: str, index: int, world: int) -> str:
    """Asked once for each device of each namespace."""
    text = subprocess.run(["ip", "-o", "link", "show", device], capture_output=True, text=True, check=True).stdout
    words = text.split()
    return words[words.index("link/ether") + 1]


def entries(world: World) -> list[dict[str, object]]:
    """The cache as it is."""
    layout = world.object.btf.struct("flow")
    return [dict(layout.unpack(value)) for _, value in world.object.maps["flows"].items()]


def track_many(lines: Iterable[str]) -> None:
    """Entries as ``conntrack -R`` reads them, many at once."""
    subprocess.run(["conntrack", "-R", "-"], input="\n".join(lines), text=True, check=True, capture_output=True)
