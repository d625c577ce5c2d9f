# SPDX-License-Identifier: Apache-2.0
"""Conntrack entries of masqueraded flows to endpoints: finds them, and enters them into the flow table.

Young flows have source ports of their own, which the agent's masquerade rule does not use. Another proxy uses all
ports: kube-proxy masquerades with ``--random-fully``. Its flows go on after the agent has replaced it, so no young flow
may take one of their ports. Nor may a young flow continue one of its UDP flows, to another endpoint: if the programs
cannot look flows up in conntrack, they know only what is in the flow table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping

from pyebpf_proxy.datapath.connections.ctnetlink import TrackedEntry, entries
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute, word
from pyebpf_proxy.services.addresses import Place
from pyebpf_proxy.services.model import IPFamily, Protocol

#: Whether the source of an entry's replies (protocol; address and port) is an endpoint of a Service.
IsEndpoint = Callable[[int, Place], bool]

# include/linux/netfilter/nf_conntrack_common.h
_FILTER_IP_DST = 1 << 1
#: TCP states in which packets with data may follow: SYN_SENT to LAST_ACK, and SYN_SENT2.
_OPEN = frozenset((1, 2, 3, 4, 5, 6, 9))
_SIZES = {IPFamily.IPV4: 4, IPFamily.IPV6: 16}
#: Ports as the programs have them.
_PORTS = struct.Struct("=HH")


def masqueraded(
    addresses: Collection[bytes], ports: range, is_endpoint: IsEndpoint, datagrams: bool = False
) -> Iterator[tuple[IPFamily, TrackedEntry]]:
    """Entries whose replies go from an endpoint to one of these (packed) addresses and ports, not to the client.

    ``datagrams``: also UDP flows from the client itself to an endpoint that it has not named.
    In the network namespace of the calling thread; not a snapshot. OSError.
    """
    for family, size in _SIZES.items():
        wanted = {address for address in addresses if len(address) == size} if ports else set()
        if not wanted and not datagrams:
            continue
        for entry in entries(family, None, b"" if datagrams else _wanted(family, wanted)):
            original, reply = entry.original, entry.reply
            if original is None or reply is None:
                continue
            endpoint, seen = reply.ends
            client, frontend = original.ends
            if client[0] != seen[0]:
                fits = seen[0] in wanted and seen[1] in ports
            else:
                fits = datagrams and reply.protocol == Protocol.UDP and client == seen and frontend != endpoint
            if fits and is_endpoint(reply.protocol, endpoint):
                yield family, entry


def enter(
    addresses: Collection[bytes],
    ports: range,
    is_endpoint: IsEndpoint,
    btf: Btf,
    enter_flow: Callable[[bytes], bool],
    most: int,
    datagrams: bool = False,
) -> tuple[int, bool]:
    """Enter the open flows of :func:`masqueraded` into the flow table; how many, and whether those are all.

    ``enter_flow`` runs the program of that name with a ``struct tracked_flow`` (bpf/observer.h) and returns whether the
    table has the flow. ``most``: entered at most. TCP comes first, since a datagram's flow has probably ended. UDP
    flows that are not masqueraded come last. OSError.
    """
    key = btf.struct("flow_key").packer("source", "destination", "source_port", "destination_port", "protocol", "ipv6")
    of_tcp: list[bytes] = []
    of_udp: list[bytes] = []
    unmasqueraded: list[bytes] = []
    complete = True
    for family, entry in masqueraded(addresses, ports, is_endpoint, datagrams):
        original, reply, tcp = entry.original, entry.reply, entry.tcp_state != 0
        assert original is not None
        assert reply is not None
        if tcp and entry.tcp_state not in _OPEN:
            continue
        if reply.protocol not in (Protocol.TCP, Protocol.UDP):
            continue
        (client, client_port), (frontend, frontend_port) = original.ends
        (endpoint, endpoint_port), (source, source_port) = reply.ends
        found = of_tcp if tcp else unmasqueraded if client == source else of_udp
        if len(found) >= most:
            complete = False
            continue
        packed = key.pack(client, frontend, client_port, frontend_port, reply.protocol, family is IPFamily.IPV6)
        ends = source.ljust(16, b"\0") + endpoint.ljust(16, b"\0")
        found.append(packed + ends + _PORTS.pack(source_port, endpoint_port))
    flows = of_tcp + of_udp + unmasqueraded
    return sum(map(enter_flow, flows[:most])), complete and len(flows) <= most


def endpoint_test(maps: Mapping[str, Map], btf: Btf) -> IsEndpoint:
    """By the maps of endpoints, whatever their Service."""
    tables = {4: maps["endpoints4"], 16: maps["endpoints6"]}
    layouts = {4: btf.struct("endpoint4_key"), 16: btf.struct("endpoint6_key")}

    def is_endpoint(protocol: int, place: Place) -> bool:
        address, port = place
        # Service 0: of any Service.
        key = layouts[len(address)].pack(service=0, address=address, port=port, protocol=protocol)
        return tables[len(address)].lookup(key) is not None

    return is_endpoint


def _wanted(family: IPFamily, addresses: Collection[bytes]) -> bytes:
    # The kernel compares with one address at most. With IPv6 it does the opposite: it returns the entries with other
    # addresses.
    return _only(*addresses) if family is IPFamily.IPV4 and len(addresses) == 1 else b""


def _only(address: bytes) -> bytes:
    place = attribute(uapi.CTA_TUPLE_IP, attribute(uapi.CTA_IP_V4_DST, address), nested=True)
    flags = ((uapi.CTA_FILTER_ORIG_FLAGS, 0), (uapi.CTA_FILTER_REPLY_FLAGS, _FILTER_IP_DST))
    what = b"".join(attribute(kind, word(value)) for kind, value in flags)
    return attribute(uapi.CTA_TUPLE_REPLY, place, nested=True) + attribute(uapi.CTA_FILTER, what, nested=True)
