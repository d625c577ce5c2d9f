# SPDX-License-Identifier: Apache-2.0
"""The architectures of guests: Debian's and the kernel's names of each, and the machine that QEMU emulates."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from tests.kernels.problem import KernelsError


@dataclass(frozen=True)
class Architecture:
    """One architecture, by Debian's name."""

    name: str
    machine: str  # the kernel's name, which uname shows
    emulator: str
    package: str  # Debian's, with the emulator
    board: str
    processor: str  # where it is emulated
    console: str
    #: The second serial port, for results.
    results: str

    @property
    def foreign(self) -> bool:
        """Whether this machine cannot run its programs, and KVM cannot run its kernels."""
        return platform.machine() != self.machine


AMD64 = Architecture(
    name="amd64",
    machine="x86_64",
    emulator="qemu-system-x86_64",
    package="qemu-system-x86",
    board="q35",
    # la57: kernels before 6.6 fail with the emulation's five levels of page tables. erms, fsrm: if these seem fast, a
    # kernel copies byte by byte, and each byte is emulated separately.
    processor="max,la57=off,erms=off,fsrm=off",
    console="ttyS0",
    results="ttyS1",
)
ARM64 = Architecture(
    name="arm64",
    machine="aarch64",
    emulator="qemu-system-aarch64",
    package="qemu-system-arm",
    board="virt,gic-version=3",
    # A server's processor with atomic instructions (LSE). Later ones sign pointers, which is slow if it is emulated.
    processor="neoverse-n1",
    console="ttyAMA0",
    results="ttyAMA1",
)
_ALL = {each.name: each for each in (AMD64, ARM64)}


def named(name: str) -> Architecture:
    """The architecture with this name; amd64 for "". KernelsError if there is none."""
    try:
        return _ALL[name or AMD64.name]
    except KeyError:
        raise KernelsError(f"ARCH: {name} is no architecture of the guests: {' or '.join(_ALL)}") from None
