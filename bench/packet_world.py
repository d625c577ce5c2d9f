# SPDX-License-Identifier: Apache-2.0
"""Packets of flows for ``bpf_prog_test_run``, in a namespace with a node's devices, routes and neighbours."""

from __future__ import annotations

import functools
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from pyebpf_proxy.datapath.connections.promotion import run_for_flow
from pyebpf_proxy.datapath.loader.libbpf import Link, Object
from pyebpf_proxy.lab import manifests
from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.namespace import Namespace, set_network_namespace

from . import workload
from .filled import POD_CIDR6, Filled, fill

GO_ON, REDIRECT = -1, 7
XDP_PASS, XDP_REDIRECT = 2, 4
_ANY_FRAMES = 2  # enum xdp_frames
CLUSTER_IP = Dual("172.31.0.20", "fd00:10:96::20")
NODE, GATEWAY = Dual("192.0.2.11", "2001:db8:1::11"), Dual("192.0.2.1", "2001:db8:1::1")
POD, ENDPOINT = Dual("10.32.64.9", "fd00:32:0:1::9"), Dual("10.33.0.7", "fd00:32:0:2::7")
ELSEWHERE = Dual("198.51.100.7", "2001:db8:2::7")
FAR = "02:00:00:00:0f:01"
PORTS = {"TCP": (80, 8080), "UDP": (53, 8053)}
_TO_DEVICE = 1
#: Kept open until the process ends.
_LINKS: list[Link] = []


@contextmanager
def node(name: str) -> Iterator[dict[str, int]]:
    """Move this process to a namespace with the node's interfaces ``pods`` and ``nic``. The result: their indexes."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    made = Namespace(f"bench-{name}-{os.getpid()}")
    made.create()
    try:
        made.ip("link add dev nic type veth peer name nic-far", "link set nic-far up", "link set nic up",
                "link add dev pods type veth peer name pods-far", "link set pods-far up", "link set pods up",
                f"addr add {NODE.v4}/24 dev nic", f"addr add {NODE.v6}/64 dev nic nodad",
                "addr add 10.32.64.1/18 dev pods", "addr add fd00:32:0:1::1/64 dev pods nodad",
                f"route add default via {GATEWAY.v4}", f"route add default via {GATEWAY.v6}",
                f"route add {workload.POD_CIDR} via {GATEWAY.v4}", f"route add {POD_CIDR6} via {GATEWAY.v6}",
                *(f"neigh replace {address} lladdr {FAR} nud permanent dev {device}"
                  for device, of in (("nic", GATEWAY), ("pods", POD)) for address in of))  # fmt: skip
        made.sysctl({"net.ipv4.ip_forward": 1, "net.ipv6.conf.all.forwarding": 1})
        set_network_namespace(made.path)
        yield {device: socket.if_nametoindex(device) for device in ("nic", "pods")}
    finally:
        set_network_namespace(f"/proc/self/fd/{home}")
        os.close(home)
        made.remove()


def filled(services: int, fast: bool, devices: dict[str, int], xdp: bool = False) -> Filled:
    """Programs whose maps have that many services, the one under test, and the agent's entries about the node."""
    ports = [manifests.Port(protocol.lower(), *PORTS[protocol], protocol) for protocol in PORTS]
    objects = [manifests.service("asked", ports, CLUSTER_IP), *manifests.slices("asked", ports, [(ENDPOINT, None)])]
    changes = [*workload.parsed(services), *(change for each in objects for change in workload.read(each))]
    found = fill(changes, fast, xdp)
    maps, btf = found.loaded.maps, found.loaded.tc.btf
    maps["node_addresses4"].update(socket.inet_aton(NODE.v4), _u32(1))
    maps["node_addresses6"].update(socket.inet_pton(socket.AF_INET6, NODE.v6), _u32(1))
    if fast:
        of_device, word = btf.struct("node_device"), btf.struct("fast_path")
        for index in devices.values():
            maps["devices"].update(_u32(index), of_device.pack(redirect=_TO_DEVICE))
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + 3600 * 10**9
        open_to_all = btf.enum("slow_path_reason")["NOT_SLOW"]
        values = {"alive_until": until, "generation": 1, "closed4": open_to_all, "closed6": open_to_all}
        maps["fast_path"].update(bytes(4), word.pack(**values))
    if found.loaded.xdp is not None:
        _attach(found.loaded.xdp, devices)
        for device, index in devices.items():
            here = bytes.fromhex(mac(device).replace(":", ""))
            value = btf.struct("xdp_device").pack(mac=here, starts_flow=1, returns=_ANY_FRAMES, takes=_ANY_FRAMES)
            maps["xdp_devices"].update(_u32(index), value)
    return found


def _attach(xdp: Object, devices: dict[str, int]) -> None:
    """Attach a program: a test run accepts only an interface with one. It stays attached as long as the interface."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "bpf", "bpf", folder], check=True)
        try:
            for device, index in devices.items():
                xdp.programs["xdp_ethernet"].attach_xdp(index, False, Path(folder, device))
                _LINKS.append(Link.open_pinned(Path(folder, device)))
        finally:
            subprocess.run(["umount", folder], check=True)


class Flow(NamedTuple):
    """A flow of the pod to the service, or to an address that belongs to no service."""

    protocol: str
    family: int
    sport: int
    served: bool = True

    def frame(self, devices: dict[str, int], flags: str = "A", reply: bool = False, size: int = 100) -> bytes:
        """A frame as it arrives from the pod, or with ``reply`` from the endpoint."""
        port, target = PORTS[self.protocol] if self.served else (4433, 4433)
        to = CLUSTER_IP if self.served else ELSEWHERE
        ends, ports = ((ENDPOINT, POD), (target, self.sport)) if reply else ((POD, to), (self.sport, port))
        source, destination = (each.of(self.family) for each in ends)
        layer: Packet = IP(src=source, dst=destination, id=7) if self.family == 4 else IPv6(src=source, dst=destination)
        transport: Packet = TCP(flags=flags, seq=1, ack=1) if self.protocol == "TCP" else UDP()
        transport.sport, transport.dport = ports
        here = mac("nic" if reply else "pods")
        return bytes(Ether(src=FAR, dst=here) / layer / transport / Raw(b"x" * (0 if "S" in flags else size)))

    def know(self, found: Filled, devices: dict[str, int]) -> None:
        """Enter the flow into the flow table, with a rewrite that changes only the hop count.

        So a test run can send the same packet many times, fewer than its hops.
        """
        btf, maps = found.loaded.tc.btf, found.loaded.maps
        family = socket.AF_INET if self.family == 4 else socket.AF_INET6
        source, destination = (socket.inet_pton(family, each.of(self.family)) for each in (POD, CLUSTER_IP))
        ends = {"source": source.ljust(16, b"\0"), "destination": destination.ljust(16, b"\0")}
        ports = {"source_port": self.sport, "destination_port": PORTS[self.protocol][0]}
        number = socket.IPPROTO_TCP if self.protocol == "TCP" else socket.IPPROTO_UDP
        key = btf.struct("flow_key").pack(**ends, **ports, protocol=number, ipv6=int(self.family == 6))
        # struct tracked_flow (bpf/observer.h)
        tracked = key + ends["source"] + ends["destination"] + struct.pack("=HH", *ports.values())
        if not run_for_flow(found.loaded.tc.programs["enter_flow"], tracked):
            raise RuntimeError(f"{self} was not entered into the flow table")
        here, far = (bytes.fromhex(each.replace(":", "")) for each in (mac("pods"), FAR))
        link = btf.struct("link").pack(device=devices["nic"], mac_to=here, mac_from=far, mtu=1500, redirect=_TO_DEVICE)
        flow, rewrite = btf.struct("flow"), btf.struct("flow_rewrite")
        value = flow.unpack(maps["flows"].lookup(key) or b"")
        complete = {**rewrite.unpack(value["rewrite"]), "device_in": devices["pods"], "mac_in": here, "out": link}
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + 3600 * 10**9
        maps["flows"].update(key, flow.pack(**{**value, "rewrite": rewrite.pack(**complete), "confirmed_until": until}))

    def track(self) -> None:
        """Create the flow's conntrack entry, in state established."""
        port, target = PORTS[self.protocol]
        endpoint = ENDPOINT.v4 if self.family == 4 else f"[{ENDPOINT.v6}]"
        words = ["-I", "-p", self.protocol.lower(), "-s", POD.of(self.family), "-d", CLUSTER_IP.of(self.family)]
        words += ["--sport", str(self.sport), "--dport", str(port), "-t", "600", "-u", "SEEN_REPLY,ASSURED"]
        words += ["--dst-nat", f"{endpoint}:{target}"]
        words += ["--state", "ESTABLISHED"] if self.protocol == "TCP" else []
        subprocess.run(["conntrack", *words], check=True, capture_output=True)


@functools.cache
def mac(device: str) -> str:
    """The link address of an interface in this process's namespace; it is read once."""
    text = subprocess.run(["ip", "-o", "link", "show", device], capture_output=True, text=True, check=True).stdout
    words = text.split()
    return words[words.index("link/ether") + 1]


def _u32(number: int) -> bytes:
    return number.to_bytes(4, sys.byteorder)
