# SPDX-License-Identifier: Apache-2.0
"""The cost of XDP for TCP streams from outside: ``python -m bench.xdp_streams``. docs/xdp.md has the numbers.

Several nodes take turns. Nodes without a proxy: unchanged; with segmentation before the node, as on a wire, and GRO;
with an XDP program that passes everything, without and with GRO on that interface. Nodes with pyebpf-proxy: without
XDP, with XDP, and with XDP and GRO. The results are throughput, CPU time per byte, and the size of frames that reach
the node and the pod.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import NamedTuple

from .contenders import CONTENDERS, NONE, OURS, WAYS, XDP, Field, Ground, turns
from .loads import stream
from .measure import TOOLS, summary
from .plots import significant


class Setting(NamedTuple):
    """A node's contender, and changes of its interface. ``segments``: the peer sends frames of MTU size."""

    words: str
    like: str
    passes: bool = False
    gro: bool = False
    segments: bool = False


SETTINGS = (
    Setting("no proxy", NONE),
    Setting("no proxy, frames of the MTU, GRO", NONE, gro=True, segments=True),
    Setting("no proxy, XDP that passes all", NONE, passes=True),
    Setting("no proxy, XDP that passes all, GRO", NONE, passes=True, gro=True),
    Setting("pyebpf-proxy (no XDP)", OURS),
    Setting("pyebpf-proxy (XDP)", XDP),
    Setting("pyebpf-proxy (XDP, GRO)", XDP, gro=True),
)


class Sample(NamedTuple):
    """Gbit/s, CPU nanoseconds per byte, bytes per frame at the node's interface and at the pod's."""

    rate: float
    cpu: float
    at_node: float
    at_pod: float


def prepare(ground: Ground, setting: Setting) -> None:
    """Configure the node's interface."""
    node, core = ground.node.namespace, ground.lab.core
    if setting.passes:
        node.run("ip", "link", "set", "dev", "eth0", "xdpdrv", "obj", str(TOOLS / "empty.bpf.o"), "sec", "xdp")
    if setting.segments:
        core.run("ethtool", "-K", ground.node.name, "tso", "off", "gso", "off")
    if setting.gro:
        node.run("ethtool", "-K", "eth0", "gro", "on")


def _sent(ground: Ground) -> tuple[int, int, int, int]:
    """Bytes and frames received by the node's interface, then by the pod's interface."""
    found: list[int] = []
    for namespace, device in ((ground.lab.core, ground.node.name), (ground.node.namespace, ground.server.device)):
        sent = json.loads(namespace.run("ip", "-j", "-s", "link", "show", device))[0]["stats64"]["tx"]
        found += [sent["bytes"], sent["packets"]]
    return found[0], found[1], found[2], found[3]


def take(ground: Ground, way: str, family: int, seconds: float) -> Sample:
    """Measure one stream."""
    before = _sent(ground)
    rate, cpu = stream(ground, way, family, seconds)
    bytes_, frames, pod_bytes, pod_frames = (b - a for a, b in zip(before, _sent(ground), strict=True))
    return Sample(rate, cpu, bytes_ / max(frames, 1), pod_bytes / max(pod_frames, 1))


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.xdp_streams", description=__doc__)
    parser.add_argument("--way", choices=[way for way in WAYS if way != "pod"], default="cluster")
    parser.add_argument("--family", type=int, choices=(4, 6), default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    grounds = Field()
    samples: dict[str, list[Sample]] = {}
    try:
        nodes: dict[str, Ground] = {}
        for setting in SETTINGS:
            name = setting.words
            CONTENDERS[name] = CONTENDERS[setting.like]._replace(name=name)
            if found := grounds.grounds([name]):
                nodes[name] = found[0]
                prepare(nodes[name], setting)
        for _, order in turns(arguments.rounds, list(nodes.values())):
            for ground in order:
                one = take(ground, arguments.way, arguments.family, arguments.seconds)
                samples.setdefault(ground.contender.name, []).append(one)
    finally:
        grounds.close()
    print("| | Gbit/s | of no proxy | CPU, ns a byte | a frame at the node | at the pod |")
    print("|---|---|---|---|---|---|")
    for name, of in samples.items():
        ratio = summary([a.rate / b.rate for a, b in zip(of, samples[SETTINGS[0].words], strict=True)])
        middle = Sample(*(statistics.median(values) for values in zip(*of, strict=True)))
        cells = [significant(middle.rate), f"{ratio.median:.2f}", significant(middle.cpu)]
        cells += [f"{middle.at_node:.0f} B", f"{middle.at_pod:.0f} B"]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(f"load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
