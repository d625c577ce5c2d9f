# SPDX-License-Identifier: Apache-2.0
"""This node for the data plane: its devices carry programs, its addresses are in maps, both follow netlink."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from pyebpf_proxy.config.addresses import Address
from pyebpf_proxy.datapath.node.follower import Follower
from pyebpf_proxy.datapath.node.plan import Link, NodeConfig, Wanted, plan
from pyebpf_proxy.datapath.node.tc import Filters

# A filter that others remove this often within a minute is left alone until the device changes.
REATTACH_LIMIT = 10
REATTACH_SECONDS = 60.0


class NodeMap(Protocol):
    """What is used of ``libbpf.Map``."""

    def update(self, key: bytes, value: bytes, flags: int = 0) -> None: ...

    def delete(self, key: bytes) -> bool: ...

    def items(self) -> Iterator[tuple[bytes, bytes]]: ...


class StructLayout(Protocol):
    """What is used of ``btf.Layout``."""

    def pack(self, **values: int | bytes) -> bytes: ...


class Layouts(Protocol):
    """What is used of ``btf.Btf``: the layouts of the structs in bpf/node_maps.h."""

    def struct(self, name: str, /) -> StructLayout: ...


Contents = dict[bytes, bytes]


def contents(wanted: Wanted, layouts: Layouts) -> dict[str, Contents]:
    """The maps of the node as bytes, by map name (bpf/node_maps.h)."""
    maps: dict[str, Contents] = {name: {} for name in MAPS}
    address_layouts = {size: layouts.struct(name) for size, name in ((4, "address4"), (16, "address6"))}
    key_layouts = {size: layouts.struct(name) for size, name in ((4, "masquerade4_key"), (16, "masquerade6_key"))}
    suffixes = {4: "4", 16: "6"}
    values = {accepted: layouts.struct("node_address").pack(node_ports=int(accepted)) for accepted in (False, True)}
    for address, node_ports in wanted.node_addresses.items():
        key = address_layouts[len(address)].pack(address=address)
        maps[f"node_addresses{suffixes[len(address)]}"][key] = values[node_ports]
    for prefix, address in wanted.masquerade.items():
        key = key_layouts[len(address)].pack(
            prefix_length=32 + prefix.prefix_length, device=prefix.device, address=prefix.address
        )
        maps[f"masquerade{suffixes[len(address)]}"][key] = address_layouts[len(address)].pack(address=address)
    layout = layouts.struct("node_device")
    for index, device in wanted.devices.items():
        value = layout.pack(
            bridge=device.bridge,
            bridge_mac=device.bridge_mac,
            pod_source=int(device.pod_source),
            passage=device.passage,
        )
        maps["devices"][struct.pack("=I", index)] = value
    return maps


MAPS = ("node_addresses4", "node_addresses6", "masquerade4", "masquerade6", "devices")


class Node:
    """Devices and addresses of the network namespace it was made in.

    ``maps`` are the five of :data:`MAPS`. What they hold from before is adopted: only differences are written.
    ``report`` takes one line for each thing that went wrong with one device or entry; the others are served.
    Make it, then :meth:`attach`; add :meth:`fileno` to the loop with :meth:`read` as reader.
    """

    def __init__(
        self,
        directory: Path,
        config: NodeConfig,
        maps: Mapping[str, NodeMap],
        layouts: Layouts,
        report: Callable[[str], None],
    ) -> None:
        self._config = config
        self._maps = maps
        self._layouts = layouts
        self._report = report
        self._said: set[str] = set()
        #: Told of every change of devices, after what follows from it was done.
        self.on_change: Callable[[Mapping[int, Link], Wanted], None] = lambda links, wanted: None
        self._written: dict[str, Contents] = {name: dict(maps[name].items()) for name in MAPS}
        self._programs: Mapping[str, int] = {}
        self._attached: dict[int, str] = {}
        self._reattached: dict[int, list[float]] = {}
        self._filters = Filters(directory)
        try:
            self._follower = Follower()
        except BaseException:
            self._filters.close()
            raise
        self._wanted = plan(self._follower.state, config)
        self._write()

    @property
    def attached(self) -> dict[int, str]:
        """Devices that carry a program, by ifindex, with the program's name."""
        return dict(self._attached)

    @property
    def wanted(self) -> Wanted:
        return self._wanted

    @property
    def addresses(self) -> list[Address]:
        """Every address of a device."""
        return [address for _, address, _ in self._follower.state.addresses]

    def fileno(self) -> int:
        return self._follower.fileno()

    def close(self) -> None:
        """Stops following. Programs, filters and maps stay as they are."""
        self._follower.close()
        self._filters.close()

    def configure(self, config: NodeConfig) -> None:
        """Other configuration, or node IPs that have become known."""
        if config != self._config:
            self._config = config
            self._replan()

    def attach(self, programs: Mapping[str, int]) -> None:
        """Puts programs (name → fd, which must stay open) on every entrance; replaces those of a former run atomically.

        A device that carries our filter but is no entrance any more loses it.
        """
        self._programs = dict(programs)
        for index in self._filters.attached():
            if index not in self._wanted.programs:
                self._detach(index)
        for index, name in self._wanted.programs.items():
            self._attach(index, name)
        self.changed()

    def changed(self) -> None:
        """Tell once more how things are."""
        self.on_change(self._follower.state.links, self._wanted)

    def read(self) -> None:
        """Takes in what netlink has brought and brings maps and devices up to date."""
        events = self._follower.read()
        for index in events.gone:
            self._attached.pop(index, None)
            self._reattached.pop(index, None)
            self._filters.forget(index)
        if events.changed:
            self._replan()
        for index in events.filters & self._attached.keys():
            self._check(index)

    def _replan(self) -> None:
        self._wanted = plan(self._follower.state, self._config)
        self._write()
        if not self._programs:
            return
        for index in [index for index in self._attached if index not in self._wanted.programs]:
            self._detach(index)
        for index, name in self._wanted.programs.items():
            if self._attached.get(index) != name:
                self._attach(index, name)
        self.changed()

    def _write(self) -> None:
        for name in self._wanted.unsupported:
            self._say(f"device {name}: its link layer is not supported, services are not served to packets from it")
        for name, entries in contents(self._wanted, self._layouts).items():
            written = self._written[name]
            self._add(name, entries)
            stale = [key for key in written if key not in entries]
            for key in stale:
                self._maps[name].delete(key)
                del written[key]
            if stale:
                self._add(name, entries)  # what found the map full before

    def _add(self, name: str, entries: Contents) -> None:
        written = self._written[name]
        for key, value in entries.items():
            if written.get(key) == value:
                continue
            try:
                self._maps[name].update(key, value)
            except OSError as error:
                self._say(f"map {name}: {error}")
            else:
                written[key] = value

    def _attach(self, index: int, name: str) -> None:
        device = self._name(index)
        try:
            if self._filters.attach(index, device, self._programs[name]):
                self._attached[index] = name
        except OSError as error:
            self._say(str(error))

    def _detach(self, index: int) -> None:
        self._attached.pop(index, None)
        try:
            self._filters.detach(index, self._name(index))
        except OSError as error:
            self._say(str(error))

    def _check(self, index: int) -> None:
        """Somebody removed a filter or qdisc there: if it was ours, it goes back."""
        if self._filters.is_attached(index):
            return
        now = time.monotonic()
        recent = [then for then in self._reattached.get(index, []) if now - then < REATTACH_SECONDS]
        if len(recent) >= REATTACH_LIMIT:
            self._say(f"device {self._name(index)}: somebody keeps removing our tc filter, it is left off")
            self._attached.pop(index)
            return
        self._reattached[index] = [*recent, now]
        self._report(f"device {self._name(index)}: somebody removed our tc filter, attaching it again")
        self._attach(index, self._attached.pop(index))

    def _name(self, index: int) -> str:
        link = self._follower.state.links.get(index)
        return link.name if link else f"number {index}"

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._report(text)
