# SPDX-License-Identifier: Apache-2.0
"""connect() through io_uring, with system calls only."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct

from pyebpf_proxy.lab.client import Answer
from tests.netns.socket_calls import DEADLINE, REQUEST, Place, looks_connected, opened, read_http, sockaddr

# The same numbers on every architecture.
_SETUP, _ENTER = 425, 426
_OFF_SQ_RING, _OFF_SQES = 0, 0x10000000
_OP_CONNECT, _GETEVENTS, _ASYNC = 16, 1, 1 << 4
_ENTRY_BYTES = 64
_libc = ctypes.CDLL(None, use_errno=True)


def supported() -> str:
    """Why there is no io_uring; empty if there is one."""
    parameters = ctypes.create_string_buffer(120)
    ring = _libc.syscall(_SETUP, 1, parameters)
    if ring < 0:
        return f"io_uring_setup: {os.strerror(ctypes.get_errno())}"
    os.close(ring)
    return ""


def io_uring_connect(place: Place, own: str) -> list[Answer]:
    """In the submitting process, and in a worker thread of the kernel."""
    return [_connect(place, 0), _connect(place, _ASYNC)]


def _connect(place: Place, flags: int) -> Answer:
    parameters = ctypes.create_string_buffer(120)
    ring = _libc.syscall(_SETUP, 1, parameters)
    assert ring >= 0, os.strerror(ctypes.get_errno())
    # struct io_uring_params: ten words, then the offsets of both queues.
    submission = struct.unpack_from("=10I", parameters, 40)
    completion = struct.unpack_from("=10I", parameters, 80)
    name = ctypes.create_string_buffer(sockaddr(place))
    try:
        with (
            mmap.mmap(ring, 4096, offset=_OFF_SQ_RING) as queue,
            mmap.mmap(ring, 4096, offset=_OFF_SQES) as entries,
            opened(place, socket.SOCK_STREAM) as sock,
        ):
            # opcode, flags, priority, fd; offset: length of the address; address.
            struct.pack_into(
                "=BBHiQQ",
                entries,
                0,
                *(_OP_CONNECT, flags, 0, sock.fileno(), len(sockaddr(place)), ctypes.addressof(name)),
            )
            tail, array = submission[1], submission[6]
            struct.pack_into("=I", queue, array, 0)
            struct.pack_into("=I", queue, tail, 1)
            assert _libc.syscall(_ENTER, ring, 1, 1, _GETEVENTS, None, 0) == 1, os.strerror(ctypes.get_errno())
            (result,) = struct.unpack_from("=i", queue, completion[5] + 8)
            assert result == 0, os.strerror(-result)
            looks_connected(sock, place)
            sock.settimeout(DEADLINE)
            sock.sendall(REQUEST)
            return read_http(sock)
    finally:
        os.close(ring)
