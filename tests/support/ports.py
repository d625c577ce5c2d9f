# SPDX-License-Identifier: Apache-2.0
"""Ports on loopback for servers that do not choose their port themselves.

If the kernel assigns a free port and it is released, another process may get it before the server listens. These ports
are outside the kernel's range, and each process has its own.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

#: Below the kernel's own range (net.ipv4.ip_local_port_range) and the NodePorts.
_FIRST, _BLOCK, _BLOCKS = 20_000, 50, 200
#: Held until this process ends: an abstract name disappears with it, however it ends.
_claims: list[socket.socket] = []


def _claimed() -> Iterator[int]:
    for number in range(_BLOCKS):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0pyebpf-proxy-tests-ports-{number}")
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        yield from range(_FIRST + number * _BLOCK, _FIRST + (number + 1) * _BLOCK)


def _is_free(port: int) -> bool:
    """Whether no server listens there, in both families."""
    with contextlib.ExitStack() as stack:
        for family, host in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
            try:
                stack.enter_context(socket.create_server((host, port), family=family))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
    return True


_ports = filter(_is_free, _claimed())


def free_port() -> int:
    """A free port, reserved for the caller."""
    return next(_ports)
