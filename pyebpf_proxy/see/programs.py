# SPDX-License-Identifier: Apache-2.0
"""Which programs are where, and what they were told when they were loaded. Read from the kernel, without the agent.

Programs are had by number, which takes CAP_SYS_ADMIN. Who lacks it, as in the agent's own pod, is told by the agent.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pyebpf_proxy.datapath.loader import kernel_objects
from pyebpf_proxy.datapath.loader.btf import StaleObjectError
from pyebpf_proxy.datapath.loader.kernel_objects import ProgramInfo
from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.node.attachments import Attachments
from pyebpf_proxy.datapath.node.follower import Follower
from pyebpf_proxy.datapath.node.plan import Link, State, program_for
from pyebpf_proxy.see import local
from pyebpf_proxy.see.answers import SeeError
from pyebpf_proxy.see.maps import Pinned

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
    #: Or by a filter of a clsact qdisc.
    by_tcx: bool = True


class Programs(NamedTuple):
    """``devices`` that carry a program or should; ``settings`` as in bpf/settings.h, None: nothing attached.

    ``hidden``: programs are attached, but what they were loaded with cannot be seen; says why.
    """

    devices: list[Device]
    settings: Mapping[str, Any] | None
    links: list[str]
    node: State
    hidden: str = ""


def read(maps: Pinned) -> Programs:
    """Everything attached in this network namespace. SeeError."""
    try:
        follower = Follower()
        try:
            node = follower.state
        finally:
            follower.close()
        ids, by_tcx = _ids(maps.folder.parent / "tcx")
        own = kernel_objects.map_info(maps.map("services").fd).id
        modes = dict(_xdp_pins(maps.folder / "xdp"))
        hidden = ""
        try:
            infos = {index: info for index, number in ids.items() if (info := _info(number)) is not None}
            settings = next((s for info in infos.values() if (s := _settings(info)) is not None), None)
        except BpfError as error:
            if error.errno != errno.EPERM:
                raise
            infos, settings = _told(maps, ids, own)
            hidden = _HIDDEN if ids and settings is None else ""
        devices = [
            _device(link, node, infos, own, modes)._replace(by_tcx=link.ifindex in by_tcx)
            for link in node.links.values()
        ]
        found = [device for device in devices if device.program is not None or device.wanted]
    except BpfError as error:
        raise SeeError(str(error)) from None
    except OSError as error:
        raise SeeError(f"devices and their programs: {error.strerror or error}") from None
    links = maps.folder / "links"
    return Programs(found, settings, sorted(os.listdir(links)) if links.is_dir() else [], node, hidden)


def _ids(pins: Path) -> tuple[dict[int, int], set[int]]:
    """The program of ours at ingress, by device, and which devices have it by tcx. OSError."""
    attachments = Attachments(pins, pins, use_tcx=True)
    try:
        return attachments.ingress_programs(), attachments.by_tcx()
    finally:
        attachments.close()


def _xdp_pins(folder: Path) -> Iterator[tuple[int, XdpMode]]:
    """How our program was put on each device (datapath/node/xdp.py names the pins)."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        index, _, mode = name.partition("-")
        if index.isdigit():
            yield int(index), "generic" if mode == "generic" else "native"


def _info(number: int) -> ProgramInfo | None:
    """None: it was replaced just now. BpfError."""
    try:
        return kernel_objects.program_info(number)
    except BpfError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


_Told = tuple[dict[int, ProgramInfo], Mapping[str, Any] | None]
_HIDDEN = (
    "what the programs were loaded with takes CAP_SYS_ADMIN to see, and the agent, which knows it, does not answer:"
    " ask on the node as root"
)


def _told(maps: Pinned, ids: Mapping[int, int], own: int) -> _Told:
    """What the agent says of the programs with these ids, by device. Of a program: its name; that it is ours."""
    known = (local.state(maps.directory) or {}).get("datapath", {})
    devices = known.get("devices", {})
    infos = {
        index: ProgramInfo(number, str(devices.get(str(index), {}).get("program") or "unknown"), frozenset((own,)))
        for index, number in ids.items()
    }
    settings = known.get("settings")
    if settings is None:
        return infos, None
    return infos, {name: bytes.fromhex(v) if isinstance(v, str) else v for name, v in settings.items()}


def _device(
    link: Link, node: State, infos: Mapping[int, ProgramInfo], own: int, modes: Mapping[int, XdpMode]
) -> Device:
    program = infos.get(link.ifindex)
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
