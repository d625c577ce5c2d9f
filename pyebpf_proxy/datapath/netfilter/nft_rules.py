# SPDX-License-Identifier: Apache-2.0
"""What our one nftables table holds, as text: chains, rules, maps, sets. Pure; ``nft.Table`` puts it into the kernel.

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
drop_invalid       forward, filter, 0           iptables mode: what conntrack calls INVALID, unless conntrack
                                                is liberal (§5.1)
own_datagrams      output, nat, -110            gives datagrams of the node the bit that their socket has (sock.bpf.c)
unknown_forwarded  prerouting, nat, -90         nftables mode: cluster IPs at a port that nobody defined are
unknown_own        output, nat, -90             rejected, other addresses of the ServiceCIDRs dropped (§9)
=================  ===========================  ==========================================================

Chains of type nat are asked by the kernel only for the first packet of a flow, and only until the flow has its NAT:
packets of established flows, and flows of the direct lane, meet one rule, that of clear_mark, and in iptables mode
that of drop_invalid. What a service port serves is translated before -90, and so never called unknown.

The NAT statements are also what makes conntrack and the NAT hooks live in the network namespace, for both
families; without them entries created from BPF are not translated.

Not built: kube-proxy's explicit ACCEPT of marked and established packets in the forward path (§5.1, iptables mode).
An accept in one nftables table does not overrule a drop in another or in iptables, so it would mean nothing here.
A firewall that drops by default in FORWARD must let pod and service traffic pass itself, as with
kube-proxy's nftables mode.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import NamedTuple

BACKEND_TAG = 0xEB000000
REJECT_CLASS = "ec00:0001"
MAPS = {"backends4": "ipv4_addr", "backends6": "ipv6_addr"}
_TRANSPORTS = "meta l4proto { tcp, udp, sctp }"
_REJECT = f"meta priority {REJECT_CLASS}"
_PORT_UNREACHABLE = "reject with icmpx type port-unreachable"

#: Packed address and prefix length.
Prefix = tuple[bytes, int]


class Behaviour(NamedTuple):
    """What the table is to do, beyond the decisions that packets carry."""

    #: One bit.
    masquerade_mark: int
    drop_invalid: bool = False
    refuse_unknown: bool = False
    mark_datagrams: bool = False


class Target(NamedTuple):
    """Where a backend id leads: packed address (its length tells the family) and port."""

    address: bytes
    port: int


#: Sets of addresses by name, and the type of their elements.
SETS = {
    "cluster_ips4": "type ipv4_addr ;",
    "cluster_ips6": "type ipv6_addr ;",
    "service_cidrs4": "type ipv4_addr ; flags interval ;",
    "service_cidrs6": "type ipv6_addr ; flags interval ;",
}


def chains(behaviour: Behaviour) -> dict[str, tuple[str, str, int]]:
    """Type, hook and priority of every chain."""
    found = {
        "reject_forwarded": ("nat", "prerouting", -110),
        "reject_local": ("nat", "input", -110),
        "translate": ("nat", "prerouting", -100),
        "hide_source": ("nat", "postrouting", 100),
        "clear_mark": ("filter", "postrouting", 101),
    }
    if behaviour.drop_invalid:
        found["drop_invalid"] = ("filter", "forward", 0)
    if behaviour.mark_datagrams:
        found["own_datagrams"] = ("nat", "output", -110)
    if behaviour.refuse_unknown:
        found["unknown_forwarded"] = ("nat", "prerouting", -90)
        found["unknown_own"] = ("nat", "output", -90)
    return found


def rules(behaviour: Behaviour) -> list[tuple[str, str]]:
    """(chain, rule) in order."""
    mark = behaviour.masquerade_mark
    marked = f"meta mark and {mark:#x} == {mark:#x}"
    found = [
        ("reject_forwarded", f"{_REJECT} fib daddr type != local {_PORT_UNREACHABLE}"),
        ("reject_local", f"{_REJECT} {_PORT_UNREACHABLE}"),
        ("translate", f"meta nfproto ipv4 {_TRANSPORTS} dnat ip to meta priority map @backends4"),
        ("translate", f"meta nfproto ipv6 {_TRANSPORTS} dnat ip6 to meta priority map @backends6"),
        ("hide_source", f"{marked} masquerade fully-random"),
        ("clear_mark", f"{marked} meta mark set meta mark and {~mark & 0xFFFFFFFF:#x}"),
    ]
    if behaviour.drop_invalid:
        found.append(("drop_invalid", "ct state invalid counter drop"))
    if behaviour.mark_datagrams:
        # The mark of a message is older than its socket's: it may have the bit from the message before.
        bare = f"socket mark and {mark:#x} == 0"
        found += [
            ("own_datagrams", f"meta l4proto udp socket mark and {mark:#x} != 0 meta mark set meta mark or {mark:#x}"),
            ("own_datagrams", f"meta l4proto udp {marked} {bare} meta mark set meta mark and {~mark & 0xFFFFFFFF:#x}"),
        ]
    if behaviour.refuse_unknown:
        for chain, not_ours in (("unknown_forwarded", "fib daddr type != local "), ("unknown_own", "")):
            for family, number in (("ip", 4), ("ip6", 6)):
                found.append((chain, f"{family} daddr @cluster_ips{number} {not_ours}{_PORT_UNREACHABLE}"))
                found.append((chain, f"{family} daddr @service_cidrs{number} {not_ours}drop"))
    return found


def definition(table: str, behaviour: Behaviour) -> list[str]:
    """Commands that make the table, or put it right where it exists; elements stay."""
    commands = [f"add table inet {table}"]
    for name, data in MAPS.items():
        commands.append(f"add map inet {table} {name} {{ type classid : {data} . inet_service ; }}")
    if behaviour.refuse_unknown:
        commands += [f"add set inet {table} {name} {{ {shape} }}" for name, shape in SETS.items()]
    for name, (kind, hook, priority) in chains(behaviour).items():
        shape = f"type {kind} hook {hook} priority {priority} ; policy accept ;"
        commands.append(f"add chain inet {table} {name} {{ {shape} }}")
    commands += [f"flush chain inet {table} {name}" for name in chains(behaviour)]
    return commands + [f"add rule inet {table} {chain} {rule}" for chain, rule in rules(behaviour)]


def backend_elements(table: str, verb: str, elements: Mapping[int, Target], keys_only: bool = False) -> list[str]:
    """Commands that ``add`` or ``delete`` backends by id."""
    commands = []
    for name, size in (("backends4", 4), ("backends6", 16)):
        texts = [
            _class(id_) if keys_only else f"{_class(id_)} : {ipaddress.ip_address(target.address)} . {target.port}"
            for id_, target in elements.items()
            if len(target.address) == size
        ]
        if texts:
            commands.append(f"{verb} element inet {table} {name} {{ {', '.join(texts)} }}")
    return commands


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


def _class(id_: int) -> str:
    """A backend id as nft writes a packet's priority: two 16-bit numbers in hexadecimal."""
    value = BACKEND_TAG | id_
    return f"{value >> 16:04x}:{value & 0xFFFF:04x}"
