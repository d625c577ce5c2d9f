# SPDX-License-Identifier: Apache-2.0
"""State of the node that ``status`` and ``doctor`` read, other than maps and programs."""

from __future__ import annotations

import contextlib
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pyebpf_proxy.common.kernel_files import kernel_number
from pyebpf_proxy.datapath.netfilter.nfnetlink import Channel
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.see import model

_NETFILTER = Path("/proc/sys/net/netfilter")
#: PROC_PID_INIT_INO of include/linux/proc_ns.h, the same on every kernel.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
#: The remedy if a command may not read the node's nftables.
AS_ROOT = "run the command as root on the node, or in the agent's pod"


def in_container() -> bool:
    """Whether this process has its own PID namespace. Then the files that it sees are those of its image."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino != _FIRST_PID_NAMESPACE
    except OSError:
        return False


def conntrack_fill() -> model.Fill | None:
    """Usage of the conntrack table. The limit is the same for all network namespaces; the count is of this one."""
    used, capacity = kernel_number(_NETFILTER / "nf_conntrack_count"), kernel_number(_NETFILTER / "nf_conntrack_max")
    return (
        model.Fill(name="conntrack", used=used, capacity=capacity)
        if used is not None and capacity is not None
        else None
    )


def nft_rules(directory: Path) -> int | None:
    """The number of rules in the agent's nftables table; None without a table. OSError if nftables cannot be read."""
    name = mounts.table_name(directory)
    # libnftables is not used: with 10 000 Services, it takes a second.
    with contextlib.closing(Channel()) as channel:
        return channel.rules(name) if channel.has_table(name) else None


def unknown_address(directory: Path, address: bytes) -> Literal["", "cluster IP", "ServiceCIDR"]:
    """What the agent's table of mode nftables knows about an address: it refuses the one and drops the other.

    OSError if nftables cannot be read.
    """
    name, family = mounts.table_name(directory), 4 if len(address) == 4 else 6
    with contextlib.closing(Channel()) as channel:
        if channel.contains(name, f"cluster_ips{family}", address):
            return "cluster IP"
        return "ServiceCIDR" if channel.contains(name, f"service_cidrs{family}", address) else ""


def nft_remedy() -> str:
    """The remedy if libnftables cannot list the rules."""
    if find_spec("nftables") is not None:
        return AS_ROOT
    # Nothing can be installed in the agent's pod: its root file system is read-only.
    if os.access("/usr", os.W_OK):
        return "apt-get install python3-nftables"
    return "nothing can be installed here; use an image built from deploy/Dockerfile, which has python3-nftables"


def nft(command: str) -> list[dict[str, Any]] | None:
    """The output of an nftables list command, without the elements of sets; None if the object does not exist.

    OSError if nftables cannot be read.
    """
    try:
        import nftables
    except ImportError:
        raise OSError("python3-nftables is not installed") from None
    from pyebpf_proxy.datapath.netfilter.nft import LIBRARY

    with LIBRARY:
        library = nftables.Nftables()
        library.set_json_output(True)
        # With 10 000 Services, the agent's sets have 20 000 elements: reading them takes a second.
        library.set_terse_output(True)
        status, output, error = library.cmd(command)
    if status:
        if "No such file" in error:
            return None
        raise OSError(f"nftables: {error.strip().splitlines()[0] if error.strip() else 'refused'}")
    listed: list[dict[str, Any]] = json.loads(output)["nftables"] if output else []
    return listed
