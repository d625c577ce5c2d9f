# SPDX-License-Identifier: Apache-2.0
"""What ``status``, ``top`` and ``drops`` show of the fast path with real traffic: permits, ages, reasons, waiting
packets.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

from pyebpf_proxy.see import model
from tests.netns.top_tools import Watching, watching
from tests.support.conversation import PORT
from tests.support.fast_lab import NEAR, ON, Ask, FastWorld
from tests.support.lab_tools import wait_until
from tests.support.new_flows import BOTH, NewFlows, ask_once, ending, wait_until_fast
from tests.support.see_tools import answer, see

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

_own_ports = itertools.count(24_000)
#: It counts packets, so it must see all of them.
RULE = "type filter hook forward priority 0; tcp dport 7 limit rate 9/second accept;"
COUNTS = f"table inet counts {{ chain c {{ {RULE} }}; }}"


def new_flows(world: FastWorld) -> list[NewFlows]:
    return [NewFlows(world.client.namespace, NEAR.v4, protocol) for protocol in BOTH]


def test_status_counts_permits(fast_world: FastWorld) -> None:
    """A pair has one permit per protocol, for a second after its last new flow."""

    def permits() -> int:
        found: dict[str, Any] = json.loads(see(fast_world.node, "status", "-o", "json").stdout)["fastPath"]
        return int(found["permits"])

    flows = new_flows(fast_world)
    with ending(*flows):
        wait_until_fast(fast_world, *flows)
        wait_until(lambda: permits() == 2, "two permits")
        assert re.search(r"fast path .* entries, [12] permits; ", see(fast_world.node, "status").stdout)
    wait_until(lambda: permits() == 0, "they have expired")


def until(seen: Watching, condition: Callable[[model.TopFastPath], object], what: str) -> model.TopFastPath:
    """The fast path of the first interval that satisfies the condition."""

    def holds() -> bool:
        return seen.last.fast_path is not None and bool(condition(seen.last.fast_path))

    seen.until(holds, what)
    assert seen.last.fast_path is not None
    return seen.last.fast_path


def test_top_shows_permits_and_flows_of_both_ages(fast_world: FastWorld, ask: Ask) -> None:
    conversation = ask(fast_world.client.namespace, NEAR.v4)
    fast_world.fast(conversation)
    flows = new_flows(fast_world)
    with watching(fast_world.node) as seen, ending(*flows):
        wait_until_fast(fast_world, *flows)
        found = until(
            seen, lambda fast: fast.permits and fast.young and fast.kernel and fast.new_flows["fast"], "all of them"
        )
        assert (found.closed, found.draining) == ({}, False)
        wanted = r"fast path: open · young \d+ · kernel \d+ · permits [12] · new flows a second: .* fast"
        assert re.search(wanted, see(fast_world.node, "top", "--once").stdout)


def test_top_names_the_rule_that_closes_it(fast_world: FastWorld) -> None:
    node = fast_world.node.namespace
    with watching(fast_world.node) as seen:
        node.run("nft", COUNTS)
        try:
            found = until(seen, lambda fast: "IPv4" in fast.closed, "it is closed")
            assert re.match(r"stack_rules, .*table inet counts.*chain c", found.closed["IPv4"])
            shown = see(fast_world.node, "top", "--once").stdout
            assert f"fast path: closed: {found.closed['IPv4']} · young " in shown
        finally:
            node.run("nft", "delete", "table", "inet", "counts")
        until(seen, lambda fast: not fast.closed, "it is open again")


def test_top_shows_a_fast_path_without_an_agent(fast_world: FastWorld) -> None:
    agent = fast_world.node.agent
    agent.kill()
    try:
        with watching(fast_world.node) as seen:
            found = until(seen, lambda fast: len(fast.closed) == 2, "it is closed after five seconds")
            assert found.closed["IPv6"].startswith("stack_no_agent, ")
    finally:
        agent.start(own=ON)
        agent.wait_synced()


def test_a_packet_that_waits_for_a_promotion_is_among_the_drops(fast_world: FastWorld, family: int) -> None:
    """A connection directly to the endpoint, from the port of a young flow: its first SYN is dropped."""
    client, near = fast_world.client, fast_world.near
    before, own_port = fast_world.count("drop_awaiting_promotion"), 0

    def dropped() -> bool:
        nonlocal own_port
        own_port = next(_own_ports)
        client.namespace.call(_two_from_one_port, NEAR.of(family), near.address.of(family), own_port)
        return fast_world.count("drop_awaiting_promotion") > before

    wait_until(dropped, "the second one's SYN is dropped")
    drops = {each["reason"]: each for each in answer(fast_world.node, "drops", status=1)["drops"]}
    drop = drops["drop_awaiting_promotion"]
    ends = client.address.of(family), near.address.of(family)
    source, destination = (f"[{end}]" if family == 6 else end for end in ends)
    assert (drop["source"], drop["destination"]) == (f"{source}:{own_port}", f"{destination}:{PORT}")
    assert (drop["protocol"], drop["device"]) == ("TCP", client.device)
    assert drop["lastMinute"] >= 1
    assert drop["secondsAgo"] < 60
    assert drop["meaning"].endswith("its retransmission gets through")
    assert "conntrack is full" in drop["remedy"]
    text = see(fast_world.node, "drops").stdout
    assert re.search(rf"drop_awaiting_promotion +\d+ +\d+ +\d+ s ago +{re.escape(drop['source'])} > ", text)
    assert any(drop["meaning"] in each["what"] for each in answer(fast_world.node, "status", status=1)["warnings"])


def _two_from_one_port(address: str, endpoint: str, own_port: int) -> None:
    """A flow to the Service that is young if it has a permit; then the SYN of another flow to its endpoint."""
    for _ in range(4):
        assert ask_once(address, PORT, "tcp")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as first, socket.socket(family) as second:
        for sock in (first, second):
            sock.settimeout(5)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", own_port))
        first.connect((address, PORT))
        first.sendall(b"question".ljust(64, b"."))
        assert first.recv(64)
        second.setblocking(False)
        second.connect_ex((endpoint, PORT))
