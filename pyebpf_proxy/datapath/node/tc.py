# SPDX-License-Identifier: Apache-2.0
"""The proxy's programs at a device's tc hooks without tcx: clsact qdisc and cls_bpf filters in direct-action mode.

A filter is the proxy's if its kind, handle and name match. At ingress it has the first free priority, at egress the
last one. Everything else on the device is left alone: an existing clsact or ingress qdisc is used and stays, other
filters run before or after the proxy's (its programs return TC_ACT_UNSPEC to continue). An ingress qdisc has no egress.

A clsact created by the proxy is recorded as an empty file ``<directory>/clsact/<ifindex>-<name>``, written before the
qdisc is created. Without a record, since the folder is read-only or full, the qdisc stays when the proxy is removed.
The qdisc is removed if it is recorded and neither of its hooks has a filter left, but only when the
device is left for good: the kernel stops the device's queues while a clsact comes or goes, and drops what is sent then.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute, number, text, values, word, zero_terminated
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.rtnetlink import NetlinkError, Rtnetlink
from pyebpf_proxy.datapath.node.mounts import opened_folder

NAME = "pyebpf-proxy"
_log = Logger("datapath")
HANDLE = 0xEB
CLSACT_HANDLE = 0xFFFF0000
CLSACT_PARENT = uapi.TC_H_CLSACT
INGRESS = uapi.TC_H_CLSACT_INGRESS
EGRESS = uapi.TC_H_CLSACT_EGRESS
_HOOKS = {INGRESS: "ingress", EGRESS: "egress"}
PROTOCOL_ALL = 0x0300  # htons(ETH_P_ALL)
PRIORITY_MAX = 0xFFFF
# Earlier versions had their filter at 235; no other software needs that many priorities before it.
_PRIORITIES = {INGRESS: range(1, 0xEB), EGRESS: range(PRIORITY_MAX, PRIORITY_MAX - 0xEB, -1)}
_IFINDEX = re.compile("[0-9]{1,9}")
# Errors for a device that is gone, or goes meanwhile.
GONE = (errno.ENODEV, errno.ENXIO)


class Filters:
    """The proxy's filters in the network namespace in which it is created. ``directory`` has the record of qdiscs."""

    def __init__(self, directory: Path) -> None:
        self._records = directory / "clsact"
        self._netlink = Rtnetlink()

    def close(self) -> None:
        self._netlink.close()

    def attach(self, ifindex: int, device: str, program_fd: int, hook: int = INGRESS) -> bool:
        """Attaches the program to the device, or replaces the existing one, atomically.

        A filter at another priority (of an earlier version) also runs the program until the new one is attached.
        False if the device is gone. NetlinkError names the device and the kernel's reason.
        """
        try:
            self._ensure_qdisc(ifindex, device)
            try:
                self._put(ifindex, device, program_fd, hook)
            except NetlinkError:
                self._release_qdisc(ifindex, device)
                raise
        except NetlinkError as error:
            if error.errno in GONE:
                self.forget(ifindex)
                return False
            raise
        return True

    def replace(self, ifindex: int, device: str, program_fd: int) -> bool:
        """Replaces the program of the existing ingress filters atomically. False: there are none."""
        own = self._own(ifindex, INGRESS)
        for priority in own:
            self._add(ifindex, device, program_fd, INGRESS, priority)
        return bool(own)

    def detach(self, ifindex: int, device: str) -> bool:
        """Removes the proxy's filters, and its clsact if it is unused. False if there was nothing."""
        try:
            found = self.remove(ifindex, device)
            return self._release_qdisc(ifindex, device) or found
        except NetlinkError as error:
            if error.errno not in (*GONE, errno.ENOENT):
                raise
            self.forget(ifindex)
            return False

    def remove(self, ifindex: int, device: str) -> bool:
        """Removes the proxy's filters; a clsact stays, and its record. False if there were none. NetlinkError."""
        found = False
        for hook in _HOOKS:
            for priority in self._own(ifindex, hook):
                self._remove(ifindex, device, hook, priority)
                found = True
        return found

    def is_attached(self, ifindex: int, hook: int = INGRESS) -> bool:
        return bool(self._own(ifindex, hook))

    def attached(self) -> list[int]:
        """Devices of this namespace, by ifindex, that have an ingress filter of the proxy."""
        listed = map(_read, self._netlink.list_all(uapi.RTM_GETQDISC, uapi.TCMSG.pack(0, 0, 0, 0, 0), "list of qdiscs"))
        candidates = {each.device for each in listed if each.kind in ("clsact", "ingress")}
        return sorted(index for index in candidates if self.is_attached(index))

    def qdisc(self, ifindex: int) -> str:
        """The qdisc with a device's hooks: "clsact", "ingress" (no egress), "": there is none."""
        return qdiscs({ifindex}).get(ifindex, Qdiscs()).hooks

    def recorded(self) -> list[tuple[int, str]]:
        """Devices whose clsact was created by the proxy, from the record: ifindex and the name at that time."""
        found = []
        with self._folder() as folder:
            for name in sorted(_entries(folder)):
                index, _, device = name.partition("-")
                if _IFINDEX.fullmatch(index):
                    found.append((int(index), device))
        return found

    def is_recorded(self, ifindex: int) -> bool:
        """Whether the device's clsact was created by the proxy, from the record."""
        with self._folder() as folder:
            return bool(_entries(folder, ifindex))

    def forget(self, ifindex: int) -> None:
        """Drops the record of a device that is gone: its qdisc is gone, too, and its ifindex may be reused."""
        with self._folder() as folder:
            for name in _entries(folder, ifindex):
                try:
                    os.unlink(name, dir_fd=folder)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    record = str(self._records / name)
                    _log.warning("the record of a clsact could not be removed", record=record, error=error.strerror)

    @contextmanager
    def _folder(self) -> Iterator[int | None]:
        """The open folder of the records; None: there is none.

        A container of the agent may put a link in its place at any moment, and other folders have files with such names
        (10-example.conf). So the folder is opened without following links, and used by its descriptor.
        """
        with ExitStack() as opened:
            folder = None
            with suppress(OSError):
                folder = opened.enter_context(opened_folder(self._records))
            yield folder

    def _write_record(self, ifindex: int, device: str) -> None:
        if self._records.is_symlink():
            self._records.unlink()
        self._records.mkdir(parents=True, exist_ok=True, mode=0o755)
        with self._folder() as folder:
            if folder is None:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            os.close(os.open(f"{ifindex}-{device}", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644, dir_fd=folder))

    def _ensure_qdisc(self, ifindex: int, device: str) -> None:
        """A qdisc with an ingress hook: a new clsact, or the existing clsact or ingress qdisc."""
        recorded = self.is_recorded(ifindex)
        if not recorded:
            # Written first: an agent killed between the two steps must not leave an unrecorded qdisc.
            try:
                self._write_record(ifindex, device)
            except OSError as error:
                text = "the record of a clsact could not be written: --cleanup will not remove this clsact"
                _log.warning(text, device=device, error=error.strerror)
        flags = uapi.NLM_F_CREATE | uapi.NLM_F_EXCL
        try:
            self._netlink.change(uapi.RTM_NEWQDISC, flags, _clsact(ifindex), f"clsact of {device}: add")
        except NetlinkError as error:
            if not recorded:
                self.forget(ifindex)
            if error.errno != errno.EEXIST:
                raise

    def _release_qdisc(self, ifindex: int, device: str) -> bool:
        """Deletes the clsact if it is recorded and empty. False if it is not recorded."""
        if not self.is_recorded(ifindex):
            return False
        if not self._in_use(ifindex):
            try:
                self._netlink.change(uapi.RTM_DELQDISC, 0, _clsact(ifindex), f"clsact of {device}: delete")
            except NetlinkError as error:
                # EINVAL: it was replaced by an ingress qdisc.
                if error.errno not in (*GONE, errno.ENOENT, errno.EINVAL):
                    raise
        self.forget(ifindex)
        return True

    def _put(self, ifindex: int, device: str, program_fd: int, hook: int) -> None:
        own = self._own(ifindex, hook)
        for priority in own:
            self._add(ifindex, device, program_fd, hook, priority)
        wanted = self._priority(ifindex, device, hook)
        if wanted not in own:
            self._add(ifindex, device, program_fd, hook, wanted)
        for priority in own:
            if priority != wanted:
                self._remove(ifindex, device, hook, priority)

    def _priority(self, ifindex: int, device: str, hook: int) -> int:
        """The outermost priority that is free, or has only filters that allow another one at the same priority."""
        taken = set()
        for each in self._filters(ifindex, hook):
            foreign = each.handle == HANDLE and not each.is_own
            if each.kind != "bpf" or each.info & 0xFFFF != PROTOCOL_ALL or foreign:
                taken.add(each.info >> 16)
        free = next((priority for priority in _PRIORITIES[hook] if priority not in taken), 0)
        if not free:
            what = f"other programs use every priority of the {_HOOKS[hook]}"
            raise NetlinkError(errno.EEXIST, f"tc filter on {device}: {what}")
        return free

    def _add(self, ifindex: int, device: str, program_fd: int, hook: int, priority: int) -> None:
        options = attribute(uapi.TCA_BPF_FD, word(program_fd))
        options += attribute(uapi.TCA_BPF_NAME, zero_terminated(NAME))
        options += attribute(uapi.TCA_BPF_FLAGS, word(uapi.TCA_BPF_FLAG_ACT_DIRECT))
        body = _filter(ifindex, hook, priority) + attribute(uapi.TCA_OPTIONS, options)
        flags = uapi.NLM_F_CREATE | uapi.NLM_F_REPLACE
        self._netlink.change(uapi.RTM_NEWTFILTER, flags, body, f"tc filter on {device}: attach")

    def _remove(self, ifindex: int, device: str, hook: int, priority: int) -> None:
        what = f"tc filter on {device}: detach"
        self._netlink.change(uapi.RTM_DELTFILTER, 0, _filter(ifindex, hook, priority), what)

    def _own(self, ifindex: int, hook: int) -> list[int]:
        """The priorities of the proxy's filters, usually one."""
        if hook == EGRESS and self.qdisc(ifindex) != "clsact":
            return []  # an ingress qdisc lists its ingress filters for egress, too
        return [each.info >> 16 for each in self._filters(ifindex, hook) if each.is_own]

    def _in_use(self, ifindex: int) -> bool:
        return any(self._filters(ifindex, INGRESS)) or any(self._filters(ifindex, EGRESS))

    def _filters(self, ifindex: int, parent: int) -> list[_Listed]:
        body = uapi.TCMSG.pack(0, ifindex, 0, parent, 0)
        return [_read(each) for each in self._netlink.list_all(uapi.RTM_GETTFILTER, body, "list of tc filters")]


def _entries(folder: int | None, ifindex: int | None = None) -> list[str]:
    """The names of records, of one device or of all. The device's name is for people: CNI plugins rename devices."""
    prefix = "" if ifindex is None else f"{ifindex}-"
    return [] if folder is None else [name for name in os.listdir(folder) if name.startswith(prefix) and "-" in name]


def _clsact(ifindex: int) -> bytes:
    """The body of a request about the clsact qdisc of a device."""
    kind = attribute(uapi.TCA_KIND, zero_terminated("clsact"))
    return uapi.TCMSG.pack(0, ifindex, CLSACT_HANDLE, CLSACT_PARENT, 0) + kind


def _filter(ifindex: int, hook: int, priority: int) -> bytes:
    """The body of a request about the proxy's filter at a hook of a device."""
    kind = attribute(uapi.TCA_KIND, zero_terminated("bpf"))
    return uapi.TCMSG.pack(0, ifindex, HANDLE, hook, priority << 16 | PROTOCOL_ALL) + kind


class _Listed(NamedTuple):
    """A qdisc or a filter as the kernel lists it. ``info`` of a filter: priority << 16 | protocol."""

    device: int
    handle: int
    parent: int
    info: int
    kind: str
    options: bytes

    @property
    def is_own(self) -> bool:
        """Whether it is a filter of the proxy."""
        return self.kind == "bpf" and self.handle == HANDLE and text(self.bpf(uapi.TCA_BPF_NAME)) == NAME

    def bpf(self, kind: int) -> bytes:
        """An attribute of a BPF filter; empty for other filters."""
        return values(self.options).get(kind, b"") if self.kind == "bpf" else b""


def _read(message: bytes) -> _Listed:
    _, device, handle, parent, info = uapi.TCMSG.unpack_from(message)
    parts = values(message, uapi.TCMSG.size)
    kind = text(parts.get(uapi.TCA_KIND, b""))
    return _Listed(device, handle, parent, info, kind, parts.get(uapi.TCA_OPTIONS, b""))


class Qdiscs(NamedTuple):
    """A device's qdiscs: the kind of the root qdisc, and of the one with the tc hooks; "": there is none."""

    root: str = ""
    hooks: str = ""


def qdiscs(devices: Container[int] | None = None) -> dict[int, Qdiscs]:
    """The qdiscs of these devices, or of all of this network namespace, that have any, by ifindex. OSError."""
    found: dict[int, Qdiscs] = {}
    with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
        for message in netlink.dump(uapi.RTM_GETQDISC, uapi.TCMSG.pack(0, 0, 0, 0, 0)):
            if devices is not None and uapi.TCMSG.unpack_from(message)[1] not in devices:
                continue
            each = _read(message)
            if each.parent == uapi.TC_H_ROOT:
                found[each.device] = found.get(each.device, Qdiscs())._replace(root=each.kind)
            elif each.parent == CLSACT_PARENT:
                found[each.device] = found.get(each.device, Qdiscs())._replace(hooks=each.kind)
    return found


class Filter(NamedTuple):
    """A tc filter; ``name`` is the name of a BPF filter."""

    priority: int
    kind: str
    name: str
    own: bool
    program: int

    def __str__(self) -> str:
        return f"filter pref {self.priority} {self.kind} {self.name}".rstrip()


def filters(ifindex: int, hook: int) -> list[Filter]:
    """The filters at a hook of a device, in the order in which they run. OSError."""
    found = []
    with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
        for each in map(_read, netlink.dump(uapi.RTM_GETTFILTER, uapi.TCMSG.pack(0, ifindex, 0, hook, 0))):
            if each.kind == "bpf" and not each.handle:
                continue  # the header of the filters of one priority
            name, program = text(each.bpf(uapi.TCA_BPF_NAME)), number(each.bpf(uapi.TCA_BPF_ID))
            found.append(Filter(each.info >> 16, each.kind, name, each.is_own, program))
    return found
