# SPDX-License-Identifier: Apache-2.0
"""Our one nftables table in the kernel: made, kept right, adopted after a restart. ``nft_rules`` says what it holds."""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import nftables

from pyebpf_proxy.datapath.netfilter import nft_rules
from pyebpf_proxy.datapath.netfilter.nft_rules import MAPS, SETS, Behaviour, Prefix, Target
from pyebpf_proxy.datapath.netfilter.own_sctp import NOTHING, Existing, OwnSctp, is_ours
from pyebpf_proxy.datapath.refused import RefusedError

NETLINK_NETFILTER = 12
NLM_F_REQUEST = 1
# include/uapi/linux/netfilter/nf_tables.h, in the subsystem NFNL_SUBSYS_NFTABLES
NFT_MSG_NEWGEN = 10 << 8 | 15
NFT_MSG_GETGEN = 10 << 8 | 16
NFTA_GEN_ID = 1
TABLE = "pyebpf-proxy"
#: libnftables keeps some things for all its users in a process: one call at a time, in whatever thread.
LIBRARY = threading.Lock()


class NftError(RefusedError):
    """A transaction that nftables refused, with what was being done and its own words."""


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
        #: By the set's name without its number.
        self._addresses: dict[str, set[Prefix]] = {"cluster_ips": set(), "service_cidrs": set()}
        self._behaviour: Behaviour | None = None
        #: None: not said yet, and what a former run has left of it stays.
        self._own_sctp: OwnSctp | None = None
        self._known: int | None = None

    @property
    def elements(self) -> Mapping[int, Target]:
        """Backend ids in the maps and where they lead."""
        return self._elements

    def knows_sockets(self) -> bool:
        """Whether this kernel's nftables can look at the mark of a packet's socket (CONFIG_NFT_SOCKET). Tried."""
        probe = f"{self.name}-probe"
        commands = [
            f"add table inet {probe}",
            f"add chain inet {probe} own {{ type nat hook output priority 0 ; }}",
            f"add rule inet {probe} own socket mark 0",
            f"delete table inet {probe}",
        ]
        try:
            self._run(commands, "look at a socket")
        except NftError:
            return False
        return True

    def ensure(self, behaviour: Behaviour) -> None:
        """Makes the table, or puts its rules right and keeps the elements of its maps and sets.

        Chains of another shape (another version or mode of us) are replaced, in the same transaction, elements kept.
        Also heals a table that was flushed while we ran; costs next to nothing if nobody has changed any
        nftables rule since our own last change. NftError with clear text.
        """
        if behaviour == self._behaviour and self._known is not None and self._generation() == self._known:
            return
        seen = self._generation()
        chains = self._chains()
        kept = {} if chains is None else self._read_back()
        held = {name: set[Prefix]() for name in self._addresses} if chains is None else self._read_addresses()
        self._known = seen
        if self._behaviour is None:
            self._elements = kept
            if behaviour.refuse_unknown:
                self._addresses = held
        self._behaviour = behaviour
        if chains is None or _without_sctp(chains) == nft_rules.chains(behaviour):
            missing = {id_: target for id_, target in self._elements.items() if kept.get(id_) != target}
            lacking = {name: wanted - held[name] for name, wanted in self._addresses.items()}
            try:
                self._run(self._definition(missing, lacking, self._existing(chains)), "make the table")
                return
            except NftError:
                if chains is None:
                    raise
        # Somebody, perhaps an older version of us, has made it differently.
        self._run(self._fresh(self._elements, self._addresses), "replace the table")

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
        commands = nft_rules.backend_elements(
            self.name, "delete", {id_: self._elements[id_] for id_ in gone}, keys_only=True
        )
        commands += nft_rules.backend_elements(self.name, "add", changed)
        try:
            self._run(commands, "change backends")
        except NftError:
            if self._behaviour is None:
                raise
            # The table is not what we left (flushed by a firewall's reload, say): make it again, whole.
            self._run(self._fresh(after, self._addresses), "make the table again")
        self._elements = after

    def replace(self, wanted: Mapping[int, tuple[bytes, int]]) -> None:
        """Makes the maps hold exactly ``wanted``, writing only the differences (for adoption after a restart)."""
        self.update(wanted, [id_ for id_ in self._elements if id_ not in wanted])

    def set_addresses(self, base: str, wanted: Iterable[Prefix]) -> None:
        """Makes the sets ``cluster_ips`` or ``service_cidrs`` hold exactly ``wanted``, writing only the differences.

        Without ``refuse_unknown`` there are no such sets, and nothing is done.
        """
        present = self._addresses[base]
        wanted = set(wanted)
        self.change_addresses(base, wanted - present, present - wanted)

    def change_addresses(self, base: str, added: Iterable[Prefix], removed: Iterable[Prefix]) -> None:
        """Adds and removes addresses of a set, in one transaction; what is in both is added."""
        if self._behaviour is None or not self._behaviour.refuse_unknown:
            return
        present = self._addresses[base]
        new = set(added)
        gone = {prefix for prefix in removed if prefix in present} - new
        new -= present
        if not new and not gone:
            return
        after = {**self._addresses, base: (present - gone) | new}
        commands = nft_rules.address_elements(self.name, "delete", base, gone)
        commands += nft_rules.address_elements(self.name, "add", base, new)
        try:
            self._run(commands, f"change {base}")
        except NftError:
            self._run(self._fresh(self._elements, after), "make the table again")
        self._addresses = after

    def set_own_sctp(self, wanted: OwnSctp) -> None:
        """Makes the rules for SCTP of the node itself exactly those, writing only what differs."""
        if wanted is self._own_sctp:
            return
        if self._own_sctp is None:
            commands = wanted.definition(self.name, self._existing(self._chains()))
        else:
            commands = self._own_sctp.change(self.name, wanted)
        before, self._own_sctp = self._own_sctp, wanted
        try:
            if commands:
                self._run(commands, "change what SCTP of the node goes by")
        except NftError:
            try:
                self._run(self._fresh(self._elements, self._addresses), "make the table again")
            except NftError:
                self._own_sctp = before
                raise

    def remove(self) -> bool:
        """Deletes the table and everything in it; False if it was not there."""
        present = self._chains() is not None
        if present:
            self._run([f"delete table inet {self.name}"], "delete the table")
        self._elements = {}
        self._addresses = {name: set() for name in self._addresses}
        self._behaviour = None
        self._own_sctp = None
        return present

    def exists(self) -> bool:
        return self._chains() is not None

    def _definition(
        self,
        elements: Mapping[int, Target],
        addresses: Mapping[str, Iterable[Prefix]],
        existing: Existing = NOTHING,
    ) -> list[str]:
        assert self._behaviour is not None
        commands = nft_rules.definition(self.name, self._behaviour)
        commands += nft_rules.backend_elements(self.name, "add", elements)
        if self._behaviour.refuse_unknown:
            for base, prefixes in addresses.items():
                commands += nft_rules.address_elements(self.name, "add", base, prefixes)
        return commands if self._own_sctp is None else commands + self._own_sctp.definition(self.name, existing)

    def _fresh(self, elements: Mapping[int, Target], addresses: Mapping[str, Iterable[Prefix]]) -> list[str]:
        """Commands that make the table anew, whatever is there under its name."""
        away = [f"add table inet {self.name}", f"delete table inet {self.name}"]
        return away + self._definition(elements, addresses)

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

    def _existing(self, chains: Mapping[str, object] | None) -> Existing:
        """What the table has for SCTP of the node."""
        if not chains or not any(map(is_ours, chains)):
            return NOTHING
        listed = [*self._list("list sets inet"), *self._list("list maps inet")]
        objects = [kind[word] for kind in listed for word in ("set", "map") if word in kind]
        return Existing(
            [name for name in chains if is_ours(name)],
            [one["name"] for one in objects if one["table"] == self.name and is_ours(one["name"])],
        )

    def _read_back(self) -> dict[int, Target]:
        found = {}
        for _, (key, value) in self._read_elements("map", MAPS):
            major, minor = (int(part, 16) for part in key.split(":"))
            address, port = value["concat"]
            id_ = (major << 16 | minor) & 0xFFFFFF
            found[id_] = Target(ipaddress.ip_address(address).packed, port)
        return found

    def _read_addresses(self) -> dict[str, set[Prefix]]:
        found: dict[str, set[Prefix]] = {base: set() for base in self._addresses}
        for name, element in self._read_elements("set", SETS):
            prefix = element["prefix"] if isinstance(element, dict) else {"addr": element, "len": None}
            packed = ipaddress.ip_address(prefix["addr"]).packed
            found[name[:-1]].add((packed, prefix["len"] if prefix["len"] is not None else 8 * len(packed)))
        return found

    def _read_elements(self, kind: str, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """The elements of our maps or sets, each with the name of its map or set."""
        for name in names:
            try:
                items = self._list(f"list {kind} inet {self.name} {name}")
            except NftError:
                continue  # not there: ensure() will make it
            for item in items:
                for element in item.get(kind, {}).get("elem", []):
                    yield name, element

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
        with LIBRARY:
            status, output, error = self._nft.cmd(text)
        if status:
            raise _failure(self.name, what, error)
        return str(output)


def _without_sctp(chains: Mapping[str, tuple[str, str, int]]) -> dict[str, tuple[str, str, int]]:
    """Which of these there are goes by the services."""
    return {name: shape for name, shape in chains.items() if not is_ours(name)}


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
