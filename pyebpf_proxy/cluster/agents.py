# SPDX-License-Identifier: Apache-2.0
"""The agents' own reports, for ``cluster status``: their ``status``, in short, and where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from pyebpf_proxy.cluster import ask
from pyebpf_proxy.cluster.api import Api
from pyebpf_proxy.cluster.model import View
from pyebpf_proxy.cluster.output import Finding, State
from pyebpf_proxy.see import model
from pyebpf_proxy.see.answers import listed
from pyebpf_proxy.see.text import ago

#: An answer is a few kilobytes: a node that is slower has another problem.
_SECONDS = 30.0
#: A watch that ends on schedule is back within seconds, and its last bookmark is at most a minute old.
_BEHIND_SECONDS = 120.0


class Asked(NamedTuple):
    """The agents' answers by node, and the nodes without one. ``why``: why no agent was asked, "" if they were."""

    answers: Mapping[str, model.Status]
    problems: list[model.NodeProblem]
    why: str = ""


NOT_ASKED = Asked({}, [])


def ask_all(api: Api, found: View, seconds: float) -> Asked:
    """Ask every agent for its status, where this user may run commands in their pods."""
    if not any(node in found.agents for node in found.nodes):
        return NOT_ASKED
    if missing := api.missing_rights(ask.RIGHTS):
        return Asked({}, [], f"this user may not {'; '.join(missing)}")
    answers, problems = ask.everywhere(api, found, ["status"], model.Status, min(seconds, _SECONDS))
    known = {node: each for node, each in answers.items() if each is not None}
    problems += [
        model.NodeProblem(node=node, text="the agent rejects the command") for node in answers if node not in known
    ]
    return Asked(known, problems)


def cells(status: model.Status | None) -> list[str]:
    """Of a node's row: version, fast path, drops, how far behind; empty without an answer."""
    if status is None:
        return ["", "", "", ""]
    behind = status.agent.behind_seconds
    total, lately = drops(status)
    return [
        status.version,
        fast_path(status),
        f"{total}, {lately} in the last minute" if lately else str(total),
        "unknown" if behind is None else ago(behind).removesuffix(" ago"),
    ]


def fast_path(status: model.Status) -> str:
    """In a few words."""
    path = status.fast_path
    if path is None:
        return "none"
    if not path.watched:
        return "closed"
    closed = [f"{family} closed" for family in path.closed()]
    return ", ".join(closed) or ("draining" if path.draining else "open")


def drops(status: model.Status) -> tuple[int, int]:
    """Packets and socket calls refused or dropped: all, and those of the last minute."""
    return sum(each.count for each in status.drops), sum(each.last_minute or 0 for each in status.drops)


def document(status: model.Status | None) -> dict[str, Any] | None:
    """A node's part of the document."""
    if status is None:
        return None
    total, lately = drops(status)
    return {
        "version": status.version,
        "kernel": status.kernel,
        "features": status.features,
        "fastPath": fast_path(status),
        "fastPathClosed": _closed(status),
        "drops": total,
        "dropsLastMinute": lately,
        "behindSeconds": status.agent.behind_seconds,
        "warnings": msgspec.to_builtins(status.warnings),
    }


def _closed(status: model.Status) -> dict[str, str]:
    """By family, why its packets take the slow path."""
    path = status.fast_path
    if path is None:
        return {}
    return path.closed() if path.watched else dict.fromkeys(("IPv4", "IPv6"), "no agent follows rules and routes")


def findings(asked: Asked) -> Iterator[Finding]:
    """Nodes without an answer, differences between nodes, and what the agents warn of."""
    for problem in asked.problems:
        yield Finding("agent", "warning", f"no answer: {problem.text}", "", problem.node)
    yield from _differences(asked)
    closed = _grouped(asked, lambda status: [f"{family}: {why}" for family, why in _closed(status).items()])
    for text, nodes in closed.items():
        # Services work, at netfilter's speed.
        yield Finding("fast path", "good", f"closed for {text}", "", listed(nodes))
    for node, status in asked.answers.items():
        if (status.agent.behind_seconds or 0.0) > _BEHIND_SECONDS:
            text = f"behind the API server for {ago(status.agent.behind_seconds or 0.0).removesuffix(' ago')}"
            yield Finding("agent", "warning", text, "docs/runbook.md#pyebpfproxyapiserverlost", node)
    remedies = {each.what: each.remedy for status in asked.answers.values() for each in status.warnings}
    for text, nodes in _grouped(asked, lambda status: [each.what for each in status.warnings]).items():
        yield Finding("agent", "warning", text, remedies[text], listed(nodes))


class _Alike(NamedTuple):
    """What nodes should have alike. ``texts``: one text."""

    what: str
    state: State
    remedy: str
    texts: Callable[[model.Status], list[str]]


_ALIKE = (
    _Alike("version", "warning", "run pyebpf-proxy cluster upgrade", lambda status: [status.version]),
    # They differ while nodes are updated.
    _Alike("kernel", "good", "", lambda status: [status.kernel]),
    _Alike(
        "features",
        "warning",
        "pyebpf-proxy status on a node names those that are not available there",
        lambda status: [", ".join(status.features) or "none"],
    ),
)


def _differences(asked: Asked) -> Iterator[Finding]:
    for alike in _ALIKE:
        found = _grouped(asked, alike.texts)
        if len(found) > 1:
            text = "; ".join(f"{each} on {listed(nodes)}" for each, nodes in found.items())
            yield Finding(alike.what, alike.state, f"nodes differ: {text}", alike.remedy)


def _grouped(asked: Asked, texts: Callable[[model.Status], list[str]]) -> dict[str, list[str]]:
    """Nodes by text, those with most nodes first."""
    found: dict[str, list[str]] = {}
    for node, status in asked.answers.items():
        for text in texts(status):
            found.setdefault(text, []).append(node)
    return dict(sorted(found.items(), key=lambda each: -len(each[1])))
