# SPDX-License-Identifier: Apache-2.0
"""The proxy's programs on devices, attached by tcx or by clsact, and other programs there.

With tcx (Linux 6.6) the proxy's program is the first at ingress and the last at egress, and no qdisc is created, so CNI
plugins can add their own. Without tcx, clsact filters are used (``tc``). If filters of an earlier version exist, their
program is replaced first, then the new link is attached, then they are removed: every packet passes the program, and
never passes two that decide differently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import text, values
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.node import tc
from pyebpf_proxy.datapath.node.plan import Others
from pyebpf_proxy.datapath.node.tcx import Links

_OF_BRIDGE = uapi.NFGENMSG.pack(uapi.NFPROTO_BRIDGE, 0, 0)
_EBTABLES = ("filter", "nat", "broute")
# What can be wrong with the proxy's program on a device.
GONE, NOT_AT_ITS_END = "gone", "not at its end of the chain"


class Attachments:
    """In the network namespace in which it is created. ``directory``: the instance's; ``folder``: for pins.

    ``use_tcx``: None probes the kernel.
    """

    def __init__(self, directory: Path, folder: Path, use_tcx: bool | None = None) -> None:
        self.uses_tcx = tcx.available() if use_tcx is None else use_tcx
        self._filters = tc.Filters(directory)
        self._links = Links(folder)
        self._unobserved: dict[int, str] = {}

    def close(self) -> None:
        self._filters.close()
        self._links.close()

    def pin(self) -> None:
        """Pins what could not be pinned before."""
        self._links.pin()

    def attach(self, ifindex: int, device: str, program_fd: int, egress_fd: int | None) -> bool:
        """Attaches the programs, or replaces former ones. ``egress_fd`` None: no egress program.

        False if the device is gone. NetlinkError, BpfError.
        """
        if not self.uses_tcx:
            return self._attach_filters(ifindex, device, program_fd, egress_fd)
        try:
            if egress_fd is None:
                self._links.detach(ifindex, tcx.EGRESS)
            else:
                self._links.attach(ifindex, tcx.EGRESS, egress_fd)
            earlier = self._filters.qdisc(ifindex) and self._filters.replace(ifindex, device, program_fd)
            self._links.attach(ifindex, tcx.INGRESS, program_fd)
            if earlier or self._filters.is_recorded(ifindex):
                # A clsact of the proxy stays until the clean-up: its removal would lose packets.
                self._filters.remove(ifindex, device)
        except OSError as error:
            if error.errno in tc.GONE:
                self.forget(ifindex)
                return False
            raise
        return True

    def detach(self, ifindex: int, device: str) -> bool:
        """Detaches all programs of this instance. False if there were none."""
        self._unobserved.pop(ifindex, None)
        found = [self._links.detach(ifindex, hook) for hook in (tcx.INGRESS, tcx.EGRESS)]
        return self._filters.detach(ifindex, device) or any(found)

    def attached(self) -> list[int]:
        """Devices of this namespace, by ifindex, that have a program of this instance."""
        return sorted({index for index, _ in self._links.programs} | set(self._filters.attached()))

    def recorded(self) -> list[int]:
        """Devices whose clsact was created by this instance, from its record."""
        return [index for index, _ in self._filters.recorded()]

    def forget(self, ifindex: int) -> None:
        """Drop what is recorded about a device that is gone.

        Links stay with a device that another network namespace had meanwhile. A new one of the same program could not
        be made until the kernel has removed the former one, a moment later.
        """
        self._unobserved.pop(ifindex, None)
        if not self._is_linked(ifindex):
            self._links.forget(ifindex)
        self._filters.forget(ifindex)

    def _is_linked(self, ifindex: int) -> bool:
        """Whether the device is there, with a program of this instance."""
        try:
            return any(self._links.is_there(ifindex, hook) for hook in (tcx.INGRESS, tcx.EGRESS))
        except OSError:
            return False

    def tidy(self, devices: Mapping[int, object]) -> None:
        """Removes the pins and records of devices that are gone."""
        self._links.tidy(devices)
        for index, _ in self._filters.recorded():
            if index not in devices:
                self._filters.forget(index)

    def ingress_programs(self) -> dict[int, int]:
        """The id of the ingress program, by device."""
        found = {index: number for (index, hook), number in self._links.programs.items() if hook == tcx.INGRESS}
        for index, qdisc in tc.qdiscs().items():
            if qdisc.hooks:
                for own in [each for each in tc.filters(index, tc.INGRESS) if each.own]:
                    found.setdefault(index, own.program)
        return found

    def by_tcx(self) -> set[int]:
        """Devices whose ingress program is held by a link."""
        return {index for index, hook in self._links.programs if hook == tcx.INGRESS}

    def standing(self, ifindex: int, egress: bool) -> str:
        """What is wrong with the program on a device: GONE or NOT_AT_ITS_END; "": nothing, or no device. OSError."""
        try:
            if not self.uses_tcx:
                there = self._filters.is_attached(ifindex)
                there &= not egress or ifindex in self._unobserved or self._filters.is_attached(ifindex, tc.EGRESS)
                return "" if there else GONE
            hooks = (tcx.INGRESS, tcx.EGRESS) if egress else (tcx.INGRESS,)
            if not all(self._links.is_there(ifindex, hook) for hook in hooks):
                return GONE
            return "" if all(self._links.is_in_place(ifindex, hook) for hook in hooks) else NOT_AT_ITS_END
        except OSError as error:
            if error.errno in tc.GONE:
                return ""
            raise

    def others(self, devices: Collection[int]) -> dict[int, Others]:
        """Other programs and filters on these devices. OSError."""
        qdiscs = tc.qdiscs(devices)
        found = {}
        for index in devices:
            try:
                found[index] = self._others(index, qdiscs.get(index, tc.Qdiscs()))
            except OSError as error:
                if error.errno not in tc.GONE:
                    raise
        return found

    def chains(self, devices: Iterable[int]) -> dict[int, tuple[tuple[int, ...], ...]]:
        """The tcx programs of devices, by id: netlink does not report them. Empty without tcx."""
        found: dict[int, tuple[tuple[int, ...], ...]] = {}
        for index in devices if self.uses_tcx else ():
            try:
                found[index] = tcx.chain(index, tcx.INGRESS), tcx.chain(index, tcx.EGRESS)
            except BpfError as error:
                if error.errno not in tc.GONE:
                    raise
        self._links.keep_names({number for both in found.values() for chain in both for number in chain})
        return found

    def _attach_filters(self, ifindex: int, device: str, program_fd: int, egress_fd: int | None) -> bool:
        self._unobserved.pop(ifindex, None)
        if not self._filters.attach(ifindex, device, program_fd):
            return False
        if egress_fd is None:
            return True
        if self._filters.qdisc(ifindex) == "ingress":
            self._unobserved[ifindex] = "its ingress qdisc is another's and has no egress"
            return True
        return self._filters.attach(ifindex, device, egress_fd, tc.EGRESS)

    def _others(self, index: int, qdiscs: tc.Qdiscs) -> Others:
        ingress: tuple[str, ...] = ()
        egress: tuple[str, ...] = ()
        if self.uses_tcx:
            ingress, egress = self._links.others(index, tcx.INGRESS), self._links.others(index, tcx.EGRESS)
        if qdiscs.hooks:
            listed = tc.filters(index, tc.INGRESS)
            own = next((at for at, each in enumerate(listed) if each.own), -1)
            # Filters run after the whole tcx chain.
            behind = listed if self.uses_tcx else listed[own + 1 :]
            ingress += _named(qdiscs.hooks, behind)
        if qdiscs.hooks == "clsact":
            egress += _named("clsact egress", tc.filters(index, tc.EGRESS))
        return Others(ingress, egress, qdiscs.root, self._unobserved.get(index, ""))


def _named(qdisc: str, filters: Iterable[tc.Filter]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{qdisc} {each}" for each in filters if not each.own))


def bridge_rules() -> str:
    """A rule of nftables or ebtables for frames that cross a bridge, as text; "": there is none."""
    return _nft_bridge_rules() or _ebtables_rules()


def _nft_bridge_rules() -> str:
    with RequestSocket(uapi.NETLINK_NETFILTER) as netlink:
        try:
            for message in netlink.dump(uapi.NFT_MSG_GETRULE, _OF_BRIDGE):
                rule = values(message, uapi.NFGENMSG.size)
                table, chain = text(rule[uapi.NFTA_RULE_TABLE]), text(rule[uapi.NFTA_RULE_CHAIN])
                return f"nftables rule in table bridge {table}, chain {chain}"
        except OSError:
            return ""  # no nftables in this kernel
    with RequestSocket(uapi.NETLINK_NETFILTER) as netlink:
        for message in netlink.dump(uapi.NFT_MSG_GETCHAIN, _OF_BRIDGE):
            known = values(message, uapi.NFGENMSG.size)
            if uapi.NFTA_CHAIN_HOOK in known and known.get(uapi.NFTA_CHAIN_POLICY, b"\0\0\0\1") == bytes(4):
                name, table = text(known[uapi.NFTA_CHAIN_NAME]), text(known[uapi.NFTA_CHAIN_TABLE])
                return f"nftables chain {name} of table bridge {table}, whose policy is drop"
    return ""


def _ebtables_rules() -> str:
    """Checks only whether one of the legacy tables is loaded: reading a table would load its module."""
    try:
        modules = {line.split()[0] for line in Path("/proc/modules").read_text().splitlines()}
    except OSError:
        return ""
    return next(
        (f"legacy ebtables has its table {table} loaded" for table in _EBTABLES if f"ebtable_{table}" in modules), ""
    )
