# SPDX-License-Identifier: Apache-2.0
"""Our one nftables table: the netfilter lane, rejection and masquerading.

A program hands a decision over in the packet itself: ``skb->priority`` (0xEB000000 | backend id, or
0xEC000001 to reject) and one bit of ``skb->mark`` (masquerade). The table carries it out:

=================  ===========================  ==========================================================
chain              hook                         what it does
=================  ===========================  ==========================================================
reject_forwarded   prerouting, nat, -110        rejects what is not for this node. Here and not in the
                                                forward hook, because the kernel resets the priority when it
                                                forwards; after conntrack (-200), before anybody's NAT
reject_local       input, nat, -110             rejects what is for an address of this node
translate          prerouting, nat, -100        translates to the backend that the program chose
hide_source        postrouting, nat, 100        masquerades packets with the bit (spec/service-semantics §5.1)
clear_mark         postrouting, filter, 101     clears that one bit. Not in the nat chain: a flow whose entry
                                                was written into conntrack never meets a nat chain
=================  ===========================  ==========================================================

All but the last are of type nat, which the kernel asks only for the first packet of a flow, and only if the flow has
no NAT yet: packets of established flows, and flows of the direct lane, meet one rule, that of the last chain.

The NAT statements are also what makes conntrack and the NAT hooks live in the network namespace, for both
families; without them entries created from BPF are not translated.

Not built: kube-proxy's explicit ACCEPT of marked and established packets in the forward path (§5.1, iptables mode).
An accept in one nftables table does not overrule a drop in another or in iptables, so it would mean nothing here.
A firewall that drops by default in FORWARD must let pod and service traffic pass itself, as with
kube-proxy's nftables mode.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import nftables

from pyebpf_proxy.datapath.refused import RefusedError

NETLINK_NETFILTER = 12
NLM_F_REQUEST = 1
# include/uapi/linux/netfilter/nf_tables.h, in the subsystem NFNL_SUBSYS_NFTABLES
NFT_MSG_NEWGEN = 10 << 8 | 15
NFT_MSG_GETGEN = 10 << 8 | 16
NFTA_GEN_ID = 1
TABLE = "pyebpf-proxy"
BACKEND_TAG = 0xEB000000
REJECT_CLASS = "ec00:0001"
CHAINS = {
    "reject_forwarded": ("nat", "prerouting", -110),
    "reject_local": ("nat", "input", -110),
    "translate": ("nat", "prerouting", -100),
    "hide_source": ("nat", "postrouting", 100),
    "clear_mark": ("filter", "postrouting", 101),
}
MAPS = {"backends4": "ipv4_addr", "backends6": "ipv6_addr"}
TRANSPORTS = "meta l4proto { tcp, udp, sctp }"
REJECT = f"meta priority {REJECT_CLASS}"


class NftError(RefusedError):
    """A transaction that nftables refused, with what was being done and its own words."""


class Target(NamedTuple):
    """Where a backend id leads: packed address (its length tells the family) and port."""

    address: bytes
    port: int


def rules(masquerade_mark: int) -> list[tuple[str, str]]:
    """(chain, rule) in order; ``masquerade_mark`` is one bit."""
    marked = f"meta mark and {masquerade_mark:#x} == {masquerade_mark:#x}"
    return [
        ("reject_forwarded", f"{REJECT} fib daddr type != local reject with icmpx type port-unreachable"),
        ("reject_local", f"{REJECT} reject with icmpx type port-unreachable"),
        ("translate", f"meta nfproto ipv4 {TRANSPORTS} dnat ip to meta priority map @backends4"),
        ("translate", f"meta nfproto ipv6 {TRANSPORTS} dnat ip6 to meta priority map @backends6"),
        ("hide_source", f"{marked} masquerade fully-random"),
        ("clear_mark", f"{marked} meta mark set meta mark and {~masquerade_mark & 0xFFFFFFFF:#x}"),
    ]


class Table:
    """The table ``inet <name>`` of the network namespace this object was made in.

    Every method is one transaction. The object mirrors the backend maps, so what a caller adds twice or
    removes twice costs nothing, and a table that somebody flushed is made again with everything in it.
    """

    def __init__(self, name: str = TABLE) -> None:
        self.name = name
        # Before libnftables, which ends the process if it cannot open its socket.
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        except OSError as error:
            raise NftError(error.errno, "nftables: this kernel has no nfnetlink (CONFIG_NF_TABLES)") from error
        self._nft: Any = nftables.Nftables()
        self._elements: dict[int, Target] = {}
        self._mark: int | None = None
        self._known: int | None = None

    @property
    def elements(self) -> Mapping[int, Target]:
        """Backend ids in the maps and where they lead."""
        return self._elements

    def ensure(self, masquerade_mark: int) -> None:
        """Makes the table, or puts its rules right and keeps the elements of its maps.

        Chains of another shape (another version of us) are replaced, elements included, in the same transaction.
        Also heals a table that was flushed while we ran; costs next to nothing if nobody has changed any
        nftables rule since our own last change. NftError with clear text.
        """
        if masquerade_mark == self._mark and self._known is not None and self._generation() == self._known:
            return
        seen = self._generation()
        chains = self._chains()
        kept = {} if chains is None else self._read_back()
        self._known = seen
        if self._mark is None:
            self._elements = kept
        self._mark = masquerade_mark
        if chains is None or chains == CHAINS:
            missing = {id_: target for id_, target in self._elements.items() if kept.get(id_) != target}
            try:
                self._run(self._definition(masquerade_mark, missing), "make the table")
                return
            except NftError:
                if chains is None:
                    raise
        # Somebody, perhaps an older version of us, has made it differently.
        fresh = [f"add table inet {self.name}", f"delete table inet {self.name}"]
        self._run(fresh + self._definition(masquerade_mark, self._elements), "replace the table")

    def update(self, added: Mapping[int, tuple[bytes, int]], removed: Iterable[int] = ()) -> None:
        """Adds (or changes) and removes backends by id, in one transaction; ids in both are added."""
        wanted = {id_: Target(*target) for id_, target in added.items()}
        changed = {id_: target for id_, target in wanted.items() if self._elements.get(id_) != target}
        gone = [id_ for id_ in removed if id_ in self._elements and id_ not in wanted]
        gone += [id_ for id_ in changed if id_ in self._elements]
        if not changed and not gone:
            return
        after = dict(self._elements)
        for id_ in gone:
            after.pop(id_, None)
        after.update(changed)
        commands = self._element_commands("delete", {id_: self._elements[id_] for id_ in gone}, keys_only=True)
        commands += self._element_commands("add", changed)
        try:
            self._run(commands, "change backends")
        except NftError:
            if self._mark is None:
                raise
            # The table is not what we left (flushed by a firewall's reload, say): make it again, whole.
            fresh = [f"add table inet {self.name}", f"delete table inet {self.name}"]
            self._run(fresh + self._definition(self._mark, after), "make the table again")
        self._elements = after

    def replace(self, wanted: Mapping[int, tuple[bytes, int]]) -> None:
        """Makes the maps hold exactly ``wanted``, writing only the differences (for adoption after a restart)."""
        self.update(wanted, [id_ for id_ in self._elements if id_ not in wanted])

    def remove(self) -> bool:
        """Deletes the table and everything in it; False if it was not there."""
        present = self._chains() is not None
        if present:
            self._run([f"delete table inet {self.name}"], "delete the table")
        self._elements = {}
        self._mark = None
        return present

    def exists(self) -> bool:
        return self._chains() is not None

    def _definition(self, mark: int, elements: Mapping[int, Target]) -> list[str]:
        commands = [f"add table inet {self.name}"]
        for name, data in MAPS.items():
            commands.append(f"add map inet {self.name} {name} {{ type classid : {data} . inet_service ; }}")
        for name, (kind, hook, priority) in CHAINS.items():
            shape = f"type {kind} hook {hook} priority {priority} ; policy accept ;"
            commands.append(f"add chain inet {self.name} {name} {{ {shape} }}")
        commands += [f"flush chain inet {self.name} {name}" for name in CHAINS]
        commands += [f"add rule inet {self.name} {chain} {rule}" for chain, rule in rules(mark)]
        return commands + self._element_commands("add", elements)

    def _element_commands(self, verb: str, elements: Mapping[int, Target], keys_only: bool = False) -> list[str]:
        commands = []
        for name, size in (("backends4", 4), ("backends6", 16)):
            texts = [
                _class(id_) if keys_only else f"{_class(id_)} : {ipaddress.ip_address(target.address)} . {target.port}"
                for id_, target in elements.items()
                if len(target.address) == size
            ]
            if texts:
                commands.append(f"{verb} element inet {self.name} {name} {{ {', '.join(texts)} }}")
        return commands

    def _chains(self) -> dict[str, tuple[str, str, int]] | None:
        """The table's chains: type, hook and priority; None if there is no such table."""
        tables = self._list("list tables inet")
        if not any("table" in item and item["table"]["name"] == self.name for item in tables):
            return None
        chains = [item["chain"] for item in self._list("list chains inet") if "chain" in item]
        return {
            chain["name"]: (chain.get("type", ""), chain.get("hook", ""), chain.get("prio", 0))
            for chain in chains
            if chain["table"] == self.name
        }

    def _read_back(self) -> dict[int, Target]:
        found = {}
        for name in MAPS:
            try:
                items = self._list(f"list map inet {self.name} {name}")
            except NftError:
                continue  # not there: ensure() will make it
            for item in items:
                for key, value in item.get("map", {}).get("elem", []):
                    major, minor = (int(part, 16) for part in key.split(":"))
                    address, port = value["concat"]
                    id_ = (major << 16 | minor) & 0xFFFFFF
                    found[id_] = Target(ipaddress.ip_address(address).packed, port)
        return found

    def _list(self, command: str) -> list[dict[str, Any]]:
        self._nft.set_json_output(True)
        try:
            output = self._call(command, command)
        finally:
            self._nft.set_json_output(False)
        return list(json.loads(output)["nftables"]) if output else []

    def _run(self, commands: list[str], what: str) -> None:
        before = self._generation()
        # A change of somebody else's between the last check and this one must still be noticed.
        undisturbed = self._known in (None, before)
        self._known = None
        self._call("\n".join(commands) + "\n", what)
        after = self._generation()
        if before is not None and after == before + 1 and undisturbed:
            self._known = after

    def _generation(self) -> int | None:
        """Number of the ruleset's present version: the kernel counts every committed transaction of the namespace."""
        self._socket.send(struct.pack("=IHHIIBBH", 20, NFT_MSG_GETGEN, NLM_F_REQUEST, 1, 0, 0, 0, 0))
        answer = self._socket.recv(4096)
        kind = struct.unpack_from("=H", answer, 4)[0]
        offset = 20
        while kind == NFT_MSG_NEWGEN and offset + 8 <= len(answer):
            length, attribute = struct.unpack_from("=HH", answer, offset)
            if attribute == NFTA_GEN_ID:
                return int(struct.unpack_from(">I", answer, offset + 4)[0])
            offset += max(4, (length + 3) & ~3)
        return None

    def _call(self, text: str, what: str) -> str:
        status, output, error = self._nft.cmd(text)
        if status:
            raise _failure(self.name, what, error)
        return str(output)


def _class(id_: int) -> str:
    """A backend id as nft writes a packet's priority: two 16-bit numbers in hexadecimal."""
    value = BACKEND_TAG | id_
    return f"{value >> 16:04x}:{value & 0xFFFF:04x}"


def _failure(table: str, what: str, text: str) -> NftError:
    first = text.strip().splitlines()[0] if text.strip() else "no reason given"
    where = f"nftables table inet {table}: {what}"
    if "Operation not permitted" in text:
        return NftError(errno.EPERM, f"{where}: not permitted; it needs root or CAP_NET_ADMIN")
    if any(words in text for words in ("not supported", "Invalid argument")) and "cache" in text:
        return NftError(errno.EOPNOTSUPP, f"{where}: this kernel has no nftables (CONFIG_NF_TABLES_INET): {first}")
    if "not supported" in text:
        return NftError(
            errno.EOPNOTSUPP, f"{where}: the kernel lacks a part of nftables (inet family, NAT, fib, reject): {first}"
        )
    return NftError(errno.EINVAL, f"{where}: {first}")
