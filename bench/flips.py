# SPDX-License-Identifier: Apache-2.0
"""Detects when a change of an endpoint has reached the kernel, from outside the process that writes it.

* pyebpf-proxy: the service's entry in the pinned map ``services`` has changed (polled every 0.1 ms);
* nftables: at the commit, the kernel reports the new endpoint in a service's map;
* iptables: the timestamp of kube-proxy's metric, which is set after iptables-restore has ended. Reading 100 000 rules
  would cost more than the change.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

from pyebpf_proxy.datapath.loader.libbpf import Map, Object
from pyebpf_proxy.datapath.loader.programs import OBJECTS
from pyebpf_proxy.datapath.maps.layouts import Layouts
from pyebpf_proxy.datapath.netlink.uapi import (
    NETLINK_ADD_MEMBERSHIP,
    NETLINK_NETFILTER,
    NFNLGRP_NFTABLES,
    SO_RCVBUFFORCE,
    SOL_NETLINK,
)
from pyebpf_proxy.lab.namespace import set_network_namespace

from . import workload
from .cluster_node import Node
from .proxies import IPTABLES, OURS

_RECEIVE_BYTES = 256 * 1024 * 1024
#: An element of the map from which a service's dnat rule chooses: address and port 8080, padded.
_ENDPOINT = re.compile(rb"\x0c\x00\x01\x00(.{4})\x1f\x90\x00\x00", re.DOTALL)


class Flips(Protocol):
    """Detects announced changes, in a thread."""

    def expect(self, number: int, address: str) -> None:
        """Announce the new, unique address of the service's first endpoint."""

    def seen(self, address: str) -> float | None:
        """Unix time at which the change took effect; None if it has not."""

    def wait(self, address: str, seconds: float) -> float:
        """Wait until the change takes effect. The result: its Unix time; RuntimeError if it does not in time."""

    def close(self) -> None: ...


class _Flips(ABC):
    def __init__(self, node: Node) -> None:
        self._node = node
        self._changed = threading.Condition()
        self._awaited: dict[str, tuple[int, float]] = {}
        self._seen: dict[str, float] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def expect(self, number: int, address: str) -> None:
        with self._changed:
            self._awaited[address] = (number, self._before(number))
            self._changed.notify_all()

    def seen(self, address: str) -> float | None:
        return self._seen.get(address)

    def wait(self, address: str, seconds: float) -> float:
        with self._changed:
            if not self._changed.wait_for(lambda: address in self._seen, seconds):
                raise RuntimeError(f"a change is not in force after {seconds} s:\n{self._node.proxy.log()[-2000:]}")
            return self._seen[address]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _found(self, address: str, at: float) -> None:
        with self._changed:
            if self._awaited.pop(address, None) is not None:
                self._seen[address] = at
                self._changed.notify_all()

    def _idle(self) -> bool:
        """Wait for an announced change; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._awaited or self._closed)
            return not self._closed

    @abstractmethod
    def _before(self, number: int) -> float:
        """The value before the change, with which ``_run`` compares."""

    @abstractmethod
    def _run(self) -> None: ...


class Words(_Flips):
    """The maps of pyebpf-proxy."""

    def __init__(self, node: Node) -> None:
        with Object.open(OBJECTS / "tc.bpf.o") as unloaded:
            layouts = Layouts(unloaded.btf)
        names = Map.open_pinned(self._pin(node, "service_names"))
        self._ids = {layouts.unpack_name(value).name: struct.unpack("=I", key)[0] for key, value in names.items()}
        names.close()
        if len(self._ids) != node.services + 1:  # the Service ``kubernetes``
            raise RuntimeError(f"{len(self._ids)} service ports in the maps instead of {node.services + 1}")
        services = Map.open_pinned(self._pin(node, "services"))
        self._words = services.mmap().cast("Q")
        services.close()
        super().__init__(node)

    def _before(self, number: int) -> float:
        return float(self._words[self._ids[workload.name_of(number)]])

    def _run(self) -> None:
        while self._idle():
            for address, (number, before) in list(self._awaited.items()):
                if self._before(number) != before:
                    self._found(address, time.time())
            time.sleep(0.0001)

    @staticmethod
    def _pin(node: Node, name: str) -> Path:
        return next(node.folder.glob(f"state/bpf/**/{name}"))


class Chains(_Flips):
    """nftables, through the kernel's notifications."""

    def __init__(self, node: Node) -> None:
        made: list[socket.socket] = []

        def make() -> None:
            set_network_namespace(node.namespace.path)
            made.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER))

        maker = threading.Thread(target=make)
        maker.start()
        maker.join()
        self._socket = made[0]
        self._socket.bind((0, 0))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, _RECEIVE_BYTES)
        self._socket.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, NFNLGRP_NFTABLES)
        self._socket.settimeout(0.2)
        super().__init__(node)

    def _before(self, number: int) -> float:
        return 0.0

    def _run(self) -> None:
        while not self._closed:
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError:
                continue
            at = time.time()
            for match in _ENDPOINT.finditer(data):
                self._found(socket.inet_ntoa(match[1]), at)
        self._socket.close()


class Stamps(_Flips):
    """iptables. Only one change at a time, because the metric does not show what a sync has written."""

    def _before(self, number: int) -> float:
        return time.time()

    def _run(self) -> None:
        while self._idle():
            stamp = self._node.proxy.synced().get("IPv4", 0.0)
            for address, (_, before) in list(self._awaited.items()):
                if stamp > before:
                    self._found(address, stamp)
            time.sleep(0.02)


def flips(node: Node) -> Flips:
    """The detector for the node's proxy."""
    return Words(node) if node.kind == OURS else Stamps(node) if node.kind == IPTABLES else Chains(node)
