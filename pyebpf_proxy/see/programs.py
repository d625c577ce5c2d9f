# SPDX-License-Identifier: Apache-2.0
"""Which programs are where, and what they were told when they were loaded. Read from the kernel, without the agent."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pyebpf_proxy.datapath.connections.rawlink import RawLink, attributes
from pyebpf_proxy.datapath.loader import kernel_objects
from pyebpf_proxy.datapath.loader.btf import StaleObjectError
from pyebpf_proxy.datapath.loader.kernel_objects import ProgramInfo
from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.node.follower import Follower
from pyebpf_proxy.datapath.node.plan import Link, State, program_for
from pyebpf_proxy.datapath.node.tc import HANDLE, INGRESS, NAME, PRIORITY
from pyebpf_proxy.see.answers import SeeError
from pyebpf_proxy.see.maps import Pinned

NETLINK_ROUTE, RTM_GETTFILTER = 0, 46
_TCMSG = struct.Struct("=B3xiIII")
# include/uapi/linux/rtnetlink.h, pkt_cls.h; pyroute2 does not know the last one
_OPTIONS, _BPF_NAME, _BPF_ID = 2, 7, 11

XdpMode = Literal["", "native", "generic", "foreign"]


class Device(NamedTuple):
    """A device that packets enter by. ``program``: what it carries of ours, None: nothing; ``wanted``: its name.

    ``xdp``: how it carries our XDP program; "foreign": it carries somebody else's.
    """

    ifindex: int
    name: str
    wanted: str
    program: ProgramInfo | None
    same_maps: bool
    xdp: XdpMode = ""
    mac: bytes = bytes(6)


class Programs(NamedTuple):
    """``devices`` that carry a program or should; ``settings`` as in bpf/settings.h, None: nothing attached."""

    devices: list[Device]
    settings: Mapping[str, Any] | None
    links: list[str]
    node: State


def read(maps: Pinned) -> Programs:
    """Everything attached in this network namespace. SeeError."""
    try:
        follower = Follower()
        try:
            node = follower.state
        finally:
            follower.close()
        ids = dict(_attached(node.links))
        own = kernel_objects.map_info(maps.map("services").fd).id
        modes = dict(_xdp_pins(maps.folder / "xdp"))
        devices = [_device(link, node, ids, own, modes) for link in node.links.values()]
        found = [device for device in devices if device.program is not None or device.wanted]
        settings = next((s for d in found if d.program is not None and (s := _settings(d.program)) is not None), None)
    except BpfError as error:
        raise SeeError(str(error)) from None
    except OSError as error:
        raise SeeError(f"devices and their programs: {error.strerror or error}") from None
    links = maps.folder / "links"
    return Programs(found, settings, sorted(os.listdir(links)) if links.is_dir() else [], node)


def _attached(devices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The program that our filter runs, for every device that has one. OSError."""
    with RawLink(NETLINK_ROUTE) as link:
        for device in devices:
            for message in link.dump(RTM_GETTFILTER, _TCMSG.pack(0, device, 0, INGRESS, 0)):
                _, _, handle, _, info = _TCMSG.unpack_from(message)
                known = {kind: (begin, end) for kind, begin, end in attributes(message, _TCMSG.size, len(message))}
                if handle != HANDLE or info >> 16 != PRIORITY or _OPTIONS not in known:
                    continue
                inner = {kind: message[begin:end] for kind, begin, end in attributes(message, *known[_OPTIONS])}
                if inner.get(_BPF_NAME, b"").rstrip(b"\0").decode() == NAME and _BPF_ID in inner:
                    yield device, int.from_bytes(inner[_BPF_ID], sys.byteorder)


def _xdp_pins(folder: Path) -> Iterator[tuple[int, XdpMode]]:
    """How our program was put on each device (datapath/node/xdp.py names the pins)."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        index, _, mode = name.partition("-")
        if index.isdigit():
            yield int(index), "generic" if mode == "generic" else "native"


def _device(link: Link, node: State, ids: Mapping[int, int], own: int, modes: Mapping[int, XdpMode]) -> Device:
    program = None
    if link.ifindex in ids:
        try:
            program = kernel_objects.program_info(ids[link.ifindex])
        except BpfError:
            program = None  # replaced just now
    wanted = program_for(link, node.links) or ""
    xdp = modes.get(link.ifindex, "foreign") if link.xdp else ""
    same = program is not None and own in program.map_ids
    return Device(link.ifindex, link.name, wanted, program, same, xdp, link.mac)


def _settings(program: ProgramInfo) -> Mapping[str, Any] | None:
    try:
        found = kernel_objects.constants(program, "settings")
        if found is None:
            return None
        btf, raw = found
        return btf.struct("settings").unpack(raw)
    except StaleObjectError:
        return None


def device_name(ifindex: int) -> str:
    """The name of a device of this network namespace, its number where it is gone."""
    try:
        return socket.if_indextoname(ifindex)
    except OSError:
        return f"device {ifindex}"
