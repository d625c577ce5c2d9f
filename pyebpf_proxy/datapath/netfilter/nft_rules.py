# SPDX-License-Identifier: Apache-2.0
"""Contents of the proxy's nftables table as text: chains, rules, maps, sets. Pure; ``nft.Table`` writes them.

A program hands a decision over in the packet itself, in ``skb->priority``: 0xEB000000 | backend id; 0xED000000 |
backend id, which means the same and masquerade; 0xEC000001, reject; or 0xEC000002, midstream: not the first
packet of a connection. The table carries it out:

=================  ===========================  ==========================================================
chain              hook                         what it does
=================  ===========================  ==========================================================
guard_loopback     prerouting, filter, -300     with route_localnet, which lets packets of any device reach 127.0.0.0/8:
                                                drops those that the programs have not seen, for example because
                                                of two VLAN tags, or because the device has no program yet
reject_local       input, nat, -110             rejects packets for an address of this node
translate          prerouting, nat, -105        leaves out packets that go to no frontend any more;
                                                rejects packets that are not for this node. Not in the forward
                                                hook, because the kernel resets the priority when it
                                                forwards; after conntrack (-200), before all other NAT;
                                                resets connections that conntrack would pick up midstream;
                                                sets the masquerade bit of the mark if the tag asks for it, after
                                                other mangle chains (-150) that may restore a mark;
                                                translates to the backend that the program chose, before
                                                other NAT rules (-100), such as those of a kube-proxy
masquerading       postrouting, nat, 99         priority 0xEE000001 for the first packet of a translated flow: the
                                                egress program of the device sees that it was let through;
                                                masquerades packets with the bit (spec/service-semantics §5.1), before
                                                a kube-proxy (100) that has the same bit: young flows have the ports
                                                that are left out here
source_ports       postrouting, nat, 200        packets of the node itself, after all other NAT: if conntrack must
                                                change the source port, the new one is none of the young flows'
clear_mark         postrouting, filter, 101     clears that one bit, and a tag that is still there: the kernel resets
                                                the priority only when it forwards IPv4
drop_invalid       forward, filter, 0           iptables mode: drops what conntrack considers INVALID, unless
                                                conntrack is liberal (§5.1)
node_datagrams      output, nat, -110            gives datagrams of the node the bit of their socket (sock.bpf.c)
unknown_forwarded  prerouting, nat, -90         nftables mode: cluster IPs at an undefined port are
unknown_host        output, nat, -90             rejected, other addresses of the ServiceCIDRs dropped (§9)
=================  ===========================  ==========================================================

The kernel runs chains of type nat only for the first packet of a flow, and only until the flow has its NAT. A chain
costs such a packet more than most rules, so no hook has more chains than it needs. Packets of established flows pass
one rule, that of clear_mark, and in iptables mode also that of drop_invalid. Packets that other rules have marked
NOTRACK pass no nat chain at all. Packets to a served port are translated before -90. A packet to a defined port that is
not translated by then came in through a device that has no program yet: it is dropped, and the client's next attempt is
served.

A program after the agent's on the same device may translate a packet after the agent's program has decided about it.
Cilium does so with ClusterIPs, and applies NetworkPolicy to the endpoint that it has chosen. The table then knows every
frontend, and leaves these packets as they are, as kube-proxy does.

Not implemented: kube-proxy's explicit ACCEPT of marked and established packets in the forward path (§5.1, iptables
mode). An accept in one nftables table does not overrule a drop in another or in iptables, so it would have no effect.
A firewall that drops by default in FORWARD must accept pod and service traffic itself, as with kube-proxy's nftables
mode.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from pyebpf_proxy.common.bpf_constants import (
    BACKEND_ID_MASK,
    PRIORITY_BACKEND,
    PRIORITY_MASQUERADE,
    PRIORITY_MIDSTREAM,
    PRIORITY_NEW,
    PRIORITY_REJECT,
)
from pyebpf_proxy.datapath.netfilter.nfnetlink import Chain, Shape

MAPS = {"backends4": "ipv4_addr", "backends6": "ipv6_addr"}
#: A tag; address and port, with the port padded.
MAP_SHAPES = {"backends4": Shape(4, 8), "backends6": Shape(4, 20)}
#: The keys of sets of ports, by the last character of the set's name: address, protocol and port, each padded.
PORT_SHAPES = {"4": Shape(12), "6": Shape(24)}
_TAG = "meta priority and ff00:0000"
_ANY_TAG = "meta priority and f800:0000 == e800:0000"
_TRANSPORTS = "meta l4proto { tcp, udp, sctp }"
_PORT_UNREACHABLE = "reject with icmpx type port-unreachable"

#: Packed address and prefix length.
Prefix = tuple[bytes, int]


class Behaviour(NamedTuple):
    """The table's configuration, in addition to the decisions that packets carry."""

    #: One bit.
    masquerade_mark: int
    drop_invalid: bool = False
    #: The proxy sets route_localnet, or a former run has set it.
    guard_loopback: bool = False
    refuse_unknown: bool = False
    mark_datagrams: bool = False
    #: Ignore the decision about a packet that does not go to a frontend any more.
    check_destination: bool = False
    #: Mark first packets of flows; then a program at the devices' egress must reset the priority.
    prove_new: bool = False
    #: First and last source port that conntrack may choose, which no young flow has; None: the kernel chooses.
    conntrack_ports: tuple[int, int] | None = None


class Target(NamedTuple):
    """The address and port of a backend id: packed address (its length is that of the family) and port."""

    address: bytes
    port: int


_PORTS = {"4": "type ipv4_addr . inet_proto . inet_service ;", "6": "type ipv6_addr . inet_proto . inet_service ;"}
#: Sets with ``refuse_unknown``, and the type of their elements.
_KNOWN = {
    "cluster_ips4": "type ipv4_addr ;",
    "cluster_ips6": "type ipv6_addr ;",
    **{f"cluster_ports{family}": shape for family, shape in _PORTS.items()},
    "service_cidrs4": "type ipv4_addr ; flags interval ;",
    "service_cidrs6": "type ipv6_addr ; flags interval ;",
}
#: Sets with ``check_destination``. A NodePort has the address 0.0.0.0 or ::, as in the programs' maps.
_FRONTENDS = {f"frontends{family}": shape for family, shape in _PORTS.items()}


def sets(behaviour: Behaviour) -> dict[str, str]:
    """The table's sets by name, and the type of their elements."""
    return {**(_KNOWN if behaviour.refuse_unknown else {}), **(_FRONTENDS if behaviour.check_destination else {})}


def chains(behaviour: Behaviour) -> dict[str, Chain]:
    """Every chain that depends only on the behaviour."""
    found = {
        "reject_local": ("nat", "input", -110),
        "translate": ("nat", "prerouting", -105),
        "masquerading": ("nat", "postrouting", 99),
        "clear_mark": ("filter", "postrouting", 101),
    }
    if behaviour.conntrack_ports is not None:
        found["source_ports"] = ("nat", "postrouting", 200)
    if behaviour.drop_invalid:
        found["drop_invalid"] = ("filter", "forward", 0)
    if behaviour.guard_loopback:
        found["guard_loopback"] = ("filter", "prerouting", -300)
    if behaviour.mark_datagrams:
        found["node_datagrams"] = ("nat", "output", -110)
    if behaviour.refuse_unknown:
        found["unknown_forwarded"] = ("nat", "prerouting", -90)
        found["unknown_host"] = ("nat", "output", -90)
    return {name: Chain(*shape) for name, shape in found.items()}


def rules(behaviour: Behaviour) -> list[tuple[str, str]]:
    """(chain, rule) in order."""
    mark = behaviour.masquerade_mark
    marked = f"meta mark and {mark:#x} == {mark:#x}"
    masquerades = f"{_TAG} == {_class(PRIORITY_MASQUERADE)}"
    reject = f"meta priority {_class(PRIORITY_REJECT)}"
    # One map key for both tags: the elements have the tag without masquerade.
    one_tag = f"meta priority set meta priority xor {_class(PRIORITY_MASQUERADE ^ PRIORITY_BACKEND)}"
    found = [("reject_local", f"{reject} {_PORT_UNREACHABLE}")]
    if behaviour.check_destination:
        for family, number, zero in (("ip", 4, "0.0.0.0"), ("ip6", 6, "::")):
            frontend, port = f"@frontends{number}", "meta l4proto . th dport"
            elsewhere = f"{_ANY_TAG} {family} daddr . {port} != {frontend}"
            # Without the decision: reject_local would carry it out if the packet goes to the node.
            leave_alone = "meta priority set 0:0 return"
            found += [
                ("translate", f"{elsewhere} fib daddr type != local {leave_alone}"),
                # An address of the node, but no NodePort.
                ("translate", f"{elsewhere} {family} daddr and {zero} . {port} != {frontend} {leave_alone}"),
            ]
    found += [
        ("translate", f"{reject} fib daddr type != local {_PORT_UNREACHABLE}"),
        # A nat chain sees only new connections, so conntrack would pick this one up midstream.
        ("translate", f"meta priority {_class(PRIORITY_MIDSTREAM)} reject with tcp reset"),
        ("translate", f"{masquerades} meta mark set meta mark or {mark:#x} {one_tag}"),
        ("translate", f"meta nfproto ipv4 {_TRANSPORTS} dnat ip to meta priority map @backends4"),
        ("translate", f"meta nfproto ipv6 {_TRANSPORTS} dnat ip6 to meta priority map @backends6"),
    ]
    if behaviour.prove_new:
        # A priority set by other rules stays, and does not prove the flow. Packets of the node itself (no ingress
        # device) passed no program before, and no program would reset their priority.
        # The priority comes first, because it ends the evaluation of most rules.
        found += [
            ("masquerading", f"{none} iif != 0 ct status dnat meta priority set {_class(PRIORITY_NEW)}")
            for none in ("meta priority and ffff:fff0 == 0:0", f"{_TAG} == {_class(PRIORITY_BACKEND)}")
        ]
    if behaviour.conntrack_ports is not None:
        low, high = behaviour.conntrack_ports
        ports = f"{low}-{high}"
        found.append(("masquerading", f"{marked} {_TRANSPORTS} masquerade to :{ports} fully-random"))
        # The source port stays, unless conntrack has a flow with the same reply. Then it would choose one of all ports,
        # also that of a young flow to the same endpoint, which would get the replies. A port outside of the range would
        # be changed in any case: these packets are left out.
        found.append(("source_ports", f"iif 0 {_TRANSPORTS} th sport {ports} snat to :{ports}"))
    found += [
        ("masquerading", f"{marked} masquerade fully-random"),
        ("clear_mark", f"{marked} meta mark set meta mark and {~mark & 0xFFFFFFFF:#x}"),
        # 0xEB to 0xED; cheap for packets without a tag.
        ("clear_mark", f"{_ANY_TAG} {_TAG} != ee00:0000 meta priority set 0:0"),
    ]
    if behaviour.drop_invalid:
        found.append(("drop_invalid", "ct state invalid counter drop"))
    if behaviour.guard_loopback:
        found.append(("guard_loopback", 'iifname != "lo" ip daddr 127.0.0.0/8 counter drop'))
    if behaviour.mark_datagrams:
        # The mark of a message is older than its socket's: it may have the bit of the message before. The mark of a
        # connection may have lost the bit to a rule before this one, such as CONNMARK --restore-mark.
        bare, set_bit = f"socket mark and {mark:#x} == 0", f"meta mark set meta mark or {mark:#x}"
        found += [
            ("node_datagrams", f"meta l4proto {{ tcp, udp }} socket mark and {mark:#x} != 0 {set_bit}"),
            ("node_datagrams", f"meta l4proto udp {marked} {bare} meta mark set meta mark and {~mark & 0xFFFFFFFF:#x}"),
        ]
    if behaviour.refuse_unknown:
        for chain, not_ours in (("unknown_forwarded", "fib daddr type != local "), ("unknown_host", "")):
            for family, number in (("ip", 4), ("ip6", 6)):
                known = f"{family} daddr . meta l4proto . th dport @cluster_ports{number}"
                if chain == "unknown_forwarded":
                    found.append((chain, f"{known} {not_ours}drop"))
                else:
                    # A cache at the ClusterIP itself, to which the socket programs leave the node's packets.
                    found.append((chain, f"{known} fib daddr type local accept"))
                found.append((chain, f"{family} daddr @cluster_ips{number} {not_ours}{_PORT_UNREACHABLE}"))
                found.append((chain, f"{family} daddr @service_cidrs{number} {not_ours}drop"))
    return found


def places(table: str, behaviour: Behaviour) -> list[str]:
    """Commands that create the table with its maps and sets where they are missing; elements stay."""
    commands = [f"add table inet {table}"]
    for name, data in MAPS.items():
        commands.append(f"add map inet {table} {name} {{ type classid : {data} . inet_service ; }}")
    return commands + [f"add set inet {table} {name} {{ {shape} }}" for name, shape in sets(behaviour).items()]


def definition(
    table: str, behaviour: Behaviour, existing: Mapping[str, Chain], existing_sets: Collection[str] = ()
) -> list[str]:
    """Commands that create the table, or turn ``existing`` chains of any version into exactly these; elements stay.

    Sets that only another behaviour uses are deleted.
    """
    wanted = chains(behaviour)
    commands = places(table, behaviour)
    commands += [f"flush chain inet {table} {name}" for name in existing]
    commands += [f"delete chain inet {table} {name}" for name in existing if wanted.get(name) != existing[name]]
    unused = (_KNOWN | _FRONTENDS).keys() - sets(behaviour).keys()
    commands += [f"delete set inet {table} {name}" for name in sorted(unused) if name in existing_sets]
    for name, (kind, hook, priority) in wanted.items():
        shape = f"type {kind} hook {hook} priority {priority} ; policy accept ;"
        commands.append(f"add chain inet {table} {name} {{ {shape} }}")
    return commands + [f"add rule inet {table} {chain} {rule}" for chain, rule in rules(behaviour)]


def backend_key(id_: int) -> bytes:
    """The key of a backend's map element."""
    return (PRIORITY_BACKEND | id_).to_bytes(4, sys.byteorder)


def backend_id(key: bytes) -> int:
    """The backend of an element's key."""
    return int.from_bytes(key, sys.byteorder) & BACKEND_ID_MASK


def port_key(address: bytes, protocol: int, port: int) -> bytes:
    """The key of a port in the sets ``cluster_ports`` and ``frontends`` of its family."""
    return address + protocol.to_bytes(1) + bytes(3) + port.to_bytes(2) + bytes(2)


def backend_elements(table: str, elements: Mapping[int, bytes]) -> list[str]:
    """Commands that add backends by id; a value is the address and, in the last two bytes, the port."""
    commands = []
    for name, shape in MAP_SHAPES.items():
        texts = [
            f"{_class(PRIORITY_BACKEND | id_)} : {ipaddress.ip_address(packed[:-2])} . {int.from_bytes(packed[-2:])}"
            for id_, packed in elements.items()
            if len(packed) == shape.data - 2
        ]
        if texts:
            commands.append(f"add element inet {table} {name} {{ {', '.join(texts)} }}")
    return commands


def port_elements(table: str, base: str, keys: Iterable[bytes]) -> list[str]:
    """Commands that add ports to the sets ``base``4 and ``base``6, given as keys of ``port_key``."""
    texts: dict[int, list[str]] = {4: [], 6: []}
    for key in keys:
        address, number = ipaddress.ip_address(key[:-8]), int.from_bytes(key[-4:-2])
        texts[address.version].append(f"{address} . {key[-8]} . {number}")
    return [
        f"add element inet {table} {base}{number} {{ {', '.join(found)} }}" for number, found in texts.items() if found
    ]


def address_elements(table: str, verb: str, base: str, prefixes: Iterable[Prefix]) -> list[str]:
    """Commands that ``add`` or ``delete`` prefixes in the sets ``base``4 and ``base``6."""
    texts: dict[str, list[str]] = {"4": [], "6": []}
    for address, length in prefixes:
        number = "4" if len(address) == 4 else "6"
        text = str(ipaddress.ip_address(address))
        texts[number].append(text if length == 8 * len(address) else f"{text}/{length}")
    return [
        f"{verb} element inet {table} {base}{number} {{ {', '.join(found)} }}"
        for number, found in texts.items()
        if found
    ]


def _class(value: int) -> str:
    """A packet's priority in nft's notation: two 16-bit numbers in hexadecimal."""
    return f"{value >> 16:04x}:{value & 0xFFFF:04x}"
