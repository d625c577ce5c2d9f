# SPDX-License-Identifier: Apache-2.0
"""What ``status`` and ``doctor`` read of the node beside maps and programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.see import model

_NETFILTER = Path("/proc/sys/net/netfilter")


def number(path: Path) -> int | None:
    """The number in a file of /proc or /sys; None: it cannot be read."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def conntrack_fill() -> model.Fill | None:
    """How full the kernel's connection table is. The limit counts for all network namespaces, the use for this one."""
    used, room = number(_NETFILTER / "nf_conntrack_count"), number(_NETFILTER / "nf_conntrack_max")
    return model.Fill(name="conntrack", used=used, room=room) if used is not None and room is not None else None


def nft_rules(directory: Path) -> int | None:
    """How many rules our nft table has; None: there is no table. OSError where nftables cannot be asked."""
    name = mounts.table_name(directory)
    listed = nft("list table inet " + name)
    return None if listed is None else sum("rule" in entry for entry in listed)


def nft(command: str) -> list[dict[str, Any]] | None:
    """What nftables lists, its set elements left out; None: there is no such thing. OSError: it cannot be asked."""
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
