# SPDX-License-Identifier: Apache-2.0
"""The attached programs and their load-time settings, read from the kernel without the agent.

Opening programs by id requires CAP_SYS_ADMIN. Without it, as in the agent's own pod, the agent is asked.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from pyebpf_proxy.datapath.loader import kernel_objects
from pyebpf_proxy.datapath.loader.btf import StaleObjectError
from pyebpf_proxy.datapath.loader.kernel_objects import ProgramInfo
from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.loader.programs import Settings
from pyebpf_proxy.datapath.node.attachments import Attachments
from pyebpf_proxy.datapath.node.follower import Follower
from pyebpf_proxy.datapath.node.plan import Link, State, program_for
from pyebpf_proxy.see import local
from pyebpf_proxy.see.answers import SeeError
from pyebpf_proxy.see.maps import Pinned

XdpMode = Literal["", "native", "generic", "foreign"]


class Device(NamedTuple):
    """An ingress device. ``program``: the attached proxy program or None. ``wanted``: the name of the desired one.

    ``xdp``: how the proxy's XDP program is attached; "foreign" if another XDP program is attached.
    """

    ifindex: int
    name: str
    wanted: str
    program: ProgramInfo | None
    same_maps: bool
    xdp: XdpMode = ""
    mac: bytes = bytes(6)
    #: If false, by a filter of a clsact qdisc.
    by_tcx: bool = True


class Programs(NamedTuple):
    """``devices`` with an attached or desired program. ``settings`` as in bpf/settings.h; None if none is attached.

    ``hidden``: why the settings of attached programs cannot be read, else "".
    """

    devices: list[Device]
    settings: Mapping[str, Any] | None
    links: list[str]
    node: State
    hidden: str = ""


def read(maps: Pinned) -> Programs:
    """Everything attached in this network namespace. Raises SeeError."""
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
            infos, settings = _from_agent(maps, ids, own)
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
    """The proxy's ingress program by device, and the devices that have it by tcx. Raises OSError."""
    attachments = Attachments(pins, pins, use_tcx=True)
    try:
        return attachments.ingress_programs(), attachments.by_tcx()
    finally:
        attachments.close()


def _xdp_pins(folder: Path) -> Iterator[tuple[int, XdpMode]]:
    """The XDP mode of each device (datapath/node/xdp.py names the pins)."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        index, _, mode = name.partition("-")
        if index.isdigit():
            yield int(index), "generic" if mode == "generic" else "native"


def _info(number: int) -> ProgramInfo | None:
    """The program with this id; None if it has just been replaced. Raises BpfError."""
    try:
        return kernel_objects.program_info(number)
    except BpfError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


_FromAgent = tuple[dict[int, ProgramInfo], Mapping[str, Any] | None]
_HIDDEN = (
    "reading the programs' settings requires CAP_SYS_ADMIN, and the agent, which knows them, does not answer:"
    " run this command on the node as root"
)


def _from_agent(maps: Pinned, ids: Mapping[int, int], own: int) -> _FromAgent:
    """The agent's report on the programs with these ids, by device: their names and settings."""
    known = (local.state(maps.directory) or local.NOTHING)["datapath"]
    devices = known.get("devices", {})
    infos = {
        index: ProgramInfo(number, str(devices.get(str(index), {}).get("program") or "unknown"), frozenset((own,)))
        for index, number in ids.items()
    }
    return infos, _settings_of_agent(known.get("settings", {}))


def _settings_of_agent(answer: Mapping[str, bool | int | str]) -> Mapping[str, Any] | None:
    """The settings in the agent's answer; None if they are missing or are none of this version."""
    try:
        values = {name: bytes.fromhex(v) if isinstance(v, str) else v for name, v in answer.items()}
        made = asdict(msgspec.convert(values, Settings, builtin_types=(bytes,)))
    except ValueError:  # also msgspec's
        return None
    sizes = {field.name: len(field.default) for field in fields(Settings) if isinstance(field.default, bytes)}
    return made if all(len(made[name]) == size for name, size in sizes.items()) else None


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
    """The name of a device of this network namespace; its index if it does not exist any more."""
    try:
        return socket.if_indextoname(ifindex)
    except OSError:
        return f"device {ifindex}"
