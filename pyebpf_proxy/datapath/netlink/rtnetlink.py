# SPDX-License-Identifier: Apache-2.0
"""Requests about devices, addresses and tc (rtnetlink). A refusal names the request and the kernel's reason."""

from __future__ import annotations

import errno

from pyebpf_proxy.datapath.netlink.messages import attribute, error_number, error_text, message, messages, word
from pyebpf_proxy.datapath.netlink.request import RequestSocket
from pyebpf_proxy.datapath.netlink.uapi import (
    IFLA_EXT_MASK,
    NETLINK_CAP_ACK,
    NETLINK_EXT_ACK,
    NETLINK_ROUTE,
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_DUMP_INTR,
    NLM_F_REQUEST,
    NLMSG_DONE,
    NLMSG_ERROR,
    RTEXT_FILTER_SKIP_STATS,
    SOL_NETLINK,
)
from pyebpf_proxy.datapath.refused import RefusedError

_ATTEMPTS = 10
#: Asks for links without their statistics, which are most of a message.
WITHOUT_STATISTICS = attribute(IFLA_EXT_MASK, word(RTEXT_FILTER_SKIP_STATS))


class NetlinkError(RefusedError):
    """A request that the kernel refused; the text has the request and the reason."""


class _InterruptedError(Exception):
    """The list changed while it was read (NLM_F_DUMP_INTR)."""


class Rtnetlink(RequestSocket):
    """Requests whose refusal is an error with text; ``what`` is the request in that text."""

    def __init__(self) -> None:
        super().__init__(NETLINK_ROUTE)
        self._sequence = 0
        try:
            self._socket.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
            self._socket.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
        except BaseException:
            self.close()
            raise

    def change(self, kind: int, flags: int, body: bytes, what: str) -> None:
        """Make one request and wait for its acknowledgement. NetlinkError."""
        self._ask(kind, flags | NLM_F_REQUEST | NLM_F_ACK, body, what)

    def list_all(self, kind: int, body: bytes, what: str) -> list[bytes]:
        """Everything that the kernel lists; read again if the list changed meanwhile. NetlinkError."""
        for _ in range(_ATTEMPTS):
            try:
                return self._ask(kind, NLM_F_REQUEST | NLM_F_DUMP, body, what)
            except _InterruptedError:
                continue
        raise NetlinkError(errno.EAGAIN, f"{what}: the list changed while it was read, ten times in a row")

    def _ask(self, kind: int, flags: int, body: bytes, what: str) -> list[bytes]:
        self._sequence += 1
        self.send(message(kind, flags, self._sequence, body))
        found: list[bytes] = []
        interrupted = False
        while True:
            finished = False
            for answer, bits, sequence, part in messages(self.receive()):
                if sequence != self._sequence:
                    continue  # from an aborted dump
                interrupted |= bool(bits & NLM_F_DUMP_INTR)
                if answer not in (NLMSG_ERROR, NLMSG_DONE):
                    found.append(part)
                    continue
                number = error_number(part)
                if number:
                    raise NetlinkError(number, f"{what}: {error_text(part, bits)}")
                finished = True
            if finished:
                if interrupted:
                    raise _InterruptedError
                return found
