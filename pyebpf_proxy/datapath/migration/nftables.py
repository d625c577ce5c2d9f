# SPDX-License-Identifier: Apache-2.0
"""The nftables tables of other software: kube-proxy's two, and those of iptables-nft, ``ip`` and ``ip6``."""

from __future__ import annotations

import errno
import json
from typing import Any

import nftables

from pyebpf_proxy.datapath.netfilter.nft import LIBRARY, NftError, check_socket_for_devices, no_socket
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import NETLINK_NETFILTER
from pyebpf_proxy.datapath.report import Report

TABLE = "kube-proxy"
FAMILIES = {4: "ip", 6: "ip6"}


class Ruleset:
    """The nftables ruleset of this process's network namespace. NftError if the kernel refuses."""

    def __init__(self) -> None:
        # Checked first, because libnftables ends the process if it cannot open its socket.
        try:
            RequestSocket(NETLINK_NETFILTER).close()
        except OSError as error:
            raise no_socket(error) from error
        self._nft: Any = nftables.Nftables()
        self._nft.set_json_output(True)

    def tables(self) -> set[tuple[str, str]]:
        """(family, name) of every table."""
        items = self._list("list tables")
        return {(item["table"]["family"], item["table"]["name"]) for item in items if "table" in item}

    def chains(self, family: str) -> dict[str, set[str]]:
        """Names of chains by table, without reading rules."""
        found: dict[str, set[str]] = {}
        for item in self._list(f"list chains {family}"):
            if "chain" in item:
                found.setdefault(item["chain"]["table"], set()).add(item["chain"]["name"])
        return found

    def has_chain(self, family: str, table: str, chain: str) -> bool:
        """Whether the chain exists; cheap even with a long ruleset."""
        if (family, table) not in self.tables():
            return False
        with LIBRARY:
            check_socket_for_devices()
            status, _, _ = self._nft.cmd(f"list chain {family} {table} {chain}")
        return not status

    def table(self, family: str, name: str) -> str:
        """The rules of a table, as JSON."""
        return self._run(f"list table {family} {name}")

    def delete_table(self, family: str, name: str) -> None:
        self._run(f"delete table {family} {name}")

    def _list(self, command: str) -> list[dict[str, Any]]:
        output = self._run(command)
        return list(json.loads(output)["nftables"]) if output else []

    def _run(self, command: str) -> str:
        with LIBRARY:
            check_socket_for_devices()
            status, output, error = self._nft.cmd(command)
        if status:
            first = next(iter(error.strip().splitlines()), "no reason given")
            raise NftError(errno.EINVAL, f"nftables: {command}: {first}")
        return str(output)


def present() -> list[str]:
    """The families in which kube-proxy's table exists: ``ip``, ``ip6``."""
    tables = Ruleset().tables()
    return [family for family in FAMILIES.values() if (family, TABLE) in tables]


def remove(report: Report) -> None:
    """Delete kube-proxy's tables, one transaction each."""
    try:
        ruleset = Ruleset()
        tables = ruleset.tables()
    except OSError as error:
        report.problems.append(str(error))
        return
    for family in FAMILIES.values():
        if (family, TABLE) not in tables:
            continue
        try:
            ruleset.delete_table(family, TABLE)
        except OSError as error:
            report.problems.append(str(error))
        else:
            report.removed.append(f"nftables table {family} {TABLE}")
