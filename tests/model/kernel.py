# SPDX-License-Identifier: Apache-2.0
"""Reads the kernel's state by separate system calls, with layouts from bpf/*.h instead of the agent's.

It shares nothing with the agent: neither libbpf, nor BTF, nor its netlink code. Functions that read a network namespace
run inside it (``Namespace.call``).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_NR_BPF = {"x86_64": 321, "aarch64": 280}[os.uname().machine]
_LOOKUP, _UPDATE, _DELETE, _OBJ_GET, _PROG_FD, _INFO, _QUERY, _LOOKUP_BATCH, _DETACH = 1, 2, 3, 7, 13, 15, 16, 24, 34
_TCX_INGRESS, _TCX_EGRESS = 46, 47

PROTOCOLS = {6: "TCP", 17: "UDP", 132: "SCTP"}
KINDS = {1: "ClusterIP", 2: "ExternalIP", 3: "LoadBalancer", 4: "NodePort"}
_SIZE = {4: "4s", 6: "16s"}
#: Sizes of key and value, and the structs of bpf/service_maps.h and bpf/node_maps.h.
FRONTEND_KEY = {family: struct.Struct(f"={size}HBx") for family, size in _SIZE.items()}
FRONTEND = struct.Struct("=IB3x")
CONFIG = struct.Struct("=IIIIIBBBBI")
NAME = struct.Struct("=64s64s64sBB2x")
WORD = struct.Struct("=II")
BACKEND = {family: struct.Struct(f"={size}HBxII") for family, size in _SIZE.items()}
ENDPOINT_KEY = {family: struct.Struct(f"=I{size}HBx") for family, size in _SIZE.items()}
RANGE_KEY = {family: struct.Struct(f"=II{size}") for family, size in _SIZE.items()}
DEVICE = struct.Struct("=I6sBBI")
U32 = struct.Struct("=I")
SHAPES = {
    "frontends4": (8, 8),
    "frontends6": (20, 8),
    "services": (4, 8),
    "service_configs": (4, 28),
    "service_names": (4, 196),
    "slots": (4, 8),
    "backends4": (4, 16),
    "backends6": (4, 28),
    "endpoints4": (12, 4),
    "endpoints6": (24, 4),
    "source_ranges4": (12, 4),
    "source_ranges6": (24, 4),
    "node_addresses4": (4, 4),
    "node_addresses6": (16, 4),
    "devices": (4, 16),
}


def _request(attributes: bytes) -> Any:
    """The attributes of a bpf() call, in memory that the kernel may write into."""
    return ctypes.create_string_buffer(attributes, len(attributes))


def _bpf(command: int, request: Any) -> int:
    result = int(_libc.syscall(_NR_BPF, command, request, len(request)))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@lru_cache(maxsize=4096)
def text_of(address: str | bytes) -> str:
    """An address as text, in its shortest form."""
    return str(ip_address(address))


@lru_cache(maxsize=4096)
def packed_of(address: str) -> bytes:
    """An address as bytes."""
    return ip_address(address).packed


def open_pin(path: Path | str) -> int:
    """A descriptor of a pinned object."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    return _bpf(_OBJ_GET, _request(struct.pack("=QII", ctypes.addressof(name), 0, 0)))


#: How many entries one system call reads: more than the model's maps have.
_AT_ONCE = 2304
_BATCH = struct.Struct("=QQQQIIQQ")


@cache
def _buffers(key_size: int, value_size: int) -> tuple[Any, Any, Any]:
    """Memory for a position, keys and values of one system call. The program has one thread."""
    sizes = max(key_size, 4), key_size * _AT_ONCE, value_size * _AT_ONCE
    position, keys, values = (ctypes.create_string_buffer(size) for size in sizes)
    return position, keys, values


class Map:
    """A pinned map, open until :meth:`close`."""

    def __init__(self, path: str) -> None:
        self.name = os.path.basename(path)
        self.key_size, self.value_size = SHAPES[self.name]
        self._key = ctypes.create_string_buffer(self.key_size)
        self._value = ctypes.create_string_buffer(self.value_size)
        self._fd = open_pin(path)
        # The same buffers, and so the same arguments, for every entry.
        here = ctypes.addressof
        self._lookup = _request(struct.pack("=IIQQQ", self._fd, 0, here(self._key), here(self._value), 0))
        self._delete = _request(struct.pack("=IIQ", self._fd, 0, here(self._key)))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def get(self, key: bytes) -> bytes | None:
        """The value of a key."""
        self._key.raw = key
        try:
            _bpf(_LOOKUP, self._lookup)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return self._value.raw

    def items(self) -> dict[bytes, bytes]:
        """All entries. If others write meanwhile, an entry may be missing, or a deleted one may be included."""
        found: dict[bytes, bytes] = {}
        position, keys, values = _buffers(self.key_size, self.value_size)
        here = ctypes.addressof
        begin = 0
        while True:
            request = _request(_BATCH.pack(begin, here(position), here(keys), here(values), _AT_ONCE, self._fd, 0, 0))
            try:
                _bpf(_LOOKUP_BATCH, request)
                ended = False
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise
                ended = True
            count = _BATCH.unpack(request.raw)[4]
            before = len(found)
            names, contents = (
                memoryview(each).cast("B")[: count * size].tobytes()
                for each, size in ((keys, self.key_size), (values, self.value_size))
            )
            for at in range(count):
                key = names[at * self.key_size : (at + 1) * self.key_size]
                found[key] = contents[at * self.value_size : (at + 1) * self.value_size]
            # A batch with nothing new: others write so fast that the iteration began again.
            if ended or len(found) == before:
                return found
            begin = here(position)

    def put(self, key: bytes, value: bytes) -> None:
        """Write an entry."""
        self._key.raw, self._value.raw = key, value
        _bpf(_UPDATE, self._lookup)

    def delete(self, key: bytes) -> None:
        """Delete an entry if it exists."""
        self._key.raw = key
        try:
            _bpf(_DELETE, self._delete)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise


class Maps:
    """The pinned maps in a folder, by name. They stay open; one whose pin was replaced is opened again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, tuple[int, Map]] = {}

    def __getitem__(self, name: str) -> Map:
        path = f"{self.folder}/{name}"
        inode = os.stat(path).st_ino
        known, found = self._open.get(name, (0, None))
        if found is None or known != inode:
            if found is not None:
                found.close()
                del self._open[name]
            found = Map(path)
            self._open[name] = inode, found
        return found

    def close(self) -> None:
        """Close all maps."""
        for _, each in self._open.values():
            each.close()
        self._open.clear()


class Frontend(NamedTuple):
    """The address, port and protocol of a service port."""

    kind: str
    address: str
    port: int


class Backend(NamedTuple):
    """An endpoint in a list."""

    address: str
    port: int
    local: bool


class Policies(NamedTuple):
    """The fields of ``service_configs`` without the lists."""

    any_endpoints: bool = False
    internal_local: bool = False
    external_local: bool = False
    affinity_seconds: int = 0
    vip_source_allowed: bool = False


class Port(NamedTuple):
    """A service port, without the numbers that link the maps."""

    frontends: frozenset[Frontend]
    cluster: tuple[Backend, ...]
    local: tuple[Backend, ...]
    serving: frozenset[tuple[str, int]]
    ranges: frozenset[str]
    policies: Policies


#: Namespace, name, port name, protocol, family.
Name = tuple[str, str, str, str, int]


class Broken(Exception):  # noqa: N818
    """The maps are inconsistent; the text says how."""


class Services(NamedTuple):
    """The service maps. ``garbage``: entries without a reference."""

    ports: dict[Name, Port]
    #: Backend id → address and port, of every entry.
    backends: dict[int, tuple[str, int]]
    garbage: Counter[str]


def _dumps(maps: Maps) -> dict[str, dict[bytes, bytes]]:
    others = ("services", "slots", "node_addresses4", "node_addresses6", "devices")
    return {name: maps[name].items() for name in SHAPES if name not in others}


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")  # others may have written it


def _words(each: Map, numbers: Iterable[int]) -> list[int]:
    values = [each.get(U32.pack(number)) for number in numbers]
    return [WORD.unpack(value)[0] if value else 0 for value in values]


def services(maps: Maps, everything: int = 0) -> Services:
    """Read the service maps; Broken if they are inconsistent.

    ``everything``: how many words of ``services`` to read, in addition to those of known service ports.
    """
    dump = _dumps(maps)
    garbage: Counter[str] = Counter()
    names: dict[int, Name] = {}
    for key, value in dump["service_names"].items():
        namespace, name, port, family, protocol = NAME.unpack(value)
        names[U32.unpack(key)[0]] = _text(namespace), _text(name), _text(port), PROTOCOLS.get(protocol, "?"), family
    ids = sorted({*names, *range(1, everything)})
    tables = dict(zip(ids, _words(maps["services"], ids), strict=True))
    live: dict[int, Name] = {}
    for number, table in tables.items():
        if table and number not in names:
            raise Broken(f"services[{number}] is {table}, and has no name")
        if table:
            if names[number] in live.values():
                raise Broken(f"two live ids of {names[number]}")
            live[number] = names[number]
        elif number in names:
            garbage["service_names"] += 1
    configs = {U32.unpack(key)[0]: CONFIG.unpack(value) for key, value in dump["service_configs"].items()}
    garbage["service_configs"] += len(configs) - len(live)
    backends: dict[int, tuple[int, str, int, int, int, int]] = {}
    uses: Counter[tuple[int, str, int, int]] = Counter()
    for family in (4, 6):
        for key, value in dump[f"backends{family}"].items():
            packed, port, protocol, service, local = BACKEND[family].unpack(value)
            backends[U32.unpack(key)[0]] = family, text_of(packed), port, protocol, service, local
            uses[family, text_of(packed), port, protocol] += 1
    serving: dict[int, set[tuple[str, int]]] = {}
    for family in (4, 6):
        left = {key for key in uses if key[0] == family}
        for key, value in dump[f"endpoints{family}"].items():
            service, packed, port, protocol = ENDPOINT_KEY[family].unpack(key)
            address = text_of(packed)
            if service:
                serving.setdefault(service, set()).add((address, port))
                if live.get(service, ("", "", "", "", 0))[3:] != ("UDP", family):
                    garbage[f"endpoints{family}"] += 1
                continue
            count = U32.unpack(value)[0]
            if count != uses[family, address, port, protocol]:
                raise Broken(f"endpoints{family} counts {count} backends at {address}:{port}/{protocol}")
            left.discard((family, address, port, protocol))
        if left:
            raise Broken(f"endpoints{family} lacks {left}")
    frontends: dict[int, set[Frontend]] = {}
    for family in (4, 6):
        for key, value in dump[f"frontends{family}"].items():
            packed, port, protocol = FRONTEND_KEY[family].unpack(key)
            service, kind = FRONTEND.unpack(value)
            if service not in live or live[service][3:] != (PROTOCOLS.get(protocol), family):
                raise Broken(f"frontend {text_of(packed)}:{port}/{protocol} leads to {service}: {live.get(service)}")
            frontends.setdefault(service, set()).add(Frontend(KINDS.get(kind, "?"), text_of(packed), port))
    ranges: dict[int, set[str]] = {}
    current = {tables[number] for number in live}
    for family in (4, 6):
        for key in dump[f"source_ranges{family}"]:
            length, table, packed = RANGE_KEY[family].unpack(key)
            if table in current:
                ranges.setdefault(table, set()).add(f"{text_of(packed)}/{length - 32}")
            else:
                garbage[f"source_ranges{family}"] += 1
    ports: dict[Name, Port] = {}
    used: set[int] = set()
    slots = maps["slots"]
    for number, name in live.items():
        config = configs.get(tables[number])
        if config is None or config[0] != number:
            raise Broken(f"table {tables[number]} of {name} is {config}")
        _, first, cluster, local, seconds, any_endpoints, internal, external, restricted, vips = config
        if cluster + local > _AT_ONCE:
            raise Broken(f"{name} has {cluster + local} slots")  # damage; reading billions would take hours
        listed = _words(slots, range(first, first + cluster + local))
        found = []
        for id_ in listed:
            backend = backends.get(id_)
            if backend is None or backend[4] != number or (backend[0], PROTOCOLS.get(backend[3])) != (name[4], name[3]):
                raise Broken(f"a slot of {name} has backend {id_}: {backend}")
            found.append(Backend(backend[1], backend[2], bool(backend[5])))
        used.update(listed)
        if bool(restricted) != bool(ranges.get(tables[number])):
            raise Broken(f"{name} is restricted: {restricted}, and has {ranges.get(tables[number])}")
        if [*found[:cluster]] != sorted(found[:cluster], key=_order) or found[cluster:] != sorted(
            found[cluster:], key=_order
        ):
            raise Broken(f"the lists of {name} are not in order: {found}")
        ports[name] = Port(
            frozenset(frontends.get(number, ())),
            tuple(sorted(found[:cluster])),
            tuple(sorted(found[cluster:])),
            frozenset(serving.get(number, ())),
            frozenset(ranges.get(tables[number], ())),
            Policies(bool(any_endpoints), bool(internal), bool(external), seconds, bool(vips)),
        )
    # UDP sockets keep an endpoint that has left the lists as long as it serves (service-semantics §10).
    places = {id_: (service, address, port) for id_, (_, address, port, _, service, _) in backends.items()}
    listed_places = {places[id_] for id_ in used}
    kept = {place for place in places.values() if place[1:] in serving.get(place[0], ()) and place not in listed_places}
    garbage["backends"] += len(backends) - len(used) - len(kept)
    plain = {number: (address, port) for number, (_, address, port, *_) in backends.items()}
    return Services(ports, plain, +garbage)


def _order(backend: Backend) -> tuple[bytes, int]:
    return packed_of(backend.address), backend.port


class NodeMaps(NamedTuple):
    """The maps of the node."""

    #: Address → whether it serves NodePorts.
    addresses: dict[str, bool]
    #: Ifindex → index of its bridge, MAC of its bridge, whether its packets are a pod's, MTU, redirect mode.
    devices: dict[int, tuple[int, str, bool, int, int]]


def node_maps(maps: Maps) -> NodeMaps:
    """Read the maps of the node."""
    addresses, devices = {}, {}
    for family in (4, 6):
        for key, value in maps[f"node_addresses{family}"].items().items():
            addresses[text_of(key)] = bool(U32.unpack(value)[0])
    for key, value in maps["devices"].items().items():
        bridge, mac, pod, redirect, mtu = DEVICE.unpack(value)
        devices[U32.unpack(key)[0]] = bridge, mac.hex(":"), bool(pod), mtu, redirect
    return NodeMaps(addresses, devices)


# ---- inside the namespace ---------------------------------------------------------------------------------------


def _program_name(number: int) -> str:
    fd = _bpf(_PROG_FD, _request(struct.pack("=III", number, 0, 0)))
    try:
        info = ctypes.create_string_buffer(232)
        _bpf(_INFO, _request(struct.pack("=IIQ", fd, len(info), ctypes.addressof(info))))
        return info.raw[64:80].rstrip(b"\0").decode()
    finally:
        os.close(fd)


def _chain(index: int, hook: int) -> list[str]:
    numbers = (ctypes.c_uint32 * 64)()
    attributes = struct.pack("=IIIIQI", index, hook, 0, 0, ctypes.addressof(numbers), 64) + bytes(36)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    if _libc.syscall(_NR_BPF, _QUERY, buffer, len(attributes)) < 0:
        number = ctypes.get_errno()
        if number == errno.ENODEV:
            return []
        raise OSError(number, os.strerror(number))
    count = struct.unpack_from("=I", buffer.raw, 24)[0]
    return [_program_name(numbers[at]) for at in range(count)]


def chains(indexes: list[int]) -> dict[int, tuple[list[str], list[str]]]:
    """Names of the tcx programs of devices, at ingress and at egress, in order."""
    return {index: (_chain(index, _TCX_INGRESS), _chain(index, _TCX_EGRESS)) for index in indexes}


def detach(path: Path) -> None:
    """Detach the program of a pinned link."""
    fd = open_pin(path)
    try:
        _bpf(_DETACH, _request(struct.pack("=I", fd)))
    finally:
        os.close(fd)


class Link(NamedTuple):
    """A device with its addresses."""

    index: int
    name: str
    loopback: bool
    #: "veth", "bridge" and so on; empty: none.
    kind: str
    #: 0 while it is down or not connected.
    mtu: int
    mac: str
    #: The index of the device to which it belongs; 0: none.
    master: int
    addresses: tuple[str, ...]


def links() -> list[Link]:
    """The devices of this namespace with their addresses."""
    addresses: dict[int, list[str]] = {}
    found = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as route:
        for raw in _dump(route, _GETADDR, bytes(8)):
            entry = dict(_attributes(raw, 8))
            # Of an address with a peer, this is the own one.
            packed = entry.get(_IFA_LOCAL, entry[_IFA_ADDRESS])
            addresses.setdefault(struct.unpack_from("=I", raw, 4)[0], []).append(text_of(packed))
        for raw in _dump(route, _GETLINK, bytes(16)):
            kind, index, flags = struct.unpack_from("=HiI", raw, 2)
            entry = dict(_attributes(raw, 16))
            info = dict(_attributes(entry.get(_LINKINFO, b""), 0))
            found.append(
                Link(
                    index,
                    _text(entry[_IFNAME]),
                    kind == _LOOPBACK,
                    _text(info.get(_KIND, b"")),
                    U32.unpack(entry[_MTU])[0] if flags & _SENDS == _SENDS else 0,
                    entry.get(_MAC, b"").hex(":"),
                    U32.unpack(entry.get(_MASTER, bytes(4)))[0],
                    tuple(addresses.get(index, ())),
                )
            )
    return found


# rtnetlink(7), linux/netfilter/nf_tables.h
_NETLINK_NETFILTER, _GETGEN, _REQUEST, _GEN_ID = 12, 10 << 8 | 16, 1, 1
_NETLINK_ROUTE, _GETLINK, _GETADDR, _LOOPBACK = 0, 18, 22, 772
_SENDS = 0x10001  # IFF_UP, IFF_LOWER_UP
_REQUEST_DUMP, _INTERRUPTED, _ERROR, _DONE = 0x301, 0x10, 2, 3
_MAC, _IFNAME, _MTU, _MASTER, _LINKINFO, _KIND, _IFA_ADDRESS, _IFA_LOCAL = 1, 3, 4, 10, 18, 1, 1, 2
_HEADER = struct.Struct("=IHHII")


def _dump(route: socket.socket, request: int, body: bytes) -> Iterator[bytes]:
    """The bodies of the messages that answer a request for everything."""
    route.send(_HEADER.pack(_HEADER.size + len(body), request, _REQUEST_DUMP, 1, 0) + body)
    while True:
        raw = route.recv(1 << 18)
        at = 0
        while at < len(raw):
            size, kind, marks, _, _ = _HEADER.unpack_from(raw, at)
            # An interrupted answer has old and new devices; the caller asks again.
            if kind == _ERROR or marks & _INTERRUPTED:
                raise OSError(errno.EINTR, "a list of devices or addresses was interrupted")
            if kind == _DONE:
                return
            yield raw[at + _HEADER.size : at + size]
            at += size + 3 & ~3


def _attributes(raw: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    while at < len(raw):
        size, kind = struct.unpack_from("=HH", raw, at)
        yield kind & 0x3FFF, raw[at + 4 : at + size]
        at += size + 3 & ~3


_nft: Any = None


class Table(NamedTuple):
    """The agent's nftables table: names of chains with rules, and elements."""

    chains: dict[str, int]
    backends: dict[int, tuple[str, int]]
    sets: dict[str, frozenset[str]]


def table(name: str) -> Table | None:
    """The agent's table as libnftables lists it; None: it does not exist.

    It is listed again only if the generation of this namespace's tables has changed since.
    """
    global _listed
    # Before the list: a change in between is seen next time.
    key = name, _generation()
    if _listed is None or _listed[0] != key:
        _listed = key, _list(name)
    return _listed[1]


#: Name and generation, and the table that was listed.
_listed: tuple[tuple[str, bytes], Table | None] | None = None


def _generation() -> bytes:
    """What the kernel changes with every change of a table in this namespace."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as tables:
        tables.send(_HEADER.pack(_HEADER.size + 4, _GETGEN, _REQUEST, 1, 0) + bytes(4))
        raw = tables.recv(1 << 12)
    if _HEADER.unpack_from(raw)[1] == _ERROR:
        raise OSError(errno.EIO, "the generation of the tables cannot be read")
    return dict(_attributes(raw[: U32.unpack_from(raw)[0]], _HEADER.size + 4))[_GEN_ID]


def _list(name: str) -> Table | None:
    global _nft
    if _nft is None:
        import nftables

        _nft = nftables.Nftables()
        _nft.set_json_output(True)
        _nft.set_numeric_proto_output(True)
        _nft.set_stateless_output(True)
    status, output, _ = _nft.cmd(f"list table inet {name}")
    if status:
        return None
    counts: dict[str, int] = {}
    backends: dict[int, tuple[str, int]] = {}
    sets: dict[str, frozenset[str]] = {}
    for item in json.loads(output)["nftables"]:
        if "chain" in item:
            counts.setdefault(item["chain"]["name"], 0)
        elif "rule" in item:
            counts[item["rule"]["chain"]] = counts.get(item["rule"]["chain"], 0) + 1
        elif "map" in item and item["map"]["name"].startswith("backends"):
            for key, value in item["map"].get("elem", ()):
                address, port = value["concat"]
                backends[_tag(key)] = text_of(address), int(port)
        elif "set" in item:
            sets[item["set"]["name"]] = frozenset(map(_element, item["set"].get("elem", ())))
    return Table(counts, backends, sets)


def _tag(key: Any) -> int:
    """The backend id in a traffic class, which libnftables prints as a number or as two."""
    if isinstance(key, int):
        return key & 0xFFFFFF
    major, minor = str(key).split(":")
    return (int(major or "0", 16) << 16 | int(minor or "0", 16)) & 0xFFFFFF


def _element(element: Any) -> str:
    if isinstance(element, dict) and "prefix" in element:
        return f"{text_of(element['prefix']['addr'])}/{element['prefix']['len']}"
    if isinstance(element, dict) and "concat" in element:
        address, protocol, port = element["concat"]
        return f"{text_of(address)} {PROTOCOLS[int(protocol)].lower()} {port}"
    return text_of(element)


def nft(text: str) -> None:
    """Run lines of nft in this namespace."""
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True, capture_output=True)
