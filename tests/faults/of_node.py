# SPDX-License-Identifier: Apache-2.0
"""Faults of the node: the proxy's kernel state is removed, devices change, messages are lost."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.proxies import OURS
from pyebpf_proxy.datapath.loader.libbpf import Link
from pyebpf_proxy.datapath.node import cgroups
from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.links import pod_routes
from pyebpf_proxy.lab.namespace import LabError, batch
from tests.faults.ground import VICTIM, Ground, answers
from tests.support import socket_links
from tests.support.damage import CannotBeMadeError, detach_program, enter_here, has_program

#: Routes and conntrack entries that are added and removed at once.
_MANY = 20_000
#: Seconds until that happens again.
_STORM_PAUSE = 0.5
#: An agent on a fast machine may read all messages of one round. The storm continues until messages were dropped, but
#: only for so many rounds.
_MOST_ROUNDS = 100


@contextmanager
def netlink_overrun(ground: Ground) -> Iterator[None]:
    """Routes and conntrack entries are added and removed again and again, faster than any program can read the
    messages.
    """
    context = multiprocessing.get_context("fork")
    stop, rounds = context.Event(), context.RawValue("L", 0)
    space, pid = ground.node.namespace, ground.proxy.pid
    before = space.call(_dropped, pid)
    # In a separate process: calls into the namespace run one after the other.
    task = space.start(_storm, stop, rounds, pid if ground.name == OURS else 0)
    try:
        yield
    finally:
        stop.set()
        task.result()
    dropped = space.call(_dropped, pid) - before
    ground.notes.append(f"{rounds.value} times; {dropped} messages to the proxy were dropped")
    if ground.name == OURS and not dropped:
        raise RuntimeError(f"the agent read all messages of {rounds.value} rounds")


def _storm(stop: Any, rounds: Any, pid: int) -> None:
    """Repeat until ``stop`` is set and, if ``pid`` is not 0, messages about routes to that process were dropped."""
    before = _dropped(pid) if pid else 0
    routes = [f"route add blackhole 198.19.{n >> 8}.{n & 255}/32 table 77" for n in range(_MANY)]
    flow = "-d 198.19.0.2 --dport 9 -t 600 -u SEEN_REPLY,ASSURED --state ESTABLISHED"
    entries = "\n".join(f"-I -p tcp -s 198.18.0.2 --sport {n} {flow}" for n in range(1, _MANY))
    delete = ["conntrack", "-D", "-d", "198.19.0.2"]
    while True:
        batch(routes)
        batch(["route flush table 77"])
        enter_here(entries)
        subprocess.run(delete, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        rounds.value += 1
        if stop.wait(_STORM_PAUSE) and (not pid or _dropped(pid) > before or rounds.value >= _MOST_ROUNDS):
            return


def _dropped(pid: int) -> int:
    """How many messages about routes the kernel dropped because this process's sockets were full."""
    folder = Path(f"/proc/{pid}/fd")
    inodes = set()
    for each in folder.iterdir():
        try:
            inodes.add(os.readlink(each))
        except OSError:
            continue  # closed meanwhile
    # sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode
    rows = [line.split() for line in Path("/proc/net/netlink").read_text().splitlines()[1:]]
    return sum(int(row[8]) for row in rows if row[1] == str(socket.NETLINK_ROUTE) and f"socket:[{row[9]}]" in inodes)


@contextmanager
def rules_flushed(ground: Ground) -> Iterator[None]:
    ground.node.namespace.run("nft", "flush", "ruleset")
    yield


def has_rules(ground: Ground) -> bool:
    tables = ground.node.namespace.run("nft", "list", "tables")
    return ("pyebpf-proxy" if ground.name == OURS else "kube-proxy") in tables


def _devices(ground: Ground) -> list[str]:
    return ["eth0", *(pod.device for pod in ground.node.pods)]


@contextmanager
def programs_detached(ground: Ground) -> Iterator[None]:
    for device in _devices(ground):
        if not ground.node.namespace.call(detach_program, ground.node.agent.directory, device):
            raise CannotBeMadeError(f"no program on {device}")
    yield


def has_programs(ground: Ground) -> bool:
    return all(ground.node.namespace.call(has_program, device) for device in _devices(ground))


@contextmanager
def pins_unmounted(ground: Ground) -> Iterator[None]:
    place = str(ground.node.agent.directory / "bpf")
    subprocess.run(["umount", "-l", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-t", "bpf", "bpffs", place], check=True)


def has_pins(ground: Ground) -> bool:
    return any((ground.node.agent.directory / "bpf").rglob("frontends4"))


@contextmanager
def sockets_detached(ground: Ground) -> Iterator[None]:
    """The programs lose their cgroup, as if it were removed. They are on the root, which cannot be removed."""
    for name in cgroups.PROGRAMS:
        link = Link.open_pinned(_links(ground) / name)
        try:
            link.detach()
        finally:
            link.close()
    yield


def has_socket_programs(ground: Ground) -> bool:
    return not socket_links.detached(_links(ground))


def _links(ground: Ground) -> Path:
    return next((ground.node.agent.directory / "bpf").rglob("links"))


@contextmanager
def device_moved(ground: Ground) -> Iterator[None]:
    """Move the device of the victim's pod to another network namespace and back."""
    pod, space, other = ground.lab.pods["victim"], ground.node.namespace, ground.lab.core
    space.ip(f"link set dev {pod.device} netns {other.name}")
    try:
        yield
    finally:
        # A move removes the configuration; set it as the plugin does.
        other.ip(f"link set dev {pod.device} netns {space.name}")
        gateway = ground.node.gateway
        space.ip(
            f"link set {pod.device} up",
            f"addr add {gateway.v4}/32 dev {pod.device}",
            f"addr add {gateway.v6}/128 dev {pod.device} nodad",
            *pod_routes(pod.device, pod.address),
        )


def victim_is_served(ground: Ground) -> bool:
    """Whether its node's programs serve it: another pod gets an answer, and the device has its program."""
    device = ground.lab.pods["victim"].device
    return ground.toolbox.namespace.call(answers, cluster_ip(VICTIM), 80) and (
        ground.name != OURS or ground.node.namespace.call(has_program, device)
    )


@contextmanager
def device_renamed(ground: Ground) -> Iterator[None]:
    """A pod's device is renamed while it is up."""
    with _renamed(ground, ground.lab.pods["web-1"].device):
        yield


@contextmanager
def uplink_renamed(ground: Ground) -> Iterator[None]:
    """The node's device to the outside is renamed while it is up."""
    with _renamed(ground, "eth0"):
        yield


@contextmanager
def _renamed(ground: Ground, name: str) -> Iterator[None]:
    try:
        ground.node.namespace.ip(f"link set dev {name} name other0")
    except LabError as error:
        raise CannotBeMadeError(f"this kernel renames no device that is up: {error}") from None
    try:
        yield
    finally:
        ground.node.namespace.ip(f"link set dev other0 name {name}")


@contextmanager
def neighbours_deleted(ground: Ground) -> Iterator[None]:
    """All neighbour entries, five times a second."""
    task = ground.node.namespace.start(_delete_neighbours)
    try:
        yield
    finally:
        task.stop()


def _delete_neighbours() -> None:
    while True:
        subprocess.run(["ip", "neigh", "flush", "all"], stdout=subprocess.DEVNULL, check=True)
        time.sleep(0.2)
