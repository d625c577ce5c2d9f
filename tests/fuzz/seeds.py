# SPDX-License-Identifier: Apache-2.0
"""The first inputs of a search: valid ones, from the repository's examples and recordings if there are any.

Inputs that a search has found and that were fixed belong here too: ``tests/unit/suites/test_fuzz_seeds.py`` runs every
seed.
"""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path

from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.lab.addresses import cluster_ip, node_address, pod_address, pod_cidr, vip
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from tests import ROOT

#: The kept corpus: for each target a file with an input per line, in base64 (``python -m tests.fuzz --keep``).
CORPUS = Path(__file__).parent / "corpus"


def corpus(name: str) -> list[bytes]:
    """Inputs that earlier searches of a target kept, because they reach code that others do not."""
    file = CORPUS / f"{name}.base64"
    return [base64.b64decode(line) for line in file.read_text().splitlines()] if file.exists() else []


_PORTS = [Port("p", 80, 8080, "TCP", 30080), Port("d", 53, 5353, "UDP")]
_SERVICE = service("web", _PORTS, cluster_ip(1), vip=vip(1), sessionAffinity="ClientIP")
_OBJECTS = [
    _SERVICE,
    *slices("web", _PORTS, [(pod_address(1, 0), "node1")]),
    node("node1", node_address(1), pod_cidr(1), "zone-a"),
]
_KUBECONFIG = b"""apiVersion: v1
kind: Config
current-context: a
clusters: [{name: c, cluster: {server: "https://192.0.2.1:6443", certificate-authority-data: LS0tLQ==}}]
users: [{name: u, user: {token: t, exec: {apiVersion: client.authentication.k8s.io/v1, command: x, args: [a]}}}]
contexts: [{name: a, context: {cluster: c, user: u}}]
"""


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _tuple(kind: int) -> bytes:
    addresses = _attribute(1, _attribute(1, bytes([10, 0, 0, 1])) + _attribute(2, bytes([10, 0, 0, 2])))
    ports = _attribute(2, _attribute(1, b"\x11") + _attribute(2, b"\0\x35") + _attribute(3, b"\0\x36"))
    return _attribute(kind, addresses + ports)


_RULE = b"\2\0\0\0" + _attribute(1, b"x\0") + _attribute(2, b"c\0") + _attribute(3, bytes(8))
_ACCEPT = _attribute(2, _attribute(2, _attribute(1, b"\0\0\0\1")))
_EXPRESSION = _attribute(1, _attribute(1, b"immediate\0") + _attribute(2, _attribute(1, b"\0\0\0\0") + _ACCEPT))
_LEGACY = struct.pack("=32sI5I5III", b"filter", 14, *range(0, 500, 100), *range(0, 500, 100), 4, 500)

_LINK = (
    uapi.IFINFOMSG.pack(0, 1, 7, 0x11043, 0)
    + _attribute(uapi.IFLA_IFNAME, b"pod7\0")
    + (_attribute(uapi.IFLA_ADDRESS, bytes([2, 0, 0, 0, 0, 7])) + _attribute(uapi.IFLA_MTU, b"\xdc\5\0\0"))
)
_VETH = _attribute(uapi.IFLA_LINKINFO, _attribute(uapi.IFLA_INFO_KIND, b"veth\0")) + (
    _attribute(uapi.IFLA_LINK, b"\2\0\0\0") + _attribute(uapi.IFLA_LINK_NETNSID, b"\xff\xff\xff\xff")
    + _attribute(uapi.IFLA_XDP, _attribute(uapi.IFLA_XDP_ATTACHED, b"\1") + _attribute(4, b"\7\0\0\0"))
)  # fmt: skip
_BRIDGE = _attribute(
    uapi.IFLA_LINKINFO,
    _attribute(uapi.IFLA_INFO_KIND, b"bridge\0")
    + _attribute(uapi.IFLA_INFO_DATA, _attribute(uapi.IFLA_BR_VLAN_FILTERING, b"\1")),
)

SEEDS: dict[str, list[bytes]] = {
    "configuration": [(ROOT / "examples" / "config.yaml").read_bytes()] if (ROOT / "examples" / "config.yaml").exists()
    else [b"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n"],
    "datapath_configuration": [(ROOT / "examples" / "datapath-config.yaml").read_bytes()],
    "kubeconfig": [_KUBECONFIG],
    "manifests": [
        "\n---\n".join(map(json.dumps, _OBJECTS)).encode(),
        json.dumps({"apiVersion": "v1", "kind": "List", "items": _OBJECTS}).encode(),
    ],
    "api_objects": [
        bytes([number]) + json.dumps(each).encode()
        for number, each in ((0, _OBJECTS[0]), (1, _OBJECTS[1]), (2, _OBJECTS[3]))
    ]
    # Found by the search: a Service that is not served and so not checked, with a number of more than 64 bits.
    + [b'\0{"metadata": {"name": "a"}, "spec": {"type": "ExternalName", "ports": [{"port": 99999999999999999999}]}}'],
    "nftables": [
        b"\0\2\0\0\0" + _attribute(1, b"x\0") + _attribute(2, b"\0\0\0\0"),
        b"\1\2\0\0\0" + _attribute(1, b"x\0") + _attribute(3, b"d\0") + _attribute(4, _attribute(1, b"\0\0\0\2")),
        b"\2\2\0\0\0" + _attribute(1, b"x\0") + _attribute(2, b"s\0") + _attribute(6, b"\xff\xff\xff\0"),
        b"\3\2\0\0\0" + _attribute(3, _attribute(1, _ACCEPT)),
        b"\4" + _RULE + _attribute(4, _EXPRESSION),
    ],
    "iptables_legacy": [b"\0" + _LEGACY + bytes(500)],
    "conntrack": [
        b"\2\0\0\0" + _tuple(1) + _tuple(2) + _attribute(12, b"\0\0\0\1"),
        # A TCP state without a value.
        b"\0\0\0\0\x80\0\4\0\2\xff\xff\0\4\0\1\0",
    ],
    "rtnetlink": [
        b"\0" + _LINK + _VETH,
        b"\0" + _LINK + _BRIDGE,
        b"\1" + uapi.IFADDRMSG.pack(2, 24, 0x80, 0, 2)
        + _attribute(uapi.IFA_ADDRESS, bytes([192, 0, 2, 1])) + _attribute(uapi.IFA_LOCAL, bytes([192, 0, 2, 1])),
        b"\1" + uapi.IFADDRMSG.pack(10, 64, 0, 0, 2)
        + _attribute(uapi.IFA_ADDRESS, b"\x20\x01" + bytes(14)) + _attribute(uapi.IFA_FLAGS, b"\x80\0\0\0"),
        # An address of a size that no family has.
        b"\1" + uapi.IFADDRMSG.pack(2, 24, 0, 0, 2) + _attribute(uapi.IFA_LOCAL, bytes(5)),
        b"\2" + uapi.NDMSG.pack(2, 0, 0, 2, 2, 0, 1)
        + _attribute(uapi.NDA_DST, bytes([192, 0, 2, 1])) + _attribute(uapi.NDA_LLADDR, bytes([2, 0, 0, 0, 0, 1])),
        b"\3" + uapi.FIB_RULE_HDR.pack(2, 0, 0, 0, 254, 0, 0, 1, 2) + _attribute(uapi.FRA_PRIORITY, b"\1\0\0\0")
        + _attribute(uapi.FRA_FWMARK, b"\0\1\0\0") + _attribute(23, bytes(4)),
        b"\4" + uapi.RTMSG.pack(2, 32, 0, 0, 254, 3, 0, 1, 0) + _attribute(uapi.RTA_OIF, b"\2\0\0\0")
        + _attribute(uapi.RTA_VIA, b"\n\0" + bytes(16)),
        b"\5" + _LINK + _VETH,
    ],
    "btf": [
        struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, 40, 40, 12)
        + struct.pack("=III", 1, 4 << 24 | 1, 4)
        + struct.pack("=III", 5, 2, 0)
        + struct.pack("=IIII", 7, 1 << 24, 4, 32)
        + b"\0abc\0d\0int\0\0",
    ],
    "http": [
        b"\xffGET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /metrics?a=b HTTP/1.0\r\n\r\n",
        b"\x10POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
        b"3\r\nabc\r\n0\r\n\r\n",
    ],
}  # fmt: skip
