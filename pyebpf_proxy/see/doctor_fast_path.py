# SPDX-License-Identifier: Apache-2.0
"""``doctor``: what on this node closes the fast path, or makes it slower; looked at as the agent looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.datapath.node.attachments import Attachments, bridge_rules
from pyebpf_proxy.datapath.node.fast_path import closed_on_node
from pyebpf_proxy.datapath.node.follower import Follower
from pyebpf_proxy.datapath.node.plan import REDIRECT_NONE, NodeConfig, State, plan, program_for
from pyebpf_proxy.datapath.rulesets import kernel
from pyebpf_proxy.see import model
from pyebpf_proxy.see.answers import listed

Found = Iterator[model.Finding]
_RULES = (
    "new flows take the slow path; take the rule away, limit it to what must meet it, or fastPath: true if packets of"
    " Services need not meet it (docs/fast-path.md)"
)


def findings(directory: Path) -> Found:
    """Rules of others by family, then devices."""
    yield from _families()
    try:
        state = _state(directory)
    except OSError as error:
        yield _finding("devices", "warning", f"they cannot be looked at: {error}", "run it as root, on the node")
        return
    yield from _devices(state)


def _finding(what: str, state: str, text: str, remedy: str = "") -> model.Finding:
    return model.Finding(what=what, state="good" if state == "good" else "warning", text=text, remedy=remedy)


def _families() -> Found:
    on_node = closed_on_node()
    verdicts = kernel.read().verdicts
    for family in (4, 6):
        what = f"fast path, IPv{family}"
        verdict = verdicts.get(family)
        if family in on_node:
            yield _finding(
                what, "warning", f"closed: {on_node[family].text}", "new flows take the slow path, as before"
            )
        elif verdict is not None and verdict.closes:
            yield _finding(what, "warning", f"closed by rules of others: {verdict}", _RULES)
        else:
            yield _finding(what, "good", "no rule closes it")


def _state(directory: Path) -> State:
    place = next((path for path in mounts.bpffs_candidates(directory) if mounts.holds_pins(path)), mounts.SYSTEM_BPFFS)
    follower = Follower()
    try:
        state = follower.state
    finally:
        follower.close()
    attachments = Attachments(directory, mounts.tcx_directory(place, directory))
    try:
        watched = [i for i, link in state.links.items() if program_for(link, state.links) or link.kind == "bridge"]
        state.others = attachments.others(watched)
        state.bridge_rules = bridge_rules()
        return state
    finally:
        attachments.close()


def _devices(state: State) -> Found:
    wanted = plan(state, NodeConfig(fast_path=True))
    closed: dict[str, list[str]] = {}
    slower: dict[str, list[str]] = {}
    for index, why in wanted.limits.items():
        to = closed if wanted.devices[index].redirect == REDIRECT_NONE else slower
        to.setdefault(why, []).append(state.links[index].name)
    for why, names in closed.items():
        text = f"the fast path does not use {listed(names)}: {why}"
        yield _finding("devices", "warning", text, "what is there must see every packet: take it away, or leave it so")
    for why, names in slower.items():
        yield _finding("devices", "good", f"{listed(names)} is sent to by its queue, not straight into the pod: {why}")
    if not closed and not slower:
        yield _finding("devices", "good", "nothing stands in the way of the fast path")
