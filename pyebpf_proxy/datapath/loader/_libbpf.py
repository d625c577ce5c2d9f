# SPDX-License-Identifier: Apache-2.0
"""libbpf through cffi (ABI mode): only the functions that are used, their log, and their errors.

Every function of libbpf 1.x reports failure in one of two ways: NULL with errno set, or a negative errno.
``checked`` and ``checked_pointer`` turn both into a :class:`BpfError` that names the failed operation and has the
lines that libbpf and the verifier wrote meanwhile.
"""

from __future__ import annotations

import errno as errors
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.datapath.loader import _libbpf_abi

#: With the declarations of tools/libbpf_abi.py. They are parsed there: parsing them at each start takes 40 ms and 3 MB.
ffi: Any = _libbpf_abi.ffi

_LEVEL_DEBUG = 2
_log: list[str] = []


class BpfError(OSError):
    """A libbpf call or bpf() failed. ``str()`` is one line; ``log`` is everything that libbpf and the verifier wrote.

    ``done`` is how many entries of a batch were processed before the failure. ``refused``: the kernel does not accept
    an object, that is a program, a map, or something that a program refers to.
    """

    refused = False

    def __init__(self, what: str, number: int, log: str = "", done: int = 0) -> None:
        super().__init__(number, what)
        self.log = log
        self.done = done
        self.text = _text(what, number, log)

    def __str__(self) -> str:
        return self.text


# Added by libbpf to every failure, and the verifier's statistics: not useful in one line.
_NOISE = re.compile(
    r"^(processed \d+ insns|verification time|stack depth|-- (BEGIN|END)|max_states_per_insn|peak_states|$)"
    r"|-- (BEGIN|END) PROG LOAD LOG --|failed to load object|prog '.*': failed to load"
)


def _text(what: str, number: int, log: str) -> str:
    name = errors.errorcode.get(number, str(number))
    text = f"{what}: {os.strerror(number)} ({name})"
    if number == errors.EPERM and (not log or "trivial BPF program" in log):
        return text + "; root, or CAP_BPF with CAP_NET_ADMIN, is needed"
    lines = [line.strip().removeprefix("libbpf: ") for line in log.splitlines()]
    relevant = [line for line in lines if not _NOISE.search(line)][-3:]
    return text + (": " + "; ".join(relevant) if relevant else "")


@cache
def lib() -> Any:
    """libbpf itself. Raises FatalError if it is missing or older than 1.0."""
    try:
        library = ffi.dlopen("libbpf.so.1")
    except OSError as error:
        raise FatalError(f"libbpf 1.x is missing ({error}): apt-get install libbpf1") from error
    library.libbpf_set_print(_callback())
    return library


@cache  # cffi frees a callback without a reference
def _callback() -> Any:
    return ffi.callback("libbpf_print_fn_t", _on_log)


def _on_log(level: int, format_: Any, arguments: Any) -> int:
    if level >= _LEVEL_DEBUG:
        return 0
    out = ffi.new("char **")
    # A va_list is passed as a pointer on every architecture for which libbpf1 is packaged; it can be read only once.
    size: int = _libc().vasprintf(out, format_, arguments)
    if size >= 0:
        _log.append(ffi.string(out[0]).decode(errors="replace"))
        _libc().free(out[0])
    return size


@cache
def _libc() -> Any:
    return ffi.dlopen(None)


@contextmanager
def captured() -> Iterator[list[str]]:
    """Collect libbpf's log of the calls inside the block."""
    lib()
    _log.clear()
    try:
        yield _log
    finally:
        _log.clear()


def checked(result: int, what: str) -> int:
    """The result of a call that reports failure as a negative errno."""
    if result < 0:
        raise BpfError(what, -result, "".join(_log))
    return result


def checked_pointer(result: Any, what: str) -> Any:
    """The result of a call that reports failure as NULL and errno."""
    if result == ffi.NULL:
        raise BpfError(what, ffi.errno, "".join(_log))
    return result


@cache
def possible_cpus() -> int:
    """How many CPUs this kernel can have: the number of values in a per-CPU map."""
    return checked(lib().libbpf_num_possible_cpus(), "count CPUs")


@cache
def batch_options() -> Any:
    return ffi.new("struct batch_options *", {"sz": ffi.sizeof("struct batch_options")})
