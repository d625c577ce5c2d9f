# SPDX-License-Identifier: Apache-2.0
"""Breakdown of a load's CPU time; contenders take turns: ``python -m bench.shares exchange client none fast``.

``perf`` samples the CPU that does all the work, by its clock, with call chains. Each sample belongs to the nearest
caller in CALLERS. The results are nanoseconds per exchange, connection, request or kilobyte: the share of the samples
times the duration of one of these. They are medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from tempfile import TemporaryDirectory

from .contenders import BEFORE_OTHERS, CONTENDERS, WAYS, Ground, field, turns
from .latency import CONNECTIONS, LOAD
from .loads import connect, exchange, paced, query, stream, watched
from .plots import significant

FREQUENCY = 1999
#: Kernel functions, and the kind to which their time belongs. Callees that are not listed themselves are included.
CALLERS = {
    "conntrack": r"nf_conntrack_\w+|nf_confirm|nf_ct_\w+|__nf_conntrack\w*|nf_hook_entries_\w+",
    "NAT": r"nf_nat_\w+|__nf_nat\w*",
    "rules of nftables and iptables": r"nft_do_chain\w*|ipt_do_table|ip6t_do_table",
    "the BPF programs": r"bpf_prog_\w+",
    "what redirects to": r"skb_do_redirect|__bpf_redirect\w*",
    "the programs' call": r"tcf_classify|tc_run|cls_bpf_classify|sch_handle_ingress",
    "copying": r"_?copy_(from|to)_iter|rep_movs_alternative|skb_copy_datagram_\w+|__skb_datagram_iter",
    "wake-ups and switches": r"_*schedule\w*|try_to_wake_up|finish_task_switch\S*|__wake_up\w*|ep_poll_callback",
    "TCP": r"tcp_\w+|__tcp_\w+|inet6?_csk_\w+|__inet6?_lookup\w*",
    "routing and forwarding": r"ip6?_(forward|rcv|route|sublist|output|finish_output)\w*|ipv6_rcv|fib\d?_\w+",
    "devices and their queues": r"__dev_queue_xmit|dev_hard_start_xmit|veth_\w+|br_\w+|process_backlog|__netif_rec\w+",
    "softirq": r"handle_softirqs|__local_bh_enable_ip|do_softirq\S*|net_rx_action|run_ksoftirqd",
    "system calls": r"do_syscall_64|entry_SYSCALL_\w+|syscall_\w+",
}
_CALLERS = [(words, re.compile(f"(?:{names})$")) for words, names in CALLERS.items()]
#: Calls of these functions into conntrack are counted separately.
ASKED, _ASK = "conntrack, called by the BPF programs", re.compile(r"bpf_(skb|xdp)_ct_\w+|bpf_ct_\w+")
INTERRUPT = "asm_sysvec_apic_timer_interrupt"
PROGRAM = "the load programs themselves"
OTHERS = "idle, and what is none of it"


def kind(chain: Sequence[str]) -> str:
    """The kind of a sample. ``chain``: its functions, the innermost first.

    The timer interrupt, which also takes the samples, belongs to the kind of the code that it interrupted.
    """
    before = max((number for number, function in enumerate(chain) if function == INTERRUPT), default=-1)
    chain = chain[before + 1 :]
    if any(map(_ASK.match, chain)):
        return ASKED
    for function in chain:
        for words, names in _CALLERS:
            if names.match(function):
                return words
    return PROGRAM


def samples(lines: Iterable[str], programs: Sequence[str]) -> Counter[str]:
    """Samples of these programs and of ksoftirqd, by kind. ``lines``: the output of ``perf script -F comm,ip,sym``."""
    found: Counter[str] = Counter()
    program, chain = "", list[str]()
    for line in (*lines, ""):
        if line[:1].isspace():
            chain.append(line.split()[1] if len(line.split()) > 1 else "")
            continue
        if line.strip():
            program, chain = line.strip(), []
        elif chain:
            found[kind(chain) if program.startswith(("ksoftirqd", *programs)) else OTHERS] += 1
            chain = []
    return found


_rates: dict[str, float] = {}


def _at_rate(ground: Ground, way: str, family: int, seconds: float) -> float:
    """Requests at LOAD times the maximum rate without a proxy, as in the figure latency."""
    if way not in _rates:
        no_proxy = field().grounds(["none"])[0]
        _rates[way] = LOAD * paced(no_proxy, way, family, CONNECTIONS, 0, seconds)["per_second"]
    return paced(ground, way, family, CONNECTIONS, _rates[way], seconds)["per_second"]


def _kilobytes(ground: Ground, way: str, family: int, seconds: float) -> float:
    """Kilobytes per second of one stream."""
    return stream(ground, way, family, seconds)[0] * 1e9 / 8 / 1024


Take = Callable[[Ground, str, int, float], float]
#: For each load: the function that runs it and returns its rate per second, its programs, the name of its unit.
LOADS: dict[str, tuple[Take, tuple[str, ...], str]] = {
    "exchange": (exchange, ("pingpong",), "exchange"),
    "connect": (connect, ("connections",), "connection"),
    "dns": (query, ("datagrams",), "query"),
    "latency": (_at_rate, ("paced", "connections"), "request"),
    "stream": (_kilobytes, ("iperf3",), "kB"),
}


def record(load: Callable[[], float], frequency: int, fields: str, *options: str) -> tuple[float, list[str]]:
    """The rate of a load, and samples of the CPU that does all the work, as ``perf script -F FIELDS`` prints them."""
    with TemporaryDirectory() as folder:
        data, cpu = f"{folder}/perf.data", max(os.sched_getaffinity(0))
        command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(frequency), "-C", str(cpu), "-m", "32M"]
        with watched([*BEFORE_OTHERS, *command, *options, "-o", data, "--"]):
            per_second = load()
        script = ["perf", "script", "-i", data, "-F", fields]
        return per_second, subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()


def profile(ground: Ground, load: str, way: str, family: int, seconds: float) -> dict[str, float]:
    """Nanoseconds per unit of the load, by kind."""
    take, programs, _ = LOADS[load]
    per_second, lines = record(lambda: take(ground, way, family, seconds), FREQUENCY, "comm,ip,sym", "-g")
    found = samples(lines, programs)
    return {what: count / found.total() * 1e9 / per_second for what, count in found.items()}


def table(found: Mapping[str, Sequence[Mapping[str, float]]], unit: str) -> Iterator[str]:
    """A Markdown table with medians of the rounds: a line for each kind, a column for each contender."""
    names = list(found)
    yield f"| nanoseconds for one {unit} | " + " | ".join(CONTENDERS[name].words for name in names) + " |"
    yield "|" + "---|" * (len(names) + 1)
    for what in (ASKED, *CALLERS, PROGRAM, OTHERS):
        values = [statistics.median(each.get(what, 0.0) for each in found[name]) for name in names]
        if any(values):
            yield f"| {what} | " + " | ".join(significant(value) if value else "–" for value in values) + " |"
    sums = [statistics.median(sum(each.values()) - each.get(OTHERS, 0) for each in found[name]) for name in names]
    yield "| all but that | " + " | ".join(map(significant, sums)) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.shares", description=__doc__)
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("contenders", nargs="+", choices=CONTENDERS, metavar="CONTENDER")
    parser.add_argument("--family", type=int, choices=(4, 6), default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each profile; an integer for a stream")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    try:
        for _, order in turns(arguments.rounds, field().grounds(arguments.contenders)):
            for ground in order:
                of = (ground, arguments.load, arguments.way, arguments.family, arguments.seconds)
                found.setdefault(ground.contender.name, []).append(profile(*of))
    finally:
        field().close()
    ordered = {name: found[name] for name in arguments.contenders if name in found}
    print("\n".join(table(ordered, LOADS[arguments.load][2])))
    print(f"load {os.getloadavg()[0]:.1f}; {arguments.load}, {WAYS[arguments.way]}, IPv{arguments.family}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
