# SPDX-License-Identifier: Apache-2.0
"""A small blocking rtnetlink socket around pyroute2's message classes.

pyroute2 encodes and decodes. Its ``IPRoute`` is not used because its synchronous calls run an event loop and do not
work inside a running one, such as the agent's. The kernel answers a request on a netlink socket before ``send``
returns, so blocking costs no waiting.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import Any

from pyebpf_proxy.datapath.node.messages import NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, MarshalRtnl
from pyebpf_proxy.datapath.refused import RefusedError

NLMSG_ERROR = 2
NLMSG_DONE = 3
NLM_F_DUMP_INTR = 0x10
HEADER = struct.Struct("=IHHII")
SOL_NETLINK = 270
NETLINK_EXT_ACK = 11
NETLINK_CAP_ACK = 10
NLMSGERR_ATTR_MSG = 1
NLM_F_CAPPED = 0x100
NLM_F_ACK_TLVS = 0x200
RECEIVE_BYTES = 1 << 18
EVENT_BUFFER_BYTES = 8 << 20
SO_RCVBUFFORCE = 33


class NetlinkError(RefusedError):
    """A request that the kernel refused; the text has the request and the reason."""


class DumpInterruptedError(Exception):
    """The list changed while it was read (NLM_F_DUMP_INTR)."""


def attribute(message: Any, name: str) -> Any:
    """Value of a netlink attribute, None if the message does not have it."""
    return message.get_attr(name)


class Netlink:
    """Requests and dumps. With ``groups`` (a bit mask of RTMGRP_*) also events, see :meth:`events`."""

    def __init__(self, groups: int = 0) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        try:
            self._socket.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
            self._socket.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
            if groups:
                try:
                    self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, EVENT_BUFFER_BYTES)
                except PermissionError:
                    pass  # the default buffer overflows earlier, which events() reports
                self._socket.setblocking(False)
            self._socket.bind((0, groups))
        except BaseException:
            self._socket.close()
            raise
        self._marshal = MarshalRtnl()
        self._sequence = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Netlink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, message: Any, kind: int, flags: int, what: str) -> None:
        """Sends one request and waits for its acknowledgement; ``what`` is used in the error text."""
        self._send(message, kind, NLM_F_REQUEST | NLM_F_ACK | flags)
        for _ in self._answers(what):
            pass

    def dump(self, message: Any, kind: int, what: str) -> list[Any]:
        """Everything the kernel lists for ``message``; read again if the list changed meanwhile."""
        for _ in range(10):
            self._send(message, kind, NLM_F_REQUEST | NLM_F_DUMP)
            try:
                return list(self._answers(what))
            except DumpInterruptedError:
                continue
        raise NetlinkError(errno.EAGAIN, f"{what}: the list changed while it was read, ten times in a row")

    def events(self) -> tuple[list[Any], bool]:
        """Messages that have arrived, without waiting; the flag is set if some were lost (ENOBUFS): dump again."""
        found: list[Any] = []
        lost = False
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return found, lost
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                lost = True
                continue
            found.extend(message for message in self._marshal.parse(data) if message["header"]["type"] >= 16)

    def _send(self, message: Any, kind: int, flags: int) -> None:
        self._sequence += 1
        message["header"] = {"type": kind, "flags": flags, "sequence_number": self._sequence, "pid": 0}
        message.reset()
        message.encode()
        self._socket.send(message.data)

    def _answers(self, what: str) -> list[Any]:
        found: list[Any] = []
        interrupted = False
        while True:
            data = self._socket.recv(RECEIVE_BYTES)
            offset = 0
            finished = False
            while offset + HEADER.size <= len(data):
                length, kind, flags, sequence, _pid = HEADER.unpack_from(data, offset)
                body = data[offset : offset + length]
                offset += (length + 3) & ~3
                if sequence != self._sequence:
                    continue  # from an aborted dump
                interrupted |= bool(flags & NLM_F_DUMP_INTR)
                if kind in (NLMSG_ERROR, NLMSG_DONE):
                    code = struct.unpack_from("=i", body, HEADER.size)[0] if length >= HEADER.size + 4 else 0
                    if code:
                        raise NetlinkError(-code, f"{what}: {_why(body, flags, -code)}")
                    finished = True
                else:
                    found.extend(self._marshal.parse(body))
            if finished:
                if interrupted:
                    raise DumpInterruptedError
                return found


def _why(body: bytes, flags: int, code: int) -> str:
    """The error's name, and the kernel's message if it sends one (extended acknowledgement)."""
    text = os.strerror(code)
    if not flags & NLM_F_ACK_TLVS:
        return text
    offset = HEADER.size + 4 + HEADER.size
    if not flags & NLM_F_CAPPED:
        offset += (struct.unpack_from("=I", body, HEADER.size + 4)[0] - HEADER.size + 3) & ~3
    while offset + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, offset)
        if length < 4:
            break
        if kind & 0x3FFF == NLMSGERR_ATTR_MSG:
            return f"{text} ({body[offset + 4 : offset + length].rstrip(bytes(1)).decode(errors='replace')})"
        offset += (length + 3) & ~3
    return text
