# SPDX-License-Identifier: Apache-2.0
"""Search a log: of an agent in the lab, of a container, or of this process (``caplog``).

    Log(node.agent).wait(Message.NODE_DELETED)
    line = Log(caplog).only(Message.NODE_IPS_CHANGED, level="info")
    Log(node.agent).none(Message.KUBE_PROXY_RUNS, "iptables")

``Message`` names a part of each message once. If a message is reworded, only that part is changed: a unit test fails
within seconds if a part is not in the package any more. So a test that a message is absent always tests something.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import pytest

DEADLINE = 60.0
_SHOWN = 30
#: The format of pyebpf_proxy.common.log: the time, the level, the message and its fields.
_LINE = re.compile(r"(?:\d{4}-\d\d-\d\dT[\d:.]+Z )?(debug|info|warning|error) (.*)")


class Message(StrEnum):
    """A part of each message that tests look for; exactly one string of the package contains it."""

    API_SERVER_BACK = "the API server is reachable again"
    API_SERVER_FAILS = "the API server fails"
    ATTACHING_AGAIN = ", attaching it again"
    CGROUP_IS_NO_ROOT = " is not the root cgroup: processes of the node outside it are not served"
    CONFIGURATION_INCOMPLETE = "Kube-proxy configuration may be incomplete or incorrect"
    CONFIGURATION_INCORRECT = "kube-proxy configuration is incorrect"
    CONNTRACK_FULL = "conntrack accepts no more flows; they stay on the fast path for now"
    CONNTRACK_TAKES_AGAIN = "conntrack accepts flows again"
    ENTRY_STAYS_OPEN = "the conntrack entry of a reset connection could not be closed; it expires by itself"
    FAST_PATH_DRAINED = "the fast path is drained"
    FAST_PATH_ON = "the fast path is ready"
    FLOWS_ENDED = "ended young flows that could not be promoted"
    FLOWS_NOT_DRAINED = "the flow table of another version cannot be read: its young flows will end"
    PERMITS_EXTENDED = "conntrack is nearly full: permits are extended"
    FLOWS_TAKEN_OVER = "took over flows of the former flow table"
    FORWARD_CHAIN_STAYS = "stays; --cleanup removes it"
    HEALTH_CHECKS_GONE = "kube-proxy's rules that accepted health check node ports were"
    HEALTH_CHECK_PORT_FAILS = "health check node port cannot be served"
    INTERNAL_ERROR = "internal error, please report it"
    KERNEL_REFUSES = "the kernel does not accept it: "
    MASQUERADED_FLOWS = "flows in conntrack keep their source ports"
    KUBE_PROXY_REMOVED = "removed what kube-proxy left behind"
    KUBE_PROXY_REST = "some leftovers of kube-proxy could not be removed"
    KUBE_PROXY_RUNS = " runs alongside this agent: "
    LOOKUP_NEEDS_SYS_ADMIN = "lookups from BPF need CAP_SYS_ADMIN"
    MAP_TOO_SMALL = " cannot get the size "
    NO_ADDRESS_OF_NODE = "no address of this Node is known"
    NO_BPFFS = "no bpffs, and mounting one failed"
    NO_FAST_PATH = "there is no fast path"
    NO_ROOT_CA = "Expected to load root CA config from "
    NODE_DELETED = "Node is being deleted"
    NODE_IPS_CHANGED = "NodeIPs changed for the node"
    NODE_PORT_ADDRESSES_UNSET = "nodePortAddresses is unset"
    ONE_VALUE_FOR_ALL = "the setting applies to the whole machine"
    OOM_SCORE_FAILS = "oomScoreAdj cannot be set"
    POD_CIDRS_AWAITED = "waiting for the podCIDRs of this Node"
    POD_CIDRS_CHANGED = "PodCIDRs changed for the node"
    RESOURCE_BACK = "the resource can be watched again"
    RESOURCE_FAILS = "a resource cannot be watched"
    RUN_ERROR = "Error running ProxyServer"
    SOCKET_PROGRAMS_ATTACHED_AGAIN = "socket programs were detached, they are attached again"
    SOCKET_PROGRAMS_DETACHED = "the socket programs of a former run are detached"
    TABLE_RESTORED = "another program deleted or flushed the nftables table"
    USED_BY_SERVICE = " is already used by Service "
    XDP_NOWHERE = "the XDP program is attached to no device"
    XDP_NOT_ON = "no XDP on "


class Line(NamedTuple):
    """One line of a log. ``level`` is empty for a line without one, such as those of a traceback."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level} {self.text}" if self.level else self.text


class HasLog(Protocol):
    """An agent or a container."""

    def log(self) -> str: ...


class Log:
    """A log, read again for each search. ``parts``: a line contains all of them; ``level``: it has this level."""

    def __init__(self, source: pytest.LogCaptureFixture | HasLog | Sequence[str] | str, after: int = 0) -> None:
        self._source = source
        self._after = after

    def from_now(self) -> Log:
        """Only the lines that are logged from now on."""
        return Log(self._source, len(self._all()))

    def lines(self, *parts: str, level: str = "") -> list[Line]:
        """All matching lines, the oldest first."""
        found = self._all()[self._after :]
        return [
            line for line in found if (not level or line.level == level) and all(part in line.text for part in parts)
        ]

    def only(self, *parts: str, level: str = "") -> Line:
        """The matching line. Fails if there is none, or more than one."""
        found = self.lines(*parts, level=level)
        assert len(found) == 1, self._problem(f"{len(found)} lines, not one,", parts, level)
        return found[0]

    def some(self, *parts: str, level: str = "") -> Line:
        """The newest matching line. Fails if there is none."""
        found = self.lines(*parts, level=level)
        assert found, self._problem("no line", parts, level)
        return found[-1]

    def none(self, *parts: str, level: str = "") -> None:
        """Fails if a line matches."""
        assert not self.lines(*parts, level=level), self._problem("a line", parts, level)

    def last(self) -> Line:
        """The newest line. Fails if the log is empty."""
        return self.some()

    def wait(self, *parts: str, level: str = "", seconds: float = DEADLINE) -> Line:
        """Wait for a matching line, and return the newest. Fails after so many seconds."""
        end = time.monotonic() + seconds
        while not (found := self.lines(*parts, level=level)):
            assert time.monotonic() < end, self._problem(f"after {seconds:g} s no line", parts, level)
            time.sleep(0.01)
        return found[-1]

    def _all(self) -> list[Line]:
        source = self._source
        if isinstance(source, pytest.LogCaptureFixture):
            return [
                Line(record.levelname.lower(), f"{record.getMessage()}{_fields(vars(record).get('fields', {}))}")
                for record in source.records
            ]
        if isinstance(source, str):
            texts: Sequence[str] = source.splitlines()
        elif isinstance(source, Sequence):
            texts = list(source)
        else:
            texts = source.log().splitlines()
        return [_line(text) for text in texts]

    def _problem(self, what: str, parts: Sequence[str], level: str) -> str:
        wanted = " and ".join(map(repr, map(str, parts))) or "anything"
        shown = self._all()[self._after :]
        text = "\n".join(f"    {line}" for line in shown[-_SHOWN:]) or "    nothing"
        return f"{what} with {wanted}{f' of level {level}' if level else ''}; the newest of {len(shown)} lines:\n{text}"


def _line(text: str) -> Line:
    found = _LINE.fullmatch(text)
    return Line(found[1], found[2]) if found else Line("", text)


def _fields(fields: dict[str, object]) -> str:
    return "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
