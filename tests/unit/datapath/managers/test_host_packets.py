# SPDX-License-Identifier: Apache-2.0
"""When the rules for the node's own packets are written again."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from pyebpf_proxy.datapath.managers import host_packets
from pyebpf_proxy.datapath.managers.host_packets import HostPackets
from pyebpf_proxy.datapath.netfilter.host_rules import HostRules, HostTraffic
from pyebpf_proxy.datapath.netfilter.nft import NftError
from pyebpf_proxy.services.model import (
    Endpoint,
    Frontend,
    FrontendKind,
    IPFamily,
    Protocol,
    ServicePort,
    ServicePortName,
)
from pyebpf_proxy.services.node_facts import NodeFacts

NAME = ServicePortName("ns", "web", "", Protocol.SCTP, IPFamily.IPV4)
ENDS = (Endpoint(bytes([10, 0, 0, 1]), 80, False),)
PLAN = ServicePort(NAME, (Frontend(FrontendKind.CLUSTER_IP, bytes([10, 96, 0, 1]), 80),), ENDS, (), any_endpoints=True)


class Table:
    """Counts the attempts; refuses them while ``lacks``."""

    def __init__(self) -> None:
        self.lacks = False
        self.attempts = 0
        self.rules: HostRules | None = None

    def set_host_rules(self, wanted: HostRules) -> None:
        self.attempts += 1
        if self.lacks:
            raise NftError(errno.ENOMEM, "no memory")
        self.rules = wanted


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def packets(table: Table, monkeypatch: pytest.MonkeyPatch) -> HostPackets:
    monkeypatch.setattr(host_packets, "host_traffic", lambda effective, facts: HostTraffic(0x4000))
    nft: Any = SimpleNamespace(table=table)
    effective: Any = None
    made = HostPackets(effective, nft)
    made.start(NodeFacts(), {})
    return made


def test_a_refused_change_is_written_again_without_another_change(packets: HostPackets, table: Table) -> None:
    table.lacks = True
    packets.apply({NAME: PLAN}, False)
    assert packets.problems
    table.lacks = False
    packets.refresh()
    assert table.rules
    assert not packets.problems


def test_attempts_become_rare_and_end_with_success(packets: HostPackets, table: Table) -> None:
    """A kernel that lacks an expression refuses for ever."""
    table.lacks = True
    packets.apply({NAME: PLAN}, False)
    table.attempts = 0
    for _ in range(1000):
        packets.refresh()
    assert 15 < table.attempts < 25
    table.lacks = False
    packets.apply({NAME: None}, False)
    table.attempts = 0
    packets.refresh()
    assert table.attempts == 0
