# SPDX-License-Identifier: Apache-2.0
"""One target for each parser of foreign input: it returns, or raises an error that its caller expects.

Everything else is a finding. A target gets the input as bytes, and keeps no state between inputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.config import datapath_config, loader
from pyebpf_proxy.config.loader import ConfigError
from pyebpf_proxy.datapath.connections import ctnetlink
from pyebpf_proxy.datapath.loader.btf import Btf
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.node import follower, neighbours, peers, policy_routing
from pyebpf_proxy.datapath.rulesets import kernel, legacy, nft
from pyebpf_proxy.datapath.rulesets.model import Part, Table
from pyebpf_proxy.kube.api import kubeconfig as kubeconfig_file
from pyebpf_proxy.kube.api.inventory import Inventory
from pyebpf_proxy.kube.catalogue import Catalogue
from pyebpf_proxy.kube.limits import UnreadableError
from pyebpf_proxy.see import routes
from pyebpf_proxy.servers.connection import Connection
from pyebpf_proxy.servers.http import Pool, Request, Response, Sources

Target = Callable[[bytes], None]
TARGETS: dict[str, Target] = {}


def target(function: Target) -> Target:
    """Register a target by its name."""
    TARGETS[function.__name__] = function
    return function


def _nothing(_: str) -> None:
    pass


@target
def configuration(data: bytes) -> None:
    """kube-proxy's configuration file."""
    with contextlib.suppress(ConfigError):
        loader.decode_text(data)


@target
def datapath_configuration(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        datapath_config.decode_text(data)


@target
def kubeconfig(data: bytes) -> None:
    # A file without a name: it has no folder with files that it could name.
    descriptor = os.memfd_create("kubeconfig")
    try:
        os.write(descriptor, data)
        with contextlib.suppress(FatalError):
            kubeconfig_file.load(Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)


@target
def manifests(data: bytes) -> None:
    """A file; then the same file with another end."""
    catalogue = Catalogue(_nothing, _nothing)
    for text in (data, data[: len(data) // 2]):
        catalogue.read("a.yaml", text)
        catalogue.changes()
    catalogue.remove("a.yaml")
    catalogue.changes()


@target
def api_objects(data: bytes) -> None:
    """An object of a list or a watch; the first byte selects the expected kind."""
    kinds = ("Service", "EndpointSlice", "Node", "ServiceCIDR")
    inventory = Inventory(cast(Any, kinds[data[0] % len(kinds)]) if data else "Service", _nothing)
    with contextlib.suppress(UnreadableError):
        inventory.change(inventory.read(data[1:]))
        inventory.keep_only(())


@target
def nftables(data: bytes) -> None:
    """A message of each dump, selected by the first byte."""
    known: dict[bytes, Part] = {}
    table = Table("nftables table ip x", frozenset({4}))
    readers: tuple[Callable[[list[bytes]], object], ...] = (
        nft.tables,
        lambda messages: nft.add_chains({(2, "x"): table}, messages),
        lambda messages: nft.add_sets(table, messages),
        lambda messages: nft.add_elements(table, "x", messages),
        lambda messages: nft.add_rules(table, messages, known),
    )
    with contextlib.suppress(*kernel.UNREADABLE):
        nft.add_chains({(2, "x"): table}, [_CHAIN])
        readers[data[0] % len(readers)]([data[1:]])


#: Chain c of table x, family ip.
_CHAIN = b"\2\0\0\0" + b"\6\0\1\0x\0\0\0" + b"\6\0\3\0c\0\0\0"


@target
def iptables_legacy(data: bytes) -> None:
    """The first byte is the family; then the kernel's information, and the entries."""
    with contextlib.suppress(*kernel.UNREADABLE):
        about = legacy.info(data[1:])
        family = 6 if data[0] & 1 else 4
        blob = data[1 + legacy.INFO.size :]
        legacy.digest(family, blob)
        legacy.table(family, about, blob, {})


@target
def conntrack(data: bytes) -> None:
    """A flow of a dump."""
    ctnetlink.read_entry(data)


@target
def rtnetlink(data: bytes) -> None:
    """A link, an address, a neighbour, an ip rule, a route, the other end of a veth, selected by the first byte.

    The kernel always sends a header of fixed size; any bytes may follow.
    """
    size, read = _ROUTING[data[0] % len(_ROUTING) if data else 0]
    read(data[1:].ljust(size, b"\0"))


_ROUTING: tuple[tuple[int, Callable[[bytes], object]], ...] = (
    (uapi.IFINFOMSG.size, follower._link),
    (uapi.IFADDRMSG.size, follower._address),
    (uapi.NDMSG.size, neighbours._read),
    (uapi.FIB_RULE_HDR.size, policy_routing.parse),
    (uapi.RTMSG.size, routes.read),
    (uapi.IFINFOMSG.size, peers._has_native),
)


@target
def btf(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        found = Btf(data, "fuzz")
        for name in found._structs:
            found.struct(name)


class _Transport:
    """The parts of asyncio's transport that a connection needs."""

    def __init__(self) -> None:
        self.closing = False
        self.written = b""

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    pause_reading = resume_reading = write_eof

    def set_write_buffer_limits(self, high: int) -> None:
        pass


_loop = asyncio.new_event_loop()


@target
def http(data: bytes) -> None:
    """Requests, in pieces of the first byte's size."""
    _loop.run_until_complete(_serve(data[1:], data[0] + 1 if data else 1))


async def _serve(data: bytes, size: int) -> None:
    pool, sources = Pool(8), Sources(share=1e9)
    transport = _Transport()
    connection = Connection(_echo, pool, set(), sources, sources.of(None, None))
    connection.connection_made(cast(asyncio.BaseTransport, transport))
    for begin in range(0, len(data), size):
        connection.data_received(data[begin : begin + size])
    connection.eof_received()
    # Pipelined requests are answered in several rounds.
    for _ in range(len(data) // 8):
        await asyncio.sleep(0)
        if not connection._scheduled:
            break
    connection.connection_lost(None)
    assert pool.kept == 0
    assert len(pool) == 0
    assert not transport.written or transport.written.startswith(b"HTTP/1.1 ")
    assert b"500 Internal" not in transport.written


def _echo(request: Request) -> Response:
    return Response(200, (("Content-Type", "text/plain"),), request.path.encode()[:10] + request.body[:10])
