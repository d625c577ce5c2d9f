# SPDX-License-Identifier: Apache-2.0
"""Questions to all agents at once: a command runs in each agent's pod, and its JSON is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from pyebpf_proxy.cluster.api import Api, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.model import Pod, View
from pyebpf_proxy.cluster.objects import NAMESPACE
from pyebpf_proxy.see import model
from pyebpf_proxy.see.answers import NO_ANSWER, NOT_RIGHT, QUESTION, RIGHT, SeeError

#: A command in a pod is a WebSocket: get, and since Kubernetes 1.35 also create.
RIGHTS = (("get", "", "pods/exec", NAMESPACE), ("create", "", "pods/exec", NAMESPACE))
_AT_ONCE = 16

A = TypeVar("A", bound=model.Answer)


class UnknownError(SeeError):
    """An agent does not have what was asked for."""


def one(api: Api, pod: Pod, command: Sequence[str], kind: type[A], seconds: float) -> A:
    """The answer of one agent. ClusterError: there is none; UnknownError: it has no such Service."""
    try:
        words = ["pyebpf-proxy", *command, "-o", "json"]
        status, said, errors = api.execute(pod.name, NAMESPACE, pod.container, words, seconds)
    except RefusedError as error:
        # Also 401 and 403: rights were checked before. The status may be the kubelet's, for the API server's own
        # credentials, or that of an admission policy which forbids commands in pods.
        raise ClusterError(str(error), NO_ANSWER) from None
    if status not in (RIGHT, NOT_RIGHT):
        text = (errors.strip().splitlines() or [f"exit status {status}"])[-1].removeprefix("Error: ")
        raise UnknownError(text) if status == QUESTION else ClusterError(text, NO_ANSWER)
    try:
        return msgspec.json.decode(said, type=kind)
    except msgspec.MsgspecError as error:
        raise ClusterError(
            f"the answer cannot be read; the agent may have another version: {error}", NO_ANSWER
        ) from None


def everywhere(
    api: Api, found: View, command: Sequence[str], kind: type[A], seconds: float
) -> tuple[dict[str, A | None], list[model.NodeProblem]]:
    """The answers by node; None: it does not have what was asked for. Then the nodes without an answer."""
    nodes = [node for node in found.nodes if node in found.agents]

    def ask(node: str) -> A | ClusterError | None:
        pod = found.agents[node]
        if not pod.usable:
            return ClusterError(f"the agent is not running{f': {pod.hopeless}' if pod.hopeless else ''}")
        try:
            return one(api, pod, command, kind, seconds)
        except UnknownError:
            return None
        except ClusterError as error:
            return error

    if not nodes:
        raise ClusterError("no agent runs on these nodes", NO_ANSWER)
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        answers = dict(zip(nodes, pool.map(ask, nodes), strict=True))
    except BaseException:
        api.hang_up()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    problems = [model.NodeProblem(node=node, text=str(e)) for node, e in answers.items() if isinstance(e, ClusterError)]
    return {node: each for node, each in answers.items() if not isinstance(each, ClusterError)}, problems
