# SPDX-License-Identifier: Apache-2.0
"""Sends flows from inside a namespace, many at once, and says what came of each."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pyebpf_proxy.lab.client import read_answer
from tests.flows.flow import DROPPED, Flow

#: Nothing heard for so long counts as dropped. Over one second: an IPv6 REJECT reaches connect() with the second SYN.
PATIENCE = 2.4
AT_ONCE = 64
#: Requests of one flow that may be lost before it counts as dropped.
LOST = 1
#: Refusals of one flow that end it.
REFUSED = 2

_IP_RECVERR, _IPV6_RECVERR = 11, 25
_MSG_ERRQUEUE = 0x2000
_ORIGINS = {2: "ICMP", 3: "ICMPv6"}


class Raw(NamedTuple):
    """One request: who answered, at which address and port, whom it saw; or how it failed."""

    pod: str
    port: int
    peer: str
    own: str
    failed: str = ""


def ask_flows(flows: Sequence[Flow]) -> list[list[Raw]]:
    """Every flow, until nothing new comes of it; in the order of ``flows``. Runs in the namespace of the client."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(_ask_until_nothing_new, flows))


def _ask_until_nothing_new(flow: Flow) -> list[Raw]:
    """Each different outcome once. Failures take long, and are seldom a matter of chance: a few of them end it."""
    found: dict[tuple[str, int, str, str], Raw] = {}
    in_vain = lost = refused = 0
    # The more answers there are, the longer another may keep away by chance.
    while in_vain < flow.count * max(1, len(found)) and refused < REFUSED:
        raw = ask(flow)
        if raw.failed == DROPPED:
            # A busy machine loses an answer, a rule loses all of them.
            lost += 1
            if lost <= LOST:
                continue
            return [*found.values(), raw]
        refused += bool(raw.failed)
        key = raw.pod, raw.port, raw.peer, raw.failed
        in_vain = in_vain + 1 if key in found else 0
        found.setdefault(key, raw)
    return list(found.values())


def ask(flow: Flow) -> Raw:
    """One request from a fresh socket."""
    family = socket.AF_INET6 if flow.family == 6 else socket.AF_INET
    kind = socket.SOCK_STREAM if flow.protocol == "tcp" else socket.SOCK_DGRAM
    own = ""
    with socket.socket(family, kind) as sock:
        sock.settimeout(PATIENCE)
        level, option = (socket.IPPROTO_IPV6, _IPV6_RECVERR) if flow.family == 6 else (socket.IPPROTO_IP, _IP_RECVERR)
        sock.setsockopt(level, option, 1)
        try:
            sock.connect((flow.address, flow.port))
            own = sock.getsockname()[0]
            sock.sendall(b"GET / HTTP/1.1\r\nHost: flow\r\n\r\n" if flow.protocol == "tcp" else b"who ")
            text = sock.recv(65536)
            answer = read_answer(text.partition(b"\r\n\r\n")[2] if flow.protocol == "tcp" else text)
            return Raw(answer.pod, answer.local[1], answer.peer[0], own)
        except TimeoutError:
            return Raw("", 0, "", own, DROPPED)
        except OSError as error:
            return Raw("", 0, "", own, f"refused ({_reason(sock, error)})")


def _reason(sock: socket.socket, error: OSError) -> str:
    """What refused: the ICMP error in the socket's error queue, else a reset, else the kernel's word."""
    try:
        _, ancillary, _, _ = sock.recvmsg(512, 512, _MSG_ERRQUEUE | socket.MSG_DONTWAIT)
    except OSError:
        ancillary = []
    for _, _, data in ancillary:
        if len(data) >= 16:
            # struct sock_extended_err
            _, origin, icmp_type, icmp_code = struct.unpack_from("=IBBB", data)
            if origin in _ORIGINS:
                return f"{_ORIGINS[origin]} {icmp_type}/{icmp_code}"
    if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
        return "RST"
    return errno.errorcode.get(error.errno or 0, str(error))
