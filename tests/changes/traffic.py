# SPDX-License-Identifier: Apache-2.0
"""Real connections, all recorded: ``traffic.c`` inside the lab's namespaces.

A target is text, ``ADDRESS,PORT`` or ``ADDRESS,PORT,udp``. With ``udp`` a connection is a UDP flow.
"""

from __future__ import annotations

import errno
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from pyebpf_proxy.lab.addresses import cluster_ip, node_address, vip
from pyebpf_proxy.lab.namespace import Namespace, die_with_parent
from tests import ROOT
from tests.changes.checker import ANSWERED, BROKEN, MOVED, Record, Stall
from tests.changes.model import REFUSED, SILENT, UNREACHABLE, Target

TOOL = ROOT / "build" / "tests" / "traffic"
#: Milliseconds until an unanswered connection fails.
TIMEOUT = 4000
#: Seconds to wait for an output or action of a process, on any machine.
PATIENCE = 120.0
_STALL = 0xFFFFFFFF
_RECORD = struct.Struct("=QQIiI24sI")
_ENDS = {
    0: ANSWERED,
    errno.ECONNREFUSED: REFUSED,
    errno.EHOSTUNREACH: UNREACHABLE,
    errno.ENETUNREACH: UNREACHABLE,
    errno.EPERM: UNREACHABLE,
    errno.EACCES: UNREACHABLE,
    errno.ETIMEDOUT: SILENT,
    errno.ECONNRESET: BROKEN,
    errno.EPIPE: BROKEN,
    errno.EPROTO: BROKEN,
    errno.EBADMSG: BROKEN,
    errno.ESTALE: MOVED,
}


def address_of(target: Target) -> str:
    """``ADDRESS,PORT`` as the tool takes it. NodePorts are those of node1."""
    address = {
        "ClusterIP": cluster_ip(target.number),
        "LoadBalancer": vip(target.number),
        "ExternalIP": vip(target.number),
        "NodePort": node_address(1),
    }[target.kind]
    return f"{address.of(target.family)},{target.port}"


class _Process:
    """The tool in a namespace; it always ends with this process."""

    def __init__(self, namespace: Namespace, *arguments: str) -> None:
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace.name, str(TOOL), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        self._in = cast(IO[bytes], self._process.stdin)
        self._out = cast(IO[bytes], self._process.stdout)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()

    def _line(self) -> str:
        text = self._out.readline().decode().strip()
        if not text:
            raise RuntimeError(f"{self._process.args} ended with status {self._process.wait()}")
        return text


class Server(_Process):
    """A pod's server; it listens when the constructor returns."""

    def __init__(self, namespace: Namespace, name: str, *ports: int) -> None:
        super().__init__(namespace, "serve", name, *map(str, ports))
        if self._line() != "listening":
            raise RuntimeError(f"the server of {name} does not listen")


class _Client(_Process):
    def __init__(self, namespace: Namespace, file: Path, command: str, options: Sequence[str], asked: Sequence[str]):
        self._file = file
        super().__init__(namespace, command, str(file), *options, *asked)

    def status(self) -> tuple[int, int]:
        """The two numbers of its line."""
        self._in.write(b"?")
        self._in.flush()
        one, other = self._line().split()
        return int(one), int(other)

    def stop(self) -> None:
        """Start nothing new, and end when all connections have ended."""
        self._in.close()

    def records(self) -> tuple[list[Record], list[Stall]]:
        """Call it after ``stop``: all records. ``target`` counts from 0 in the order in which the targets were
        given.
        """
        status = self._process.wait(PATIENCE)
        self._out.close()
        if status:
            raise RuntimeError(f"{self._process.args} ended with status {status}")
        records, stalls = [], []
        for begun, ended, target, error, count, name, port in _RECORD.iter_unpack(self._file.read_bytes()):
            if target == _STALL:
                stalls.append(Stall(begun / 1e9, ended / 1e9))
            else:
                text = name.rstrip(b"\0").decode()
                records.append(Record(begun / 1e9, ended / 1e9, target, _ENDS[error], text, count, port))
        return records, stalls


class NewConnections(_Client):
    """One new connection after the other, to each target in turn. ``rate`` a second; 0: as many as possible.

    Each gets one answer, and ``questions`` more, with ``pause`` milliseconds in between.
    """

    def __init__(
        self,
        namespace: Namespace,
        file: Path,
        asked: Sequence[str],
        rate: float,
        questions: int = 0,
        pause: int = 0,
    ) -> None:
        patience = TIMEOUT + questions * pause
        super().__init__(namespace, file, "load", [f"{rate:.1f}", *map(str, (patience, questions, pause))], asked)

    @property
    def made(self) -> int:
        """How many have ended so far, with any outcome."""
        return self.status()[0]


class LongConnections(_Client):
    """``count`` connections that carry data in both directions every ``period`` milliseconds.

    A lost datagram ends its flow after ten seconds.
    """

    def __init__(self, namespace: Namespace, file: Path, asked: Sequence[str], count: int, period: int) -> None:
        self.count = count
        super().__init__(namespace, file, "hold", [str(period), str(count)], asked)

    def wait_rounds(self, more: int) -> None:
        """Wait until every existing connection has done so many more rounds. Raises TimeoutError."""
        wanted = self.status()[1] + more
        end = time.monotonic() + PATIENCE
        while (state := self.status())[1] < wanted and state[0]:
            if time.monotonic() > end:
                raise TimeoutError(f"long connections stand still: {state[0]} open, the last at round {state[1]}")
            time.sleep(0.02)


def plain_rate(folder: Path, sources: Mapping[str, Namespace], target: str) -> float:
    """How many connections a second the machine manages to a pod without a Service, from all sources at once."""
    begun = time.monotonic()
    loads = [NewConnections(each, folder / f"plain-{name}", [target], 0) for name, each in sources.items()]
    while (made := sum(load.made for load in loads)) < 1500:
        time.sleep(0.02)
    took = time.monotonic() - begun
    for load in loads:
        load.stop()
    for load in loads:
        load.records()
    return made / took
