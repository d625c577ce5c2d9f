# SPDX-License-Identifier: Apache-2.0
"""The proxy's XDP program on devices, with pinned links: on which devices, and which frames they can send.

A link belongs to its owner: the proxy never replaces another program, nor can another program replace the proxy's. A
new version of the proxy's program replaces the former one in the link atomically. The pin ``<folder>/<ifindex>-<mode>``
keeps the link when the agent is gone; removing the pin detaches the program.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from pyebpf_proxy.common.bpf_constants import ANY_FRAMES, NO_FRAMES, ONE_BUFFER
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Program
from pyebpf_proxy.datapath.loader.libbpf import Link as BpfLink
from pyebpf_proxy.datapath.node import ethtool
from pyebpf_proxy.datapath.node.netdev import BASIC, NDO_XMIT, NDO_XMIT_SG, RX_SG
from pyebpf_proxy.datapath.node.plan import ARPHRD_ETHER, TC_ETHERNET, Link
from pyebpf_proxy.datapath.repairs import Repair, repairs

Mode = Literal["native", "generic"]
#: In the list of devices: every physical device with XDP in its driver.
EVERY_PHYSICAL = "*"
# Devices whose other end is on this machine. XDP_TX reaches it only if it has XDP itself (6.18: with only GRO, frames
# stay in its queue until something else wakes it); the kernel reports whether a redirect to the device works.
_PAIRS = frozenset({"veth", "netkit"})


class DeviceMap(Protocol):
    """The used part of ``libbpf.Map``."""

    def update(self, key: bytes, value: bytes, flags: int = 0) -> None: ...

    def delete(self, key: bytes) -> bool: ...


class Layout(Protocol):
    """The used part of ``btf.Layout``."""

    def pack(self, **values: int | bytes) -> bytes: ...


class Entry(NamedTuple):
    """``struct xdp_device`` of bpf/xdp_maps.h."""

    mac: bytes
    starts_flow: int
    returns: int
    takes: int


@dataclass(frozen=True)
class XdpConfig:
    """``devices``: names, or :data:`EVERY_PHYSICAL`. ``pod_sockets``: whether socketLB is "all"."""

    devices: tuple[str, ...]
    mode: Mode = "native"
    pod_sockets: bool = False


@dataclass
class Plan:
    """Devices to attach the program to; devices that cannot have it, and why; the map ``xdp_devices``."""

    attach: dict[int, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)


def plan(
    links: Mapping[int, Link],
    programs: Mapping[int, str],
    features: Mapping[int, int] | None,
    config: XdpConfig,
    takes_tags_off: Callable[[str], bool],
) -> Plan:
    """Pure. ``programs``: the tc program of each device. ``features``: None if the kernel does not report them."""
    found = Plan()
    for index, link in links.items():
        named = link.name in config.devices
        if not named and not (EVERY_PHYSICAL in config.devices and _is_physical(link, features)):
            continue
        why = _why_not(link, links, programs, takes_tags_off)
        if not why:
            found.attach[index] = link.name
        elif named:
            found.refused[link.name] = why
    for name in config.devices:
        if name != EVERY_PHYSICAL and all(link.name != name for link in links.values()):
            found.refused[name] = "there is no such device yet"
    for index, link in links.items():
        bits = features.get(index, 0) if features is not None else 0
        takes = _frames(bits, NDO_XMIT, NDO_XMIT_SG)
        if index in found.attach:
            starts_flow = not (config.pod_sockets and link.kind in _PAIRS)
            # Every driver with XDP supports XDP_TX.
            returns = NO_FRAMES if link.kind in _PAIRS else _frames(bits | BASIC, BASIC, RX_SG)
            found.entries[index] = Entry(link.mac, int(starts_flow), returns, takes)
        elif takes:
            found.entries[index] = Entry(bytes(6), 0, NO_FRAMES, takes)
    return found


def _is_physical(link: Link, features: Mapping[int, int] | None) -> bool:
    if link.kind or link.type != ARPHRD_ETHER:
        return False
    # If the kernel does not report it, an attempt to attach shows it.
    return features is None or bool(features.get(link.ifindex, 0) & BASIC)


def _why_not(
    link: Link, links: Mapping[int, Link], programs: Mapping[int, str], takes_tags_off: Callable[[str], bool]
) -> str:
    if link.type != ARPHRD_ETHER:
        return "its packets have no Ethernet header"
    if link.master:
        master = links.get(link.master)
        return f"it is a port of {master.name if master else 'another device'}"
    if programs.get(link.ifindex) != TC_ETHERNET:
        return "it does not have the tc program, which handles what XDP leaves"
    tagged = any(upper.kind == "vlan" and upper.lower == link.ifindex for upper in links.values())
    if tagged and takes_tags_off(link.name):
        return f"it has VLAN devices and strips their tags before XDP sees a frame (ethtool -K {link.name} rxvlan off)"
    return ""


def _frames(bits: int, one: int, several: int) -> int:
    if not bits & one:
        return NO_FRAMES
    return ANY_FRAMES if bits & several else ONE_BUFFER


def takes_tags_off(device: str) -> bool:
    """Whether a device strips VLAN tags from frames (ethtool: rx-vlan-offload), in this network namespace."""
    try:
        return bool(ethtool.get(device, ethtool.GFLAGS) & ethtool.RXVLAN)
    except OSError:
        return False


class Xdp:
    """The program on the devices of this network namespace. ``warn`` is called with one line for each failure."""

    def __init__(
        self,
        program: Program,
        table: DeviceMap,
        layout: Layout,
        config: XdpConfig,
        folder: Path,
        warn: Callable[[str], None],
    ) -> None:
        self._program = program
        self._table = table
        self._layout = layout
        self._config = config
        self._folder = folder
        self._warn = warn
        self._reported: dict[str, str] = {}
        self._written: dict[int, Entry] = {}
        #: How often the map was changed.
        self.writes = 0
        #: Names of the devices that have the program, by ifindex.
        self.attached: dict[int, str] = {}

    @property
    def mode(self) -> Mode:
        return self._config.mode

    def apply(
        self, links: Mapping[int, Link], programs: Mapping[int, str], features: Mapping[int, int] | None
    ) -> list[str]:
        """Bring devices and map up to date; returns the names of devices that newly have the program."""
        wanted = plan(links, programs, features, self._config, takes_tags_off)
        for index, entry in wanted.entries.items():
            if self._written.get(index) != entry:
                self._table.update(struct.pack("=I", index), self._layout.pack(**entry._asdict()))
                self._written[index] = entry
                self.writes += 1
        for pin in _pins(self._folder):
            index, mode = _of(pin)
            if index not in wanted.attach or mode != self._config.mode:
                # The device is gone, or must not have the program any more, or not in this mode.
                _detach_link(pin)
        for index, name in list(self.attached.items()):
            if index not in wanted.attach:
                del self.attached[index]
            elif self._is_attached(index):
                self.attached[index] = wanted.attach[index]  # it may have been renamed
            else:
                self._warn(f"device {name}: the agent's XDP program is gone, attaching it again")
                repairs.note(Repair.XDP_PROGRAM)
                del self.attached[index]
        for name, why in wanted.refused.items():
            self._report(name, why)
        fresh = [name for index, name in wanted.attach.items() if index not in self.attached and self._put(index, name)]
        for index in [index for index in self._written if index not in wanted.entries]:
            self._table.delete(struct.pack("=I", index))
            del self._written[index]
            self.writes += 1
        return fresh

    def _pin(self, index: int) -> Path:
        return self._folder / f"{index}-{self._config.mode}"

    def _is_attached(self, index: int) -> bool:
        """False: the pin or the link was removed, or another device has the ifindex. Netlink reports none of this."""
        if not self._folder.is_dir():
            return True  # the bpffs is unmounted, and something else holds it: KeptPins restores it
        try:
            link = BpfLink.open_pinned(self._pin(index))
        except BpfError:
            return False
        try:
            return link.attached_to("ifindex") == index
        finally:
            link.close()

    def _put(self, index: int, name: str) -> bool:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        pin = self._pin(index)
        try:
            if not (pin.exists() and self._replace(pin, index)):
                pin.unlink(missing_ok=True)
                self._program.attach_xdp(index, self._config.mode == "generic", pin)
        except BpfError as error:
            if error.errno != errno.ENODEV:
                self._report(name, _why(error, self._config.mode))
            return False
        self._reported.pop(name, None)
        self.attached[index] = name
        return True

    def _replace(self, pin: Path, index: int) -> bool:
        """Replaces the program of a former run. False: its device is gone, and the ifindex was reused."""
        link = BpfLink.open_pinned(pin)
        try:
            if link.attached_to("ifindex") != index:
                return False
            link.update(self._program)
        finally:
            link.close()
        return True

    def _report(self, name: str, why: str) -> None:
        if self._reported.get(name) != why:
            self._reported[name] = why
            self._warn(f"no XDP on {name}: {why}")


def _why(error: BpfError, mode: Mode) -> str:
    if error.errno in (errno.EBUSY, errno.EEXIST):
        return "it already has another XDP program, which stays"
    if error.errno == errno.EOPNOTSUPP and mode == "native":
        return "its driver has none (xdpMode: generic works everywhere, and is slower than tc alone)"
    if error.errno in (errno.EINVAL, errno.ERANGE, errno.ENOMEM, errno.EOPNOTSUPP):
        return f"its driver refuses: {error}; its MTU, its number of queues or LRO may be the reason"
    return str(error)


def _pins(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _of(pin: Path) -> tuple[int, str]:
    index, _, mode = pin.name.partition("-")
    return (int(index) if index.isdigit() else 0), mode


def release(folder: Path) -> int:
    """Detach the program from every device; returns how many there were."""
    pins = _pins(folder)
    for pin in pins:
        _detach_link(pin)
    return len(pins)


def _detach_link(pin: Path) -> None:
    """Detaches the link at once. Removing only the pin would detach it later, and the device would stay occupied."""
    try:
        link = BpfLink.open_pinned(pin)
        try:
            link.detach()
        finally:
            link.close()
    except BpfError:
        pass  # Its device is gone.
    pin.unlink(missing_ok=True)
