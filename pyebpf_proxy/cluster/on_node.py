# SPDX-License-Identifier: Apache-2.0
"""What task pods run, inside a pod on the node: needs nothing of the kubernetes library.

``pyebpf-proxy cluster on-node fit`` checks what only the node itself shows. ``verify [ADDRESS PORT …]`` removes rules
that kube-proxy wrote while both ran, then connects to Services. ``kube-proxy [ADDRESS PORT …]`` waits until kube-proxy
has rules for these Services. ``peer``: a pod of ``cluster test``.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

_CONNECT_SECONDS = 5.0
_PATIENCE = 10.0
_RULES_PATIENCE = 120.0
_LISTS = (
    *(
        [f"{family}-{variant}save", "-t", "nat"]
        for family in ("iptables", "ip6tables")
        for variant in ("nft-", "legacy-")
    ),
    *(["nft", "list", "table", family, "kube-proxy"] for family in ("ip", "ip6")),
)


def fit() -> list[str]:
    """Problems of this node."""
    problems = []
    if not Path("/sys/kernel/btf/vmlinux").exists():
        problems.append("the kernel has no BTF (/sys/kernel/btf/vmlinux, CONFIG_DEBUG_INFO_BTF)")
    return problems


def remove_rules() -> list[str]:
    """Remove what kube-proxy wrote after the agent's start; what could not be removed."""
    from pyebpf_proxy.datapath.migration import leftovers

    report = leftovers.remove((), at_start=True)
    for thing in report.removed:
        print(f"removed what kube-proxy left behind: {thing}")
    return list(report.problems)


def connect(places: list[tuple[str, int]]) -> list[str]:
    """Services that this node cannot connect to."""
    problems = []
    for place in places:
        where = f"the Service at {place[0]} port {place[1]}"
        if why := _why_not_connected(place):
            problems.append(f"no connection to {where}: {why}")
        else:
            print(f"connected to {where}")
    return problems


def _why_not_connected(place: tuple[str, int]) -> str:
    """The last of several attempts; "" if one succeeded."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            socket.create_connection(place, _CONNECT_SECONDS).close()
            return ""
        except OSError as error:
            if time.monotonic() >= end:
                return error.strerror or str(error)
        time.sleep(0.5)


def await_rules(places: list[tuple[str, int]], patience: float = _RULES_PATIENCE) -> list[str]:
    """Services for which kube-proxy has written no rule. It writes those of a family in one transaction."""
    end = time.monotonic() + patience
    while True:
        rules = _rules()
        missing = [
            address for address, _ in places if not re.search(rf"(?<![\w.:]){re.escape(address)}(?![\w.:])", rules)
        ]
        if not missing or time.monotonic() > end:
            return [f"kube-proxy has no rule for the Service at {address}" for address in missing]
        time.sleep(0.5)


def _rules() -> str:
    """The rules of every kube-proxy that may run here."""
    found = ""
    for command in _LISTS:
        if shutil.which(command[0]):
            found += subprocess.run(command, capture_output=True, text=True, check=False).stdout
    # Each line of iptables names its chain; other programs' chains may name the addresses, too.
    return "\n".join(line for line in found.splitlines() if not line.startswith("-A") or line.startswith("-A KUBE-"))


def main(arguments: list[str]) -> int:
    """The command line; status 1 with the problems on the last line."""
    what, *rest = arguments
    if what == "peer":
        from pyebpf_proxy.cluster import peer

        return peer.main()
    if what == "fit":
        problems = fit()
    else:
        places = [(rest[index], int(rest[index + 1])) for index in range(0, len(rest), 2)]
        problems = await_rules(places) if what == "kube-proxy" else [*remove_rules(), *connect(places)]
    print("; ".join(problems) or "all is well", flush=True)
    return 1 if problems else 0
