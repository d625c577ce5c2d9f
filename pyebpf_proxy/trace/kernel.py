# SPDX-License-Identifier: Apache-2.0
"""The parent's side of :mod:`kernel_side`: starts the process, reads its events, ends it."""

from __future__ import annotations

import os
import select
import subprocess
import time
from pathlib import Path

import msgspec

from pyebpf_proxy.datapath.loader.btf import Btf, StaleObjectError
from pyebpf_proxy.datapath.loader.rings import pages

#: The interpreter for which Debian's python3-bpfcc is installed. An environment variable may name another one.
INTERPRETER = "/usr/bin/python3"
INTERPRETER_VARIABLE = "PYEBPF_PROXY_BCC_PYTHON"
_BTF = Path("/sys/kernel/btf/vmlinux")
_SCRIPT = Path(__file__).with_name("kernel_side.py")
_START_SECONDS = 30.0
_END_SECONDS = 5.0
_INSTALL = "apt-get install python3-bpfcc"
#: The remedy in the agent's image. It has no bcc, which needs a compiler, and its root file system is read-only.
_ELSEWHERE = "nothing can be installed here; on the node, use pyebpf-proxy's package and python3-bpfcc"
_OFFSETS = {
    "SKB_HEAD": ("sk_buff", "head"),
    "SKB_NETWORK": ("sk_buff", "network_header"),
    "SKB_PROTOCOL": ("sk_buff", "protocol"),
    "SKB_DEV": ("sk_buff", "dev"),
    "DEV_IFINDEX": ("net_device", "ifindex"),
    "DEV_NET": ("net_device", "nd_net", "net"),
    "NET_INUM": ("net", "ns", "inum"),
    "SOCK_PROTOCOL": ("sock", "sk_protocol"),
    "SOCK_FAMILY": ("sock_common", "skc_family"),
    # skc_num is already 0 when a socket is closed.
    "SOCK_SPORT": ("inet_sock", "inet_sport"),
    "SOCK_DPORT": ("sock_common", "skc_dport"),
    "SOCK_SADDR": ("sock_common", "skc_rcv_saddr"),
    "SOCK_DADDR": ("sock_common", "skc_daddr"),
    "SOCK_SADDR6": ("sock_common", "skc_v6_rcv_saddr"),
    "SOCK_DADDR6": ("sock_common", "skc_v6_daddr"),
    "SOCK_NET": ("sock_common", "skc_net", "net"),
}


def _remedy() -> str:
    return _INSTALL if os.access("/usr", os.W_OK) else _ELSEWHERE


class KernelEvent(msgspec.Struct):
    """A line of kernel_side: a change of the TCP state from ``reason`` to ``state``, or, if ``state`` is 0, a drop."""

    when: int = 0
    where: str = ""
    netns: int = 0
    ifindex: int = 0
    reason: int = 0
    state: int = 0
    protocol: int = 0
    source: str = ""
    source_port: int = 0
    destination: str = ""
    destination_port: int = 0
    lost: int = 0
    ready: bool = False


class MissingError(Exception):
    """Kernel events are unavailable. The text is one line with the cause and the remedy."""


class Kernel:
    """The kernel's events, until :meth:`close`. MissingError if they are unavailable."""

    def __init__(self, pins: Path, ring_size: int) -> None:
        try:
            btf = Btf(_BTF.read_bytes(), str(_BTF))
            offsets = {name: btf.offset(*path) for name, path in _OFFSETS.items()}
            reasons = btf.enum("skb_drop_reason")
        except (OSError, ValueError, StaleObjectError) as error:
            raise MissingError(f"the kernel's types cannot be read: {error}") from None
        #: Names of the kernel's drop reasons, by number.
        self.reasons = {number: name.removeprefix("SKB_DROP_REASON_") for name, number in reasons.items()}
        self._decoder = msgspec.json.Decoder(KernelEvent)
        self._rest = b""
        #: Whether the process has ended.
        self.ended = False
        # A file in memory: the agent's pod has no writable folder.
        self._errors = os.fdopen(os.memfd_create("bcc"), "w+b")
        interpreter = os.environ.get(INTERPRETER_VARIABLE) or INTERPRETER
        request = {
            "parent": os.getpid(),
            "pins": str(pins),
            "offsets": offsets,
            "pages": pages(ring_size),
        }
        try:
            self._process = subprocess.Popen(
                [interpreter, "-I", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            self._errors.close()
            raise MissingError(f"{interpreter}: {error.strerror}; python3-bpfcc needs it: {_remedy()}") from None
        try:
            self._start(msgspec.json.encode(request), interpreter)
        except BaseException:
            self.close()
            raise

    def _start(self, request: bytes, interpreter: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + b"\n")
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        end = time.monotonic() + _START_SECONDS
        while select.select([self.fd], [], [], max(0.0, end - time.monotonic()))[0]:
            if any(event.ready for event in self.read()):
                return
            if self.ended:
                break
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "no answer"
        if "No module named 'bcc'" in last:
            raise MissingError(f"bcc is not installed for {interpreter}: {_remedy()}")
        raise MissingError(f"bcc could not be started: {last}")

    @property
    def fd(self) -> int:
        """A descriptor for poll; it is readable when events have arrived."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read(self) -> list[KernelEvent]:
        """New events. Empty if there are none, or if the process has ended."""
        if self.ended or not select.select([self.fd], [], [], 0)[0]:
            return []
        data = os.read(self.fd, 1 << 20)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [self._decoder.decode(line) for line in lines]

    def rest(self) -> list[KernelEvent]:
        """Ask the process to end. The result: its remaining events of the next few seconds."""
        self._process.terminate()
        end = time.monotonic() + _END_SECONDS
        found: list[KernelEvent] = []
        while not self.ended and select.select([self.fd], [], [], max(0.0, end - time.monotonic()))[0]:
            found += self.read()
        return found

    def close(self) -> None:
        """Kill the process and wait for it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._errors.close()
