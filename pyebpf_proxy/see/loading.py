# SPDX-License-Identifier: Apache-2.0
"""Programs loaded to see whether this kernel takes them: pinned nowhere, attached to nothing, gone at once."""

from __future__ import annotations

from collections.abc import Mapping

from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.loader.programs import OBJECTS, unused_maps

_BASE = {"conntrack_lookup": 1, "direct_lane": 0, "masquerade_mark": 0x4000}
#: Entries of each map: what is tried is code, not room.
_ENTRIES = 64

#: What is tried: a name, what it means that it loads, the constants, the object, and what happens without it.
ATTEMPTS = (
    (
        "netfilter lane",
        "the programs load",
        _BASE,
        "tc.bpf.o",
        "services cannot be carried here: report the kernel's version and this text",
    ),
    (
        "direct lane",
        "conntrack's kfuncs can be called: flows are made by the programs",
        {**_BASE, "direct_lane": 1},
        "tc.bpf.o",
        "all flows take the netfilter lane, which is slower for new ones; a newer kernel, or nf_conntrack loaded",
    ),
    (
        "socket programs",
        "this node's own connections are translated when they connect",
        _BASE,
        "sock.bpf.o",
        "socketLB: off; this node's own processes do not reach services then",
    ),
    (
        "socketLB: all",
        "sockets of pods could be translated, too",
        {**_BASE, "pod_sockets": 1},
        "sock.bpf.o",
        "leave socketLB at node",
    ),
    (
        "fast path",
        "established flows could go by the flow cache",
        {**_BASE, "direct_lane": 1, "fast_path": 1},
        "tc.bpf.o",
        "leave fastPath off",
    ),
    (
        "XDP",
        "flows of the cache could be sent by XDP, and in the direct lane new ones opened",
        {**_BASE, "direct_lane": 1, "fast_path": 1, "xdp": 1},
        "xdp.bpf.o",
        "leave xdpDevices empty",
    ),
)


def in_lane(name: str, settings: Mapping[str, int], direct: bool) -> dict[str, int]:
    """The constants of one of ATTEMPTS where the direct lane loads, or does not: the rest goes by the lane there is."""
    return {**settings, "direct_lane": int(settings["direct_lane"] and (direct or name == "direct lane"))}


def attempt(object_name: str, settings: Mapping[str, int]) -> None:
    """Load an object with these constants. BpfError says why the kernel refuses; FatalError: it was not built."""
    path = OBJECTS / object_name
    with Object.open(path) as unset:
        packed = unset.btf.struct("settings").pack(**settings)
        sizes = {name: min(size, _ENTRIES) for name, size in unset.sizes.items()}
    without = unused_maps(
        0, bool(settings.get("pod_sockets")), bool(settings.get("fast_path")), bool(settings.get("xdp"))
    )
    with Object.open(path, rodata={"settings": packed}, max_entries=sizes, without=without) as opened:
        opened.load()
