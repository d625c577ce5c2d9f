# SPDX-License-Identifier: Apache-2.0
"""Creates the proxy's nftables table, repairs it, and adopts it after a restart. ``nft_rules`` has its contents."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import nftables

from pyebpf_proxy.datapath.netfilter import nft_rules
from pyebpf_proxy.datapath.netfilter.host_rules import NOTHING, Existing, HostRules, is_own
from pyebpf_proxy.datapath.netfilter.nfnetlink import Chain, Channel, Step
from pyebpf_proxy.datapath.netfilter.nft_rules import MAP_SHAPES, PORT_SHAPES, Behaviour, Prefix, Target
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import NETLINK_ROUTE
from pyebpf_proxy.datapath.refused import RefusedError

TABLE = "pyebpf-proxy"
#: libnftables has process-wide state: one call at a time, in any thread.
LIBRARY = threading.Lock()
#: Errors that say nothing about what this kernel can do.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR, errno.EBUSY)
#: Address followed by port, as in an element but without padding: up to a hundred thousand are kept.
_Packed = bytes


class _Found(NamedTuple):
    """What the table has. ``chains`` is None if there is no table."""

    chains: Mapping[str, Chain] | None
    sets: Collection[str]


class NftError(RefusedError):
    """A transaction that nftables refused, with the operation and nftables' message."""


def no_socket(error: OSError) -> NftError:
    """Why a socket for nftables cannot be opened."""
    if error.errno == errno.EPROTONOSUPPORT:
        return NftError(error.errno, "nftables: this kernel has no nfnetlink (CONFIG_NF_TABLES)")
    return NftError(error.errno, f"nftables: a socket cannot be opened: {error.strerror or error}")


def check_socket_for_devices() -> None:
    """Call it before each call of libnftables: that opens a socket if a rule names a device, and otherwise ends the
    process. NftError.
    """
    try:
        RequestSocket(NETLINK_ROUTE).close()
    except OSError as error:
        raise no_socket(error) from error


class Table:
    """The table ``inet <name>`` of the network namespace in which this object was created.

    Every method is one transaction. The object mirrors the backend maps, so repeated additions or removals cost
    nothing, and a table that was flushed is created again with everything in it.
    """

    def __init__(self, name: str = TABLE) -> None:
        self.name = name
        # Checked first, because libnftables ends the process if it cannot open its socket.
        try:
            self._channel = Channel()
        except OSError as error:
            raise no_socket(error) from error
        self._nft: Any = nftables.Nftables()
        self._elements: dict[int, _Packed] = {}
        #: By the set's name without the 4 or 6.
        self._addresses: dict[str, set[Prefix]] = {"cluster_ips": set(), "service_cidrs": set()}
        #: The same for sets of ports, with their keys (``nft_rules.port_key``).
        self._ports: dict[str, set[bytes]] = {"cluster_ports": set(), "frontends": set()}
        self._behaviour: Behaviour | None = None
        #: None: not set yet; the rules of a former run stay.
        self._host_rules: HostRules | None = None
        self._known: int | None = None

    @property
    def elements(self) -> Mapping[int, Target]:
        """Backend ids in the maps and their targets. Computed on each access."""
        return {id_: Target(packed[:-2], int.from_bytes(packed[-2:])) for id_, packed in self._elements.items()}

    def knows_sockets(self) -> bool:
        """Whether this kernel's nftables can match the mark of a packet's socket (CONFIG_NFT_SOCKET). Probed.

        NftError: the kernel lacked something for a moment, so this is unknown.
        """
        probe = f"{self.name}-probe"
        commands = [
            f"add table inet {probe}",
            f"add chain inet {probe} own {{ type nat hook output priority 0 ; }}",
            f"add rule inet {probe} own socket mark 0",
            f"delete table inet {probe}",
        ]
        try:
            self._run(commands, "probe the socket expression")
        except NftError as error:
            if any(os.strerror(number) in error.text for number in _PASSING):
                raise
            return False
        return True

    def checks_destination(self) -> bool:
        """Whether the table that exists was made with ``check_destination``.

        Sets alone do not show it: an agent that was killed may not have filled them, and an older version leaves them
        as they are.
        """
        with self._in_words("read the table"):
            return self._channel.looks_up(self.name, "frontends4")

    def conntrack_ports(self) -> tuple[int, int] | None:
        """First and last source port of the masquerade in the table that exists; None: all ports, or no table."""
        with self._in_words("read the table"):
            loaded = self._channel.loaded(self.name, "masquerading")
        ports = [int.from_bytes(value, "big") for value in loaded if len(value) == 2]
        return (min(ports), max(ports)) if ports else None

    def ensure(self, behaviour: Behaviour, frontends: Callable[[], Iterable[bytes]] = tuple) -> bool:
        """Creates the table, or repairs its rules and keeps the elements of its maps and sets.

        ``frontends`` returns what the sets of frontends contain if the behaviour adds them.

        Chains of another shape (of another version or mode of the proxy) are replaced in the same transaction; elements
        are kept. Also repairs a table that was flushed meanwhile. Costs next to nothing if no nftables rule has changed
        since the proxy's own last change. Returns whether the table, or a part of it, was missing. Raises NftError.
        """
        if behaviour == self._behaviour and self._known is not None and self._generation() == self._known:
            # A commit of others may have been counted as the proxy's own, if its own changed nothing at that moment.
            with self._in_words("read the table"):
                if self._channel.has_table(self.name):
                    return False
        # Until the table is complete: after a failure, the next call must not take what is there for it.
        self._known = None
        with self._in_words("read the table"):
            known = self._channel.generation()
            chains = self._channel.chains(self.name) if self._channel.has_table(self.name) else None
            counts = {} if chains is None else self._channel.sets(self.name)
            kept = self._kept(counts)
        held = {name: set[Prefix]() for name in self._addresses} if chains is None else self._read_addresses(counts)
        ports = self._read_ports(counts)
        if self._behaviour is None:
            self._elements = dict(kept)
            if behaviour.refuse_unknown:
                self._addresses = held
            self._ports = {base: set(keys) if _has(behaviour, base) else set() for base, keys in ports.items()}
            checked = "frontends4" in counts
        else:
            checked = self._behaviour.check_destination
        if behaviour.check_destination != checked:
            self._ports["frontends"] = set(frontends()) if behaviour.check_destination else set()
        self._behaviour = behaviour
        missing: dict[int, _Packed] = {}
        if kept is not self._elements:
            missing = {id_: target for id_, target in self._elements.items() if kept.get(id_) != target}
        lacking = {name: wanted - held[name] for name, wanted in self._addresses.items()}
        self._known = known
        try:
            wrong = {id_: kept[id_] for id_ in missing if id_ in kept}
            self._make(
                _Found(chains, counts),
                wrong,
                missing,
                lacking,
                {base: keys - ports[base] for base, keys in self._ports.items()},
            )
        except NftError:
            self._known = None
            if chains is None:
                raise
            # The existing table cannot be repaired, for example because a map has another type.
            self._remake(self._elements)
        return not chains or bool(missing)

    def update(self, added: Mapping[int, tuple[bytes, int]], removed: Iterable[int] = ()) -> None:
        """Adds (or changes) and removes backends by id, in one transaction; ids in both are added."""
        wanted = {id_: address + port.to_bytes(2) for id_, (address, port) in added.items()}
        present = self._elements
        changed = {id_: target for id_, target in wanted.items() if present.get(id_) != target}
        gone = {id_: present[id_] for id_ in removed if id_ in present and id_ not in wanted}
        gone |= {id_: present[id_] for id_ in changed if id_ in present}
        if not changed and not gone:
            return
        try:
            self._change(_backend_steps(gone, changed), "change backends")
        except NftError:
            if self._behaviour is None:
                raise
            # Others have changed the table (a firewall's reload may flush it): create it again completely.
            after = {id_: target for id_, target in present.items() if id_ not in gone} | changed
            self._remake(after)
            self._elements = after
            return
        for id_ in gone:
            del present[id_]
        present.update(changed)

    def replace(self, wanted: Mapping[int, tuple[bytes, int]]) -> None:
        """Makes the maps hold exactly ``wanted``, writing only the differences (for adoption after a restart)."""
        self.update(wanted, [id_ for id_ in self._elements if id_ not in wanted])

    def change_ports(self, base: str, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Adds and removes keys of the sets ``cluster_ports`` or ``frontends``; keys in both are added.

        Nothing is done if the table's behaviour does not have these sets.
        """
        if self._behaviour is None or not _has(self._behaviour, base):
            return
        present = self._ports[base]
        new = set(added)
        gone = {key for key in removed if key in present} - new
        new -= present
        present -= gone
        present |= new
        try:
            self._change([*_port_steps(base, True, gone), *_port_steps(base, False, new)], f"change {base}")
        except NftError:
            try:
                self._remake(self._elements)
            except NftError:
                present -= new
                present |= gone
                raise

    def set_ports(self, base: str, wanted: Iterable[bytes]) -> None:
        """Makes the sets ``cluster_ports`` or ``frontends`` hold exactly ``wanted``, writing only the differences."""
        # Without these sets, the wanted keys are not even computed.
        if self._behaviour is not None and _has(self._behaviour, base):
            wanted = set(wanted)
            self.change_ports(base, wanted - self._ports[base], self._ports[base] - wanted)

    def set_addresses(self, base: str, wanted: Iterable[Prefix]) -> None:
        """Makes the sets ``cluster_ips`` or ``service_cidrs`` hold exactly ``wanted``, writing only the differences.

        Without ``refuse_unknown`` these sets do not exist, and nothing is done.
        """
        present = self._addresses[base]
        wanted = set(wanted)
        self.change_addresses(base, wanted - present, present - wanted)

    def change_addresses(self, base: str, added: Iterable[Prefix], removed: Iterable[Prefix]) -> None:
        """Adds and removes addresses of a set, in one transaction; addresses in both are added."""
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
            before, self._addresses = self._addresses, after
            try:
                self._remake(self._elements)
            except NftError:
                self._addresses = before
                raise
        self._addresses = after

    def set_host_rules(self, wanted: HostRules) -> None:
        """Makes the rules for the node's own packets exactly ``wanted``, writing only the differences."""
        if wanted is self._host_rules:
            return
        if self._host_rules is None:
            commands = wanted.definition(self.name, self._existing(self._chains()))
        else:
            commands = self._host_rules.change(self.name, wanted)
        before, self._host_rules = self._host_rules, wanted
        try:
            if commands:
                self._run(commands, "change the rules for the node's own packets")
        except NftError:
            try:
                self._remake(self._elements)
            except NftError:
                self._host_rules = before
                raise

    def remove(self) -> bool:
        """Deletes the table and everything in it; False if it did not exist."""
        present = self._chains() is not None
        if present:
            self._run([f"delete table inet {self.name}"], "delete the table")
        self._elements = {}
        self._addresses = {name: set() for name in self._addresses}
        self._ports = {base: set() for base in self._ports}
        self._behaviour = None
        self._host_rules = None
        return present

    def exists(self) -> bool:
        return self._chains() is not None

    def _make(
        self,
        found: _Found,
        wrong: Mapping[int, _Packed],
        missing: Mapping[int, _Packed],
        lacking: Mapping[str, Iterable[Prefix]],
        ports: Mapping[str, Collection[bytes]],
    ) -> None:
        """Brings the table from the found to the wanted state. Elements first: rules must find them."""
        assert self._behaviour is not None
        if missing or any(ports.values()):
            self._run(nft_rules.places(self.name, self._behaviour), "make the maps")
            steps = [*_backend_steps(wrong, missing)]
            for base, keys in ports.items():
                steps += _port_steps(base, False, keys)
            self._change(steps, "fill the maps")
        chains = {name: shape for name, shape in (found.chains or {}).items() if not is_own(name)}
        commands = nft_rules.definition(self.name, self._behaviour, chains, found.sets)
        if self._behaviour.refuse_unknown:
            for base, prefixes in lacking.items():
                commands += nft_rules.address_elements(self.name, "add", base, prefixes)
        if self._host_rules is not None:
            commands += self._host_rules.definition(self.name, self._existing(found.chains))
        self._run(commands, "make the table")

    def _remake(self, elements: Mapping[int, _Packed]) -> None:
        """Replaces the table, whatever it has, or leaves it: all as text, in one transaction."""
        assert self._behaviour is not None
        commands = [f"add table inet {self.name}", f"delete table inet {self.name}"]
        commands += nft_rules.definition(self.name, self._behaviour, {})
        commands += nft_rules.backend_elements(self.name, elements)
        if self._behaviour.refuse_unknown:
            for base, prefixes in self._addresses.items():
                commands += nft_rules.address_elements(self.name, "add", base, prefixes)
        for base, keys in self._ports.items():
            commands += nft_rules.port_elements(self.name, base, keys)
        if self._host_rules is not None:
            commands += self._host_rules.definition(self.name)
        self._run(commands, "make the table again")

    def _chains(self) -> dict[str, Chain] | None:
        """The table's chains; None if the table does not exist."""
        with self._in_words("read the table"):
            return self._channel.chains(self.name) if self._channel.has_table(self.name) else None

    def _existing(self, chains: Mapping[str, object] | None) -> Existing:
        """The existing rules for packets of the node."""
        if not chains or not any(map(is_own, chains)):
            return NOTHING
        with self._in_words("read the table"):
            sets = self._channel.sets(self.name)
        return Existing(list(filter(is_own, chains)), list(filter(is_own, sets)))

    def _kept(self, counts: Mapping[str, int | None]) -> Mapping[int, _Packed]:
        """The backends in the maps. If their number is as written, they are assumed to be the written ones."""
        if self._behaviour is not None:
            wide = sum(1 for packed in self._elements.values() if len(packed) > 6)
            if (counts.get("backends4"), counts.get("backends6")) == (len(self._elements) - wide, wide):
                return self._elements
        found = {}
        for name, shape in MAP_SHAPES.items():
            if counts.get(name, 0) != 0:
                for key, data in self._channel.elements(self.name, name, shape).items():
                    found[nft_rules.backend_id(key)] = data[:-2]
        return found

    def _read_ports(self, counts: Mapping[str, int | None]) -> dict[str, set[bytes]]:
        found: dict[str, set[bytes]] = {base: set() for base in self._ports}
        with self._in_words("read sets of ports"):
            for base, keys in found.items():
                for family, shape in PORT_SHAPES.items():
                    if counts.get(base + family, 0) != 0:
                        keys.update(self._channel.elements(self.name, base + family, shape))
        return found

    def _read_addresses(self, counts: Mapping[str, int | None]) -> dict[str, set[Prefix]]:
        found: dict[str, set[Prefix]] = {base: set() for base in self._addresses}
        names = [base + number for base in found for number in "46" if counts.get(base + number, 0) != 0]
        for name, element in self._read_elements(names):
            prefix = element["prefix"] if isinstance(element, dict) else {"addr": element, "len": None}
            packed = ipaddress.ip_address(prefix["addr"]).packed
            found[name[:-1]].add((packed, prefix["len"] if prefix["len"] is not None else 8 * len(packed)))
        return found

    def _read_elements(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """The elements of the proxy's sets of addresses, each with the name of its set."""
        for name in names:
            for item in self._list(f"list set inet {self.name} {name}"):
                for element in item.get("set", {}).get("elem", []):
                    yield name, element

    def _list(self, command: str) -> list[dict[str, Any]]:
        self._nft.set_json_output(True)
        try:
            output = self._call(command, command)
        finally:
            self._nft.set_json_output(False)
        return list(json.loads(output)["nftables"]) if output else []

    def _run(self, commands: list[str], what: str) -> None:
        self._counted(lambda: self._call("\n".join(commands) + "\n", what))

    def _change(self, steps: Iterable[Step], what: str) -> None:
        steps = [step for step in steps if step.elements]
        if steps:
            with self._in_words(what):
                self._counted(lambda: self._channel.change(self.name, steps))

    def _counted(self, transaction: Callable[[], object]) -> None:
        """Make one transaction, so that a change by others between the last check and this one is still noticed."""
        before = self._generation()
        undisturbed = before is not None and self._known == before
        self._known = None
        transaction()
        after = self._generation()
        if undisturbed and before is not None and after == before + 1:
            self._known = after

    def _generation(self) -> int | None:
        with self._in_words("read the table"):
            return self._channel.generation()

    @contextmanager
    def _in_words(self, what: str) -> Iterator[None]:
        try:
            yield
        except NftError:
            raise
        except OSError as error:
            raise _failure(self.name, what, str(error), error.errno) from error

    def _call(self, text: str, what: str) -> str:
        with LIBRARY:
            check_socket_for_devices()
            status, output, error = self._nft.cmd(text)
            if status:
                # The rest of an answer may be in its socket. Then every later call would fail, or end the process.
                with suppress(NftError):
                    check_socket_for_devices()
                    self._nft = nftables.Nftables()
        if status:
            raise _failure(self.name, what, error)
        return str(output)


def _backend_steps(gone: Mapping[int, _Packed], added: Mapping[int, _Packed]) -> Iterator[Step]:
    for name, shape in MAP_SHAPES.items():
        size = shape.data - 2
        key = nft_rules.backend_key
        yield Step(True, name, shape, [key(id_) for id_, old in gone.items() if len(old) == size])
        yield Step(False, name, shape, [key(id_) + to + b"\0\0" for id_, to in added.items() if len(to) == size])


def _has(behaviour: Behaviour, base: str) -> bool:
    """Whether the table has these sets of ports."""
    return f"{base}4" in nft_rules.sets(behaviour)


def _port_steps(base: str, delete: bool, keys: Iterable[bytes]) -> Iterator[Step]:
    keys = list(keys)
    for family, shape in PORT_SHAPES.items():
        yield Step(delete, base + family, shape, [key for key in keys if len(key) == shape.key])


def _failure(table: str, what: str, text: str, number: int | None = None) -> NftError:
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
    return NftError(number or errno.EINVAL, f"{where}: {first}")
