# SPDX-License-Identifier: Apache-2.0
"""Checks before anything is changed: does the machine have what the data plane needs?  Each failure names a remedy."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import re
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.kernel_versions import TESTED_KERNEL, dotted

# For devices, nftables and attaching; for comparing packet pointers, which the verifier allows only with CAP_PERFMON;
# for bpf() itself. tests/netns/test_deploy_capabilities.py tries without each.
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_PERFMON": 38, "CAP_BPF": 39}
_SYS_ADMIN = 21
#: Capabilities that CAP_SYS_ADMIN includes (capabilities(7)).
_IN_SYS_ADMIN = frozenset({"CAP_PERFMON", "CAP_BPF"})
_BTF = Path("/sys/kernel/btf/vmlinux")
# include/uapi/asm-generic/socket.h
SO_NETNS_COOKIE = 71
_OBJECTS = Path(__file__).resolve().parent.parent / "bpf"


class Need(NamedTuple):
    """A requirement. ``look`` returns in a few words what was found; FatalError if it is missing."""

    what: str
    look: Callable[[], str]


def check() -> None:
    """FatalError for the first thing that is missing."""
    check_rights()
    for need in needs():
        need.look()


def needs() -> tuple[Need, ...]:
    """The data plane's requirements on the machine, apart from capabilities."""
    return (
        Need("BTF", _kernel_types),
        Need("namespace cookies", _namespace_cookies),
        Need("libbpf", _libbpf),
        Need("libnftables", libnftables),
        Need("BPF objects", _objects),
    )


def _kernel_types() -> str:
    if not _BTF.exists():
        raise FatalError(
            f"the kernel has no BTF ({_BTF} does not exist){old_kernel()};"
            " use a kernel built with CONFIG_DEBUG_INFO_BTF (Debian's are)"
        )
    return str(_BTF)


def _namespace_cookies() -> str:
    """The socket programs identify a network namespace by its cookie."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise
            raise FatalError(
                f"the kernel has no cookies of network namespaces (SO_NETNS_COOKIE){old_kernel()}; use a newer kernel"
            ) from error
    return "SO_NETNS_COOKIE"


def _libbpf() -> str:
    if not _loads("libbpf.so.1"):
        raise FatalError("libbpf is missing; install it (Debian: libbpf1)")
    return "libbpf.so.1"


def libnftables() -> str:
    """What was found. FatalError: libnftables or its binding is missing, so the data plane cannot be imported."""
    if importlib.util.find_spec("nftables") is None or not _loads("libnftables.so.1"):
        raise FatalError("libnftables or its Python binding is missing; install it (Debian: python3-nftables)")
    return "libnftables.so.1 and its binding"


def _objects() -> str:
    for name in ("tc.bpf.o", "tc_without_lookup.bpf.o", "sock.bpf.o", "xdp.bpf.o"):
        if not (_OBJECTS / name).is_file():
            raise FatalError(f"the BPF object {_OBJECTS / name} is missing; build it with `make setup` (needs clang)")
    return str(_OBJECTS)


def check_rights(needed: Collection[str] = tuple(_CAPABILITIES)) -> None:
    """FatalError if this process lacks a capability."""
    held = effective_capabilities()
    privileged = bool(held >> _SYS_ADMIN & 1)
    missing = [
        name for name in needed if not (held >> _CAPABILITIES[name] & 1 or (privileged and name in _IN_SYS_ADMIN))
    ]
    if missing:
        raise FatalError(
            f"not allowed: {' and '.join(missing)} missing; run as root (sudo), in a pod: add the capabilities of"
            " deploy/base/daemonset.yaml"
        )


def unreachable_conntrack() -> str:
    """Why conntrack cannot be looked up from BPF although the kernel has it; "" if it can, or if it is built in.

    The BTF of a module is opened by id, which needs CAP_SYS_ADMIN (bpf(2), BPF_BTF_GET_FD_BY_ID).
    """
    if not (_BTF.parent / "nf_conntrack").exists() or effective_capabilities() >> _SYS_ADMIN & 1:
        return ""
    return "nf_conntrack is a module: lookups from BPF need CAP_SYS_ADMIN"


def effective_capabilities() -> int:
    """The bit set of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def kernel_version() -> tuple[int, int] | None:
    """Version of the running kernel; None if its release has another form."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else None


def old_kernel() -> str:
    """Text for a message about something that fails if the running kernel is older than the tested ones, else ""."""
    version = kernel_version()
    if version is None or version >= TESTED_KERNEL:
        return ""
    return f"; this kernel, {os.uname().release}, is older than {dotted(TESTED_KERNEL)}"
