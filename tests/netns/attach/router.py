# SPDX-License-Identifier: Apache-2.0
"""A network namespace that routes between two others."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

CLONE_NEWNET = 0x40000000


libc = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


Shell = Callable[[str], str]


class Router:
    """The test's namespace between two others, each behind a veth: ``client`` (c0) and ``server`` (s0).

    Addresses: 10.1.0.1 and fd01::1 towards the client (.2, ::2), 10.2.0.1 and fd02::1 towards the server.
    """

    SERVER: ClassVar = {4: "10.2.0.2", 6: "fd02::2"}
    CLIENT: ClassVar = {4: "10.1.0.2", 6: "fd01::2"}
    TOWARDS_CLIENT: ClassVar = {4: "10.1.0.1", 6: "fd01::1"}
    TOWARDS_SERVER: ClassVar = {4: "10.2.0.1", 6: "fd02::1"}
    VIP: ClassVar = {4: "10.96.0.1", 6: "fd96::1"}

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._names = {role: f"pep-{os.getpid()}-{role}" for role in ("client", "server")}

    def make(self) -> None:
        shell = self._shell
        no_waiting = "sysctl -qw net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.all.accept_dad=0"
        shell(f"sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1; {no_waiting}")
        for number, (role, name) in enumerate(self._names.items(), 1):
            shell(f"ip netns add {name}; ip netns exec {name} {no_waiting}")
            port = role[0] + "0"
            shell(f"""
                ip link add {port} type veth peer name eth0 netns {name}
                ip addr add 10.{number}.0.1/24 dev {port}
                ip addr add fd0{number}::1/64 dev {port} nodad
                ip link set {port} up
                ip -n {name} addr add 10.{number}.0.2/24 dev eth0
                ip -n {name} addr add fd0{number}::2/64 dev eth0 nodad
                ip -n {name} link set eth0 up
                ip -n {name} route add default via 10.{number}.0.1
                ip -n {name} route add default via fd0{number}::1
            """)

    def remove(self) -> None:
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    @contextmanager
    def inside(self, role: str) -> Iterator[None]:
        """Sockets that are created in the block belong to that namespace for good."""
        here = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(f"/run/netns/{self._names[role]}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            check(libc.setns(there, CLONE_NEWNET))
            yield
        finally:
            check(libc.setns(here, CLONE_NEWNET))
            os.close(here)
            os.close(there)
