# SPDX-License-Identifier: Apache-2.0
"""What must hold after an upgrade: of connections, session affinity, the log, and what ``--cleanup`` leaves."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from pyebpf_proxy.lab.cluster import Node
from tests.changes.checker import REMEMBERED, Record
from tests.changes.load import Flow, Outcome
from tests.support.logs import Log, Message

#: Lines of a difference that are shown.
_SHOWN = 12
#: Settings of the whole machine, and those that are counters.
_NOT_COMPARED = re.compile(r"net\.netfilter\.nf_conntrack_(count|max|buckets)|net\.nf_conntrack_max")


def affinity_lost(outcome: Outcome, addresses: Collection[str], forgotten: str = "") -> list[str]:
    """Which clients of these addresses more than one endpoint answered. ``forgotten``: the client without affinity."""
    names: dict[tuple[str, bool], dict[str, list[float]]] = {}
    for flow in sorted((*outcome.new, *outcome.long), key=lambda flow: flow.record.begun):
        address = flow.target.rpartition("[")[2].partition("]")[0]
        if address in addresses and flow.record.name and flow.target.split()[1] != forgotten:
            begun = flow.record.begun - outcome.begun
            names.setdefault((flow.target, flow.udp), {}).setdefault(flow.record.name, []).append(begun)
    return [
        f"affinity lost: {'UDP' if udp else 'TCP'} {target}: "
        + ", ".join(f"{len(at)} by {name} from {at[0]:.2f} to {at[-1]:.2f} s" for name, at in found.items())
        for (target, udp), found in names.items()
        if len(found) > 1
    ]


def without_clashes(outcome: Outcome) -> tuple[Outcome, int]:
    """Without connections that waited because another one of the same client had their port shortly before; how many.

    If that is a young flow to the same endpoint, packets are dropped until it is promoted, which needs an agent
    (docs/fast-path.md, "One client port, two flows to one endpoint"). The client does not know the endpoint of a
    connection without an answer, so a few that are lost for another reason may be among them: they are counted.
    """
    users: dict[tuple[str, bool, bool, int], list[Record]] = {}
    for flow in (*outcome.new, *outcome.long):
        users.setdefault(_client_port(flow), []).append(flow.record)

    def waited(flow: Flow) -> bool:
        record = flow.record
        others = (each for each in users[_client_port(flow)] if each is not record)
        slow = record.count or not record.name
        return bool(slow) and any(each.begun <= record.begun < each.ended + REMEMBERED for each in others)

    rest = [flow for flow in outcome.new if not waited(flow)]
    return outcome._replace(new=rest), len(outcome.new) - len(rest)


def _client_port(flow: Flow) -> tuple[str, bool, bool, int]:
    """The client, the protocol, the family and the client's port."""
    return flow.target.split()[1], flow.udp, flow.target.count(":") > 1, flow.record.port


def errors(log: str) -> list[str]:
    """Lines that no agent should log: tracebacks, errors, internal errors."""
    return [
        f"logged: {line}"
        for line in Log(log).lines()
        if line.level == "error" or "Traceback" in line.text or Message.INTERNAL_ERROR in line.text
    ]


def layouts(directory: Path) -> set[int]:
    """The layout versions whose maps are pinned below an agent's directory."""
    found = (re.fullmatch(r"v(\d+)", path.name) for path in directory.glob("bpf/**/v*") if path.is_dir())
    return {int(each[1]) for each in found if each}


def left(node: Node) -> dict[str, list[str]]:
    """What an agent may leave on its node, each as lines."""

    def lines(script: str) -> list[str]:
        return node.namespace.run("sh", "-c", script).splitlines()

    devices = [each["ifname"] for each in json.loads(node.namespace.run("ip", "-j", "link"))]
    filters = "; ".join(f"tc filter show dev {each} {way}" for each in devices for way in ("ingress", "egress"))
    return {
        "pins": sorted(str(path) for path in node.agent.directory.rglob("*") if not path.is_dir()),
        "nft tables": lines("nft list tables"),
        "filters": lines(f"({filters}) 2>&1; for d in {' '.join(devices)}; do tc qdisc show dev $d; done"),
        "programs": lines("bpftool net show"),
        "settings": [each for each in lines("sysctl -a 2>/dev/null | grep ^net") if not _NOT_COMPARED.match(each)],
        "routes": sorted(lines("ip route show table all; ip -6 route show table all; ip rule; ip -6 rule")),
        "addresses": lines("ip -o address | sed 's/ valid_lft.*//'"),
    }


def differences(before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> list[str]:
    """What a clean-up has left, or has removed although it was there before."""
    found = []
    for what, was in before.items():
        more = [f"+{line}" for line in after[what] if line not in was]
        less = [f"-{line}" for line in was if line not in after[what]]
        if more or less:
            found.append(f"{what} after the clean-up:\n" + "\n".join((more + less)[:_SHOWN]))
    return found
