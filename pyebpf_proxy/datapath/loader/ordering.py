# SPDX-License-Identifier: Apache-2.0
"""The order in which other processors see what the agent writes into maps through mmap."""

from __future__ import annotations

import platform

from pyebpf_proxy.datapath.loader import grace

_STRONG = ("x86_64", "i386", "i586", "i686", "s390x", "s390")


def is_weak() -> bool:
    """Whether processors of this architecture reorder loads, and stores (arm64)."""
    return platform.machine() not in _STRONG


def publish() -> None:
    """Every program that sees a later store of this thread also sees its earlier ones, in any map.

    A map that is changed by a system call needs no such call: the kernel publishes its elements in order.
    """
    if is_weak() and not grace.barrier():
        grace.wait()
