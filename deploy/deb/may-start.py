#!/usr/bin/python3 -I
# SPDX-License-Identifier: Apache-2.0
"""Whether the service of the Debian package may start: status 1, with the reason, where another proxy serves the node.

Two proxies on one node write rules against each other. A kube-proxy is a process of this network namespace, in a
container or not; k3s has it inside its own process, and then its health page answers. So does that of an agent that a
DaemonSet runs. This program runs with all rights: the namespaces of a privileged container are not for everyone to see.
"""

import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, "/usr/lib/pyebpf-proxy")

from pyebpf_proxy.common.kube_proxy_health import DEFAULT, VARIABLE


def processes() -> list[str]:
    """Processes of kube-proxy in this network namespace."""
    own = os.readlink("/proc/self/ns/net")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text() == "kube-proxy\n" and os.readlink(folder / "ns" / "net") == own:
                found.append(folder.name)
        except OSError:
            pass  # It has ended.
    return found


def answers(address: str) -> bool:
    """Whether anything listens there: an agent that started beside it could not have the port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 2).close()
    except (OSError, ValueError):
        return False
    return True


def main() -> int:
    """The command line."""
    if found := processes():
        print(f"not started: kube-proxy runs on this node (process {found[0]}); end it first")
        return 1
    address = os.environ.get(VARIABLE, DEFAULT)
    if address and answers(address):
        print(f"not started: another proxy serves this node, it listens at {address}; end it first")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
