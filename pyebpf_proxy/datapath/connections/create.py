# SPDX-License-Identifier: Apache-2.0
"""Conntrack entries for established flows that conntrack has never seen (ctnetlink).

See ``ctnetlink_create_conntrack()`` in net/netfilter/nf_conntrack_netlink.c for how the kernel handles each attribute.
"""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy.datapath.connections.ctnetlink import TrackedEntry, header, lookup, tuple_of
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.services.addresses import Place, family_of
from pyebpf_proxy.services.model import Protocol

#: By the size of the address. Without a maximum the kernel takes the minimum for it.
_MIN_IP = {4: uapi.CTA_NAT_V4_MINIP, 16: uapi.CTA_NAT_V6_MINIP}
#: Timeout of an entry whose flow ended while the entry was created.
ABANDONED_SECONDS = 10

_FULL = {errno.ENOMEM, errno.ENOSPC, errno.E2BIG, errno.ENOBUFS}
_SYSCTLS = Path("/proc/sys/net/netfilter")


class TcpState(enum.IntEnum):
    """TCP states that entries are given, from enum tcp_conntrack; the names are those of the sysctls."""

    SYN_RECV = 2
    ESTABLISHED = 3
    FIN_WAIT = 4
    CLOSE_WAIT = 5
    CLOSE = 8


#: The states of connections that both sides have closed, and of those that one side has closed; 6 and 7 are LAST_ACK
#: and TIME_WAIT.
_ENDED = {6, 7, int(TcpState.CLOSE)}
_CLOSING = _ENDED | {int(TcpState.FIN_WAIT), int(TcpState.CLOSE_WAIT)}
#: Entries in these states need not be replaced.
_ALIVE = {int(TcpState.ESTABLISHED), int(TcpState.FIN_WAIT), int(TcpState.CLOSE_WAIT)}


class Entry(NamedTuple):
    """A flow from ``client`` to ``frontend``, answered by ``endpoint``. Packed addresses, ports as numbers.

    ``source``: the masqueraded source, address and port; None: the client itself. ``answered``: whether a reply was
    seen; netfilter rules see a flow without one as NEW.
    """

    protocol: Protocol
    client: Place
    frontend: Place
    endpoint: Place
    source: Place | None = None
    state: TcpState = TcpState.ESTABLISHED
    answered: bool = True

    @property
    def seen(self) -> Place:
        """The address and port that the endpoint replies to."""
        return self.source or self.client


class Outcome(enum.Enum):
    """The result for an entry. The kernel has it after CREATED, REPLACED and KNOWN."""

    CREATED = "created"
    #: Entries of other flows with the same addresses and ports, in either direction, were deleted first.
    REPLACED = "replaced"
    #: The kernel already has this flow, with the same translation.
    KNOWN = "known"
    #: An entry with one of its tuples came back right after the old one was deleted. May work later.
    CLASH = "clash"
    #: The connection table is full, or there is no memory. May work later.
    FULL = "full"
    REFUSED = "refused"


class Result(NamedTuple):
    """``number``: the errno of FULL and REFUSED, else 0."""

    outcome: Outcome
    number: int = 0

    @property
    def exists(self) -> bool:
        """Whether the kernel has this flow with the wanted translation."""
        return self.outcome in (Outcome.CREATED, Outcome.REPLACED, Outcome.KNOWN)

    def __str__(self) -> str:
        return self.outcome.value + (f": {os.strerror(self.number)}" if self.number else "")


def time_outs() -> Mapping[tuple[Protocol, TcpState], int]:
    """The kernel's timeouts of this network namespace in seconds. OSError without conntrack."""
    udp = _sysctl("udp_timeout_stream")
    found = {(Protocol.TCP, state): _sysctl(f"tcp_timeout_{state.name.lower()}") for state in TcpState}
    return {**found, **{(Protocol.UDP, state): udp for state in TcpState}}


def is_nearly_full() -> bool:
    """Whether less than a twentieth of conntrack's entries is free. A maximum of 0 is no limit. OSError."""
    limit = _sysctl("max")
    return bool(limit) and 20 * _sysctl("count") > 19 * limit


def _sysctl(name: str) -> int:
    return int((_SYSCTLS / f"nf_conntrack_{name}").read_text())


def create(
    netlink: RequestSocket, entries: Sequence[Entry], seconds: Mapping[tuple[Protocol, TcpState], int]
) -> list[Result]:
    """Create conntrack entries for these flows. Returns the result for each, in order.

    ``netlink``: of NETLINK_NETFILTER, in the flows' network namespace. ``seconds``: from :func:`time_outs`.
    OSError if the kernel does not answer at all.
    """
    # The kernel ignores an address of the other family, and the flow would not be translated.
    mixed = Result(Outcome.REFUSED, errno.EAFNOSUPPORT)
    results = [mixed] * len(entries)
    accepted = [number for number, entry in enumerate(entries) if _is_of_one_family(entry)]
    bodies = [message(entries[n], seconds[entries[n].protocol, entries[n].state]) for n in accepted]
    answers = netlink.request_many(uapi.IPCTNL_MSG_CT_NEW, uapi.NLM_F_CREATE | uapi.NLM_F_EXCL, bodies)
    for number, body, answer in zip(accepted, bodies, answers, strict=True):
        entry = entries[number]
        if answer == errno.EEXIST:
            results[number] = _replace_conflicting(netlink, entry, body, seconds[entry.protocol, entry.state])
        else:
            results[number] = _result(answer, Outcome.CREATED)
    return results


def _is_of_one_family(entry: Entry) -> bool:
    return len({len(place[0]) for place in (entry.client, entry.frontend, entry.endpoint, entry.seen)}) == 1


def close(netlink: RequestSocket, entries: Sequence[Entry], seconds: Mapping[tuple[Protocol, TcpState], int]) -> None:
    """Give TCP connections that began to close before their entries were created the state of their entry. OSError."""
    ending = [entry for entry in entries if entry.protocol is Protocol.TCP]
    netlink.request_many(uapi.IPCTNL_MSG_CT_NEW, 0, [_key(e) + _state(e, seconds[e.protocol, e.state]) for e in ending])


def shorten(netlink: RequestSocket, entries: Iterable[Entry]) -> None:
    """Give connections of which one side has vanished the timeout of those that conntrack saw retransmit. OSError.

    It is nf_conntrack_tcp_timeout_max_retrans. A packet of the connection makes the timeout long again.
    """
    limit = _sysctl("tcp_timeout_max_retrans")
    timeout = attribute(uapi.CTA_TIMEOUT, limit.to_bytes(4, "big"))
    bodies = []
    for entry in entries:
        known = _own(netlink, entry)
        if known and known.tcp_state == TcpState.ESTABLISHED and known.seconds > limit:
            bodies.append(_key(entry) + timeout)
    netlink.request_many(uapi.IPCTNL_MSG_CT_NEW, 0, bodies)


class Closed(NamedTuple):
    """What :func:`reset` has not closed: entries that had a packet after the RST, and the errno of each refusal."""

    extended: list[Entry]
    refused: list[int]


def reset(
    netlink: RequestSocket, entries: Iterable[tuple[Entry, bool]], seconds: Mapping[tuple[Protocol, TcpState], int]
) -> Closed:
    """Close the entries of kernel's flows that were reset, so that a SYN with the same ports opens a new one. OSError.

    conntrack keeps such an entry ESTABLISHED, with the timeout of CLOSE, because it does not know all sequence numbers
    (nf_conntrack_tcp_packet()). An entry with a longer timeout has had a packet since. It stays, unless the flow is
    quiet (the second value): then the RST had overtaken that packet.
    """
    closed = seconds[Protocol.TCP, TcpState.CLOSE]
    over: list[bytes] = []
    closing: list[tuple[Entry, TrackedEntry]] = []
    extended = []
    for entry, quiet in entries:
        known = _own(netlink, entry)
        if known is None or known.tcp_state != TcpState.ESTABLISHED:
            continue
        if known.seconds > closed and not quiet:
            extended.append(entry)
        else:
            # Both ends were ESTABLISHED, also if the replies took the slow path and `entry` knows of none. The kernel
            # does not let SEEN_REPLY and ASSURED be cleared (EBUSY).
            closed_entry = entry._replace(state=TcpState.CLOSE, answered=True)
            over.append(_key(entry) + _state(closed_entry, min(known.seconds, closed)))
            closing.append((entry, known))
    numbers = netlink.request_many(uapi.IPCTNL_MSG_CT_NEW, 0, over)
    _reopen(netlink, closing, seconds)
    return Closed(extended, [number for number in numbers if number not in (0, errno.ENOENT)])


def _reopen(
    netlink: RequestSocket,
    closed: Iterable[tuple[Entry, TrackedEntry]],
    seconds: Mapping[tuple[Protocol, TcpState], int],
) -> None:
    """Undo :func:`reset` for connections that have replaced those meanwhile: a SYN came with the same ports. OSError.

    The kernel checks an entry's id when it deletes it, but not when it changes it. In SYN_RECV the client's next ACK
    makes the entry ESTABLISHED; in CLOSE it would expire after ten seconds without a packet.
    """
    bodies = []
    for entry, before in closed:
        now = lookup(netlink, entry.protocol, entry.client, entry.frontend)
        if now is not None and now.key != before.key and now.tcp_state == TcpState.CLOSE:
            opening = entry._replace(state=TcpState.SYN_RECV, answered=True)
            bodies.append(_key(entry) + _state(opening, seconds[Protocol.TCP, TcpState.SYN_RECV]))
    netlink.request_many(uapi.IPCTNL_MSG_CT_NEW, 0, bodies)


def _own(netlink: RequestSocket, entry: Entry) -> TrackedEntry | None:
    """What conntrack has of this flow. None: nothing, or an entry of another flow with its client's end. OSError."""
    known = lookup(netlink, entry.protocol, entry.client, entry.frontend)
    return known if known and known.reply and known.reply.ends == (entry.endpoint, entry.seen) else None


def restore(
    netlink: RequestSocket, entries: Iterable[tuple[Entry, bool]], seconds: Mapping[tuple[Protocol, TcpState], int]
) -> None:
    """Make entries ESTABLISHED again that a forged RST or FIN has closed, or whose timeout it has shortened. OSError.

    The kernel does not check the sequence numbers while the fast path is on (nf_conntrack_tcp_be_liberal and
    nf_conntrack_tcp_ignore_invalid_rst). The second value: one side has really sent a FIN. An entry that is
    gone stays gone.
    """
    limit = seconds[Protocol.TCP, TcpState.CLOSE]
    bodies = []
    for entry, half_closed in entries:
        if entry.protocol is not Protocol.TCP:
            continue
        known = _own(netlink, entry)
        if known is None:
            continue
        shortened = known.tcp_state == TcpState.ESTABLISHED and known.seconds <= limit
        closed = known.tcp_state in (_ENDED if half_closed else _CLOSING)
        if shortened or closed:
            established = entry._replace(state=TcpState.ESTABLISHED, answered=True)
            bodies.append(_key(entry) + _state(established, seconds[Protocol.TCP, TcpState.ESTABLISHED]))
    netlink.request_many(uapi.IPCTNL_MSG_CT_NEW, 0, bodies)


def abandon(netlink: RequestSocket, entries: Sequence[Entry]) -> None:
    """Undo :func:`create` for flows that have ended: the entries expire after ABANDONED_SECONDS. OSError.

    They are not deleted, because a new connection from the same port may use its entry already. Its packets extend the
    timeout. A missing entry is no error.
    """
    soon = attribute(uapi.CTA_TIMEOUT, ABANDONED_SECONDS.to_bytes(4, "big"))
    netlink.request_many(uapi.IPCTNL_MSG_CT_NEW, 0, [_key(each) + soon for each in entries])


def delete(netlink: RequestSocket, entries: Sequence[Entry]) -> None:
    """Delete the entries of these UDP flows: their next packets are those of new flows. OSError.

    A missing entry is no error.
    """
    netlink.request_many(uapi.IPCTNL_MSG_CT_DELETE, 0, [_key(each) for each in entries])


def message(entry: Entry, seconds: int) -> bytes:
    """The body of IPCTNL_MSG_CT_NEW that creates an entry. ``seconds``: its timeout."""
    # The reply's tuple is that of an untranslated flow: only then does the kernel set IPS_DST_NAT and IPS_SRC_NAT and
    # change the tuple itself. With an exact port for both it does not choose one.
    return b"".join(
        (
            _header(entry),
            tuple_of(uapi.CTA_TUPLE_ORIG, entry.protocol, entry.client, entry.frontend),
            tuple_of(uapi.CTA_TUPLE_REPLY, entry.protocol, entry.frontend, entry.client),
            _nat(uapi.CTA_NAT_DST, entry.endpoint),
            _nat(uapi.CTA_NAT_SRC, entry.seen),
            _state(entry, seconds),
        )
    )


def _header(entry: Entry) -> bytes:
    return header(family_of(entry.client[0]))


def _key(entry: Entry) -> bytes:
    """The attributes that identify an entry in a message."""
    return _header(entry) + tuple_of(uapi.CTA_TUPLE_ORIG, entry.protocol, entry.client, entry.frontend)


def _nat(kind: int, place: Place) -> bytes:
    address, port = place[0], place[1].to_bytes(2, "big")
    ports = attribute(uapi.CTA_PROTONAT_PORT_MIN, port) + attribute(uapi.CTA_PROTONAT_PORT_MAX, port)
    ports = attribute(uapi.CTA_NAT_PROTO, ports, nested=True)
    return attribute(kind, attribute(_MIN_IP[len(address)], address) + ports, nested=True)


def _state(entry: Entry, seconds: int) -> bytes:
    # CONFIRMED is set before these are checked, and cannot be cleared: without it the kernel returns EBUSY.
    bits = uapi.IPS_CONFIRMED | (uapi.IPS_SEEN_REPLY | uapi.IPS_ASSURED if entry.answered else 0)
    status = attribute(uapi.CTA_STATUS, bits.to_bytes(4, "big"))
    status += attribute(uapi.CTA_TIMEOUT, seconds.to_bytes(4, "big"))
    if entry.protocol is not Protocol.TCP:
        return status
    flags = uapi.IP_CT_TCP_FLAG_BE_LIBERAL
    # Otherwise the kernel replaces an ended connection at the next SYN only if the client's RST was the last packet.
    flags |= 0 if entry.state is TcpState.ESTABLISHED else uapi.IP_CT_TCP_FLAG_CLOSE_INIT
    changed = bytes([flags, flags])  # the flags, and the mask of what to change
    info = attribute(uapi.CTA_PROTOINFO_TCP_STATE, bytes([entry.state]))
    info += attribute(uapi.CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, changed)
    info += attribute(uapi.CTA_PROTOINFO_TCP_FLAGS_REPLY, changed)
    return status + attribute(uapi.CTA_PROTOINFO, attribute(uapi.CTA_PROTOINFO_TCP, info, nested=True), nested=True)


def _replace_conflicting(netlink: RequestSocket, entry: Entry, body: bytes, seconds: int) -> Result:
    """After EEXIST: replace an existing entry that has one of the two tuples, in either direction.

    The programs already send every packet with one of these tuples as one of this flow, so an entry of another flow
    serves no packet: a client has reused the port, or packets from another device were forged. If it stayed, the
    rules of netfilter would never see the flow.
    """
    original, reply = (entry.client, entry.frontend), (entry.endpoint, entry.seen)
    for source, destination in (original, reply):
        try:
            known = lookup(netlink, entry.protocol, source, destination)
        except OSError as error:
            return Result(Outcome.REFUSED, error.errno or errno.EIO)
        if known is None or known.original is None or known.reply is None:
            continue
        alive = entry.protocol is not Protocol.TCP or known.tcp_state in _ALIVE
        if alive and (known.original.ends, known.reply.ends) == (original, reply):
            # It is this flow's own entry, with sequence numbers that are out of date.
            number = netlink.request(uapi.IPCTNL_MSG_CT_NEW, _key(entry) + _state(entry, seconds))
            if number == errno.EBUSY:
                # conntrack has seen a reply that the flow table did not send.
                answered = entry._replace(answered=True)
                number = netlink.request(uapi.IPCTNL_MSG_CT_NEW, _key(entry) + _state(answered, seconds))
            return _result(number, Outcome.KNOWN)
        # The key includes the entry's id, so that no other entry is deleted.
        number = netlink.request(uapi.IPCTNL_MSG_CT_DELETE, _header(entry) + known.key)
        if number not in (0, errno.ENOENT):
            return Result(Outcome.REFUSED, number)
    number = netlink.request_many(uapi.IPCTNL_MSG_CT_NEW, uapi.NLM_F_CREATE | uapi.NLM_F_EXCL, [body])[0]
    return Result(Outcome.CLASH) if number == errno.EEXIST else _result(number, Outcome.REPLACED)


def _result(number: int, done: Outcome) -> Result:
    if number == 0:
        return Result(done)
    return Result(Outcome.FULL if number in _FULL else Outcome.REFUSED, number)
