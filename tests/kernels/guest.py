# SPDX-License-Identifier: Apache-2.0
"""One virtual machine from start to end: QEMU with a kernel and an initramfs, no disk, no network.

The console goes to a file; results come as tars through the second serial port. QEMU dies with this process.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.kernels.architecture import AMD64, Architecture
from tests.kernels.problem import KernelsError

#: The last line of a guest that has ended; init prints it.
END = "VM_EXIT"
BOOTED = "Linux version"
#: The first word of init.
UP = "guest: "
# The time of an emulated CPU follows its instructions, 2**shift nanoseconds each, and idle time is skipped. So the load
# of this machine does not affect the guest, and waiting costs nothing here. There is only one CPU. A smaller shift is a
# faster machine, where waiting while others work takes longer in real time.
CLOCK_SHIFT = 2
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_running: set[subprocess.Popen[bytes]] = set()
_stopped: list[bool] = []


@dataclass(frozen=True)
class Machine:
    """How a guest is run here."""

    command: tuple[str, ...]
    accelerator: str  # "kvm" or "tcg"
    why: str  # why not kvm, or ""
    cpus: int = 1
    memory: int = 2048  # MiB
    shift: int = CLOCK_SHIFT
    architecture: Architecture = AMD64

    def arguments(self, kernel: Path, initrd: Path | None, results: Path, words: str) -> list[str]:
        """The whole command line."""
        kind = self.architecture
        processor = "host" if self.accelerator == "kvm" else kind.processor
        append = f"console={kind.console} panic=-1 oops=panic quiet loglevel=4 mitigations=off {words}"
        return [
            *self.command,
            *(() if self.accelerator == "kvm" else ("-icount", f"shift={self.shift},sleep=off")),
            *("-accel", self.accelerator, "-cpu", processor, "-M", kind.board, "-smp", str(self.cpus)),
            *("-m", str(self.memory), "-nodefaults", "-display", "none", "-no-reboot"),
            *("-serial", "stdio", "-serial", f"file:{results}", "-kernel", str(kernel)),
            *(("-initrd", str(initrd)) if initrd else ()),
            *("-append", append.strip()),
        ]


@dataclass(frozen=True)
class Outcome:
    """How a guest ended."""

    problem: str  # one line, or ""
    console: str
    seconds: float

    @property
    def booted(self) -> bool:
        """Whether the guest has printed its first line, which is its init's."""
        return UP in self.console


def find_qemu(unpacked: Path, architecture: Architecture = AMD64) -> tuple[str, ...]:
    """The command of QEMU: ``QEMU`` of the environment, the machine's own if it is new enough, or the unpacked one.

    KernelsError if there is none.
    """
    named = os.environ.get("QEMU")
    if named:
        if shutil.which(named) is None:
            raise KernelsError(f"QEMU={named}: there is no such program")
        return (named,)
    installed = shutil.which(architecture.emulator)
    # 7.2 crashed in one of ten boots of kernel 6.12.
    if installed and _major(installed) >= 10:
        return (installed,)
    binary = unpacked / "usr/bin" / architecture.emulator
    if not binary.exists():
        package = f"{architecture.package} (10 or newer)"
        raise KernelsError(f"there is no QEMU: install {package}, or give apt a mirror that has it")
    libraries = [unpacked / "lib/x86_64-linux-gnu", unpacked / "usr/lib/x86_64-linux-gnu"]
    loader = unpacked / "lib64/ld-linux-x86-64.so.2"
    if loader.is_symlink() or not loader.exists():  # its target is relative to the root
        loader = unpacked / "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
    shares = [part for name in ("qemu", "seabios") for part in ("-L", str(unpacked / "usr/share" / name))]
    return (str(loader), "--library-path", ":".join(map(str, libraries)), str(binary), *shares)


def _major(binary: str) -> int:
    shown = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version (\d+)", shown)
    return int(found.group(1)) if found else 0


def choose_machine(
    command: tuple[str, ...], kernel: Path, scratch: Path, architecture: Architecture = AMD64
) -> Machine:
    """KVM if a kernel prints its first line under it, else emulation; ``ACCEL`` of the environment overrides."""
    wanted = os.environ.get("ACCEL", "")
    if wanted not in ("", "kvm", "tcg"):
        raise KernelsError(f"ACCEL={wanted}: kvm or tcg")
    if wanted == "tcg":
        return Machine(command, "tcg", "ACCEL=tcg", architecture=architecture)
    why = ""
    if architecture.foreign:
        why = f"this machine is not {architecture.name}"
    elif not os.path.exists("/dev/kvm"):
        why = "there is no /dev/kvm"
    elif not os.access("/dev/kvm", os.R_OK | os.W_OK):
        why = "/dev/kvm may not be used"
    else:
        machine = Machine(command, "kvm", "", cpus=1, memory=512, architecture=architecture)
        # Without an initramfs it panics and ends.
        tried = run(machine, kernel, None, scratch / "kvm", 20, "loglevel=7")
        if BOOTED not in tried.console:
            why = f"a kernel does not start with /dev/kvm ({tried.problem or 'no first line'})"
    if why and wanted == "kvm":
        raise KernelsError(f"ACCEL=kvm: {why}")
    return Machine(command, "tcg" if why else "kvm", why, architecture=architecture)


def run(machine: Machine, kernel: Path, initrd: Path | None, folder: Path, limit: float, words: str = "") -> Outcome:
    """Boot, wait for the end (at most ``limit`` seconds), unpack the results into ``folder``; no process is left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console, results = folder / "console.log", folder / "results.tar"
    results.touch()
    began = time.monotonic()
    with console.open("wb") as output:
        process = subprocess.Popen(
            machine.arguments(kernel, initrd, results, words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,
        )
        _running.add(process)
        problem = ""
        if _stopped:
            process.kill()
        try:
            # Not Popen.wait: if it is interrupted, it keeps its lock, and the wait below never ends.
            ended = os.pidfd_open(process.pid)
            if not select.select([ended], [], [], limit)[0]:
                problem = f"not done after {limit:.0f} s"
            os.close(ended)
        finally:
            process.kill()
            process.wait()
            _running.discard(process)
    seconds = time.monotonic() - began
    text = console.read_bytes().decode(errors="replace").replace("\r", "")
    if not problem and f"{END} 0" not in text:
        problem = _what_happened(text, process.returncode)
    # Not by tarfile: Debian 12's has no filters yet. -i: several archives, each with its end mark; -m: file times by
    # this machine's clock, since an emulated one may be ahead.
    if results.stat().st_size and subprocess.run(["tar", "-C", folder, "-imxf", results], check=False).returncode:
        problem = problem or "its results cannot be read"
    results.unlink()
    return Outcome(problem, text, seconds)


def stop_all() -> None:
    """End every guest of this process, also one that is just being started; waiting code sees a crash."""
    _stopped.append(True)
    for process in list(_running):
        process.kill()


def stopped() -> bool:
    """Whether :func:`stop_all` was called: then results of guests have no meaning."""
    return bool(_stopped)


def _what_happened(console: str, status: int) -> str:
    lines = [line.strip() for line in console.splitlines() if line.strip()]
    for line in lines:
        if "Kernel panic" in line or "qemu-system" in line:
            return re.sub(r"^\[ *[\d.]+\] ", "", line)
    if not lines:
        return f"it does not boot: no word on its console (QEMU's exit status {status})"
    return f"it ended before its tests did; last words: {lines[-1][:200]}"


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
