# SPDX-License-Identifier: Apache-2.0
"""A node for the packet tests: one namespace with real routes, the real programs, and maps that the tests write.

Names stand for addresses of both families, so each case is written once:

    world.run("tc_ethernet", world.tcp("pod", "cluster_ip", 80))

The control plane is not involved: the tests show what the programs do with given maps.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NamedTuple

from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.layers.sctp import SCTP, SCTPChunkInit
from scapy.packet import Packet, Raw

import pyebpf_proxy
from pyebpf_proxy.datapath.loader.abilities import STORAGE_MAPS
from pyebpf_proxy.datapath.loader.btf import Layout
from pyebpf_proxy.datapath.loader.libbpf import Link, Object, Program, RunResult, SkBuff
from pyebpf_proxy.datapath.loader.programs import object_file, unused_maps
from pyebpf_proxy.datapath.loader.reasons import reasons
from pyebpf_proxy.datapath.maps.hints import AddressHints
from pyebpf_proxy.services.model import FrontendKind

# tests/packet/mutants.py names another object here.
OBJECT = Path(os.environ.get("PEP_TC_OBJECT") or Path(pyebpf_proxy.__file__).parent / "bpf" / "tc.bpf.o")
XDP_OBJECT = OBJECT.with_name("xdp.bpf.o")
GO_ON, SHOT = -1, 2
XDP_DROP, XDP_PASS, XDP_TX, XDP_REDIRECT = 1, 2, 3, 4
# If set, every packet of all tests goes through XDP before tc: the outcome must be the same.
XDP_EVERYWHERE = bool(os.environ.get("PEP_XDP"))
# If set, the fast path is open in all tests: the outcome must be the same, unless a test differs on purpose.
FAST_EVERYWHERE = os.environ.get("PEP_FAST_PATH") == "1"
NODE_MAC = "02:00:00:00:00:02"
MARK = 0x4000
PRIORITY_BACKEND, PRIORITY_MASQUERADE, PRIORITY_REJECT = 0xEB000000, 0xED000000, 0xEC000001
PRIORITY_MIDSTREAM = 0xEC000002
PROTOCOLS = {"tcp": 6, "udp": 17, "sctp": 132}
ADDRESSES: dict[str, tuple[str, str]] = {
    "client": ("192.0.2.9", "2001:db8::9"),
    "blocked": ("198.51.100.7", "2001:db8:bad::7"),
    "pod": ("10.244.1.9", "fd00:10:244:1::9"),
    "node": ("10.0.0.1", "fd00:10::1"),
    "gateway": ("10.0.0.2", "fd00:10::2"),
    "pod_gateway": ("10.244.1.1", "fd00:10:244:1::1"),
    "unserved_node": ("10.0.1.1", "fd00:10:1::1"),
    "cluster_ip": ("10.96.0.10", "fd00:10:96::10"),
    "external_ip": ("203.0.113.10", "2001:db8:1::10"),
    "vip": ("203.0.113.20", "2001:db8:1::20"),
    "elsewhere": ("203.0.113.99", "2001:db8:1::99"),
    "remote": ("10.244.2.5", "fd00:10:244:2::5"),
    "local": ("10.244.1.5", "fd00:10:244:1::5"),
    "outside": ("172.16.0.10", "fd00:ac::10"),
    "nowhere": ("100.64.0.9", "fd99::9"),
    "unspecified": ("0.0.0.0", "::"),
    **{f"pod{i}": (f"10.244.3.{i}", f"fd00:10:244:3::{i:x}") for i in range(1, 13)},
    **{f"caller{i}": (f"10.244.1.{100 + i}", f"fd00:10:244:1:1::{i:x}") for i in range(100)},
}
KINDS = {
    "cluster_ip": FrontendKind.CLUSTER_IP,
    "external_ip": FrontendKind.EXTERNAL_IP,
    "vip": FrontendKind.LOAD_BALANCER,
    "node_port": FrontendKind.NODE_PORT,
}
SIZES = dict.fromkeys(
    ("frontends4", "frontends6", "backends4", "backends6", "endpoints4", "endpoints6", "service_configs", "affinities"),
    128,
) | {
    "services": 64,
    "slots": 64,
    "rr_cursor": 64,
    "affinity_counts": 64,
    "connections": 64,
    "choices": 64,
    "socket_revnat4": 64,
    "socket_revnat6": 64,
    "socket_flows": 64,
    "flows": 256,
    "permits": 256,
    "promotions": 64,
}
# enum bpf_map_type
_ARRAY, _PERCPU_ARRAY = 2, 6
libc = ctypes.CDLL(None, use_errno=True)
#: The number of the system call, and of its command (include/uapi/linux/bpf.h).
_BPF = 280 if platform.machine() == "aarch64" else 321
_UPDATE = 2
_LOOKUP_AND_DELETE = 21


def u32(number: int) -> bytes:
    return number.to_bytes(4, sys.byteorder)


def enter_namespace(fd: int) -> None:
    if libc.setns(fd, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")


class Programs(NamedTuple):
    """The programs with one choice of settings, loaded, and their maps."""

    tc: Object
    xdp: Object | None

    def close(self) -> None:
        if self.xdp is not None:
            self.xdp.close()
        self.tc.close()


#: What this process has loaded, by its constants; the one that was used last is the last one. The verifier takes long,
#: so all nodes of a process share them. A node empties the maps before each use.
_loaded: dict[bytes, Programs] = {}
#: Each of them has up to a hundred descriptors, and a process often may not have more than 1024.
_MOST_LOADED = 8


@functools.cache
def _settings_layout() -> Layout:
    with Object.open(OBJECT) as opened:
        return opened.btf.struct("settings")


def _load(values: dict[str, Any]) -> Programs:
    """The programs with these settings, loaded before or now."""
    rodata = _settings_layout().pack(**values)
    found = _loaded.pop(rodata, None)
    if found is None:
        while len(_loaded) >= _MOST_LOADED:
            _loaded.pop(next(iter(_loaded))).close()
        without = unused_maps(
            values.get("scheduler", 0),
            values.get("pod_sockets", False),
            values["fast_path"],
            values["xdp"],
        )
        if values.get("dry_run"):
            without -= {"dry_results"}
        constants = {"settings": rodata}
        path = object_file("tc", bool(values["conntrack_lookup"]), OBJECT.parent)
        tc = Object.open(path, rodata=constants, max_entries=SIZES, without=without).load()
        xdp = None
        if values["xdp"]:
            xdp = Object.open(XDP_OBJECT, rodata=constants, reuse=tc.maps, without=without).load()
        found = Programs(tc, xdp)
    _loaded[rodata] = found
    return found


@functools.cache
def _array_keys(count: int) -> bytes:
    return b"".join(map(u32, range(count)))


@dataclass
class Flow:
    """One conntrack entry, as `conntrack -L` prints it."""

    protocol: str
    state: str
    original: tuple[str, str, int, int]
    reply: tuple[str, str, int, int]
    timeout: int


@dataclass
class ProgramNode:
    """One namespace, one family at a time, one loaded object."""

    family: int
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = 0 if self.family == 4 else 1
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        if libc.unshare(0x40000000):
            raise OSError(ctypes.get_errno(), "unshare")
        self._make_devices()
        self._links: list[Link] = []
        self.load()

    def load(self, **settings: Any) -> Object:
        """Load the programs with these settings added to the world's; only the node's maps have entries."""
        values: dict[str, Any] = {
            "permit_seed": 1,
            "masquerade_mark": MARK,
            "flow_quota": 16384,
            "udp_seconds": 30,
            "udp_stream_seconds": 120,
            "detector4": 1,
            "detector6": 1,
            "conntrack_lookup": 1,
            "pod_cidr4": ip_network("10.244.0.0/16").network_address.packed,
            "pod_mask4": ip_network("10.244.0.0/16").netmask.packed,
            "pod_cidr6": ip_network("fd00:10:244::/48").network_address.packed,
            "pod_mask6": ip_network("fd00:10:244::/48").netmask.packed,
            "node_address4": ip_address(ADDRESSES["node"][0]).packed,
            "node_address6": ip_address(ADDRESSES["node"][1]).packed,
            "xdp": int(XDP_EVERYWHERE),
            "fast_path": int(FAST_EVERYWHERE or XDP_EVERYWHERE),
            **self.settings,
            **settings,
        }
        if values["xdp"]:
            values["fast_path"] = 1
        self.xdp: Program | None = None
        self.has_flow_table = bool(values["fast_path"])
        asked = {**self.settings, **settings}
        # Tests without the fast path ignore the reasons why a flow did not take it.
        self._unasked = {"SLOW_NO_PERMIT", "STACK_NO_AGENT"} if not asked.get("fast_path") else set()
        programs = _load(values)
        self.object = programs.tc
        self._wipe()
        if programs.xdp is not None:
            self.xdp = programs.xdp.programs["xdp_ethernet"]
            self._attach(self.xdp)
            for device in self.devices:
                self.xdp_device(device)
        self._hints = AddressHints(self.object.maps["address_hints"], self.object.btf)
        self._next_slot, self._next_id = 1, 1
        self.backend_ids: dict[tuple[str, int], int] = {}
        self._write_node()
        if FAST_EVERYWHERE and values["fast_path"]:
            self.write_fast_path_state()
            for device in self.devices.values():
                self.object.maps["devices"].update(
                    u32(device), self.object.btf.struct("node_device").pack(redirect=1, mtu=1500)
                )
        return self.object

    def write_fast_path_state(self, alive: float = 3600.0, **fields: int) -> None:
        """Write the state as the agent does: it is alive for so many seconds, and the fast path is open."""
        values = {
            "alive_until": time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(alive * 1_000_000_000),
            "generation": 1,
            "permit_generation": 1,
            **fields,
        }
        self.object.maps["fast_path"].update(bytes(4), self.object.btf.struct("fast_path").pack(**values))

    def _attach(self, program: Program) -> None:
        """A test run accepts a device only if an XDP program has set its queues up: attach one."""
        if not self._links:
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run(["mount", "-t", "bpf", "bpf", folder], check=True)
                for device, ifindex in self.devices.items():
                    program.attach_xdp(ifindex, False, Path(folder, device))
                    self._links.append(Link.open_pinned(Path(folder, device)))
                subprocess.run(["umount", folder], check=True)

    def xdp_device(self, name: str, **changes: Any) -> None:
        """The control plane's entry for a device with XDP, with these changes."""
        values = {
            "mac": bytes.fromhex(NODE_MAC.replace(":", "")),
            "starts_flow": 1,
            "returns": 2,
            "takes": 2,
            **changes,
        }
        value = self.object.btf.struct("xdp_device").pack(**values)
        self.object.maps["xdp_devices"].update(u32(self.devices[name]), value)

    def _wipe(self) -> None:
        """Empty the maps: other tests have used them."""
        for name, of in self.object.maps.items():
            if "." in name or name == "decisions" or name in STORAGE_MAPS:
                continue  # not a map of bpf/*_maps.h, or it cannot be listed
            if of.type in (_ARRAY, _PERCPU_ARRAY):
                size = len(of.lookup(bytes(4)) or b"")  # of all CPUs
                of.update_batch(_array_keys(of.max_entries), bytes(of.max_entries * size))
            elif name == "promotions":
                self.promotions()
            else:
                of.delete_batch(of.dump()[0])

    def close(self) -> None:
        for link in self._links:
            link.close()
        enter_namespace(self._home)
        os.close(self._home)

    # ---- the node ---------------------------------------------------------------------------------

    def _make_devices(self) -> None:
        v4, v6 = ({name: pair[i] for name, pair in ADDRESSES.items()} for i in (0, 1))
        lines = ["link set lo up"]
        for device in ("pods", "nic"):
            lines += [f"link add dev {device} type veth peer name {device}-far", f"link set dev {device}-far up"]
            # The devices have the MAC address of incoming frames: the programs leave frames for other hosts alone.
            lines += [f"link set dev {device} address {NODE_MAC} up"]
        lines += [
            f"addr add {v4['pod_gateway']}/24 dev pods",
            f"addr add {v6['pod_gateway']}/64 dev pods nodad",
            f"addr add {v4['node']}/24 dev nic",
            f"addr add {v6['node']}/64 dev nic nodad",
            f"route add default via {v4['gateway']}",
            f"route add default via {v6['gateway']}",
            "route add unreachable 100.64.0.0/16",
            "route add unreachable fd99::/16",
        ]
        subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True, capture_output=True)
        for sysctl in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path("/proc/sys/net", sysctl).write_text("1")
        # sysfs shows the namespace where it was mounted; the system call uses the current one.
        self.devices = {name: socket.if_nametoindex(name) for name in ("pods", "nic")}

    def _write_node(self) -> None:
        maps = self.object.maps
        layout = self.object.btf.struct("node_address")
        for name in ("node", "pod_gateway"):
            maps[f"node_addresses{self.family}"].update(self.packed(name), layout.pack(node_ports=1))
        maps[f"node_addresses{self.family}"].update(self.packed("unserved_node"), layout.pack(node_ports=0))

    # ---- names ------------------------------------------------------------------------------------

    def address(self, name: str) -> str:
        return ADDRESSES[name][self._index]

    def packed(self, name: str) -> bytes:
        return ip_address(self.address(name)).packed

    # ---- services ---------------------------------------------------------------------------------

    def service(
        self,
        cluster: list[str],
        local: list[str] | None = None,
        protocol: str = "tcp",
        port: int = 80,
        node_port: int = 30080,
        service: int = 1,
        target_port: int = 8080,
        ranges: list[str] | None = None,
        **config: int,
    ) -> None:
        """Write one service at every kind of frontend with these endpoints (names), as the control plane would."""
        maps, btf, number = self.object.maps, self.object.btf, PROTOCOLS[protocol]
        for name in dict.fromkeys([*cluster, *(local or [])]):
            self.backend_ids[name, service] = self._next_id
            backend = btf.struct(f"backend{self.family}").pack(
                address=self.packed(name),
                port=target_port,
                protocol=number,
                service=service,
                local=int(name == "local"),
            )
            maps[f"backends{self.family}"].update(u32(self._next_id), backend)
            # Only UDP has entries for its own service port (bpf/service_maps.h).
            for of in (0, service) if protocol == "udp" else (0,):
                self.endpoint(name, of, target_port, protocol)
            self._next_id += 1
        first = self._next_slot
        # In the order of their addresses, as the writer sorts them.
        for name in [*sorted(cluster, key=self.packed), *sorted(local or [], key=self.packed)]:
            maps["slots"].update(u32(self._next_slot), u32(self.backend_ids[name, service]) + bytes(4))
            self._next_slot += 1
        config_id = self._next_id
        self._next_id += 1
        values = {"any_endpoints": int(bool(cluster or local)), "source_ranges": int(bool(ranges)), **config}
        maps["service_configs"].update(
            u32(config_id),
            btf.struct("service_config").pack(
                service=service,
                first_slot=first,
                cluster_count=len(cluster),
                local_count=len(local or []),
                **values,
            ),
        )
        for text in ranges or []:
            network = ip_network(text)
            key = btf.struct(f"source_range{self.family}_key").pack(
                prefix_length=32 + network.prefixlen, config=config_id, address=network.network_address.packed
            )
            maps[f"source_ranges{self.family}"].update(key, b"\1\0\0\0")
        maps["services"].update(u32(service), u32(config_id) + bytes(4))
        hints = maps["node_port_hints"]
        word = int.from_bytes(hints.lookup(u32(node_port // 64)) or b"", sys.byteorder) | 1 << node_port % 64
        hints.update(u32(node_port // 64), word.to_bytes(8, sys.byteorder))
        for name, kind in KINDS.items():
            address = bytes(4 if self.family == 4 else 16) if name == "node_port" else self.packed(name)
            key = btf.struct(f"frontend{self.family}_key").pack(
                address=address, port=node_port if name == "node_port" else port, protocol=number
            )
            self._hints.add([key])
            maps[f"frontends{self.family}"].update(key, btf.struct("frontend").pack(service=service, kind=int(kind)))

    def endpoint(self, name: str, service: int, port: int = 8080, protocol: str = "udp", present: bool = True) -> None:
        key = self.object.btf.struct(f"endpoint{self.family}_key").pack(
            service=service, address=self.packed(name), port=port, protocol=PROTOCOLS[protocol]
        )
        where = self.object.maps[f"endpoints{self.family}"]
        if present:
            self._hints.add([key])
            where.update(key, b"\1\0\0\0")
        else:
            where.delete(key)

    # ---- packets ----------------------------------------------------------------------------------

    def ip(self, source: str, destination: str) -> Packet:
        layer = IP if self.family == 4 else IPv6
        return layer(src=self.address(source), dst=self.address(destination))

    def frame(self, source: str, destination: str, *rest: Packet) -> Packet:
        made = Ether(src="02:00:00:00:00:01", dst=NODE_MAC) / self.ip(source, destination)
        for layer in rest:
            made = made / layer
        return made

    def tcp(self, source: str, destination: str, port: int, sport: int = 40000, flags: str = "S") -> Packet:
        return self.frame(source, destination, TCP(sport=sport, dport=port, flags=flags), Raw(b"x" * 20))

    def udp(self, source: str, destination: str, port: int, sport: int = 40000) -> Packet:
        return self.frame(source, destination, UDP(sport=sport, dport=port), Raw(b"hello"))

    def sctp(self, source: str, destination: str, port: int, sport: int = 40000) -> Packet:
        return self.frame(source, destination, SCTP(sport=sport, dport=port), SCTPChunkInit())

    def run_xdp(self, frame: Packet | bytes, device: str = "nic") -> RunResult:
        """Run a frame through XDP only."""
        assert self.xdp is not None
        return self.xdp.run_frame(bytes(frame), self.devices[device])

    def run(
        self, program: str, frame: Packet | bytes, device: str = "nic", mark: int = 0, priority: int = 0
    ) -> RunResult:
        skb = SkBuff(ifindex=self.devices[device], mark=mark, priority=priority)
        if self.xdp is not None and program == "tc_ethernet":
            first = self.run_xdp(frame, device)
            if first.retval == XDP_DROP:
                return RunResult(SHOT, first.data, first.duration, skb)
            assert first.retval == XDP_PASS
            assert first.data == bytes(frame), "XDP passes the frame on unchanged"
        return self.object.programs[program].test_run(bytes(frame), skb)

    def promotions(self) -> list[bytes]:
        """The entries of the promotion queue; empties it."""
        of, found = self.object.maps["promotions"], []
        value = ctypes.create_string_buffer(of.value_size)
        attributes = struct.pack("=IIQQQ", of.fd, 0, 0, ctypes.addressof(value), 0)
        while not libc.syscall(_BPF, _LOOKUP_AND_DELETE, attributes, len(attributes)):
            found.append(value.raw)
        assert ctypes.get_errno() == errno.ENOENT
        return found

    def fill_promotions(self, key: bytes) -> None:
        """The queue has no space left: this key is in every place."""
        of = self.object.maps["promotions"]
        value = ctypes.create_string_buffer(key, of.value_size)
        attributes = struct.pack("=IIQQQ", of.fd, 0, 0, ctypes.addressof(value), 0)
        while not libc.syscall(_BPF, _UPDATE, attributes, len(attributes)):
            pass
        assert ctypes.get_errno() == errno.E2BIG

    # ---- the outcome ------------------------------------------------------------------------------

    def reasons(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for reason, number in reasons(self.object.btf.enum).items():
            name = reason.upper()
            values = self.object.maps["counters"].lookup_cpus(u32(number))
            total = sum(int.from_bytes(v, "little") for v in values or [])
            if total and name not in self._unasked:
                found[name] = total
        return found

    def refused(self, reason: str) -> list[tuple[int, int, int]]:
        """Source port, destination port and device of the latest packet refused for this reason, as `drops` shows
        it.
        """
        number = self.object.btf.enum("drop_reason")[reason]
        layout = self.object.btf.struct("refused").packer("when", "source_port", "destination_port", "device")
        values = self.object.maps["last_refused"].lookup_cpus(u32(number)) or []
        return [tuple(rest) for when, *rest in map(layout.unpack, values) if when]

    def flows(self) -> list[Flow]:
        text = subprocess.run(
            ["conntrack", "-L", "-f", f"ipv{self.family}"], capture_output=True, text=True, check=True
        ).stdout
        found = []
        for line in text.splitlines():
            tuples = re.findall(r"src=(\S+) dst=(\S+) sport=(\d+) dport=(\d+)", line)
            words = line.split()
            (a, b) = [(s, d, int(sp), int(dp)) for s, d, sp, dp in tuples]
            state = words[3] if words[0] == "tcp" else ""
            found.append(Flow(words[0], state, a, b, int(words[2])))
        return found

    def forget_flows(self) -> None:
        subprocess.run(["conntrack", "-F"], capture_output=True, check=True)


def insert_entry(
    world: ProgramNode,
    protocol: str,
    source: str,
    destination: str,
    sport: int,
    dport: int,
    *extra: str,
    target: str = "",
) -> None:
    """Insert a conntrack entry of another program; with `target`, translated to that endpoint's port 8080."""
    command = [
        "conntrack",
        "-I",
        "-p",
        protocol,
        "-t",
        "60",
        "-s",
        world.address(source),
        "-d",
        world.address(destination),
    ]
    command += ["--sport", str(sport), "--dport", str(dport)]
    if target:
        end = world.address(target)
        command += ["-g", f"{end}:8080" if world.family == 4 else f"[{end}]:8080"]
    else:
        command += ["-r", world.address(destination), "-q", world.address(source)]
        command += ["--reply-port-src", str(dport), "--reply-port-dst", str(sport)]
    subprocess.run([*command, *extra], check=True, capture_output=True)
