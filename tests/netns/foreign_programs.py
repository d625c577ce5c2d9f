# SPDX-License-Identifier: Apache-2.0
"""Other software's programs in a device's tcx chain: they count packets, end the chain, or translate as Cilium does."""

from __future__ import annotations

import contextlib
import ipaddress
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
from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.namespace import Namespace
from tests import ROOT

#: TC_ACT_OK: later programs get no packet. TC_ACT_UNSPEC: the next program runs.
ENDS, GOES_ON = "ends_chain", "goes_on"
#: They count only packets with a value in skb->tc_index, and only those with one of Cilium's flags in it.
NUMBERED, FLAGGED = "sees_number", "sees_flags"
#: Translates UDP packets of both families from one address to another, and ends the chain.
TRANSLATES = "translates"
_SOURCE = """
struct __sk_buff { unsigned before[11], tc_index; };
static long (*const store_bytes)(void *skb, unsigned at, const void *from, unsigned size, long flags) = (void *)9;
static long (*const replace_l3)(void *skb, unsigned at, long from, long to, long flags) = (void *)10;
static long (*const replace_l4)(void *skb, unsigned at, long from, long to, long flags) = (void *)11;
static long (*const load_bytes)(void *skb, unsigned at, void *to, unsigned size) = (void *)26;
static long (*const difference)(void *from, unsigned size, void *to, unsigned also, unsigned seed) = (void *)28;
unsigned long long seen;
__attribute__((section("tc"), used)) int ends_chain(struct __sk_buff *skb) { __sync_fetch_and_add(&seen, 1); return 0; }
__attribute__((section("tc"), used)) int goes_on(struct __sk_buff *skb) { __sync_fetch_and_add(&seen, 1); return -1; }
__attribute__((section("tc"), used)) int sees_number(struct __sk_buff *skb)
{ __sync_fetch_and_add(&seen, !!*(volatile unsigned *)&skb->tc_index); return -1; }
__attribute__((section("tc"), used)) int sees_flags(struct __sk_buff *skb)
{ __sync_fetch_and_add(&seen, !!(*(volatile unsigned *)&skb->tc_index & 0x1f)); return -1; }
struct rule { unsigned from[4], to[4]; };
struct { struct rule ip4, ip6; } nat __attribute__((section(".data.nat"), used)) = {};
static void translate(struct __sk_buff *skb, unsigned at, unsigned size, unsigned checksum, struct rule *rule)
{
    unsigned found[4] = {}, to[4] = {}, other = 0;
    if (load_bytes(skb, at, found, size))
        return;
    for (unsigned i = 0; i < size / 4; i++) {
        other |= found[i] ^ ((volatile struct rule *)rule)->from[i];
        to[i] = ((volatile struct rule *)rule)->to[i];
    }
    if (other)
        return;
    long changed = difference(found, size, to, size, 0);
    if (size == 4)
        replace_l3(skb, 24, 0, changed, 0);
    replace_l4(skb, checksum, 0, changed, 0x30);
    store_bytes(skb, at, to, size, 0);
}
__attribute__((section("tc"), used)) int translates(struct __sk_buff *skb)
{
    unsigned char version = 0, ip4 = 0, ip6 = 0;
    __sync_fetch_and_add(&seen, 1);
    if (load_bytes(skb, 14, &version, 1) || load_bytes(skb, 23, &ip4, 1) || load_bytes(skb, 20, &ip6, 1))
        return 0;
    if (version == 0x45 && ip4 == 17)
        translate(skb, 30, 4, 40, &nat.ip4);
    else if (version >> 4 == 6 && ip6 == 17)
        translate(skb, 38, 16, 60, &nat.ip6);
    return 0;
}
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
    namespace: Namespace,
    file: Path,
    program: str,
    device: str,
    hook: int = tcx.INGRESS,
    where: int = tcx.BEFORE,
    nat: bytes = b"",
) -> Iterator[Foreign]:
    """Attached at the head of the chain (``tcx.BEFORE``) or at its tail, for as long as the block lasts.

    ``nat``: for ``TRANSLATES``, of :func:`nat`.
    """
    channel, other_end = multiprocessing.Pipe()
    task = namespace.start(_hold, file, program, device, hook, where, nat, other_end)
    other_end.close()
    with channel:
        try:
            assert channel.poll(20), task.result(1)
            channel.recv()
            yield Foreign(channel)
        finally:
            task.stop()


def nat(before: Dual, after: Dual) -> bytes:
    """From which address to which one ``TRANSLATES`` translates."""
    texts = (before.v4, after.v4, before.v6, after.v6)
    return b"".join(ipaddress.ip_address(text).packed.ljust(16, b"\0") for text in texts)


def _hold(file: Path, program: str, device: str, hook: int, where: int, nat: bytes, channel: Any) -> None:
    with Object.open(file) as opened:
        loaded = opened.load()
        if nat:
            (rules,) = (found for name, found in loaded.maps.items() if name.endswith(".data.nat"))
            rules.update(bytes(4), nat)
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
