# SPDX-License-Identifier: Apache-2.0
"""Kernel events of packets and connections of services. Debian's Python runs this in a separate process.

bcc exists only for that Python, so this file imports no other module of the project. The parent sends the offsets in
kernel structs on stdin (one line of JSON, see :mod:`kernel`), since bcc would need the kernel headers to find them.
Each event is a line of JSON on stdout. The process ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = r"""
struct place4 { u8 address[4]; u16 port; u8 protocol; u8 zero; };
struct place6 { u8 address[16]; u16 port; u8 protocol; u8 zero; };
struct end4 { u32 service; u8 address[4]; u16 port; u8 protocol; u8 zero; };
struct end6 { u32 service; u8 address[16]; u16 port; u8 protocol; u8 zero; };

BPF_TABLE_PINNED("hash", struct place4, u64, frontends4, 1, "@PINS@/frontends4");
BPF_TABLE_PINNED("hash", struct place6, u64, frontends6, 1, "@PINS@/frontends6");
BPF_TABLE_PINNED("hash", struct end4, u32, endpoints4, 1, "@PINS@/endpoints4");
BPF_TABLE_PINNED("hash", struct end6, u32, endpoints6, 1, "@PINS@/endpoints6");
BPF_PERF_OUTPUT(events);
BPF_ARRAY(missed, u64, 1);

struct event {
    u64 when, location;
    u32 netns, ifindex, reason;
    u16 source_port, destination_port;
    u8 state, protocol, ipv6, zero;
    u8 source[16], destination[16];
};

#define READ(to, from, offset) bpf_probe_read_kernel(&(to), sizeof(to), (void *)((u64)(from) + (offset)))

static int is_service4(u8 *address, u16 port, u8 protocol)
{
    struct place4 place = { .port = port, .protocol = protocol };
    struct end4 end = { .port = port, .protocol = protocol };

    __builtin_memcpy(place.address, address, 4);
    __builtin_memcpy(end.address, address, 4);
    return frontends4.lookup(&place) || endpoints4.lookup(&end);
}

static int is_service6(u8 *address, u16 port, u8 protocol)
{
    struct place6 place = { .port = port, .protocol = protocol };
    struct end6 end = { .port = port, .protocol = protocol };

    __builtin_memcpy(place.address, address, 16);
    __builtin_memcpy(end.address, address, 16);
    return frontends6.lookup(&place) || endpoints6.lookup(&end);
}

/* A NodePort's frontend has the address zero. */
static int is_of_services(struct event *e)
{
    u8 any[16] = {};

    if (e->ipv6)
        return is_service6(e->source, e->source_port, e->protocol) ||
               is_service6(e->destination, e->destination_port, e->protocol) ||
               is_service6(any, e->destination_port, e->protocol);
    return is_service4(e->source, e->source_port, e->protocol) ||
           is_service4(e->destination, e->destination_port, e->protocol) ||
           is_service4(any, e->destination_port, e->protocol);
}

static void send(void *ctx, struct event *e)
{
    int zero = 0;

    if (events.perf_submit(ctx, e, sizeof(*e)))
        missed.atomic_increment(zero);
}

static u32 number_of(void *net)
{
    u32 number = 0;

    if (net)
        READ(number, net, NET_INUM);
    return number;
}

static int swapped(u16 number)
{
    return (u16)(number << 8 | number >> 8);
}

static int read_ports(struct event *e, void *at)
{
    u16 ports[2];

    if (READ(ports, at, 0))
        return 0;
    e->source_port = swapped(ports[0]);
    e->destination_port = swapped(ports[1]);
    return 1;
}

static int read_packet(struct event *e, void *skb)
{
    u16 network = 0, protocol = 0;
    void *head = 0, *ip;
    u8 first = 0;

    READ(head, skb, SKB_HEAD);
    READ(network, skb, SKB_NETWORK);
    READ(protocol, skb, SKB_PROTOCOL);
    ip = (void *)((u64)head + network);
    if (protocol == 0x0008) {
        READ(first, ip, 0);
        READ(e->protocol, ip, 9);
        bpf_probe_read_kernel(e->source, 4, (void *)((u64)ip + 12));
        bpf_probe_read_kernel(e->destination, 4, (void *)((u64)ip + 16));
        return first >> 4 == 4 && read_ports(e, (void *)((u64)ip + (first & 15) * 4));
    }
    if (protocol != 0xdd86)
        return 0;
    e->ipv6 = 1;
    READ(e->protocol, ip, 6);
    bpf_probe_read_kernel(e->source, 16, (void *)((u64)ip + 8));
    bpf_probe_read_kernel(e->destination, 16, (void *)((u64)ip + 24));
    return read_ports(e, (void *)((u64)ip + 40));
}

RAW_TRACEPOINT_PROBE(kfree_skb)
{
    struct event e = {};
    void *skb = (void *)ctx->args[0], *device = 0, *net = 0;

    if (!read_packet(&e, skb) || !is_of_services(&e))
        return 0;
    e.when = bpf_ktime_get_boot_ns();
    e.location = ctx->args[1];
    e.reason = ctx->args[2];
    READ(device, skb, SKB_DEV);
    if (device) {
        READ(e.ifindex, device, DEV_IFINDEX);
        READ(net, device, DEV_NET);
    }
    e.netns = number_of(net);
    send(ctx, &e);
    return 0;
}

RAW_TRACEPOINT_PROBE(inet_sock_set_state)
{
    void *sk = (void *)ctx->args[0], *net = 0;
    int from = ctx->args[1], to = ctx->args[2];
    u16 family = 0, protocol = 0, port = 0;
    struct event e = {};

    /* Established and closed connections only. */
    if (to != 1 && to != 7)
        return 0;
    READ(protocol, sk, SOCK_PROTOCOL);
    READ(family, sk, SOCK_FAMILY);
    READ(port, sk, SOCK_SPORT);
    e.source_port = swapped(port);
    READ(port, sk, SOCK_DPORT);
    e.destination_port = swapped(port);
    e.protocol = protocol;
    e.ipv6 = family == 10;
    if (e.ipv6) {
        bpf_probe_read_kernel(e.source, 16, (void *)((u64)sk + SOCK_SADDR6));
        bpf_probe_read_kernel(e.destination, 16, (void *)((u64)sk + SOCK_DADDR6));
    } else {
        bpf_probe_read_kernel(e.source, 4, (void *)((u64)sk + SOCK_SADDR));
        bpf_probe_read_kernel(e.destination, 4, (void *)((u64)sk + SOCK_DADDR));
    }
    if (!is_of_services(&e))
        return 0;
    e.when = bpf_ktime_get_boot_ns();
    e.reason = from;
    e.state = to;
    READ(net, sk, SOCK_NET);
    e.netns = number_of(net);
    send(ctx, &e);
    return 0;
}
"""

#: Stubs of the kernel headers that bcc includes. The program above needs no others, since it reads by offsets.
HEADERS = {
    "linux/kconfig.h": "#define CONFIG_BPF_SYSCALL 1\n",
    "linux/version.h": "#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))\n"
    "#define LINUX_VERSION_CODE KERNEL_VERSION(6, 1, 0)\n",
    "linux/types.h": "#ifndef TYPES_H\n#define TYPES_H\n"
    + "".join(
        f"typedef unsigned {c} __u{n}, u{n}; typedef signed {c} __s{n}, s{n};\n"
        for n, c in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
    )
    + "typedef __u16 __be16, __le16, __sum16; typedef __u32 __be32, __le32, __wsum;\n"
    "typedef __u64 __be64, __le64, __aligned_u64; typedef _Bool bool;\n"
    "typedef unsigned long size_t, uintptr_t;\n#define NULL ((void *)0)\n#endif\n",
    "linux/bpf_common.h": "",
    "linux/log2.h": "",
    "asm/page.h": "",
    "uapi/linux/bpf.h": "",
    "uapi/linux/ptrace.h": "",
    "uapi/linux/if_packet.h": "",
    "uapi/linux/if_ether.h": "",
}
EVENT = struct.Struct("=QQIIIHHBBBx16s16s")
PR_SET_PDEATHSIG = 1


def main() -> int:
    """Print ``{"ready": true}``, then events, until the parent ends."""
    request = json.loads(sys.stdin.readline())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["parent"]:
        return 1
    # Ignore Ctrl-C: the parent handles it, and prints the remaining events.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    kernel = load(request["pins"], request["offsets"])
    lines: list[str] = []
    missed, reported = kernel["missed"], 0

    def take(_cpu: int, data: Any, size: int) -> None:
        lines.append(event_line(ctypes.string_at(data, size), kernel))

    kernel["events"].open_perf_buffer(take, page_cnt=request["pages"], lost_cb=lambda count: None)
    print('{"ready": true}', flush=True)
    last = False
    while not last:
        # Events from before the signal are still printed.
        last = bool(ending)
        kernel.perf_buffer_poll(timeout=0 if last else 200)
        lost = missed[0].value
        if lost != reported:
            lines.append(json.dumps({"lost": lost - reported}))
            reported = lost
        if lines:
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
            lines.clear()
    return 0


def load(pins: str, offsets: dict[str, int]) -> Any:
    """Compile and attach the programs. They are detached when this process ends."""
    from bcc import BPF

    flags = [f"-D{name}={offset}" for name, offset in offsets.items()]
    with tempfile.TemporaryDirectory() as folder:
        for name, text in HEADERS.items():
            path = Path(folder, "include", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        os.environ["BCC_KERNEL_SOURCE"] = folder
        return BPF(text=PROGRAM.replace("@PINS@", pins), cflags=flags)


def event_line(raw: bytes, kernel: Any) -> str:
    """One event as JSON: addresses in hexadecimal, in network order."""
    when, location, netns, ifindex, reason, *rest = EVENT.unpack_from(raw)
    source_port, destination_port, state, protocol, ipv6, source, destination = rest
    size = 16 if ipv6 else 4
    where = kernel.ksym(location).decode(errors="replace") if location else ""
    return (
        f'{{"when":{when},"where":"{where}","netns":{netns},"ifindex":{ifindex},"reason":{reason},"state":{state},'
        f'"protocol":{protocol},"source":"{source[:size].hex()}","source_port":{source_port},'
        f'"destination":"{destination[:size].hex()}","destination_port":{destination_port}}}'
    )


if __name__ == "__main__":
    sys.exit(main())
