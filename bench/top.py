# SPDX-License-Identifier: Apache-2.0
"""The cost of ``top`` for packets, by ``bpf_prog_test_run``: ``python -m bench.top``. docs/top.md has the numbers.

Counting new flows: the first packet of a flow on the slow path, in turns with and without the count (``dry_run``, which
leaves out nothing else for this packet), and again while another CPU counts in the same slot. The meter: packets that
belong to no service, and packets of a tracked flow in both directions.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

from pyebpf_proxy.datapath.loader.libbpf import Object, Program, SkBuff
from pyebpf_proxy.datapath.loader.programs import OBJECTS, Loaded, Settings, unused_maps

from .measure import say, undisturbed
from .packet_world import Flow, filled, node

REPEAT = 200_000
ROUNDS = 15


def _load(name: str, program: str | None, settings: Settings, shared: Loaded, own: frozenset[str]) -> Object:
    path = OBJECTS / name
    with Object.open(path) as unset:
        layout = unset.btf.struct("settings")
        packed = layout.pack(**{field: getattr(settings, field) for field in layout.fields})
        wanted = frozenset(unset.sizes)
    reuse = {each: shared.maps[each] for each in wanted - own if each in shared.maps}
    without = (unused_maps(0, False) | wanted) - reuse.keys() - own
    programs = {program} if program else None
    return Object.open(path, rodata={"settings": packed}, reuse=reuse, without=without, programs=programs).load()


def _rounds(kinds: Mapping[str, Callable[[], int]]) -> dict[str, list[int]]:
    taken: dict[str, list[int]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        with undisturbed():
            for kind, measure in kinds.items():
                taken[kind].append(measure())
    return taken


def _print_costs(kind: str, taken: list[int], less: list[int]) -> None:
    differences = sorted(a - b for a, b in zip(taken, less, strict=True))
    quarter = len(differences) // 4
    say(
        f"{kind}: {statistics.median(differences):.0f} ns"
        f" ({differences[quarter]} – {differences[-1 - quarter]}); together {statistics.median(taken):.0f} ns"
    )


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(prog="python -m bench.top", description=__doc__).parse_args()
    with node("top") as devices, Object.open(OBJECTS.parents[1] / "build" / "bench" / "empty.bpf.o") as empty:
        empty.load()
        nothing = next(iter(empty.programs.values()))
        found = filled(1000, False, devices)
        context = SkBuff(ifindex=devices["pods"])
        reply = SkBuff(ifindex=devices["nic"])

        def run(program: Program, frame: bytes, skb: SkBuff = context) -> Callable[[], int]:
            return lambda: program.test_run(frame, skb, repeat=REPEAT).duration

        slow = found.loaded.settings
        own = frozenset(("dry_results",))
        counting = _load("tc.bpf.o", "tc_ethernet", slow, found.loaded, own)
        not_counting = _load("tc.bpf.o", "tc_ethernet", replace(slow, dry_run=True), found.loaded, own)
        for family in (4, 6):
            syn = Flow("TCP", family, 40001).frame(devices, "S")
            with_count, without = (each.programs["tc_ethernet"] for each in (counting, not_counting))
            taken = _rounds({"with": run(with_count, syn), "without": run(without, syn)})
            _print_costs(f"the count of a new flow, IPv{family}", taken["with"], taken["without"])
            child = os.fork()
            if not child:
                while True:
                    with_count.test_run(syn, context, repeat=REPEAT)
            try:
                taken = _rounds({"with": run(with_count, syn), "without": run(without, syn)})
                _print_costs(
                    f"the same while another CPU counts new flows in the same slots, IPv{family}",
                    taken["with"],
                    taken["without"],
                )
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        meter = _load("meter.bpf.o", None, slow, found.loaded, frozenset(("meters", "meter_one_in")))
        look = meter.programs["meter_ethernet"]
        one_in = meter.maps["meter_one_in"].mmap().cast("Q")
        for number in (1, 64):
            one_in[0] = number
            for family in (4, 6):
                flow = Flow("TCP", family, 40000)
                if number == 1:
                    flow.track()
                frames = {
                    "no service": (Flow("TCP", family, 40001, served=False).frame(devices), context),
                    "to a service": (flow.frame(devices), context),
                    "from an endpoint": (flow.frame(devices, reply=True), reply),
                }
                for kind, (frame, skb) in frames.items():
                    taken = _rounds({"meter": run(look, frame, skb), "empty": run(nothing, frame, skb)})
                    _print_costs(
                        f"the meter, one packet in {number}, {kind}, IPv{family}", taken["meter"], taken["empty"]
                    )


if __name__ == "__main__":
    main()
