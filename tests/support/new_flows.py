# SPDX-License-Identifier: Apache-2.0
"""New flows, one after the other, and how many packets arrived: for tests of allowed and denied traffic."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import multiprocessing
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from pyebpf_proxy.lab.cluster import Pod
from pyebpf_proxy.lab.namespace import Namespace
from tests.support.conversation import PORT
from tests.support.fast_lab import FastWorld
from tests.support.lab_tools import counted_between, reasons, wait_until

BOTH = ("tcp", "udp")
#: Each client and target gets its own block of source ports, outside the ephemeral range. A datagram from a port that
#: was used would belong to an older flow, which rules accept. A block lasts for more than twenty seconds.
_BLOCK = 1900
_blocks: defaultdict[tuple[str, str, int, str], Iterator[int]] = defaultdict(
    lambda: itertools.cycle([*range(8_000, 20_000 - _BLOCK, _BLOCK), *range(23_000, 32_500 - _BLOCK, _BLOCK)])
)


class NewFlows:
    """One request per flow, in a new flow each time, until the test ends. Each waits ``patience`` seconds."""

    def __init__(
        self,
        namespace: Namespace,
        address: str,
        protocol: str,
        port: int = PORT,
        patience: float = 0.15,
        own_port: int = 0,
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._state = context.RawArray("d", [0.0, 0.0, 0.0])  # made, answered, when the last answered one began
        blocks = _blocks[namespace.name, address, port, protocol]
        ports = range(own_port, own_port + 1) if own_port else range(first := next(blocks), first + _BLOCK)
        self._task = namespace.start(_ask_repeatedly, (address, port, protocol, patience), ports, self._state)

    @property
    def made(self) -> int:
        return int(self._state[0])

    @property
    def answered(self) -> int:
        return int(self._state[1])

    @property
    def last_answered(self) -> float:
        """When the last answered flow began (``time.monotonic``)."""
        return float(self._state[2])

    def wait_made(self, more: int = 10) -> None:
        wait_all_made([self], more)

    def wait_answered(self, more: int = 3) -> None:
        before = self.answered
        wait_until(lambda: self.answered >= before + more, f"{more} more flows are answered")

    def end(self) -> None:
        self._task.stop()


def _ask_repeatedly(target: tuple[str, int, str, float], ports: range, state: Any) -> None:
    for own_port in itertools.cycle(ports):
        begun = time.monotonic()
        if ask_once(*target, own_port):
            state[2] = begun
            state[1] += 1
        state[0] += 1
        time.sleep(0.01)


def ask_once(address: str, port: int, protocol: str, patience: float = 0.5, own_port: int = 0) -> bool:
    """Whether a request in its own flow is answered. TCP ends with RST, so no connection remains."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    with socket.socket(family, kind) as sock:
        sock.settimeout(patience)
        if own_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", own_port))
        try:
            sock.connect((address, port))
            sock.send(b"question".ljust(64, b"."))
            answer = sock.recv(64)
            if protocol == "tcp":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return answer.startswith(b"question")
        except OSError:
            return False


@contextlib.contextmanager
def ending(*flows: NewFlows) -> Iterator[None]:
    """The flows end with the block."""
    try:
        yield
    finally:
        for each in flows:
            each.end()


def wait_all_made(flows: Sequence[NewFlows], more: int) -> None:
    """Wait until each of them has made this many more flows."""
    before = [each.made for each in flows]
    wait_until(
        lambda: all(each.made >= made + more for each, made in zip(flows, before, strict=True)),
        f"{more} more flows of each are through",
    )


def wait_until_fast(world: FastWorld, *flows: NewFlows) -> None:
    """All of them are answered, and new flows enter the flow table."""
    for each in flows:
        each.wait_answered()
    before = reasons(world.node)
    wait_until(
        lambda: world.count("new_flow_fast") > before["new_flow_fast"] + 5,
        lambda: (
            f"new flows take the fast path, but {counted_between(before, reasons(world.node))}; "
            f"the agent's last lines:\n{world.node.agent.log()[-3000:]}"
        ),
    )
    for each in flows:
        each.wait_answered()


class Arrivals:
    """Counts the packets from one address that come into a pod, without RSTs, before any rule can drop them."""

    def __init__(self, pod: Pod, source: str, what: str = "") -> None:
        self._namespace = pod.namespace
        word = "ip6" if ":" in source else "ip"
        self._namespace.run("nft", "delete table inet arrivals", check=False)
        lines = [
            "table inet arrivals {",
            "counter every { }",
            "chain c { type filter hook prerouting priority -400;",
            f"{word} saddr {source} meta l4proto udp {what} counter name every",
            f"{word} saddr {source} tcp flags & rst == 0 {what} counter name every",
            "}",
            "}",
        ]
        self._namespace.run("nft", "-f", "-", stdin="\n".join(lines))

    def __int__(self) -> int:
        listed = json.loads(self._namespace.run("nft", "-j", "list", "counters", "table", "inet", "arrivals"))
        return int(next(each["counter"]["packets"] for each in listed["nftables"] if "counter" in each))


def entries(world: FastWorld) -> list[dict[str, Any]]:
    """The entries of the flow table: the key, and the fields of the value that tests read.

    ``client``: address, protocol and port of the side that began the flow, as `Conversation.client`. In the reply of a
    masqueraded flow they are those of the masquerade. Flows of earlier tests stay in the table for a while, so a port
    alone does not identify a flow.
    """
    text = world.node.namespace.run("bpftool", "-j", "map", "dump", "pinned", str(world.node.agent.pin("flows")))
    found = []
    for each in json.loads(text):
        if "formatted" not in each:
            continue  # deleted while the table was read
        key, value = each["formatted"]["key"], each["formatted"]["value"]
        family, protocol = 6 if key["ipv6"] else 4, key["protocol"].lower()
        side = "destination" if value["reply"] else "source"
        found.append(
            {
                "family": family,
                "protocol": protocol,
                "source": _address(key["source"], family),
                "destination": _address(key["destination"], family),
                "source_port": key["source_port"],
                "destination_port": key["destination_port"],
                "client": (_address(key[side], family), protocol, key[f"{side}_port"]),
                "endpoint": _address(value["rewrite"]["destination"], family),
                **{name: value[name] for name in ("young", "reply", "closing", "packets")},
            }
        )
    return found


def _address(dumped: list[int], family: int) -> str:
    return str(ipaddress.ip_address(bytes(dumped[: 4 if family == 4 else 16])))
