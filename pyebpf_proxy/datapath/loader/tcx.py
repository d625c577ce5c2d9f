# SPDX-License-Identifier: Apache-2.0
"""The chains of tc programs that a device has since Linux 6.6 (tcx), by libbpf's basic calls.

Debian's libbpf 1.1 does not know tcx, but passes the numbers of hooks and flags to the kernel unchanged.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pyebpf_proxy.datapath.loader import _libbpf
from pyebpf_proxy.datapath.loader._libbpf import BpfError, captured, checked, ffi

# enum bpf_attach_type of include/uapi/linux/bpf.h
INGRESS, EGRESS = 46, 47
# Without a reference program: before or after all others, that is the head or the tail of the chain.
BEFORE, AFTER = 1 << 3, 1 << 4
# Programs of one chain: the kernel's BPF_MPROG_MAX.
_CHAIN_MAX = 64
_MAP_TYPE_PROG_ARRAY, _PROG_TYPE_SCHED_CLS = 3, 3
_INSTRUCTION = struct.Struct("=BBhi")


def chain(ifindex: int, hook: int) -> tuple[int, ...]:
    """Ids of the programs at a device's hook, first to last. BpfError: ENODEV; EINVAL: a kernel without tcx."""
    ids = ffi.new("uint32_t[]", _CHAIN_MAX)
    options = ffi.new("struct query_options *", {"sz": ffi.sizeof("struct query_options")})
    options.prog_ids, options.count = ids, _CHAIN_MAX
    with captured():
        checked(_libbpf.lib().bpf_prog_query_opts(ifindex, hook, options), f"tcx programs of device {ifindex}")
    return tuple(ids[i] for i in range(options.count))


def available() -> bool:
    """Whether this kernel has tcx, by a query of the loopback device's chain. BpfError without the right to query."""
    try:
        chain(1, INGRESS)
    except BpfError as error:
        # EOPNOTSUPP: the kernel knows the numbers but was built without the hooks.
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    return True


def attach(program_fd: int, ifindex: int, hook: int, where: int) -> int:
    """A new link at the head (BEFORE) or the tail (AFTER) of a chain: its descriptor.

    BpfError; ENODEV: the device is gone; EEXIST: the chain already has the program.
    """
    options = ffi.new("struct link_options *", {"sz": ffi.sizeof("struct link_options"), "flags": where})
    with captured():
        return checked(
            _libbpf.lib().bpf_link_create(program_fd, ifindex, hook, options), f"tcx of device {ifindex}: attach"
        )


def update(link_fd: int, program_fd: int) -> None:
    """Replace the program of a link atomically. BpfError; ENOLINK: its device is gone."""
    with captured():
        checked(_libbpf.lib().bpf_link_update(link_fd, program_fd, ffi.NULL), "replace the program of a tcx link")


def detach(link_fd: int) -> None:
    """Detach the link's program from its device at once, even if others hold the link."""
    with captured():
        checked(_libbpf.lib().bpf_link_detach(link_fd), "detach a tcx link")


def pin(fd: int, path: Path) -> None:
    """BpfError."""
    with captured():
        checked(_libbpf.lib().bpf_obj_pin(fd, os.fsencode(path)), f"pin {path}")


def open_pinned(path: Path) -> int:
    """The descriptor of a pinned object. BpfError."""
    with captured():
        return checked(_libbpf.lib().bpf_obj_get(os.fsencode(path)), f"open {path}")


@contextmanager
def stand_in(program_fd: int, table_pin: Path) -> Iterator[int]:
    """Yields the descriptor of a small program that runs the given one by a tail call. BpfError.

    A chain accepts each program only once. The small program allows a second attachment while a program is moved.
    It works as long as ``table_pin`` exists, which the caller removes.
    """
    library = _libbpf.lib()
    what = "program to move a tcx link"
    with ExitStack() as stack:
        stack.enter_context(captured())
        table = checked(library.bpf_map_create(_MAP_TYPE_PROG_ARRAY, b"pep_move", 4, 4, 1, ffi.NULL), what)
        stack.callback(os.close, table)
        # The kernel empties a program array that has neither a descriptor nor a pin.
        checked(library.bpf_obj_pin(table, os.fsencode(table_pin)), what)
        checked(library.bpf_map_update_elem(table, bytes(4), struct.pack("=I", program_fd), 0), what)
        # r1 is the packet; r2 = the table, r3 = 0, bpf_tail_call(); if that fails r0 = TC_ACT_UNSPEC.
        code = [
            (0x18, 0x12, 0, table),
            (0, 0, 0, 0),
            (0xB7, 3, 0, 0),
            (0x85, 0, 0, 12),
            (0xB7, 0, 0, -1),
            (0x95, 0, 0, 0),
        ]
        packed = b"".join(_INSTRUCTION.pack(*one) for one in code)
        program = checked(
            library.bpf_prog_load(_PROG_TYPE_SCHED_CLS, b"pep_move", b"Dual BSD/GPL", packed, len(code), ffi.NULL), what
        )
        stack.callback(os.close, program)
        yield program


def described(fd: int) -> dict[str, int]:
    """The numbers that the kernel shows for an open program or link: ``prog_id``, ``ifindex`` (0: gone), ..."""
    found = {}
    # Read for each link of a socket program, twice a second: a Path would take as long as the rest.
    with open(f"/proc/self/fdinfo/{fd}") as shown:
        lines = shown.read().splitlines()
    for line in lines:
        name, _, value = line.partition(":")
        if value.split()[:1] and value.split()[0].isdigit():
            found[name] = int(value.split()[0])
    return found
