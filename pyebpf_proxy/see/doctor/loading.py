# SPDX-License-Identifier: Apache-2.0
"""Loads the programs to test this kernel, without pinning or attaching them."""

from __future__ import annotations

from collections.abc import Mapping

from pyebpf_proxy.datapath.loader.libbpf import Object, load_object
from pyebpf_proxy.datapath.loader.programs import object_file, unused_maps

_BASE = {"conntrack_lookup": 0, "masquerade_mark": 0x4000}
LOOKUP = {**_BASE, "conntrack_lookup": 1}
#: Entries of each map. Their sizes are not tested.
_ENTRIES = 64

#: The attempts: name, meaning of success, constants, name of the object, consequence of failure.
ATTEMPTS = (
    (
        "programs",
        "they load",
        _BASE,
        "tc",
        "pyebpf-proxy does not work on this kernel: report the kernel version and this text",
    ),
    (
        "conntrack lookup",
        "the programs can look flows up in conntrack",
        LOOKUP,
        "tc",
        "services work without it: netfilter finds existing flows itself",
    ),
    (
        "socket programs",
        "connections of this node are translated at the socket",
        _BASE,
        "sock",
        "set socketLB: off; nftables then translates packets of this node's processes",
    ),
    (
        "socketLB: all",
        "connections of pods can be translated at the socket, too",
        {**_BASE, "pod_sockets": 1},
        "sock",
        "leave socketLB at node",
    ),
    (
        "fast path",
        "the programs can forward flows",
        {**_BASE, "fast_path": 1},
        "tc",
        "set fastPath: false",
    ),
    (
        "XDP",
        "XDP can forward flows of the fast path",
        {**_BASE, "fast_path": 1, "xdp": 1},
        "xdp",
        "leave xdpDevices empty",
    ),
)


def attempt(object_name: str, settings: Mapping[str, int]) -> None:
    """Load an object with these constants. BpfError if the kernel rejects it; FatalError if it was not built."""
    lookup = object_name != "tc" or bool(settings.get("conntrack_lookup"))
    path = object_file(object_name, lookup)
    with Object.open(path) as unset:
        packed = unset.btf.struct("settings").pack(**settings)
        sizes = {name: min(size, _ENTRIES) for name, size in unset.sizes.items()}
    without = unused_maps(
        0, bool(settings.get("pod_sockets")), bool(settings.get("fast_path")), bool(settings.get("xdp"))
    )
    load_object(lambda: Object.open(path, rodata={"settings": packed}, max_entries=sizes, without=without)).close()
