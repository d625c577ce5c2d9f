# SPDX-License-Identifier: Apache-2.0
"""A client and a server, and between them a router with conntrack and without an agent.

The router's firewall accepts packets of established flows, by nft and by iptables. It drops and counts INVALID ones.
New flows pass only between `opened` and `closed`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

from pyebpf_proxy.datapath.connections.create import Entry, Result, TcpState
from pyebpf_proxy.lab.namespace import Namespace
from pyebpf_proxy.services.addresses import Place
from pyebpf_proxy.services.model import Protocol
from tests.support.conntrack import create_now

CLIENT = {4: "10.9.1.2", 6: "fd09:1::2"}
FRONTEND = {4: "10.96.0.77", 6: "fd00:96::77"}
ENDPOINT = {4: "10.9.2.2", 6: "fd09:2::2"}
ROUTER = {4: "10.9.2.1", 6: "fd09:2::1"}
PORT, TARGET, MASQUERADE_SHIFT = 80, 8080, 20000
_TO_PORT = f"meta l4proto {{ tcp, udp }} th dport {PORT}"

_FILTER = """
table inet filter {
    chain forward {
        type filter hook forward priority -10; policy drop;
        ct state invalid counter drop
        ct state established accept
        ct state new jump new_flows
    }
    chain new_flows {
    }
}
table inet service {
    chain prerouting {
        type nat hook prerouting priority dstnat;
    }
    chain postrouting {
        type nat hook postrouting priority srcnat;
    }
}
"""
_OPEN = """
add rule inet filter new_flows accept
add rule inet service prerouting ip daddr {FRONTEND[4]} {_TO_PORT} dnat to {ENDPOINT[4]}:{TARGET}
add rule inet service prerouting ip6 daddr {FRONTEND[6]} {_TO_PORT} dnat to [{ENDPOINT[6]}]:{TARGET}
"""
_CLOSED = """
flush chain inet filter new_flows
flush chain inet service prerouting
flush chain inet service postrouting
"""


def place(address: str, port: int) -> Place:
    return ip_address(address).packed, port


class Router:
    """The three namespaces."""

    def __init__(self) -> None:
        self.client, self.router, self.server = (Namespace(f"pep-{w}-{os.getpid()}") for w in ("c", "r", "s"))

    @contextmanager
    def up(self) -> Iterator[Router]:
        """They exist within the block."""
        every = (self.client, self.router, self.server)
        try:
            for namespace in every:
                namespace.create()
            self._build()
            yield self
        finally:
            for namespace in every:
                namespace.remove()

    def _build(self) -> None:
        for host, name, four, six in ((self.client, "c", "10.9.1", "fd09:1:"), (self.server, "s", "10.9.2", "fd09:2:")):
            self.router.ip(f"link add {name} type veth peer name eth0 netns {host.name}")
            for at, device, last in ((self.router, name, 1), (host, "eth0", 2)):
                at.ip(
                    f"addr add {four}.{last}/24 dev {device}",
                    f"addr add {six}:{last}/64 dev {device} nodad",
                    f"link set {device} up",
                )
            host.ip(f"route add default via {four}.1", f"route add default via {six}:1")
        # Untranslated packets get as far as the firewall.
        self.router.ip(*(f"route add {FRONTEND[f]} via {ENDPOINT[f]}" for f in (4, 6)))
        self.router.sysctl({"net.ipv4.ip_forward": 1, "net.ipv6.conf.all.forwarding": 1})
        self.router.run("nft", "-f", "-", stdin=_FILTER)
        for tool in ("iptables-nft", "ip6tables-nft"):
            for rule in ("INVALID -j DROP", "ESTABLISHED -j ACCEPT", "NEW -j ACCEPT"):
                self.router.run(tool, *f"-A FORWARD -m conntrack --ctstate {rule}".split())
            self.router.run(tool, "-P", "FORWARD", "DROP")
        self.router.sysctl({"net.netfilter.nf_conntrack_tcp_loose": 0})

    def liberal(self, on: int) -> None:
        """Set ``nf_conntrack_tcp_be_liberal`` on the router."""
        self.router.sysctl({"net.netfilter.nf_conntrack_tcp_be_liberal": on})

    def opened(self, entry: Entry) -> None:
        """New flows pass, and rules translate them like this one."""
        rules = _OPEN.format(**globals())
        if entry.source is not None:
            address = ip_address(entry.source[0])
            family, to = ("ip", str(address)) if address.version == 4 else ("ip6", f"[{address}]")
            protocol = entry.protocol.name.lower()
            rules += f"add rule inet service postrouting {family} daddr {ip_address(entry.endpoint[0])} "
            rules += f"{protocol} sport {entry.client[1]} snat to {to}:{entry.source[1]}\n"
        self.router.run("nft", "-f", "-", stdin=rules)

    def forgotten(self) -> None:
        """No rule translates any more, no new flow passes, and the conntrack table is empty."""
        self.router.run("nft", "-f", "-", stdin=_CLOSED)
        self.router.run("conntrack", "-F")

    def create(self, *entries: Entry) -> list[Result]:
        """Create the entry by this package's code, on the router."""
        return self.router.call(create_now, entries)

    def listed(self, family: int) -> list[str]:
        """The lines of ``conntrack -L``."""
        return self.router.run("conntrack", "-L", "-f", "ipv4" if family == 4 else "ipv6").splitlines()

    def invalid(self) -> int:
        """How many packets the firewall has dropped as INVALID."""
        found = re.search(
            r"invalid counter packets (\d+)", self.router.run("nft", "list", "chain", "inet", "filter", "forward")
        )
        assert found is not None
        return int(found.group(1))


def entry(
    protocol: Protocol, family: int, own_port: int, masqueraded: bool, state: TcpState = TcpState.ESTABLISHED
) -> Entry:
    """The flow from the client's port to the frontend."""
    return Entry(
        protocol,
        place(CLIENT[family], own_port),
        place(FRONTEND[family], PORT),
        place(ENDPOINT[family], TARGET),
        place(ROUTER[family], own_port - MASQUERADE_SHIFT) if masqueraded else None,
        state,
    )
