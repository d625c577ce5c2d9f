# SPDX-License-Identifier: Apache-2.0
"""conntrack's source ports during a start: none that young flows of a former run have, until those are gone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from pyebpf_proxy.datapath import settings
from pyebpf_proxy.datapath.managers import former_run, nft_table
from pyebpf_proxy.datapath.managers.former_run import Retirement, TakeOver
from pyebpf_proxy.datapath.managers.nft_table import NftTable
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour
from pyebpf_proxy.services.node_facts import NodeFacts

Ports = tuple[int, int] | None
#: By the first port of the node's own sockets.
FIRST = {32768: (32768, 65535), 10000: (10000, 65535), 1024: None}


class Table:
    """The ports of the masquerade that it has been given, and those that a former run has left."""

    def __init__(self, former: Ports) -> None:
        self.former, self.given = former, list[Ports]()

    def conntrack_ports(self) -> Ports:
        return self.former

    def ensure(self, behaviour: Behaviour, frontends: object) -> bool:
        self.given.append(behaviour.conntrack_ports)
        return False

    def knows_sockets(self) -> bool:
        return True

    def checks_destination(self) -> bool:
        return False


def started(
    monkeypatch: pytest.MonkeyPatch, former: Ports, first: int, fast_path: bool = True
) -> tuple[NftTable, Table]:
    table = Table(former)
    monkeypatch.setattr(nft_table, "Table", lambda name: table)
    monkeypatch.setattr(nft_table, "fast_path_is_built", lambda: True)
    monkeypatch.setattr(settings, "local_ports", lambda: (first, 65535))
    kernel = SimpleNamespace(conntrack=SimpleNamespace(tcp_be_liberal=True), route_localnet=True)
    effective: Any = SimpleNamespace(
        masquerade_mark=0x4000,
        nft_mode=False,
        directory=Path("/none"),
        kernel=kernel,
        socket_lb="node",
        fast_path=fast_path,
    )
    nft = NftTable(effective)
    nft.start(NodeFacts(), {})
    return nft, table


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("former", FIRST.values())
def test_until_the_former_flows_are_gone_conntrack_takes_ports_of_no_young_flow(
    monkeypatch: pytest.MonkeyPatch, former: Ports, first: int
) -> None:
    """Neither a former one's, nor one that new programs will open: those below both ranges."""
    nft, table = started(monkeypatch, former, first)
    nft.support_fast_path(True)
    during = max(filter(None, (former, FIRST[first])), default=None)
    assert table.given == [during, during]
    nft.former_flows_gone()
    assert table.given[2:] == [FIRST[first]]


@pytest.mark.parametrize("refused", [False, True], ids=["not configured", "refused by the kernel"])
def test_without_the_fast_path_the_former_ports_stay_until_the_flows_are_gone(
    monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    nft, table = started(monkeypatch, FIRST[10000], 32768 if refused else 10000, fast_path=refused)
    nft.support_fast_path(False)
    assert table.given[-1] == FIRST[10000]
    assert None not in table.given
    nft.former_flows_gone()
    assert table.given[-1] is None


@pytest.mark.parametrize("fast_path", [True, False])
def test_without_a_former_run_conntrack_has_its_ports_at_once(monkeypatch: pytest.MonkeyPatch, fast_path: bool) -> None:
    _, table = started(monkeypatch, None, 10000, fast_path)
    assert table.given == [FIRST[10000] if fast_path else None]


def test_the_ports_do_not_change_if_the_nodes_own_ports_change_during_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs have those of the beginning."""
    nft, table = started(monkeypatch, None, 32768)
    monkeypatch.setattr(settings, "local_ports", lambda: (10000, 65535))
    nft.former_flows_gone()
    assert table.given[-1] == FIRST[32768]


def loaded(former: int | None, now: int, fast_path: bool = True) -> Any:
    """Programs whose young flows have source ports up to ``now``; those of a former run had them up to ``former``."""
    state = SimpleNamespace(lookup=lambda key: None if former is None else b"state")
    layout = SimpleNamespace(unpack=lambda data: {"snat_port_max": former})
    return SimpleNamespace(
        maps={"fast_path": state} if fast_path else {},
        tc=SimpleNamespace(btf=SimpleNamespace(struct=lambda name: layout)),
        settings=SimpleNamespace(fast_path=fast_path, snat_port_max=now),
    )


@pytest.mark.parametrize(
    ("programs", "drains"),
    [
        (loaded(32767, 32767), False),
        (loaded(9999, 32767), False),
        (loaded(0, 32767), False),
        (loaded(None, 32767), False),
        (loaded(32767, 9999), True),
        (loaded(32767, 0), True),
        (loaded(32767, 32767, fast_path=False), True),
    ],
)
def test_flows_are_drained_if_the_new_programs_have_fewer_source_ports(
    monkeypatch: pytest.MonkeyPatch, programs: Any, drains: bool
) -> None:
    drained = Mock()
    monkeypatch.setattr(former_run, "drain", drained)
    monkeypatch.setattr(former_run, "drain_resized", Mock())
    monkeypatch.setattr(former_run, "OtherLayouts", Mock())
    bpffs: Any = SimpleNamespace(pins=Path("/none"))
    TakeOver(bpffs, SimpleNamespace(loaded=programs), Mock()).start(NodeFacts(), {})  # type: ignore[arg-type]
    assert drained.called is drains


@pytest.mark.parametrize("fast_path", [True, False])
def test_conntrack_gets_the_ports_when_no_former_program_runs_any_more(
    monkeypatch: pytest.MonkeyPatch, fast_path: bool
) -> None:
    order = Mock()
    monkeypatch.setattr(former_run, "grace", order.grace)
    monkeypatch.setattr(former_run, "unpin_programs", Mock())
    order.programs.loaded.settings.fast_path = fast_path
    order.nodes.node.attached = ()
    managers = (order.nft, order.programs, order.service_maps, order.nodes, order.sockets, order.settings, order.former)
    Retirement(Mock(), *managers).start(NodeFacts(), {})
    names = [name for name, _, _ in order.mock_calls]
    assert names.count("nft.former_flows_gone") == 1
    before = names[: names.index("nft.former_flows_gone")]
    assert {"sockets.detach_former", "programs.loaded.attached", "grace.wait"} <= set(before)
