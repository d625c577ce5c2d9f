# SPDX-License-Identifier: Apache-2.0
"""``flows``: service flows with names, from conntrack and from the flow table (see/young.py)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, NamedTuple

from pyebpf_proxy.datapath.connections.ctnetlink import read_tuple
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attributes
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.see import model
from pyebpf_proxy.see.answers import QuestionError, SeeError, UnknownServiceError
from pyebpf_proxy.see.filters import means, parse_place, split
from pyebpf_proxy.see.names import suggested
from pyebpf_proxy.see.state import State
from pyebpf_proxy.see.text import Cell, Terminal, duration, table
from pyebpf_proxy.services.addresses import Place, format_address, format_address_port, parse_address
from pyebpf_proxy.services.model import Protocol

_TCP_STATES = (
    *("NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE"),
    "SYN_SENT2",
)
_SCTP_STATES = (
    "NONE",
    "CLOSED",
    "COOKIE_WAIT",
    "COOKIE_ECHOED",
    "ESTABLISHED",
    "SHUTDOWN_SENT",
    "SHUTDOWN_RECD",
    "SHUTDOWN_ACK_SENT",
    "HEARTBEAT_SENT",
)
_UDP_STATES = ("ASSURED", "REPLIED", "UNREPLIED")
_PORTS = 65536 - 1024
_BUSIEST = 5
_PROTOCOLS = frozenset(map(int, Protocol))

#: The age of a flow: only the programs know it (young), or conntrack does. Then the path of its packets.
YOUNG: Final = "young"
KERNEL: Final = "kernel"
FAST: Final = "fast"
NETFILTER: Final = "netfilter"


class Flow(NamedTuple):
    """One flow. ``client`` sends to ``frontend``; ``endpoint`` replies to ``seen``. Counters may be None."""

    protocol: Protocol
    client: Place
    frontend: Place
    endpoint: Place
    seen: Place
    status: int
    state: str
    timeout: int
    packets: int | None
    bytes: int | None
    started: float | None
    #: The flow has no conntrack entry yet.
    young: bool = False

    @property
    def masqueraded(self) -> bool:
        """Whether the endpoint sees another source address than the client's."""
        return self.seen[0] != self.client[0]


def dump() -> Iterator[Flow]:
    """Every TCP, UDP and SCTP flow of this network namespace. SeeError if the kernel refuses."""
    with RequestSocket(uapi.NETLINK_NETFILTER) as netlink:
        try:
            for message in netlink.dump(uapi.IPCTNL_MSG_CT_GET, bytes(uapi.NFGENMSG.size)):
                flow = _flow(message)
                if flow is not None:
                    yield flow
        except OSError as error:
            raise SeeError(f"conntrack entries cannot be listed: {error.strerror}; run it as root") from None


def _flow(message: bytes) -> Flow | None:
    places = {kind: (begin, end) for kind, begin, end in attributes(message, uapi.NFGENMSG.size, len(message))}
    if uapi.CTA_TUPLE_ORIG not in places or uapi.CTA_TUPLE_REPLY not in places:
        return None
    original = read_tuple(message, *places[uapi.CTA_TUPLE_ORIG])
    reply = read_tuple(message, *places[uapi.CTA_TUPLE_REPLY])
    if original is None or reply is None or original.protocol not in _PROTOCOLS:
        return None

    def word(kind: int) -> int:
        return int.from_bytes(message[slice(*places[kind])][:4], "big") if kind in places else 0

    packets, octets = _counted(message, places)
    return Flow(
        Protocol(original.protocol),
        (original.source, _port(original.source_port)),
        (original.destination, _port(original.destination_port)),
        (reply.source, _port(reply.source_port)),
        (reply.destination, _port(reply.destination_port)),
        word(uapi.CTA_STATUS),
        _state(message, places, original.protocol, word(uapi.CTA_STATUS)),
        word(uapi.CTA_TIMEOUT),
        packets,
        octets,
        _started(message, places),
    )


def _port(raw: bytes) -> int:
    return int.from_bytes(raw, "big")


def _counted(message: bytes, places: Mapping[int, tuple[int, int]]) -> tuple[int | None, int | None]:
    if uapi.CTA_COUNTERS_ORIG not in places:
        return None, None
    sums = {uapi.CTA_COUNTERS_PACKETS: 0, uapi.CTA_COUNTERS_BYTES: 0}
    for way in (uapi.CTA_COUNTERS_ORIG, uapi.CTA_COUNTERS_REPLY):
        for kind, begin, end in attributes(message, *places.get(way, (0, 0))):
            if kind in sums:
                sums[kind] += int.from_bytes(message[begin:end], "big")
    return sums[uapi.CTA_COUNTERS_PACKETS], sums[uapi.CTA_COUNTERS_BYTES]


def _started(message: bytes, places: Mapping[int, tuple[int, int]]) -> float | None:
    for kind, begin, _ in attributes(message, *places.get(uapi.CTA_TIMESTAMP, (0, 0))):
        if kind == uapi.CTA_TIMESTAMP_START:
            return float(struct.unpack_from(">Q", message, begin)[0]) / 1e9
    return None


def _state(message: bytes, places: Mapping[int, tuple[int, int]], protocol: int, status: int) -> str:
    names = _TCP_STATES if protocol == Protocol.TCP else _SCTP_STATES
    for _, begin, end in attributes(message, *places.get(uapi.CTA_PROTOINFO, (0, 0))):
        for kind, value, _ in attributes(message, begin, end):
            # SCTP has the same number.
            if kind == uapi.CTA_PROTOINFO_TCP_STATE and message[value] < len(names):
                return names[message[value]]
    assured, replied, unreplied = _UDP_STATES
    return assured if status & uapi.IPS_ASSURED else replied if status & uapi.IPS_SEEN_REPLY else unreplied


def busiest() -> list[model.Fill]:
    """The endpoints with the most masqueraded flows. Each flow uses a source port of its masquerade address."""
    counts: dict[tuple[Place, bytes, Protocol], int] = {}
    for flow in dump():
        if flow.masqueraded and flow.status & uapi.IPS_DST_NAT:
            key = (flow.endpoint, flow.seen[0], flow.protocol)
            counts[key] = counts.get(key, 0) + 1
    top = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:_BUSIEST]
    return [
        model.Fill(
            name=f"source ports of {format_address(seen)} to {format_address_port(*endpoint)} {protocol.name}",
            used=count,
            capacity=_PORTS,
        )
        for (endpoint, seen, protocol), count in top
    ]


class Names:
    """Names of addresses: services by frontend, pods by address."""

    def __init__(self, state: State, own: Mapping[bytes, bool], pods: Mapping[bytes, str] | None = None) -> None:
        """``own``: addresses of this node, and whether each serves NodePorts. ``pods``: names of pods by address."""
        from pyebpf_proxy.see.services import name_text

        self._state = state
        self._own = own
        self._pods = pods or {}
        self._text = name_text

    def service(self, flow: Flow) -> str:
        """The service port to which the client sent; "" if there is none."""
        address, port = flow.frontend
        key = (address, port, int(flow.protocol))
        found = self._state.frontends.get(key)
        loopback = len(address) == 4 and address[0] == 127
        # Where no NodePort is served, another server may have the number.
        served = self._own.get(address, False) or (
            flow.status & uapi.IPS_DST_NAT and (loopback or address in self._own)
        )
        if found is None and served:
            found = self._state.frontends.get((bytes(len(address)), port, int(flow.protocol)))
        service = self._state.services.get(found[0]) if found is not None else None
        return self._text(service.name) if service is not None else ""

    def place(self, address: bytes) -> str:
        """The owner of an address: this node, a pod, or "" if unknown."""
        return "this node" if address in self._own else self._pods.get(address, "")


def view(flow: Flow, names: Names, cached: Callable[[Flow], bool | None], now: float) -> model.FlowView:
    """One flow with its names."""
    return model.FlowView(
        protocol=flow.protocol.name,
        client=format_address_port(*flow.client),
        client_name=names.place(flow.client[0]),
        destination=format_address_port(*flow.frontend),
        service=names.service(flow),
        endpoint=format_address_port(*flow.endpoint),
        endpoint_name=names.place(flow.endpoint[0]),
        masqueraded_as=format_address_port(*flow.seen) if flow.masqueraded else "",
        state=flow.state,
        seconds_left=flow.timeout,
        seconds=None if flow.started is None else max(0.0, now - flow.started),
        packets=flow.packets,
        bytes=flow.bytes,
        fast_path=flow.young or cached(flow),
        age=YOUNG if flow.young else KERNEL,
        path=FAST if flow.young or cached(flow) else NETFILTER,
    )


Filter = Callable[[model.FlowView], bool]


def parse_filter(words: list[str], services: set[str], pods: Collection[str] = ()) -> Filter:
    """``FIELD=VALUE …`` or bare words (address, name, protocol, state). A flow must match all. QuestionError.

    ``services``, ``pods``: existing names, with their namespaces.
    """
    checks: list[Filter] = []
    for word in words:
        field, value = split(word, _FIELDS, "flows")
        if field:
            _known(field, value)
            checks.append(_check((field,), value))
        else:
            known = parse_address(word) is not None or word.upper() in (*_TCP_STATES, *Protocol.__members__)
            plausible = known or any(word in name for name in (*services, *pods)) or ":" in word or "." in word
            alike = "" if plausible else suggested(word, [_pair(name) for name in services])
            if alike:
                raise UnknownServiceError(f"no Service is called {word}{alike}", word)
            checks.append(_check(tuple(_FIELDS), word))
    return lambda flow: all(check(flow) for check in checks)


_VALUES: dict[str, Collection[str]] = {
    "protocol": Protocol.__members__,
    "age": (YOUNG, KERNEL),
    "path": (FAST, NETFILTER),
    "state": (
        "OPEN",
        "CLOSING",
        *_TCP_STATES,
        *(name for name in _SCTP_STATES if name not in _TCP_STATES),
        *_UDP_STATES,
    ),
}


def _known(field: str, value: str) -> None:
    """QuestionError if no flow can match this value."""
    if not value:
        raise QuestionError(f"{field}= needs a value")
    known = _VALUES.get(field)
    if known is not None and value.upper() not in map(str.upper, known):
        raise QuestionError(f"there is no {field} {value}: {', '.join(known)}")


def _pair(name: str) -> tuple[str, str]:
    namespace, _, service = name.partition("/")
    return namespace, service


_FIELDS: dict[str, Callable[[model.FlowView], tuple[str, ...]]] = {
    "service": lambda flow: (flow.service,),
    "client": lambda flow: (flow.client, flow.client_name),
    "endpoint": lambda flow: (flow.endpoint, flow.endpoint_name),
    "destination": lambda flow: (flow.destination,),
    "protocol": lambda flow: (flow.protocol,),
    "state": lambda flow: (flow.state,),
    "age": lambda flow: (flow.age,),
    "path": lambda flow: (flow.path,),
}


def _check(fields: tuple[str, ...], value: str) -> Filter:
    if place := parse_place(value):
        _, value = place
    return lambda flow: any(means(value, text) for field in fields for text in _FIELDS[field](flow) if text)


def text(flows: list[model.FlowView], terminal: Terminal, filtered: bool = False) -> list[str]:
    """The flows as a table. ``filtered``: the command line has a filter."""

    def named(address: str, name: str) -> str:
        return f"{address} ({name})" if name else address

    rows: list[list[Cell | str]] = [
        [
            flow.service or flow.destination,
            flow.protocol,
            named(flow.client, flow.client_name),
            named(flow.endpoint, flow.endpoint_name),
            flow.masqueraded_as,
            flow.state,
            _age(flow),
            str(flow.bytes) if flow.bytes is not None else "",
            flow.path,
        ]
        for flow in flows
    ]
    head = ["SERVICE", "PROTO", "CLIENT", "ENDPOINT", "MASQUERADED AS", "STATE", "AGE", "BYTES", "PATH"]
    return table(terminal, head, rows) or ["no service flows" + (" match the filter" if filtered else "")]


def _age(flow: model.FlowView) -> str:
    words = [YOUNG] if flow.age == YOUNG else []
    return " ".join([*words, *([duration(flow.seconds)] if flow.seconds is not None else [])])
