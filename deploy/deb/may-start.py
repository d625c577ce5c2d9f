#!/usr/bin/python3 -I
# SPDX-License-Identifier: Apache-2.0
"""Whether the service of the Debian package may start: status 1, with the reason, if another proxy serves the node.

Two proxies on one node would overwrite each other's rules. kube-proxy is a process in this network namespace, in a
container or not. k3s runs it inside its own process: there, its health server answers. So does the health server of an
agent that a DaemonSet runs. This program needs all capabilities, to see the namespaces of privileged containers.

Only processes of root count: any user may name a process kube-proxy or listen at the port, and so keep the service from
starting.
"""

import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, "/usr/lib/pyebpf-proxy")

from pyebpf_proxy.common.kube_proxy_health import DEFAULT, VARIABLE, hosts

#: In /proc/PID/status, of a process of root; in /proc/net/tcp, the state of a listening socket.
ROOTS, LISTEN = b"\nUid:\t0\t", "0A"


def processes() -> list[str]:
    """PIDs of kube-proxy in this network namespace."""
    own = os.readlink("/proc/self/ns/net")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # Bytes: a process, also one of a pod, may have a name that is not UTF-8.
            named = (folder / "comm").read_bytes() == b"kube-proxy\n"
            if named and ROOTS in (folder / "status").read_bytes() and os.readlink(folder / "ns" / "net") == own:
                found.append(folder.name)
        except OSError:
            pass  # the process has ended
    return found


def answers(address: str) -> bool:
    """Whether a program listens there. Then an agent could not bind the port."""
    host, _, port = address.rpartition(":")
    return any(connects(each, port) for each in hosts(host.strip("[]"))) and not is_of_another_user(int(port))


def connects(host: str, port: str) -> bool:
    """Whether a program accepts connections there."""
    try:
        socket.create_connection((host, int(port)), 2).close()
    except (OSError, ValueError):
        return False
    return True


def is_of_another_user(port: int) -> bool:
    """Whether programs of this node listen at the port, and none of them is root's."""
    users = []
    for table in ("tcp", "tcp6"):
        try:
            rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
        except OSError:
            continue  # no IPv6
        users += [row[7] for row in rows if row[3] == LISTEN and int(row[1].rpartition(":")[2], 16) == port]
    return bool(users) and "0" not in users


def main() -> int:
    """Run the checks. The result is the exit status."""
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
