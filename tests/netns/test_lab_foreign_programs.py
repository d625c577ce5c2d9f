# SPDX-License-Identifier: Apache-2.0
"""Other software's tcx programs on the devices of Services' packets: Services work, and these programs see their
packets.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.lab.addresses import Dual
from pyebpf_proxy.lab.agent import FEW_RIGHTS
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.namespace import Namespace
from tests.netns.foreign_programs import ENDS, FLAGGED, GOES_ON, NUMBERED, Foreign, attached, chain, compiled
from tests.support.conversation import PORT, Conversation
from tests.support.fast_lab import FAR, NEAR, ON, Ask, FastWorld, build_fast_world
from tests.support.lab_tools import Capture, wait_until
from tests.support.new_flows import BOTH, NewFlows, ending, wait_until_fast
from tests.support.see_tools import answer, see

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

FAMILIES = (4, 6)
# A classic BPF program: every kernel with cls_bpf supports it.
OTHERS = ("bpf", "bytecode", "1,6 0 0 4294967295", "flowid", "1:1")
#: Seconds.
LONG = 4.0
PEER, QUEUE, CLOSED = "peer", "device", "none"


@pytest.fixture(scope="module")
def world() -> Iterator[FastWorld]:
    if not tcx.available():
        pytest.skip("this kernel has no tcx: others have filters, after the agent's (test_attach_others)")
    with Lab() as lab:
        yield build_fast_world(lab)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("foreign"))


def state(world: FastWorld, device: str) -> dict[str, Any]:
    """A device in ``status``."""
    found: dict[str, Any] = next(e for e in answer(world.node, "status")["devices"] if e["name"] == device)
    return found


def wait_for(world: FastWorld, device: str, redirect: str) -> str:
    """Wait until the fast path sends through this device in this way; returns the reason in ``status``."""
    wait_until(lambda: state(world, device)["redirect"] == redirect, f"{device}: {redirect}")
    return str(state(world, device)["limit"])


def named(program: str) -> str:
    """A pattern for the name of another program: the kernel shows names only with CAP_SYS_ADMIN."""
    return r"number \d+" if os.environ.get(FEW_RIGHTS) == "1" else program


def places(world: FastWorld, device: str) -> list[tuple[Namespace, Dual, int]]:
    """The client, the server and the port of flows whose first packet comes in through this device."""
    if device == "eth0":
        return [(world.lab.client, world.node.address, 30007)]
    return [(world.client.namespace, NEAR, PORT), (world.client.namespace, FAR, PORT)]


def new_flows(world: FastWorld, device: str) -> list[NewFlows]:
    return [
        NewFlows(namespace, address.of(family), protocol, port, patience=5.0)
        for namespace, address, port in places(world, device)
        for family in FAMILIES
        for protocol in BOTH
    ]


def begin_conversations(world: FastWorld, ask: Ask, device: str) -> list[Conversation]:
    return [
        ask(namespace, address.of(family), protocol, port)
        for namespace, address, port in places(world, device)
        for family in FAMILIES
        for protocol in BOTH
    ]


def all_answered(flows: list[NewFlows]) -> None:
    # The last one may still wait for its answer.
    assert [each.made - each.answered <= 1 for each in flows] == [True] * len(flows)


def sees_every_question(program: Foreign, conversations: list[Conversation]) -> None:
    """For longer than a flow is young, and longer than the confirmation of a kernel's flow."""
    begun = time.monotonic()
    while time.monotonic() < begun + LONG:
        before = int(program)
        answers = [conversation.answers for conversation in conversations]
        for conversation in conversations:
            conversation.wait(20)
        more = sum(conversation.answers for conversation in conversations) - sum(answers)
        # The first answer of each may belong to an earlier request.
        assert int(program) - before >= more - len(conversations)


# ---- at ingress ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def at_ingress(world: FastWorld, file: Path, program: str, device: str, when: str) -> Iterator[Foreign]:
    """A program that is there before the agent, or comes later at the head or the tail."""
    node, agent = world.node.namespace, world.node.agent
    if when == "before the agent":
        agent.stop()
        agent.cleanup()
        assert chain(node, device) == ()
        with attached(node, file, program, device) as foreign:
            agent.start(own=ON)
            agent.wait_synced()
            yield foreign
        return
    (own,) = chain(node, device)
    where = tcx.BEFORE if when == "at the head" else tcx.AFTER
    with attached(node, file, program, device, where=where) as foreign:
        # Netlink does not report it: the agent checks every three seconds.
        wait_until(lambda: len(chain(node, device)) == 2 and chain(node, device)[0] == own, "the agent's is first")
        yield foreign


@pytest.mark.parametrize(
    ("where", "when", "program"),
    [
        ("a pod's device", "before the agent", ENDS),
        ("a pod's device", "before the agent", GOES_ON),
        ("a pod's device", "at the head", ENDS),
        ("eth0", "before the agent", ENDS),
        ("eth0", "at the tail", GOES_ON),
    ],
)
def test_a_program_at_ingress(world: FastWorld, ask: Ask, foreign: Path, where: str, when: str, program: str) -> None:
    """It runs after the agent's program and sees every packet of its device, also of long flows (finding D2)."""
    device = "eth0" if where == "eth0" else world.client.device
    other = world.client.device if device == "eth0" else "eth0"
    with at_ingress(world, foreign, program, device, when) as behind:
        logged = f"after the agent's program: tcx program {named(program)}"
        assert re.fullmatch(logged, wait_for(world, device, CLOSED))
        text = see(world.node, "status").stdout
        assert re.search(f"closed: {logged}", " ".join(text.split())), text
        flows = new_flows(world, device)
        with ending(*flows):
            for each in flows:
                each.wait_answered(10)
            all_answered(flows)
        conversations = begin_conversations(world, ask, device)
        sees_every_question(behind, conversations)
        assert state(world, other)["redirect"] != CLOSED, "the other device stays open"
    assert wait_for(world, device, PEER) == ""
    for conversation in conversations:
        world.fast(conversation)
    flows = new_flows(world, device)
    with ending(*flows):
        wait_until_fast(world, *flows)
        all_answered(flows)


@pytest.mark.parametrize("where", ["a pod's device", "eth0"])
def test_a_hand_over_has_no_flag_of_cilium(world: FastWorld, foreign: Path, where: str) -> None:
    """The lower five bits of skb->tc_index: by the lowest one Cilium skips the policy of the pod that receives."""
    device = "eth0" if where == "eth0" else world.client.device
    hook = partial(attached, world.node.namespace, foreign, device=device, where=tcx.AFTER)
    with hook(NUMBERED) as numbered, hook(FLAGGED) as flagged:
        flows = new_flows(world, device)
        with ending(*flows):
            wait_until(lambda: int(numbered) > 200, "hand-overs")
        assert int(flagged) == 0
    wait_for(world, device, PEER)


# ---- at egress -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [GOES_ON, ENDS])
def test_a_program_at_the_egress_of_a_pods_device(world: FastWorld, ask: Ask, foreign: Path, program: str) -> None:
    """It sees packets to the pod, also those of the fast path: they are not put directly into the pod."""
    node, device = world.node.namespace, world.near.device
    assert wait_for(world, device, PEER) == ""
    with attached(node, foreign, program, device, tcx.EGRESS) as egress:
        limit = wait_for(world, device, QUEUE)
        assert re.fullmatch(f"behind the fast path: tcx program {named(program)}", limit), limit
        flows = [
            NewFlows(world.client.namespace, NEAR.of(family), protocol, patience=5.0)
            for family in FAMILIES
            for protocol in BOTH
        ]
        with ending(*flows):
            for each in flows:
                each.wait_answered(10)
            if program == GOES_ON:
                wait_until_fast(world, *flows)
            all_answered(flows)
        conversations = [
            ask(world.client.namespace, NEAR.of(family), protocol) for family in FAMILIES for protocol in BOTH
        ]
        hits = world.count("flow_hit")
        sees_every_question(egress, conversations)
        if program == GOES_ON:
            assert world.count("flow_hit") > hits + 500, "on the fast path"
    assert wait_for(world, device, PEER) == ""


def test_a_filter_at_the_egress_of_a_pods_device(world: FastWorld, ask: Ask) -> None:
    """As `tc filter add` does, in a clsact qdisc."""
    node, device = world.node.namespace, world.near.device
    assert wait_for(world, device, PEER) == ""
    node.run("tc", "qdisc", "add", "dev", device, "clsact")
    try:
        node.run("tc", "filter", "add", "dev", device, "egress", "pref", "7", *OTHERS)
        assert wait_for(world, device, QUEUE) == "behind the fast path: clsact egress filter pref 7 bpf"
        for family in FAMILIES:
            for protocol in BOTH:
                conversation = ask(world.client.namespace, NEAR.of(family), protocol)
                world.fast(conversation)
                question = partial(is_question, family=family, own_port=conversation.own_port)
                for _ in range(3):
                    # A packet that is put directly into the pod does not pass here.
                    sent = Capture(node, device, question)
                    assert sent.frame() is not None
                conversation.end()
    finally:
        node.run("tc", "qdisc", "del", "dev", device, "clsact")
    assert wait_for(world, device, PEER) == ""


def is_question(frame: bytes, family: int, own_port: int) -> bool:
    """A translated packet from this port of a client."""
    at = 14 + (20 if family == 4 else 40)
    return frame[at : at + 4] == struct.pack("!HH", own_port, PORT)
