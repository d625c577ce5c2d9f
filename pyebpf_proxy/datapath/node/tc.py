# SPDX-License-Identifier: Apache-2.0
"""Our program at a device's tc ingress: clsact qdisc and one cls_bpf filter in direct-action mode.

A filter is ours if its kind, priority, handle and name are all ours. Everything else on the device is left
alone: a clsact or ingress qdisc that was there is used and stays, other filters run before or after ours
(our programs return TC_ACT_UNSPEC to go on).

Whether the clsact was made by us is remembered as an empty file ``<directory>/clsact/<ifindex>-<name>``, written
before the qdisc is made. It is taken away again when it is in that record and no filter is left on either of its hooks.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

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
PRIORITY = 0xEB
HANDLE = 0xEB
CLSACT_HANDLE = 0xFFFF0000
CLSACT_PARENT = 0xFFFFFFF1
INGRESS = 0xFFFFFFF2
EGRESS = 0xFFFFFFF3
PROTOCOL_ALL = 0x0300  # htons(ETH_P_ALL)
DIRECT_ACTION = 1
# What the kernel says of a device that is gone, or leaves while we are at it.
GONE = (errno.ENODEV, errno.ENXIO)


class Filters:
    """Our filters in the network namespace this object was made in. ``directory`` holds the record of our qdiscs."""

    def __init__(self, directory: Path) -> None:
        self._records = directory / "clsact"
        self._netlink = Netlink()

    def close(self) -> None:
        self._netlink.close()

    def attach(self, ifindex: int, device: str, program_fd: int) -> bool:
        """Puts the program on the device, or in the place of the one that is there, in one atomic step.

        False if the device is gone. NetlinkError names the device and the kernel's reason.
        """
        try:
            self._ensure_qdisc(ifindex, device)
            try:
                self._refuse_foreign(ifindex, device)
                message = _message(ifindex, INGRESS, HANDLE, PRIORITY << 16 | PROTOCOL_ALL)
                options = [("TCA_BPF_FD", program_fd), ("TCA_BPF_NAME", NAME), ("TCA_BPF_FLAGS", DIRECT_ACTION)]
                message["attrs"] = [("TCA_KIND", "bpf"), ("TCA_OPTIONS", {"attrs": options})]
                what = f"tc filter on {device}: attach"
                self._netlink.request(message, RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_REPLACE, what)
            except NetlinkError:
                self._release_qdisc(ifindex, device)
                raise
        except NetlinkError as error:
            if error.errno in GONE:
                self.forget(ifindex)
                return False
            raise
        return True

    def detach(self, ifindex: int, device: str) -> bool:
        """Takes our filter off, and our clsact if nothing else uses it. False if there was nothing of ours."""
        try:
            found = self.is_attached(ifindex)
            if found:
                message = _message(ifindex, INGRESS, HANDLE, PRIORITY << 16 | PROTOCOL_ALL)
                message["attrs"] = [("TCA_KIND", "bpf")]
                self._netlink.request(message, RTM_DELTFILTER, 0, f"tc filter on {device}: detach")
            return self._release_qdisc(ifindex, device) or found
        except NetlinkError as error:
            if error.errno not in (*GONE, errno.ENOENT):
                raise
            self.forget(ifindex)
            return False

    def is_attached(self, ifindex: int) -> bool:
        return any(_is_ours(f) for f in self._filters(ifindex, INGRESS))

    def attached(self) -> list[int]:
        """Devices of this namespace, by ifindex, that carry a filter of ours."""
        message = _message(0, 0, 0, 0)
        qdiscs = self._netlink.dump(message, RTM_GETQDISC, "list of qdiscs")
        candidates = {q["index"] for q in qdiscs if attribute(q, "TCA_KIND") in ("clsact", "ingress")}
        return sorted(index for index in candidates if self.is_attached(index))

    def recorded(self) -> list[tuple[int, str]]:
        """Devices whose clsact we made, as far as the record knows: ifindex and the name it had then."""
        found = []
        for entry in sorted(self._records.glob("*-*")):
            index, _, device = entry.name.partition("-")
            if index.isdigit():
                found.append((int(index), device))
        return found

    def forget(self, ifindex: int) -> None:
        """Drops the record: the device is gone, and its qdisc with it. An ifindex may be used again."""
        for entry in self._record(ifindex):
            entry.unlink(missing_ok=True)

    def _record(self, ifindex: int) -> list[Path]:
        # By ifindex alone: CNI plugins rename their devices. The name is for people.
        return list(self._records.glob(f"{ifindex}-*"))

    def _ensure_qdisc(self, ifindex: int, device: str) -> None:
        """A qdisc with an ingress hook: clsact made by us, or the clsact or ingress qdisc that is there."""
        recorded = self._record(ifindex)
        if not recorded:
            # Written first: an agent killed between the two steps must not leave a qdisc that nobody claims.
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
        """Deletes the clsact if it is ours and empty. False if it is not ours."""
        if not self._record(ifindex):
            return False
        if not self._in_use(ifindex):
            message = _message(ifindex, CLSACT_PARENT, CLSACT_HANDLE, 0)
            message["attrs"] = [("TCA_KIND", "clsact")]
            try:
                self._netlink.request(message, RTM_DELQDISC, 0, f"clsact of {device}: delete")
            except NetlinkError as error:
                # EINVAL: somebody put an ingress qdisc in its place.
                if error.errno not in (*GONE, errno.ENOENT, errno.EINVAL):
                    raise
        self.forget(ifindex)
        return True

    def _refuse_foreign(self, ifindex: int, device: str) -> None:
        for message in self._filters(ifindex, INGRESS):
            if message["info"] >> 16 == PRIORITY and not _is_ours(message) and message["handle"]:
                raise NetlinkError(
                    errno.EEXIST,
                    f"tc filter on {device}: priority {PRIORITY} of the ingress hook is taken by a filter "
                    f"that is not ours; remove it or give it another priority",
                )

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
    if attribute(message, "TCA_KIND") != "bpf" or message["info"] >> 16 != PRIORITY or message["handle"] != HANDLE:
        return False
    options = attribute(message, "TCA_OPTIONS")
    return options is not None and attribute(options, "TCA_BPF_NAME") == NAME
