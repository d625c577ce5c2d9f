# SPDX-License-Identifier: Apache-2.0
"""Recorded rules of the real kube-proxy, loaded into a test's namespace among other programs' rules."""

from __future__ import annotations

import re
import socket
import struct
from pathlib import Path

from pyebpf_proxy.config.addresses import parse_cidr
from pyebpf_proxy.datapath.migration import leftovers
from pyebpf_proxy.datapath.report import Report
from pyebpf_proxy.lab.namespace import Namespace

DATA = Path(__file__).parent / "kube_proxy"

#: The counters are not zero, so a rule that was removed and added again is noticed.
FOREIGN = """\
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
[4:240] -A PREROUTING -p tcp -m tcp --dport 7 -j MARK --set-xmark 0x7/0xff
COMMIT
*nat
:CNI-HOSTPORT-DNAT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
[7:420] -A PREROUTING -p tcp -m tcp --dport 12 -m comment --comment "kubernetes service portals" -j CNI-HOSTPORT-DNAT
[3:180] -A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "foreign \\"x\\" -j KUBE-SERVICES" -m tcp --dport 8 -j RETURN
COMMIT
*filter
:FOREIGN - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
[9:540] -A FORWARD -j FOREIGN
[2:120] -A FOREIGN -p udp -m udp --dport 9 -j DROP
COMMIT
"""
#: Loaded after kube-proxy's rules, so that kube-proxy's jumps are between these and FOREIGN.
FOREIGN_AFTER = """\
*nat
[5:300] -A PREROUTING -p udp -m udp --dport 10 -j RETURN
[6:360] -A POSTROUTING -p udp -m udp --dport 10 -j RETURN
COMMIT
*filter
[8:480] -A INPUT -p udp -m udp --dport 11 -j ACCEPT
[1:60] -A OUTPUT -p udp -m udp --dport 11 -j ACCEPT
COMMIT
"""
KUBELETS = ("KUBE-FIREWALL", "KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY")


def recorded(family: int) -> str:
    """The rules of kube-proxy in mode iptables."""
    return (DATA / f"iptables-ipv{family}.rules").read_text()


def tool(kind: str, family: int, action: str) -> str:
    return f"ip{'' if family == 4 else '6'}tables-{kind}-{action}"


def restore(namespace: Namespace, kind: str, family: int, text: str) -> None:
    """Add these rules to the existing ones, with the counters of the text."""
    namespace.run(tool(kind, family, "restore"), "--noflush", "--counters", stdin=text)


def saved(namespace: Namespace, kind: str, family: int) -> list[str]:
    """The rules with their counters, without the comment lines, which contain the time."""
    text = namespace.run(tool(kind, family, "save"), "-c")
    return [line for line in text.splitlines() if not line.startswith("#")]


def without_kube_proxy(lines: list[str]) -> list[str]:
    """The saved rules that must remain, by a simpler criterion than the agent's that suffices for these rules."""
    return [
        line for line in lines if "KUBE-" not in line or "foreign" in line or any(name in line for name in KUBELETS)
    ]


def load_kube_proxy(namespace: Namespace, kind: str, family: int, text: str | None = None) -> None:
    """Load kube-proxy's recorded rules (or ``text``) and the nfacct objects that they count in."""
    for name in ("ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"):
        namespace.call(make_nfacct, name)
    restore(
        namespace, kind, family, re.sub(r"^:.* (ACCEPT|DROP) .*\n", "", text or recorded(family), flags=re.MULTILINE)
    )


def make_nfacct(name: str) -> None:
    """Make an nfacct object. Sends NFNL_MSG_ACCT_NEW to the subsystem NFNL_SUBSYS_ACCT (7); no library does it."""
    value = name.encode() + b"\0"
    attribute = struct.pack("=HH", 4 + len(value), 1) + value + bytes(-len(value) % 4)
    body = struct.pack("=BBH", socket.AF_UNSPEC, 0, 0) + attribute
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as sock:
        sock.send(struct.pack("=IHHII", 16 + len(body), 7 << 8, 0x605, 1, 0) + body)
        code = struct.unpack_from("=i", sock.recv(4096), 16)[0]
    assert code in (0, -17, -16), code  # -EEXIST, -EBUSY: it exists


def remove(namespace: Namespace, *exclude_cidrs: str, at_start: bool = False) -> Report:
    """Remove leftovers inside the namespace."""
    return namespace.call(_remove, exclude_cidrs, at_start)


def _remove(exclude_cidrs: tuple[str, ...], at_start: bool) -> Report:
    return leftovers.remove([cidr for text in exclude_cidrs if (cidr := parse_cidr(text))], at_start=at_start)
