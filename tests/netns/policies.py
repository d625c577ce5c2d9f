# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicies as controllers implement them on a node: rules that drop packets of one address to another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pyebpf_proxy.lab.namespace import Namespace

#: The tools that write them.
KINDS = ("nft", "nft set", "iptables-nft", "iptables-legacy", "ipset", "ipset-legacy")


#: Priorities of nftables chains: before masquerading, and after it.
PRIORITIES = {"forward": 10, "postrouting": 10, "postrouting, masqueraded": 150}


class Policy:
    """Rules on a node for one family. ``established``: packets of established flows are accepted.

    ``hook``: forward or postrouting. ``postrouting, masqueraded``, only for nft, sees the new source address.
    """

    def __init__(
        self, node: Namespace, kind: str, family: int, established: bool = True, hook: str = "forward"
    ) -> None:
        self._node = node
        self._kind = kind
        self._family = family
        self._hook = hook
        self._ip = "ip" if family == 4 else "ip6"
        backend = "legacy" if "legacy" in kind else "nft"
        self._iptables = f"{self._ip}tables-{backend}"
        self._table, self._chain = ("filter", "FORWARD") if hook == "forward" else ("mangle", "POSTROUTING")
        self._set_up(established)

    def _set_up(self, established: bool) -> None:
        if self._kind.startswith("nft"):
            address = "ipv4_addr" if self._family == 4 else "ipv6_addr"
            lines = [
                "table inet denies {",
                f"set denied {{ type {address} . {address}; }}",
                f"chain c {{ type filter hook {self._hook.partition(',')[0]} priority {PRIORITIES[self._hook]};",
                "ct state established,related accept" if established else "",
                f"{self._ip} saddr . {self._ip} daddr @denied drop",
                "}",
                "}",
            ]
            self._node.run("nft", "-f", "-", stdin="\n".join(lines))
            return
        if established:
            self._rule("-A", "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")
        if self._kind.startswith("ipset"):
            inet = "inet" if self._family == 4 else "inet6"
            match = []
            for name, end in (("from", "src"), ("to", "dst")):
                self._node.run("ipset", "create", name, "hash:ip", "family", inet)
                match += ["-m", "set", "--match-set", name, end]
            self._rule("-A", *match, "-j", "DROP")

    def _rule(self, verb: str, *rule: str) -> None:
        self._node.run(self._iptables, "-t", self._table, verb, self._chain, *rule)

    def deny(self, source: str, destination: str) -> None:
        """Drop these packets from now on."""
        if self._kind == "nft":
            rule = f"{self._ip} saddr {source} {self._ip} daddr {destination} drop"
            self._node.run("nft", f"add rule inet denies c {rule}")
        elif self._kind == "nft set":
            self._node.run("nft", f"add element inet denies denied {{ {source} . {destination} }}")
        elif self._kind.startswith("ipset"):
            self._node.run("ipset", "add", "from", source)
            self._node.run("ipset", "add", "to", destination)
        else:
            self._rule("-A", "-s", source, "-d", destination, "-j", "DROP")

    def end(self) -> None:
        if self._kind.startswith("nft"):
            self._node.run("nft", "delete table inet denies")
            return
        self._node.run(self._iptables, "-t", self._table, "-F", self._chain)
        if self._kind.startswith("ipset"):
            self._node.run("ipset", "destroy")


@contextlib.contextmanager
def policy(
    node: Namespace, kind: str, family: int, established: bool = True, hook: str = "forward"
) -> Iterator[Policy]:
    """The rules are removed at the end of the block."""
    made = Policy(node, kind, family, established, hook)
    try:
        yield made
    finally:
        made.end()
