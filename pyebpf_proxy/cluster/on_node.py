# SPDX-License-Identifier: Apache-2.0
"""The commands that task pods run on a node. They do not use the kubernetes library.

``pyebpf-proxy cluster on-node fit`` checks requirements that only the node itself can show. ``verify [ADDRESS PORT …]``
removes rules that kube-proxy wrote while both proxies ran, then connects to these Services. ``kube-proxy [ADDRESS PORT
…]`` waits until kube-proxy has rules for these Services. ``peer`` is a pod of ``cluster test``.
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
    """Requirements that this node does not meet."""
    problems = []
    if not Path("/sys/kernel/btf/vmlinux").exists():
        problems.append("the kernel has no BTF (/sys/kernel/btf/vmlinux, CONFIG_DEBUG_INFO_BTF)")
    return problems


def remove_rules() -> list[str]:
    """Remove rules that kube-proxy wrote after the agent's start. The result: what could not be removed."""
    from pyebpf_proxy.datapath.migration import leftovers

    report = leftovers.remove((), at_start=True)
    for thing in report.removed:
        print(f"removed what kube-proxy left behind: {thing}")
    return list(report.problems)


def connect(places: list[tuple[str, int]]) -> list[str]:
    """Connect to Services. The result: those to which this node cannot connect."""
    problems = []
    for place in places:
        where = f"the Service at {place[0]} port {place[1]}"
        if why := _why_not_connected(place):
            problems.append(f"no connection to {where}: {why}")
        else:
            print(f"connected to {where}")
    return problems


def _why_not_connected(place: tuple[str, int]) -> str:
    """The error of the last of several attempts; "" if one succeeded."""
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
    """Wait for rules. The result: Services without one. kube-proxy writes all rules of a family in one transaction."""
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
    """kube-proxy's rules, whatever its mode and variant of iptables."""
    found = ""
    for command in _LISTS:
        if shutil.which(command[0]):
            found += subprocess.run(command, capture_output=True, text=True, check=False).stdout
    # Keep only chains of kube-proxy: chains of other programs may contain the same addresses.
    return "\n".join(line for line in found.splitlines() if not line.startswith("-A") or line.startswith("-A KUBE-"))


def main(arguments: list[str]) -> int:
    """Run one command. Status 1: there are problems, which the last line lists."""
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
