# SPDX-License-Identifier: Apache-2.0
"""The proxy's programs at a device's tc hooks without tcx: clsact qdisc and cls_bpf filters in direct-action mode.

A filter is the proxy's if its kind, handle and name match. At ingress it has the first free priority, at egress the
last one. Everything else on the device is left alone: an existing clsact or ingress qdisc is used and stays, other
filters run before or after the proxy's (its programs return TC_ACT_UNSPEC to continue). An ingress qdisc has no egress.

A clsact created by the proxy is recorded as an empty file ``<directory>/clsact/<ifindex>-<name>``, written before the
qdisc is created. The qdisc is removed if it is recorded and neither of its hooks has a filter left.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pyebpf_proxy.datapath.connections.rawlink import RawLink, attributes
from pyebpf_proxy.datapath.node.messages import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    RTM_DELQDISC,
    RTM_DELTFILTER,
    RTM_GETQDISC,
    RTM_GETTFILTER,
    RTM_NEWQDISC,
    RTM_NEWTFILTER,
    tcmsg,
)
from pyebpf_proxy.datapath.node.netlink import Netlink, NetlinkError, attribute

NAME = "pyebpf-proxy"
HANDLE = 0xEB
# include/uapi/linux/rtnetlink.h, pkt_cls.h: attributes of qdiscs and filters, and of cls_bpf
_KIND, _OPTIONS, _BPF_NAME, _BPF_ID = 1, 2, 7, 11
_ROOT = 0xFFFFFFFF
# struct tcmsg: family, ifindex, handle, parent, info
_TCMSG = struct.Struct("=B3xiIII")
CLSACT_HANDLE = 0xFFFF0000
CLSACT_PARENT = 0xFFFFFFF1
INGRESS = 0xFFFFFFF2
EGRESS = 0xFFFFFFF3
_HOOKS = {INGRESS: "ingress", EGRESS: "egress"}
PROTOCOL_ALL = 0x0300  # htons(ETH_P_ALL)
DIRECT_ACTION = 1
PRIORITY_MAX = 0xFFFF
# Earlier versions had their filter at 235; no other software needs that many priorities before it.
_PRIORITIES = {INGRESS: range(1, 0xEB), EGRESS: range(PRIORITY_MAX, PRIORITY_MAX - 0xEB, -1)}
# Errors for a device that is gone, or goes meanwhile.
GONE = (errno.ENODEV, errno.ENXIO)


class Filters:
    """The proxy's filters in the network namespace in which it is created. ``directory`` has the record of qdiscs."""

    def __init__(self, directory: Path) -> None:
        self._records = directory / "clsact"
        self._netlink = Netlink()

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
            found = False
            for hook in _HOOKS:
                for priority in self._own(ifindex, hook):
                    self._remove(ifindex, device, hook, priority)
                    found = True
            return self._release_qdisc(ifindex, device) or found
        except NetlinkError as error:
            if error.errno not in (*GONE, errno.ENOENT):
                raise
            self.forget(ifindex)
            return False

    def is_attached(self, ifindex: int, hook: int = INGRESS) -> bool:
        return bool(self._own(ifindex, hook))

    def attached(self) -> list[int]:
        """Devices of this namespace, by ifindex, that have an ingress filter of the proxy."""
        message = _message(0, 0, 0, 0)
        qdiscs = self._netlink.dump(message, RTM_GETQDISC, "list of qdiscs")
        candidates = {q["index"] for q in qdiscs if attribute(q, "TCA_KIND") in ("clsact", "ingress")}
        return sorted(index for index in candidates if self.is_attached(index))

    def qdisc(self, ifindex: int) -> str:
        """The qdisc with a device's hooks: "clsact", "ingress" (no egress), "": there is none."""
        return qdiscs().get(ifindex, Qdiscs()).hooks

    def recorded(self) -> list[tuple[int, str]]:
        """Devices whose clsact was created by the proxy, from the record: ifindex and the name at that time."""
        found = []
        for entry in sorted(self._records.glob("*-*")):
            index, _, device = entry.name.partition("-")
            if index.isdigit():
                found.append((int(index), device))
        return found

    def is_recorded(self, ifindex: int) -> bool:
        """Whether the device's clsact was created by the proxy, from the record."""
        return bool(self._record(ifindex))

    def forget(self, ifindex: int) -> None:
        """Drops the record: the device is gone, and its qdisc with it. An ifindex may be reused."""
        for entry in self._record(ifindex):
            entry.unlink(missing_ok=True)

    def _record(self, ifindex: int) -> list[Path]:
        # By ifindex only, because CNI plugins rename their devices. The name is for people.
        return list(self._records.glob(f"{ifindex}-*"))

    def _ensure_qdisc(self, ifindex: int, device: str) -> None:
        """A qdisc with an ingress hook: a new clsact, or the existing clsact or ingress qdisc."""
        recorded = self._record(ifindex)
        if not recorded:
            # Written first: an agent killed between the two steps must not leave an unrecorded qdisc.
            self._records.mkdir(parents=True, exist_ok=True, mode=0o755)
            (self._records / f"{ifindex}-{device}").touch()
        message = _message(ifindex, CLSACT_PARENT, CLSACT_HANDLE, 0)
        message["attrs"] = [("TCA_KIND", "clsact")]
        try:
            self._netlink.request(message, RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, f"clsact of {device}: add")
        except NetlinkError as error:
            if not recorded:
                self.forget(ifindex)
            if error.errno != errno.EEXIST:
                raise

    def _release_qdisc(self, ifindex: int, device: str) -> bool:
        """Deletes the clsact if it is recorded and empty. False if it is not recorded."""
        if not self._record(ifindex):
            return False
        if not self._in_use(ifindex):
            message = _message(ifindex, CLSACT_PARENT, CLSACT_HANDLE, 0)
            message["attrs"] = [("TCA_KIND", "clsact")]
            try:
                self._netlink.request(message, RTM_DELQDISC, 0, f"clsact of {device}: delete")
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
        """The outermost priority that is free, or has only filters that allow another one beside them."""
        taken = set()
        for message in self._filters(ifindex, hook):
            kind, protocol = attribute(message, "TCA_KIND"), message["info"] & 0xFFFF
            foreign = message["handle"] == HANDLE and not _is_ours(message)
            if kind != "bpf" or protocol != PROTOCOL_ALL or foreign:
                taken.add(message["info"] >> 16)
        free = next((priority for priority in _PRIORITIES[hook] if priority not in taken), 0)
        if not free:
            raise NetlinkError(errno.EEXIST, f"tc filter on {device}: others use every priority of the {_HOOKS[hook]}")
        return free

    def _add(self, ifindex: int, device: str, program_fd: int, hook: int, priority: int) -> None:
        message = _message(ifindex, hook, HANDLE, priority << 16 | PROTOCOL_ALL)
        options = [("TCA_BPF_FD", program_fd), ("TCA_BPF_NAME", NAME), ("TCA_BPF_FLAGS", DIRECT_ACTION)]
        message["attrs"] = [("TCA_KIND", "bpf"), ("TCA_OPTIONS", {"attrs": options})]
        self._netlink.request(message, RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_REPLACE, f"tc filter on {device}: attach")

    def _remove(self, ifindex: int, device: str, hook: int, priority: int) -> None:
        message = _message(ifindex, hook, HANDLE, priority << 16 | PROTOCOL_ALL)
        message["attrs"] = [("TCA_KIND", "bpf")]
        self._netlink.request(message, RTM_DELTFILTER, 0, f"tc filter on {device}: detach")

    def _own(self, ifindex: int, hook: int) -> list[int]:
        """The priorities of the proxy's filters, usually one."""
        if hook == EGRESS and self.qdisc(ifindex) != "clsact":
            return []  # an ingress qdisc lists its ingress filters for egress, too
        return [message["info"] >> 16 for message in self._filters(ifindex, hook) if _is_ours(message)]

    def _in_use(self, ifindex: int) -> bool:
        return any(self._filters(ifindex, INGRESS)) or any(self._filters(ifindex, EGRESS))

    def _filters(self, ifindex: int, parent: int) -> list[Any]:
        message = _message(ifindex, parent, 0, 0)
        return self._netlink.dump(message, RTM_GETTFILTER, "list of tc filters")


def _message(ifindex: int, parent: int, handle: int, info: int) -> Any:
    message = tcmsg()
    message["family"] = 0
    message["index"] = ifindex
    message["parent"] = parent
    message["handle"] = handle
    message["info"] = info
    return message


def _is_ours(message: Any) -> bool:
    if attribute(message, "TCA_KIND") != "bpf" or message["handle"] != HANDLE:
        return False
    options = attribute(message, "TCA_OPTIONS")
    return options is not None and attribute(options, "TCA_BPF_NAME") == NAME


class Qdiscs(NamedTuple):
    """A device's qdiscs: the kind of the root qdisc, and of the one with the tc hooks; "": there is none."""

    root: str = ""
    hooks: str = ""


def qdiscs() -> dict[int, Qdiscs]:
    """The qdiscs of every device of this network namespace that has any, by ifindex. OSError."""
    found: dict[int, Qdiscs] = {}
    with RawLink(socket.NETLINK_ROUTE) as link:
        for message in link.dump(RTM_GETQDISC, _TCMSG.pack(0, 0, 0, 0, 0)):
            _, index, _, parent, _ = _TCMSG.unpack_from(message)
            inner = {kind: message[begin:end] for kind, begin, end in attributes(message, _TCMSG.size, len(message))}
            kind = inner.get(_KIND, b"").rstrip(bytes(1)).decode()
            if parent == _ROOT:
                found[index] = found.get(index, Qdiscs())._replace(root=kind)
            elif parent == CLSACT_PARENT:
                found[index] = found.get(index, Qdiscs())._replace(hooks=kind)
    return found


class Filter(NamedTuple):
    """A tc filter; ``name`` is the name of a BPF filter."""

    priority: int
    kind: str
    name: str
    ours: bool
    program: int

    def __str__(self) -> str:
        return f"filter pref {self.priority} {self.kind} {self.name}".rstrip()


def filters(ifindex: int, hook: int) -> list[Filter]:
    """The filters at a hook of a device, in the order in which they run. OSError."""
    found = []
    with RawLink(socket.NETLINK_ROUTE) as link:
        for message in link.dump(RTM_GETTFILTER, _TCMSG.pack(0, ifindex, 0, hook, 0)):
            _, _, handle, _, info = _TCMSG.unpack_from(message)
            known = {kind: (begin, end) for kind, begin, end in attributes(message, _TCMSG.size, len(message))}
            begin, end = known.get(_KIND, (0, 0))
            kind = message[begin:end].rstrip(bytes(1)).decode()
            if kind == "bpf" and not handle:
                continue  # the header of the filters of one priority
            begin, end = known.get(_OPTIONS, (0, 0))
            inner = {each: message[b:e] for each, b, e in attributes(message, begin, end)}
            name = inner.get(_BPF_NAME, b"").rstrip(bytes(1)).decode(errors="replace") if kind == "bpf" else ""
            ours = kind == "bpf" and handle == HANDLE and name == NAME
            number = int.from_bytes(inner.get(_BPF_ID, b""), sys.byteorder) if kind == "bpf" else 0
            found.append(Filter(info >> 16, kind, name, ours, number))
    return found
