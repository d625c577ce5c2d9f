# SPDX-License-Identifier: Apache-2.0
"""Keeps programs on the devices and the node's addresses in maps up to date, by netlink."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Container, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from pyebpf_proxy.config.addresses import Address
from pyebpf_proxy.datapath.node.attachments import GONE, Attachments, bridge_rules
from pyebpf_proxy.datapath.node.follower import Follower
from pyebpf_proxy.datapath.node.plan import (
    OBSERVED,
    TC_EGRESS,
    Link,
    NodeConfig,
    Others,
    Wanted,
    may_be_source,
    plan,
    program_for,
    source_addresses,
)
from pyebpf_proxy.datapath.repairs import Repair, repairs

# If others remove a program this often within a minute, it is attached again a minute later.
REATTACH_LIMIT = 10
REATTACH_SECONDS = 60.0
# Netlink does not report tcx programs and bridge rules, and not always the other end of a veth: these are checked at
# this interval.
LOOK_SECONDS = 3.0
# A program that could not be attached is tried again after LOOK_SECONDS, then after twice as long, at most after this.
LONGEST_RETRY_SECONDS = 60.0
# The kernel holds its lock of all network settings (RTNL) for 6 to 15 ms while it attaches a program. In this time the
# other end of a veth that has just come up does not send, because its queue is started with the same lock. If the reply
# to an ARP request is lost so, the kernel repeats the request a second later. The queue starts within this time.
SETTLE_SECONDS = 0.005
# The loop attaches programs for so long at a time. Then Service changes and the heartbeat of the fast path have their
# turn: if 300 pods start at once, as after a reboot, all attachments together take several seconds.
TURN_SECONDS = 0.1


class NodeMap(Protocol):
    """The used part of ``libbpf.Map``."""

    def update(self, key: bytes, value: bytes, flags: int = 0) -> None: ...

    def delete(self, key: bytes) -> bool: ...

    def items(self) -> Iterator[tuple[bytes, bytes]]: ...


class StructLayout(Protocol):
    """The used part of ``btf.Layout``."""

    def pack(self, **values: int | bytes) -> bytes: ...


class Layouts(Protocol):
    """The used part of ``btf.Btf``: the layouts of the structs in bpf/node_maps.h."""

    def struct(self, name: str, /) -> StructLayout: ...


Contents = dict[bytes, bytes]


def contents(wanted: Wanted, layouts: Layouts) -> dict[str, Contents]:
    """The contents of the node's maps as bytes, by map name (bpf/node_maps.h)."""
    maps: dict[str, Contents] = {name: {} for name in MAPS}
    address_layouts = {size: layouts.struct(name) for size, name in ((4, "address4"), (16, "address6"))}
    suffixes = {4: "4", 16: "6"}
    values = {accepted: layouts.struct("node_address").pack(node_ports=int(accepted)) for accepted in (False, True)}
    for address, node_ports in wanted.node_addresses.items():
        key = address_layouts[len(address)].pack(address=address)
        maps[f"node_addresses{suffixes[len(address)]}"][key] = values[node_ports]
    layout = layouts.struct("node_device")
    for index, device in wanted.devices.items():
        value = layout.pack(
            bridge=device.bridge,
            bridge_mac=device.bridge_mac,
            pod_source=int(device.pod_source),
            redirect=device.redirect,
            mtu=device.mtu,
        )
        maps["devices"][struct.pack("=I", index)] = value
    return maps


MAPS = ("node_addresses4", "node_addresses6", "devices")


class DeviceState(NamedTuple):
    """A device in the data plane: ``limit`` is the reason if ``redirect`` (enum redirect_mode) is not the best one."""

    name: str
    program: str
    redirect: int
    limit: str
    others: Others


class _Failure(NamedTuple):
    """A program could not be attached to a device. ``due``: when to try again, after ``wait`` seconds."""

    text: str
    wait: float
    due: float


class Node:
    """Devices and addresses of the network namespace in which it is created.

    ``maps`` are those of :data:`MAPS`. Their existing entries are adopted: only differences are written. ``pins`` is a
    folder in a bpffs, for the links of programs on devices. ``report`` gets one line for each failure with a device or
    an entry; the others are served. Create it, then :meth:`attach`, then :meth:`follow`.
    """

    def __init__(
        self,
        directory: Path,
        config: NodeConfig,
        maps: Mapping[str, NodeMap],
        layouts: Layouts,
        report: Callable[[str], None],
        pins: Path,
        use_tcx: bool | None = None,
    ) -> None:
        self._config = config
        self._maps = maps
        self._layouts = layouts
        self._report = report
        self._reported: set[str] = set()
        #: Called after every change of devices, when the change was applied.
        self.on_change: Callable[[Mapping[int, Link], Wanted], None] = lambda links, wanted: None
        #: With the fast path: packed addresses that no device that is up has any more. At first those of a former run.
        #: The callee of ``on_gone`` empties the set.
        self.gone: set[bytes] = set()
        self.on_gone: Callable[[], None] = lambda: None
        #: Called when the entry of a device in the map has changed; not for a new entry, which changes no known one.
        self.on_devices: Callable[[], None] = lambda: None
        #: Called with the ifindexes of devices that are gone, of which no other device has one yet.
        self.on_devices_gone: Callable[[Set[int]], None] = lambda indexes: None
        #: Called before the first program is attached, and after every change of devices and of the other programs on
        #: them, with whether any comes after the agent's at ingress.
        self.on_programs_behind: Callable[[bool], None] = lambda any_: None
        self._written: dict[str, Contents] = {name: dict(maps[name].items()) for name in MAPS}
        self._programs: Mapping[str, int] = {}
        self._attached: dict[int, str] = {}
        self._reattached: dict[int, list[float]] = {}
        self._failures: dict[int, _Failure] = {}
        #: While :meth:`follow` follows the node: it calls :meth:`_go_on` as soon as others have had their turn.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_turn: asyncio.Handle | None = None
        self._error: Callable[..., None] = lambda text, error: None
        self._attachments = Attachments(directory, pins, use_tcx)
        try:
            self._follower = Follower()
        except BaseException:
            self._attachments.close()
            raise
        #: As the last :meth:`look` has found them.
        self._chains: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._see_others()
        self._wanted = plan(self._follower.state, config)
        #: As the last :meth:`_note_sources` has found them; before it those of a former run. A device of those may have
        #: gone down since.
        self._sources = {
            key for name, entries in self._written.items() if name != "devices" for key in entries if may_be_source(key)
        }
        self._write()

    @property
    def attached(self) -> dict[int, str]:
        """Devices that have a program, by ifindex, with the program's name."""
        return dict(self._attached)

    @property
    def wanted(self) -> Wanted:
        return self._wanted

    @property
    def addresses(self) -> list[Address]:
        """Every address of a device."""
        return [entry.address for entry in self._follower.state.addresses.values()]

    @property
    def indexes(self) -> Set[int]:
        """The ifindex of every device, as reported by netlink so far."""
        return self._follower.state.links.keys()

    @property
    def uses_tcx(self) -> bool:
        """Whether programs are attached by tcx; otherwise by filters of a clsact qdisc."""
        return self._attachments.uses_tcx

    @property
    def devices(self) -> dict[int, DeviceState]:
        """Every device that has a program or sends packets of the fast path, by ifindex."""
        state, wanted = self._follower.state, self._wanted
        return {
            index: DeviceState(
                self._name(index),
                self._attached.get(index, ""),
                device.redirect,
                wanted.limits.get(index, ""),
                state.others.get(index, Others()),
            )
            for index, device in wanted.devices.items()
        }

    def fileno(self) -> int:
        return self._follower.fileno()

    def close(self) -> None:
        """Stop following. Programs, filters and maps stay as they are."""
        self._follower.close()
        self._attachments.close()

    def configure(self, config: NodeConfig) -> None:
        """Apply another configuration, or node IPs that have become known."""
        if config != self._config:
            self._config = config
            self._replan()

    def attach(self, programs: Mapping[str, int]) -> None:
        """Attaches programs (name → fd, which must stay open) to every entrance; replaces former ones atomically.

        A device that has a program of this instance but is no longer an entrance loses it.
        """
        self._programs = dict(programs)
        self._attachments.tidy(self._follower.state.links)
        # First: with many devices the last one follows a second later.
        self._note_programs_behind()
        for index in self._attachments.attached():
            if index not in self._wanted.programs:
                self._detach(index)
        for index, name in self._wanted.programs.items():
            self._attach(index, name)
        self._see_others()
        self._replan()

    def changed(self) -> None:
        """Call ``on_change`` again with the current state."""
        self.on_change(self._follower.state.links, self._wanted)

    def read(self) -> None:
        """Processes netlink messages and brings maps and devices up to date. OSError: the next look tries again."""
        events = self._follower.read()
        with self._applying():
            for index in events.gone:
                self._attached.pop(index, None)
                self._reattached.pop(index, None)
                self._failures.pop(index, None)
                self._attachments.forget(index)
            if gone := events.gone - self.indexes:
                self.on_devices_gone(gone)
            for index in events.filters & self._attached.keys():
                self._check(index)
            seen = bool(events.filters) and self._see_others(events.filters)
            if events.changed or seen:
                self._replan()

    def look(self) -> None:
        """Checks what netlink does not report: other tcx programs, bridge rules, XDP at the other end of a veth.

        Repeats what failed, since netlink does not report when it would succeed. Takes a few microseconds per device.
        OSError: the next look tries again.
        """
        if self._follower.stale:
            self.read()
        with self._applying():
            self._look()

    def _look(self) -> None:
        self._attachments.pin()
        retried = self._retry()
        peers = self._follower.look_at_peers()
        rules = bridge_rules() if self._bridges() else ""
        before, self._chains = self._chains, self._attachments.chains(self._watched())
        changed = [index for index, chain in self._chains.items() if chain != before.get(index)]
        if not changed and not peers and not retried and rules == self._follower.state.bridge_rules:
            return
        for index in changed:
            if index in self._attached and self._check(index):
                # The program is not what was found: the next look checks again.
                self._chains.pop(index, None)
        if self._see_others() or peers or retried:
            self._replan()

    @contextmanager
    def _applying(self) -> Iterator[None]:
        """If a change cannot be applied, the next read lists and applies everything: it is not reported again."""
        try:
            yield
        except BaseException:
            self._follower.stale = True
            raise

    def read_back(self) -> list[str]:
        """Repairs the maps if they do not hold what was written. Returns the names of those that were wrong."""
        # All of them first: what a map holds must not count as written before the others could be read.
        found = {name: dict(self._maps[name].items()) for name in MAPS}
        wrong = [name for name in MAPS if found[name] != self._written[name]]
        if wrong:
            self._written = found
            with self._applying():
                self._write()
        return wrong

    def follow(self, loop: asyncio.AbstractEventLoop, error: Callable[..., None]) -> Callable[[], None]:
        """Follow the node from now on: :meth:`read` when netlink has messages.

        ``error`` is called with errors as text. Returns a function that stops following; call it before :meth:`close`.
        """

        def read() -> None:
            try:
                self.read()
            except OSError as problem:
                error("a change of devices could not be followed", error=str(problem))

        descriptor = self.fileno()
        loop.add_reader(descriptor, read)
        self._loop, self._error = loop, error

        def stop() -> None:
            loop.remove_reader(descriptor)
            self._loop = None
            if self._next_turn is not None:
                self._next_turn.cancel()
                self._next_turn = None

        return stop

    async def keep_looking(self, error: Callable[..., None]) -> None:
        """:meth:`look` every few seconds, until cancelled. ``error`` is called with errors as text."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self.look()
            except OSError as problem:
                error("other programs on devices could not be listed", error=str(problem))

    def _bridges(self) -> list[int]:
        return [index for index, link in self._follower.state.links.items() if link.kind == "bridge"]

    def _watched(self) -> list[int]:
        """Entrances, and bridges, which are between their ports and the node."""
        links = self._follower.state.links
        return [*(index for index, link in links.items() if program_for(link, links)), *self._bridges()]

    def _see_others(self, devices: Container[int] | None = None) -> bool:
        """Whether other programs on these devices, or on all, have changed since they were last listed.

        Devices that were never listed are listed, too: a bridge is not attached to. Each device costs two calls that
        wait for the kernel's lock of all network settings (RTNL).
        """
        state = self._follower.state
        before = state.others, state.bridge_rules
        watched = self._watched()
        listed = {index for index in watched if devices is None or index in devices or index not in state.others}
        found = self._attachments.others(listed) if listed else {}
        kept = {index: state.others[index] for index in watched if index in state.others and index not in listed}
        state.others = kept | found
        state.bridge_rules = bridge_rules() if self._bridges() else ""
        return before != (state.others, state.bridge_rules)

    def _note_programs_behind(self) -> None:
        state = self._follower.state
        passed = set(self._wanted.programs)
        # A packet of a bridge's port then comes in by the bridge.
        passed.update(state.links[index].master for index in self._wanted.programs if index in state.links)
        self.on_programs_behind(any(state.others[index].ingress for index in passed if index in state.others))

    def _replan(self) -> None:
        self._wanted = plan(self._follower.state, self._config)
        self._write()
        if not self._programs:
            return
        for index in [index for index in self._attached if index not in self._wanted.programs]:
            self._detach(index)
        if any(index not in self._attached and index not in self._failures for index in self._wanted.programs):
            time.sleep(SETTLE_SECONDS)
        self._attach_wanted()

    def _attach_wanted(self) -> None:
        tried = self._attach_some()
        if tried and self._see_others(tried):
            self._wanted = plan(self._follower.state, self._config)
            self._write()
        self._note_programs_behind()
        self.changed()

    def _attach_some(self) -> set[int]:
        """Attaches programs to the devices that lack them, for one turn. The ifindexes of those that were tried."""
        fresh = [(index, name) for index, name in self._wanted.programs.items() if self._attached.get(index) != name]
        # Those that have failed come last: otherwise each turn would begin with them.
        fresh.sort(key=lambda device: device[0] in self._failures)
        end = time.monotonic() + TURN_SECONDS
        tried: set[int] = set()
        for index, name in fresh:
            if tried and self._loop is not None and time.monotonic() > end:
                if index not in self._failures and self._next_turn is None:
                    self._next_turn = self._loop.call_soon(self._go_on)
                break
            self._attach(index, name)
            tried.add(index)
        return tried

    def _go_on(self) -> None:
        """The next turn."""
        self._next_turn = None
        try:
            with self._applying():
                self._attach_wanted()
        except OSError as problem:
            self._error("a change of devices could not be followed", error=str(problem))

    def _write(self) -> None:
        for name in self._wanted.unsupported:
            self._report_once(
                f"device {name}: its link layer is not supported, services are not served to packets from it"
            )
        before = dict(self._written["devices"])
        for name, entries in contents(self._wanted, self._layouts).items():
            written = self._written[name]
            self._add(name, entries)
            stale = [key for key in written if key not in entries]
            for key in stale:
                self._maps[name].delete(key)
                del written[key]
            if stale:
                self._add(name, entries)  # for entries that found the map full before
        after = self._written["devices"]
        if any(after.get(key) != value for key, value in before.items()):
            self.on_devices()
        self._note_sources()

    def _note_sources(self) -> None:
        if not self._config.fast_path:
            return
        now = source_addresses(self._follower.state)
        gone, self._sources = self._sources - now, now
        if gone:
            self.gone |= gone
            self.on_gone()

    def _add(self, name: str, entries: Contents) -> None:
        written = self._written[name]
        for key, value in entries.items():
            if written.get(key) == value:
                continue
            try:
                self._maps[name].update(key, value)
            except OSError as error:
                self._report_once(f"map {name}: {error}")
            else:
                written[key] = value

    def _attach(self, index: int, name: str) -> None:
        """A failure is reported, and tried again later: see :meth:`_retry`."""
        device = self._name(index)
        before = self._failures.pop(index, None)
        try:
            egress = self._programs[TC_EGRESS] if self._is_observed(name) else None
            if self._attachments.attach(index, device, self._programs[name], egress):
                self._attached[index] = name
        except OSError as error:
            text = str(error)
            if before is None or before.text != text:
                self._report(text)
            wait = LOOK_SECONDS if before is None else min(2 * before.wait, LONGEST_RETRY_SECONDS)
            self._failures[index] = _Failure(text, wait, time.monotonic() + wait)

    def _retry(self) -> bool:
        """Attaches programs that could not be attached. Whether one is attached now."""
        now = time.monotonic()
        due = [index for index, failure in self._failures.items() if failure.due <= now]
        for index in due:
            if index in self._wanted.programs:
                self._attach(index, self._wanted.programs[index])
            else:
                del self._failures[index]
        return any(index in self._attached and index not in self._failures for index in due)

    def _detach(self, index: int) -> None:
        self._attached.pop(index, None)
        try:
            self._attachments.detach(index, self._name(index))
        except OSError as error:
            self._report_once(str(error))

    def _check(self, index: int) -> bool:
        """After a change by others: if the program was removed or displaced, attach it again, and return True."""
        name = self._attached[index]
        try:
            wrong = self._attachments.standing(index, self._is_observed(name))
        except OSError as error:
            self._report_once(str(error))
            # The next look checks every device again: the kernel does not report the same change twice.
            self._follower.stale = True
            return False
        if not wrong:
            return False
        now = time.monotonic()
        recent = [then for then in self._reattached.get(index, []) if now - then < REATTACH_SECONDS]
        if len(recent) >= REATTACH_LIMIT:
            text = (
                f"device {self._name(index)}: other software keeps moving or removing the agent's tc program,"
                f" the next attempt is {REATTACH_SECONDS:.0f} s later"
            )
            self._report_once(text)
            if wrong == GONE:
                self._attached.pop(index)
                self._failures[index] = _Failure(text, REATTACH_SECONDS, now + REATTACH_SECONDS)
            return True
        self._reattached[index] = [*recent, now]
        self._report(f"device {self._name(index)}: the agent's tc program is {wrong}, attaching it again")
        # A program that is no longer the first one has still served every packet that reached it.
        if wrong == GONE:
            repairs.note(Repair.TC_PROGRAM)
        self._attach(index, self._attached.pop(index))
        return True

    def _is_observed(self, name: str) -> bool:
        """Whether the observer belongs on the egress of a device with this program; never without a fast path."""
        return name in OBSERVED and TC_EGRESS in self._programs

    def _name(self, index: int) -> str:
        link = self._follower.state.links.get(index)
        return link.name if link else f"number {index}"

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._report(text)
