# SPDX-License-Identifier: Apache-2.0
"""Lists of conntrack's entries: what the kernel refuses, and which entries a filter leaves out."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from pyebpf_proxy.datapath.connections import ctnetlink
from pyebpf_proxy.datapath.connections.masqueraded import masqueraded
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.services.model import IPFamily, Protocol

ADDRESS = bytes((192, 0, 2, 1))
FRONTEND, ENDPOINT = bytes((192, 0, 2, 9)), bytes((10, 0, 0, 9))


def entry(protocol: int) -> bytes:
    original = ctnetlink.tuple_of(ctnetlink.CTA_TUPLE_ORIG, protocol, (bytes((10, 0, 0, 2)), 4000), (FRONTEND, 80))
    reply = ctnetlink.tuple_of(ctnetlink.CTA_TUPLE_REPLY, protocol, (ENDPOINT, 8080), (ADDRESS, 30000))
    return ctnetlink.header(IPFamily.IPV4) + original + reply


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bodies of the requests to a kernel that knows no filter and has an entry of each protocol."""
    bodies: list[bytes] = []

    def dump(self: RequestSocket, kind: int, body: bytes) -> Iterator[bytes]:
        bodies.append(body)
        if len(body) > len(ctnetlink.header(IPFamily.IPV4)):
            raise OSError(errno.EINVAL, "Invalid argument")
        yield from map(entry, Protocol)

    monkeypatch.setattr(RequestSocket, "dump", dump)
    return bodies


def test_a_kernel_without_filters_is_asked_for_all(asked: list[bytes]) -> None:
    found = list(masqueraded([ADDRESS], range(30000, 30001), lambda protocol, place: place == (ENDPOINT, 8080)))
    assert [each.reply.protocol for _, each in found if each.reply is not None] == list(Protocol)
    assert len(asked) == 2
    assert [flow.replier for flow in ctnetlink.udp_flows(IPFamily.IPV4)] == [ENDPOINT]
    assert len(asked) == 4


def test_each_list_names_conntrack_if_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def dump(self: RequestSocket, kind: int, body: bytes) -> Iterator[bytes]:
        raise OSError(errno.EPERM, "Operation not permitted")
        yield b""

    monkeypatch.setattr(RequestSocket, "dump", dump)
    with pytest.raises(OSError, match="conntrack: flows could not be listed: Operation not permitted"):
        list(masqueraded([ADDRESS], range(30000, 30001), lambda protocol, place: True))
    with pytest.raises(OSError, match="conntrack: flows could not be listed: Operation not permitted"):
        list(ctnetlink.udp_flows(IPFamily.IPV4))
