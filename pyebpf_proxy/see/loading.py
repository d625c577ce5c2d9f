# SPDX-License-Identifier: Apache-2.0
"""Programs loaded to see whether this kernel takes them: pinned nowhere, attached to nothing, gone at once."""

from __future__ import annotations

from collections.abc import Mapping

from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.loader.programs import object_file, unused_maps

_BASE = {"conntrack_lookup": 0, "masquerade_mark": 0x4000}
#: Entries of each map: what is tried is code, not room.
_ENTRIES = 64

#: What is tried: a name, what it means that it loads, the constants, the object's name, and what happens without it.
ATTEMPTS = (
    (
        "programs",
        "they load",
        _BASE,
        "tc",
        "services cannot be carried here: report the kernel's version and this text",
    ),
    (
        "conntrack lookup",
        "the programs can ask conntrack whether a flow is known",
        {**_BASE, "conntrack_lookup": 1},
        "tc",
        "services work without it: the kernel itself knows its flows",
    ),
    (
        "socket programs",
        "this node's own connections are translated when they connect",
        _BASE,
        "sock",
        "socketLB: off; nftables serves this node's own processes then",
    ),
    (
        "socketLB: all",
        "sockets of pods could be translated, too",
        {**_BASE, "pod_sockets": 1},
        "sock",
        "leave socketLB at node",
    ),
    (
        "fast path",
        "flows could be sent on by the programs",
        {**_BASE, "fast_path": 1},
        "tc",
        "fastPath: false",
    ),
    (
        "XDP",
        "flows of the fast path could be sent by XDP",
        {**_BASE, "fast_path": 1, "xdp": 1},
        "xdp",
        "leave xdpDevices empty",
    ),
)


#: What the agent does as well without.
OPTIONAL = frozenset(("conntrack lookup",))


def attempt(object_name: str, settings: Mapping[str, int]) -> None:
    """Load an object with these constants. BpfError says why the kernel refuses; FatalError: it was not built."""
    lookup = object_name != "tc" or bool(settings.get("conntrack_lookup"))
    path = object_file(object_name, lookup)
    with Object.open(path) as unset:
        packed = unset.btf.struct("settings").pack(**settings)
        sizes = {name: min(size, _ENTRIES) for name, size in unset.sizes.items()}
    without = unused_maps(
        0, bool(settings.get("pod_sockets")), bool(settings.get("fast_path")), bool(settings.get("xdp"))
    )
    with Object.open(path, rodata={"settings": packed}, max_entries=sizes, without=without) as opened:
        opened.load()
