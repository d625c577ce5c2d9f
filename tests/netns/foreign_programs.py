# SPDX-License-Identifier: Apache-2.0
"""Other software's programs in a device's tcx chain: they count packets, and end the chain or let it continue."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.lab.namespace import Namespace
from tests import ROOT

#: TC_ACT_OK: later programs get no packet. TC_ACT_UNSPEC: the next program runs.
ENDS, GOES_ON = "ends_chain", "goes_on"
#: They count only packets with a value in skb->tc_index, and only those with one of Cilium's flags in it.
NUMBERED, FLAGGED = "sees_number", "sees_flags"
_SOURCE = """
struct __sk_buff { unsigned before[11], tc_index; };
unsigned long long seen;
__attribute__((section("tc"), used)) int ends_chain(struct __sk_buff *skb) { __sync_fetch_and_add(&seen, 1); return 0; }
__attribute__((section("tc"), used)) int goes_on(struct __sk_buff *skb) { __sync_fetch_and_add(&seen, 1); return -1; }
__attribute__((section("tc"), used)) int sees_number(struct __sk_buff *skb)
{ __sync_fetch_and_add(&seen, !!*(volatile unsigned *)&skb->tc_index); return -1; }
__attribute__((section("tc"), used)) int sees_flags(struct __sk_buff *skb)
{ __sync_fetch_and_add(&seen, !!(*(volatile unsigned *)&skb->tc_index & 0x1f)); return -1; }
char LICENSE[] __attribute__((section("license"), used)) = "GPL";
"""
#: Where `make test-kernels` leaves the object file for its guests.
BUILT = ROOT / "build/tests"


def compiled(folder: Path) -> Path:
    """The object file, compiled in this folder; without a compiler, the one that was compiled before."""
    if shutil.which("clang") is None:
        return BUILT / "foreign.o"
    folder.mkdir(parents=True, exist_ok=True)
    source, found = folder / "foreign.c", folder / "foreign.o"
    source.write_text(_SOURCE)
    subprocess.run(["clang", "-O2", "-g", "-target", "bpf", "-c", source, "-o", found], check=True)
    return found


class Foreign:
    """One program at one hook of a device."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __int__(self) -> int:
        """How many packets it has seen."""
        self._channel.send("how many")
        return int(self._channel.recv())


@contextlib.contextmanager
def attached(
    namespace: Namespace, file: Path, program: str, device: str, hook: int = tcx.INGRESS, where: int = tcx.BEFORE
) -> Iterator[Foreign]:
    """Attached at the head of the chain (``tcx.BEFORE``) or at its tail, for as long as the block lasts."""
    channel, other_end = multiprocessing.Pipe()
    task = namespace.start(_hold, file, program, device, hook, where, other_end)
    other_end.close()
    with channel:
        try:
            assert channel.poll(20), task.result(1)
            channel.recv()
            yield Foreign(channel)
        finally:
            task.stop()


def _hold(file: Path, program: str, device: str, hook: int, where: int, channel: Any) -> None:
    with Object.open(file) as opened:
        loaded = opened.load()
        # The kernel detaches the program when this process ends.
        tcx.attach(loaded.programs[program].fd, socket.if_nametoindex(device), hook, where)
        (counter,) = (found for name, found in loaded.maps.items() if name.endswith(".bss"))
        channel.send("attached")
        while channel.recv():
            value = counter.lookup(bytes(4))
            assert value is not None
            channel.send(int.from_bytes(value[:8], sys.byteorder))


def chain(namespace: Namespace, device: str, hook: int = tcx.INGRESS) -> tuple[int, ...]:
    """The ids of the programs at a hook, first to last."""
    return namespace.call(_chain, device, hook)


def _chain(device: str, hook: int) -> tuple[int, ...]:
    return tcx.chain(socket.if_nametoindex(device), hook)
