# SPDX-License-Identifier: Apache-2.0
"""State of the node that ``status`` and ``doctor`` read, other than maps and programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyebpf_proxy.common.kernel_files import kernel_number
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.see import model

_NETFILTER = Path("/proc/sys/net/netfilter")
#: PROC_PID_INIT_INO of include/linux/proc_ns.h, the same on every kernel.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC


def in_container() -> bool:
    """Whether this process has a PID namespace of its own: the files that it sees are then its image's."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino != _FIRST_PID_NAMESPACE
    except OSError:
        return False


def conntrack_fill() -> model.Fill | None:
    """Usage of the conntrack table. The limit applies to all network namespaces, the count to this one."""
    used, room = kernel_number(_NETFILTER / "nf_conntrack_count"), kernel_number(_NETFILTER / "nf_conntrack_max")
    return model.Fill(name="conntrack", used=used, room=room) if used is not None and room is not None else None


def nft_rules(directory: Path) -> int | None:
    """The number of rules in the agent's nftables table; None: no table. OSError: nftables cannot be read."""
    name = mounts.table_name(directory)
    listed = nft("list table inet " + name)
    return None if listed is None else sum("rule" in entry for entry in listed)


def nft(command: str) -> list[dict[str, Any]] | None:
    """The output of an nftables list command; None: no such object. OSError: nftables cannot be read."""
    from pyebpf_proxy.datapath.netfilter.nft import LIBRARY

    try:
        import nftables
    except ImportError:
        raise OSError("python3-nftables is not installed") from None
    with LIBRARY:
        library = nftables.Nftables()
        library.set_json_output(True)
        status, output, error = library.cmd(command)
    if status:
        if "No such file" in error:
            return None
        raise OSError(f"nftables: {error.strip().splitlines()[0] if error.strip() else 'refused'}")
    listed: list[dict[str, Any]] = json.loads(output)["nftables"] if output else []
    return listed
