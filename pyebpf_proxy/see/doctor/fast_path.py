# SPDX-License-Identifier: Apache-2.0
"""``doctor``: what closes or slows the fast path on this node. It uses the agent's own checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pyebpf_proxy.common.bpf_constants import REDIRECT_NONE
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.datapath.node.attachments import Attachments, bridge_rules
from pyebpf_proxy.datapath.node.fast_path import closed_on_node, flow_hashes
from pyebpf_proxy.datapath.node.follower import Follower
from pyebpf_proxy.datapath.node.plan import NodeConfig, State, plan, program_for
from pyebpf_proxy.datapath.rulesets import kernel
from pyebpf_proxy.see import model
from pyebpf_proxy.see.answers import listed

Found = Iterator[model.Finding]
_RULES = (
    "new flows take the slow path; remove the rule, narrow its match, or set fastPath: true if packets of Services"
    " may bypass it (docs/fast-path.md)"
)


def findings(directory: Path) -> Found:
    """Rules of other programs by family, then devices."""
    yield from _families()
    try:
        state = _state(directory)
    except OSError as error:
        yield _finding("devices", "warning", f"they cannot be examined: {error}", "run it as root, on the node")
        return
    yield from _devices(state)


def _finding(what: str, state: str, text: str, remedy: str = "") -> model.Finding:
    return model.Finding(what=what, state="good" if state == "good" else "warning", text=text, remedy=remedy)


def _families() -> Found:
    try:
        on_node = closed_on_node(flow_hashes())
    except OSError as error:
        yield _finding("ip rules", "warning", f"they cannot be listed: {error}", "run it as root, on the node")
        on_node = {}
    verdicts = kernel.read().verdicts
    for family in (4, 6):
        what = f"fast path, IPv{family}"
        verdict = verdicts.get(family)
        if family in on_node:
            yield _finding(
                what, "warning", f"closed: {on_node[family].text}", "no action required: new flows take the slow path"
            )
        elif verdict is not None and verdict.closes:
            yield _finding(what, "warning", f"closed by other rules: {verdict}", _RULES)
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
        yield _finding("devices", "warning", text, "remove it if it need not see every packet; otherwise leave it")
    for why, names in slower.items():
        text = f"packets to {listed(names)} pass its queue and are not redirected directly into the pod: {why}"
        yield _finding("devices", "good", text)
    if not closed and not slower:
        yield _finding("devices", "good", "the fast path uses every device")
