# SPDX-License-Identifier: Apache-2.0
"""Records the kernel's answers about rulesets, for tests/unit/datapath/rulesets/test_rulesets.py.

    .venv/bin/python -m tests.netns.attach.record_rulesets        as root

Each file of rulesets/ is loaded by its own tool into a new network namespace; then every answer of the kernel is kept.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

from pyebpf_proxy.datapath.netlink.messages import attribute
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import NETLINK_NETFILTER
from pyebpf_proxy.datapath.rulesets import kernel
from tests import ROOT

FOLDER = Path(__file__).parent / "rulesets"
TARGET = ROOT / "tests" / "unit" / "recordings" / "rulesets.json"
OF_IPV6 = "s/icmp-port/icmp6-port/; s/255.255.255.255/ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/"
#: Recording, file, the tool that loads it.
RECORDINGS = (
    ("firewalld", "firewalld.nft", "nft -f"),
    ("plain", "plain.nft", "nft -f"),
    ("kube-router by iptables-nft", "kube-router.iptables", "iptables-nft-restore"),
    ("kube-router by iptables-legacy", "kube-router.iptables", "iptables-legacy-restore"),
    ("ufw by iptables-legacy", "ufw.iptables", "iptables-legacy-restore"),
    ("ufw by ip6tables-legacy", "ufw.iptables", f"sed '{OF_IPV6}' | ip6tables-legacy-restore"),
    ("libvirt by iptables-legacy", "libvirt.iptables", "iptables-legacy-restore"),
)


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def messages(kind: int, family: int = 0, of: bytes = b"") -> list[str]:
    with RequestSocket(NETLINK_NETFILTER) as netlink:
        return [base64.b64encode(each).decode() for each in netlink.dump(kind, bytes([family, 0, 0, 0]) + of)]


def recorded(path: Path, tool: str) -> dict[str, Any]:
    if ctypes.CDLL(None).unshare(0x40000000):
        raise OSError("no network namespace")
    subprocess.run("ipset create KUBE-SRC hash:net", shell=True, check=True)
    command = f"{tool} {path}" if tool.startswith("nft") else f"cat {path} | {tool}"
    subprocess.run(command, shell=True, check=True)
    found: dict[str, Any] = {"tables": messages(10 << 8 | 1), "chains": messages(10 << 8 | 4), "of": []}
    for table in kernel.nft.tables(base64.b64decode(each) for each in found["tables"]):
        family, name = table
        of = attribute(1, name.encode() + b"\0")
        sets = messages(10 << 8 | 10, family, of)
        of_maps = {}
        for text in sets:
            parts = kernel.nft._parts(base64.b64decode(text))
            of_map = of + attribute(2, parts[2])
            of_maps[parts[2].rstrip(b"\0").decode()] = messages(10 << 8 | 13, family, of_map)
        rules = messages(10 << 8 | 7, family, of)
        found["of"].append({"table": table, "sets": sets, "elements": of_maps, "rules": rules})
    found["legacy"] = []
    for family in (4, 6):
        for name in kernel._names(family):
            ask = bytearray(name.encode().ljust(84, b"\0"))
            kernel._getsockopt(family, 64, ask)
            blob = kernel._entries(family, name)[1]
            found["legacy"].append({"family": family, "info": packed(bytes(ask)), "blob": packed(blob)})
    return found


def main() -> None:
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    every = {}
    for name, file, tool in RECORDINGS:
        every[name] = recorded(FOLDER / file, tool)
        ctypes.CDLL(None).setns(home, 0)
    TARGET.write_text(json.dumps(every, indent=1) + "\n")
    print(f"{TARGET}: {TARGET.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
