# SPDX-License-Identifier: Apache-2.0
"""Netlink: the encoding, and that only one package implements it."""

from __future__ import annotations

import errno
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.netlink import genetlink, uapi
from pyebpf_proxy.datapath.netlink.messages import (
    attribute,
    attributes,
    error_number,
    error_text,
    message,
    messages,
    number,
    text,
    values,
    word,
    zero_terminated,
)
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.rtnetlink import NetlinkError, Rtnetlink
from pyebpf_proxy.datapath.netlink.subscription import Subscription, overruns
from tests import ROOT

PACKAGE = ROOT / "pyebpf_proxy"
SOURCE = Path(uapi.__file__).read_text()
PROGRAM = """
import sys
import pyebpf_proxy.agent.run
from pyebpf_proxy.datapath.node.follower import Follower
assert Follower().state.links
found = [name for name in sys.modules if name.startswith("pyroute2")]
assert not found, found
"""


def test_a_start_does_not_import_pyroute2() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_other_package_opens_netlink_or_knows_its_headers() -> None:
    formats = "|".join(re.escape(each.format) for each in (uapi.NLMSGHDR, uapi.TCMSG, uapi.FIB_RULE_HDR))
    found = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE / "datapath" / "netlink" and re.search(rf"AF_NETLINK|{formats}", path.read_text())
    ]
    assert found == []


#: Names that differ from the kernel's, with the kernel's expression. Messages of nfnetlink include their subsystem.
OWN_NAMES = {
    "TC_H_CLSACT_INGRESS": "TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)",
    "TC_H_CLSACT_EGRESS": "TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS)",
    "NLA_TYPE_MASK": "NLA_TYPE_MASK & 0xFFFF",
    "XFRM_USERPOLICY_ID_BYTES": "sizeof(struct xfrm_userpolicy_id)",
    "IPSET_MSG_LIST": "NFNL_SUBSYS_IPSET << 8 | IPSET_CMD_LIST",
    **{name: f"NFNL_SUBSYS_NFTABLES << 8 | {name}" for name in vars(uapi) if name.startswith("NFT_MSG_")},
    **{name: f"NFNL_SUBSYS_CTNETLINK << 8 | {name}" for name in vars(uapi) if name.startswith("IPCTNL_MSG_")},
}
#: Newer than the headers of Debian 12.
NEWER = {"NFTA_SET_COUNT"}


def test_numbers_and_sizes_are_those_of_the_kernels_headers(tmp_path: Path) -> None:
    """The compiler checks for each name whether the header has it with this value."""
    gcc = shutil.which("gcc")
    assert gcc, "make setup installs it"
    headers = ["sys/socket.h", "linux/netfilter.h", *re.findall(r"include/uapi/(linux/[\w/]+\.h)", SOURCE)]
    lines = [f"#include <{each}>" for each in headers]
    source = tmp_path / "uapi.c"
    source.write_text("\n".join(lines) + "\n")
    expanded = subprocess.run([gcc, "-E", source], capture_output=True, text=True, check=True).stdout
    for name, value in vars(uapi).items():
        if name in NEWER and name not in expanded:
            continue
        if isinstance(value, int):
            lines.append(f'_Static_assert((unsigned)({OWN_NAMES.get(name, name)}) == {value}u, "{name} is another");')
        elif isinstance(value, struct.Struct):
            lines.append(f'_Static_assert(sizeof(struct {name.lower()}) == {value.size}, "{name} has another size");')
    assert len(lines) > 200
    source.write_text("\n".join(lines) + "\n")
    done = subprocess.run([gcc, "-fsyntax-only", source], capture_output=True, text=True, check=False)
    assert [line.partition("error: ")[2] for line in done.stderr.splitlines() if "error: " in line] == []
    assert done.returncode == 0, done.stderr


def test_messages_and_attributes_are_padded_and_read_back() -> None:
    body = (
        attribute(1, zero_terminated("eth0")) + attribute(2, word(7)) + attribute(3, attribute(4, b"\1"), nested=True)
    )
    data = message(16, 5, 9, body) + message(17, 0, 10, b"abc")
    assert len(data) % 4 == 0
    assert list(messages(data)) == [(16, 5, 9, body), (17, 0, 10, b"abc")]
    parts = values(body)
    assert (text(parts[1]), number(parts[2]), values(parts[3])) == ("eth0", 7, {4: b"\1"})
    assert [kind for kind, _, _ in attributes(body, 0, len(body))] == [1, 2, 3]


@pytest.mark.parametrize("length", [0, 3])
def test_a_broken_attribute_ends_the_list(length: int) -> None:
    assert values(attribute(1, b"good") + uapi.NLATTR.pack(length, 2) + b"rest") == {1: b"good"}


def test_an_attribute_that_is_longer_than_the_message_is_cut() -> None:
    assert values(uapi.NLATTR.pack(100, 2) + b"rest") == {2: b"rest"}


def test_a_message_without_length_does_not_stop_the_reader() -> None:
    broken = uapi.NLMSGHDR.pack(0, 16, 0, 1, 0)
    assert [kind for kind, *_ in messages(broken + message(17, 0, 1, b""))] == [16, 17]


@pytest.mark.parametrize("capped", [False, True])
def test_the_kernels_reason_is_in_the_error(capped: bool) -> None:
    request = message(16, 0, 1, b"" if capped else bytes(22))
    reason = attribute(uapi.NLMSGERR_ATTR_MSG, zero_terminated("Device is busy"))
    size = struct.unpack_from("=I", request)[0]
    body = struct.pack("=i", -errno.EBUSY) + request[: uapi.NLMSGHDR.size] + bytes(-(-(size - 16) // 4) * 4) + reason
    flags = uapi.NLM_F_ACK_TLVS | (uapi.NLM_F_CAPPED if capped else 0)
    assert error_number(body) == errno.EBUSY
    assert error_text(body, flags) == "Device or resource busy (Device is busy)"
    assert error_text(body, 0) == "Device or resource busy"


def test_an_error_names_the_request() -> None:
    with Rtnetlink() as netlink, pytest.raises(NetlinkError, match=r"^delete nothing: ") as refused:
        netlink.change(uapi.RTM_DELLINK, 0, uapi.IFINFOMSG.pack(0, 0, 0x7FFFFFFF, 0, 0), "delete nothing")
    assert refused.value.errno in (errno.ENODEV, errno.EPERM)


def test_the_loopback_device_in_a_list_and_by_request() -> None:
    asked = uapi.IFINFOMSG.pack(0, 0, 1, 0, 0)
    with RequestSocket(uapi.NETLINK_ROUTE) as netlink:
        one = values(netlink.get(uapi.RTM_GETLINK, asked), uapi.IFINFOMSG.size)
        missing = uapi.IFINFOMSG.pack(0, 0, 0x7FFFFFFF, 0, 0)
        many = netlink.get_many(uapi.RTM_GETLINK, [asked, missing])
    with Rtnetlink() as netlink:
        listed = netlink.list_all(uapi.RTM_GETLINK, bytes(uapi.IFINFOMSG.size), "list of links")
    assert text(one[uapi.IFLA_IFNAME]) == "lo"
    assert isinstance(many[0], bytes)
    assert many[1] == errno.ENODEV
    assert "lo" in {text(values(each, uapi.IFINFOMSG.size)[uapi.IFLA_IFNAME]) for each in listed}


def test_families_of_generic_netlink() -> None:
    found = genetlink.family("nlctrl")
    assert found is not None
    assert found.number == uapi.GENL_ID_CTRL
    assert "notify" in found.groups
    assert genetlink.family("no such family") is None


class Full:
    """A socket whose buffer has overflowed once."""

    def __init__(self) -> None:
        end = [BlockingIOError(), BlockingIOError()]
        self.said: list[OSError | bytes] = [OSError(errno.ENOBUFS, "full"), b"message", *end]

    def recv(self, size: int) -> bytes:
        found = self.said.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    def getsockopt(self, *_: int) -> int:
        return 1 << 20

    def close(self) -> None:
        pass


class Endless(Full):
    """A socket that is filled faster than it is read; every tenth time its buffer has overrun."""

    def __init__(self, overruns: bool) -> None:
        self.calls = 0
        self.overruns = overruns

    def recv(self, size: int) -> bytes:
        self.calls += 1
        assert self.calls < 100_000, "reading does not end"
        if self.overruns and not self.calls % 10:
            raise OSError(errno.ENOBUFS, "full")
        return b"message"


@pytest.mark.parametrize("overruns", [False, True])
def test_reading_ends_though_others_send_without_a_pause(overruns: bool) -> None:
    with Subscription(uapi.NETLINK_ROUTE, []) as events:
        events._socket.close()
        events._socket = Endless(overruns)  # type: ignore[assignment]
        for _ in range(3):
            found = list(events.received())
            assert len(found) <= 1000
            assert (found[-1] is None) is overruns
            assert None not in found[:-1]


def test_dropped_notifications_are_counted_by_protocol() -> None:
    before = overruns()
    with Subscription(uapi.NETLINK_ROUTE, []) as events:
        events._socket.close()
        events._socket = Full()  # type: ignore[assignment]
        # What was there before the gap is void.
        assert list(events.received()) == [None]
        assert list(events.received()) == []
    assert {name: overruns()[name] - before[name] for name in before if overruns()[name] != before[name]} == {
        "route": 1
    }
