# SPDX-License-Identifier: Apache-2.0
"""Packets and bytes of services and endpoints, counted by a BPF program that is attached while ``top`` runs.

bpf/meter.bpf.c runs before the proxy's programs, on the same devices and maps, and changes no packet. Only this process
holds its links, so the kernel detaches it when the process ends. The agent leaves it attached: it recognizes it by its
name or, without the rights to read names, by a note next to the pins.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.loader.btf import StaleObjectError
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Object, load_object
from pyebpf_proxy.datapath.loader.programs import object_file, unused_maps
from pyebpf_proxy.datapath.node.tcx import announce, withdraw
from pyebpf_proxy.see import programs
from pyebpf_proxy.see.answers import SeeError
from pyebpf_proxy.see.maps import Pinned

_OWN = frozenset(("meters", "meter_one_in"))
_LEAST_ENTRIES = 4096


class Place(NamedTuple):
    """An endpoint of a service; address and port are empty if it is not known."""

    service: int
    address: bytes
    port: int


class Amount(NamedTuple):
    """Counts since the meter started."""

    packets: int
    bytes: int


class Meter:
    """The meter program on every device with a proxy program. SeeError if this kernel does not support it."""

    def __init__(self, maps: Pinned, endpoints: int) -> None:
        self._maps = maps
        self._links: dict[int, int] = {}
        self._pins = maps.folder.parent / "tcx"
        self._numbers: list[int] = []
        self._devices: frozenset[tuple[int, str]] = frozenset()
        self._raw: dict[bytes, bytes] = {}
        self._amounts: dict[Place, Amount] = {}
        attached = programs.read(maps)
        if attached.settings is None:
            raise SeeError("no program of pyebpf-proxy is attached")
        try:
            self._object = _load(maps, attached.settings, endpoints)
        except StaleObjectError as error:
            raise SeeError(f"{error.what} is missing in the BPF objects of this command") from None
        except BpfError as error:
            raise SeeError(f"the program cannot be loaded: {error}") from None
        try:
            self._one_in = self._object.maps["meter_one_in"].mmap().cast("Q")
            self._numbers = [tcx.described(each.fd)["prog_id"] for each in self._object.programs.values()]
            self._key = self._object.btf.struct("meter_key").packer("service", "port", "ipv6", "address")
            self._announce()
            self.follow()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Detach from all devices."""
        for link in self._links.values():
            os.close(link)
        self._links.clear()
        withdraw(self._pins, self._numbers)
        self._object.close()

    def _announce(self) -> None:
        try:
            announce(self._pins, self._numbers)
        except OSError as error:
            raise SeeError(f"the program cannot be announced to the agent: {self._pins}: {error.strerror}") from None

    @property
    def one_in(self) -> int:
        """The sampling interval: one packet of this many is counted."""
        return self._one_in[0] or 1

    @one_in.setter
    def one_in(self, number: int) -> None:
        self._one_in[0] = number

    def follow(self) -> None:
        """Attach to devices that now have a proxy program, and detach from the others."""
        there = frozenset(socket.if_nameindex())
        if there == self._devices:
            return
        self._devices = there
        wanted = {
            device.ifindex: "meter_l3" if device.program.name == "tc_l3" else "meter_ethernet"
            for device in programs.read(self._maps).devices
            if device.program is not None
        }
        for gone in self._links.keys() - wanted.keys():
            os.close(self._links.pop(gone))
        for ifindex in wanted.keys() - self._links.keys():
            try:
                self._links[ifindex] = self._object.programs[wanted[ifindex]].attach_tcx(ifindex)
            except BpfError as error:
                if error.errno == errno.EINVAL:
                    raise SeeError("the meter needs tcx, Linux 6.6 or newer") from None
                if error.errno != errno.ENODEV:
                    raise SeeError(str(error)) from None

    def read(self) -> Mapping[Place, Amount]:
        """The counts, summed over all CPUs."""
        meters = self._object.maps["meters"]
        for key, value in meters.items():
            if self._raw.get(key) == value:
                continue
            self._raw[key] = value
            service, port, ipv6, address = self._key.unpack(key)
            words = struct.unpack(f"={len(value) // 8}Q", value)
            place = Place(service, address[: 16 if ipv6 else 4] if port else b"", port)
            self._amounts[place] = Amount(sum(words[0::2]), sum(words[1::2]))
        return dict(self._amounts)


def _load(maps: Pinned, settings: Mapping[str, Any], endpoints: int) -> Object:
    path = object_file("meter", bool(settings["conntrack_lookup"]))
    with Object.open(path) as unset:
        layout = unset.btf.struct("settings")
        packed = layout.pack(**{name: value for name, value in settings.items() if name in layout.fields})
        wanted = frozenset(unset.sizes)
    shared = {name: maps.map(name) for name in wanted - _OWN if name in maps.names}
    without = (unused_maps(0, False) | wanted) - shared.keys() - _OWN
    sizes = {"meters": max(_LEAST_ENTRIES, 2 * endpoints)}
    return load_object(
        lambda: Object.open(path, rodata={"settings": packed}, max_entries=sizes, reuse=shared, without=without)
    )
