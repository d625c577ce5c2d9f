# SPDX-License-Identifier: Apache-2.0
"""A network with loss and delay: retransmissions belong to the flow that was chosen first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pyebpf_proxy.lab.client import ANSWERED, ask, ask_many
from pyebpf_proxy.lab.cluster import Lab
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import counted_between, reasons

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 31)
CONNECTIONS = 20


@pytest.fixture(scope="module")
def slow(needs_module: Callable[..., None]) -> Iterator[Lab]:
    """Both directions between the nodes' network and each node have delay and reordering."""
    needs_module("sch_netem")
    with Lab() as lab:
        WEB.endpoints = tuple(lab.add_pod(f"web-{number}", node) for number, node in enumerate(lab.nodes))
        write_nodes(lab)
        write_services(lab, WEB)
        lab.start_agents()
        yield lab


def _disturb(lab: Lab, words: str) -> None:
    for node in lab.nodes:
        node.namespace.run("tc", "qdisc", "replace", "dev", "eth0", "root", "netem", *words.split())
        lab.core.run("tc", "qdisc", "replace", "dev", node.name, "root", "netem", *words.split())


def test_each_request_through_loss_is_one_flow(slow: Lab, family: int) -> None:
    """A SYN that was lost after the node is sent again, and must get the same endpoint."""
    first = slow.nodes[0]
    target = WEB.target("LoadBalancer", first)
    _disturb(slow, "delay 10ms loss 10%")
    before = reasons(first)
    outcomes = slow.client.call(ask_many, CONNECTIONS, target.address.of(family), 80, timeout=60.0)
    assert [outcome.kind for outcome in outcomes] == [ANSWERED] * CONNECTIONS
    counted = counted_between(before, reasons(first))
    assert counted.get("new_flow_fast", 0) + counted.get("new_flow_netfilter", 0) == CONNECTIONS
    lost = sum(int(word) for word in _dropped(slow))
    assert lost > 0  # otherwise this has tested nothing


def test_large_transfers_through_loss_and_reordering_are_complete(slow: Lab, family: int) -> None:
    _disturb(slow, "delay 5ms 3ms loss 1% reorder 20% duplicate 1%")
    address = WEB.target("LoadBalancer", slow.nodes[0]).address.of(family)
    for _ in range(4):
        outcome = slow.client.call(ask, address, 80, size=20_000, reply_size=200_000, timeout=120.0)
        assert outcome.answer is not None, outcome
        assert outcome.size == 200_000


def _dropped(lab: Lab) -> list[str]:
    shown = lab.core.run("tc", "-s", "qdisc", "show")
    return [line.split("dropped ")[1].split(",")[0] for line in shown.splitlines() if "dropped " in line]
