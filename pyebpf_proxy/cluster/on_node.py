# SPDX-License-Identifier: Apache-2.0
"""What task pods run, inside a pod on the node: needs nothing of the kubernetes library.

``pyebpf-proxy cluster on-node TASK [ADDRESS PORT …]``; a port is ``443``, or ``53/UDP`` for a DNS query.

========== =========================================================================================
task       what it does
========== =========================================================================================
fit        checks what only the node itself shows, and prints which Services can be connected to
try        only the latter: in a pod of the pod network
verify     removes rules that kube-proxy wrote while both ran, then connects to the Services
connect    only the latter: in a pod of the pod network
kube-proxy waits until kube-proxy has rules for the Services
peer       a pod of ``cluster test``
========== =========================================================================================

The last line has the problems, for which the status is 1. A line that begins with WARNING is shown by the commands.
"""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import NamedTuple

#: Begins a line about a Service that can be connected to; the rest is as in the arguments.
REACHED = "reached "
WARNING = "warning: "
NO_RULE = "kube-proxy has no rule for the Service at"
_CONNECT_SECONDS = 5.0
_PATIENCE = 10.0
_SHORT_PATIENCE = 3.0
_RULES_PATIENCE = 120.0
#: For the address of a name that every cluster has. Any answer will do.
_DNS_QUERY = b"\x70\x65\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + (
    b"\x0akubernetes\x07default\x03svc\x07cluster\x05local\x00\x00\x01\x00\x01"
)
#: A rule of kube-proxy's that leads to a Service's endpoints.
_SERVICE = re.compile(r"^-A KUBE-SERVICES .* -j KUBE-(?:SVC|SVL|EXT|FW)-", re.MULTILINE)


class Place(NamedTuple):
    """An address and port of a Service. ``udp``: a DNS server."""

    address: str
    port: int
    udp: bool = False

    def __str__(self) -> str:
        return f"{self.address} port {self.port}{'/UDP' if self.udp else ''}"

    @property
    def argument(self) -> str:
        """As on the command line."""
        return f"{self.address} {self.port}{'/UDP' if self.udp else ''}"


def places_of(arguments: list[str]) -> list[Place]:
    """The Services of a command line."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return [Place(address, int(port.removesuffix("/UDP")), port.endswith("/UDP")) for address, port in pairs]


def fit() -> list[str]:
    """Problems of this node."""
    problems = []
    if not Path("/sys/kernel/btf/vmlinux").exists():
        problems.append("the kernel has no BTF (/sys/kernel/btf/vmlinux, CONFIG_DEBUG_INFO_BTF)")
    _, unread = _rules()
    return problems + [f"kube-proxy's rules cannot be read: {why}" for why in unread]


def remove_rules() -> list[str]:
    """Remove what kube-proxy wrote after the agent's start. The result: rules of Services that stay.

    What else stays is printed as a warning: another program uses it, as portmap uses KUBE-MARK-MASQ. So is what the
    node's firewall must accept without kube-proxy's rules.
    """
    from pyebpf_proxy.datapath.migration import leftovers

    report = leftovers.remove((), at_start=True)
    for thing in report.removed:
        print(f"removed what kube-proxy left behind: {thing}")
    for text in report.warnings:
        print(f"{WARNING}{text}")
    rules, _ = _rules()
    left = [name for name, text in rules.items() if name.startswith("nftables") or _SERVICE.search(text)]
    if left:
        return [f"{', '.join(left)}: rules of kube-proxy for Services remain", *report.problems]
    for problem in report.problems:
        print(f"{WARNING}{problem}")
    return []


# ---- connections ---------------------------------------------------------------------------------------------------


def connect(places: list[Place], patience: float = _PATIENCE) -> list[str]:
    """Services that this node, or pod, cannot connect to; the others are printed. ``patience``: seconds for each."""
    problems = []
    for place in places:
        if why := _why_not_connected(place, patience):
            problems.append(f"no connection to the Service at {place}: {why}")
        else:
            print(f"{REACHED}{place.argument}")
    return problems


def _why_not_connected(place: Place, patience: float) -> str:
    """The last of several attempts; "" if one succeeded."""
    end = time.monotonic() + patience
    while True:
        try:
            _attempt(place)
            return ""
        except OSError as error:
            if time.monotonic() >= end:
                return error.strerror or str(error)
        time.sleep(0.5)


def _attempt(place: Place) -> None:
    if not place.udp:
        socket.create_connection((place.address, place.port), _CONNECT_SECONDS).close()
        return
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(_CONNECT_SECONDS)
        sock.connect((place.address, place.port))
        sock.send(_DNS_QUERY)
        sock.recv(4096)


# ---- kube-proxy's rules --------------------------------------------------------------------------------------------


def await_rules(places: list[Place], patience: float = _RULES_PATIENCE) -> list[str]:
    """Services for which kube-proxy has written no rule. It writes those of a family in one transaction."""
    end = time.monotonic() + patience
    addresses = dict.fromkeys(place.address for place in places)
    while True:
        found, unread = _rules()
        rules = "\n".join(found.values())
        missing = [each for each in addresses if not re.search(rf"(?<![\w.:]){re.escape(each)}(?![\w.:])", rules)]
        if not missing or time.monotonic() > end:
            problems = [f"{NO_RULE} {address}" for address in missing]
            return problems and problems + [f"rules cannot be read: {why}" for why in unread]
        time.sleep(0.5)


def _rules() -> tuple[dict[str, str], list[str]]:
    """kube-proxy's rules, by where they are; then what cannot be read, and why."""
    from pyebpf_proxy.datapath.migration import iptables, nftables

    found, unread = {}, []
    for variant in iptables.VARIANTS:
        try:
            lines = iptables.saved(variant).splitlines()
        except (iptables.ToolError, OSError) as error:
            unread.append(f"{variant}: {error}")
        else:
            # Each line names its chain; other programs' chains may name the addresses, too.
            found[str(variant)] = "\n".join(line for line in lines if line.startswith("-A KUBE-"))
    try:
        for family in nftables.present():
            found[f"nftables {family}"] = nftables.Ruleset().table(family, nftables.TABLE)
    except OSError as error:
        unread.append(str(error))
    return found, unread


def main(arguments: list[str]) -> int:
    """The command line; status 1 with the problems on the last line."""
    what, *rest = arguments
    if what == "peer":
        from pyebpf_proxy.cluster import peer

        return peer.main()
    places = places_of(rest)
    problems = fit() if what == "fit" else remove_rules() if what == "verify" else []
    if what == "kube-proxy":
        problems = await_rules(places)
    elif what in ("fit", "try"):
        for problem in connect(places, _SHORT_PATIENCE):
            print(problem)
    else:
        problems += connect(places)
    print("; ".join(problems) or "all is well", flush=True)
    return 1 if problems else 0
