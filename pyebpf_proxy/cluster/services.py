# SPDX-License-Identifier: Apache-2.0
"""``cluster services``: what all nodes serve, side by side, and where they differ."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pyebpf_proxy.cluster import ask
from pyebpf_proxy.cluster.api import SLICES, Api, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.model import View
from pyebpf_proxy.cluster.output import Output, counted
from pyebpf_proxy.config.addresses import join_host_port
from pyebpf_proxy.see import model
from pyebpf_proxy.see.answers import QUESTION, listed

RIGHTS = (("list", "discovery.k8s.io", "endpointslices", ""),)
#: Nodes are asked one after the other while the cluster changes: a difference counts if it is there twice.
_SETTLE_SECONDS = 2.0
HEAD = ["SERVICE", "PROTO", "FAMILY", "FRONTENDS", "ENDPOINTS", "NODES"]


class Key(NamedTuple):
    """A service port of one IP family."""

    name: str
    protocol: str
    family: int

    def __str__(self) -> str:
        return f"{self.name} {self.protocol} IPv{self.family}"


def key_of(service: model.ServiceView | model.ClusterService) -> Key:
    """The service port's key."""
    return Key(service.name, service.protocol, service.family)


class Facts(NamedTuple):
    """What every node should have alike. Endpoints of the policy Local are a node's own, and are left out."""

    frontends: frozenset[str]
    endpoints: frozenset[str]
    policies: tuple[str, ...]


class Compared(NamedTuple):
    """All nodes side by side. ``unknown``: none of those that answered has what was asked for."""

    nodes: list[str]
    services: list[model.ClusterService]
    problems: list[model.NodeProblem]

    @property
    def is_bad(self) -> bool:
        """Whether an administrator has to look at something."""
        return bool(self.problems) or any(
            not each.expected for service in self.services for each in service.differences
        )


def facts(service: model.ServiceView) -> Facts:
    """One node's view of a service port, as far as nodes are alike."""
    return Facts(
        frozenset(f"{join_host_port(each.address, each.port)} {each.kind}" for each in service.frontends),
        frozenset(each.address for each in service.endpoints if "cluster" in each.lists),
        (
            f"internal policy {service.internal_traffic_policy}",
            f"external policy {service.external_traffic_policy}",
            f"affinity {service.affinity_seconds} s",
            f"source ranges {', '.join(service.source_ranges) or 'none'}",
        ),
    )


def compare(answers: Mapping[str, model.Services | None], hinted: Collection[str] = ()) -> list[model.ClusterService]:
    """Each service port as most nodes have it, and the nodes that differ. ``hinted``: Services with topology hints."""
    seen: dict[Key, dict[str, Facts]] = {}
    for node, answer in answers.items():
        for each in answer.services if answer is not None else ():
            seen.setdefault(key_of(each), {})[node] = facts(each)
    result = []
    for key, by_node in sorted(seen.items()):
        # Counter keeps the order of nodes, so that of equally many the first counts.
        usual = Counter(by_node.values()).most_common(1)[0][0]
        service = key.name.partition(":")[0]
        differences = [
            model.NodeDifference(node=node, text=text, expected=is_endpoint and service in hinted)
            for node in answers
            for text, is_endpoint in _differences(by_node.get(node), usual)
        ]
        result.append(
            model.ClusterService(
                name=key.name,
                protocol=key.protocol,
                family=key.family,
                frontends=sorted(usual.frontends),
                endpoints=sorted(usual.endpoints),
                nodes=list(by_node),
                differences=differences,
            )
        )
    return result


def _differences(own: Facts | None, usual: Facts) -> Iterator[tuple[str, bool]]:
    """In words; whether it is about endpoints."""
    if own is None:
        yield "does not have it", False
        return
    for what, there, wanted in (
        ("frontend", own.frontends, usual.frontends),
        ("endpoint", own.endpoints, usual.endpoints),
    ):
        for missing in sorted(wanted - there):
            yield f"lacks the {what} {missing}", what == "endpoint"
        for more in sorted(there - wanted):
            yield f"has the {what} {more}, others do not", what == "endpoint"
    for policy, other in zip(own.policies, usual.policies, strict=True):
        if policy != other:
            yield f"{policy}, others: {other}", False


def read(api: Api, found: View, name: str, seconds: float) -> Compared:
    """Ask all agents; where they differ, once more after a moment. ``name``: "" for all service ports."""
    command = ["services", *([name] if name else [])]
    answers, problems = ask.everywhere(api, found, command, model.Services, seconds)
    services = compare(answers)
    if any(each.differences for each in services):
        time.sleep(_SETTLE_SECONDS)
        before = {(key_of(each), d.node, d.text) for each in services for d in each.differences}
        answers, problems = ask.everywhere(api, found, command, model.Services, seconds)
        services = compare(answers, _hinted(api))
        for each in services:
            each.differences = [d for d in each.differences if (key_of(each), d.node, d.text) in before]
    if name and not services and answers:
        try:
            ask.one(api, found.agents[next(iter(answers))], command, model.Services, seconds)
        except ask.UnknownError as error:
            raise ClusterError(str(error), QUESTION) from None
    return Compared(list(answers), services, problems)


def _hinted(api: Api) -> set[str]:
    """Services of which different nodes use different endpoints, as their slices say."""
    try:
        slices = api.objects(SLICES)
    except RefusedError:
        return set()
    return {
        f"{each['metadata']['namespace']}/{name}"
        for each in slices
        if (name := (each["metadata"].get("labels") or {}).get("kubernetes.io/service-name"))
        and any(endpoint.get("hints") for endpoint in each.get("endpoints") or ())
    }


def show(compared: Compared, output: Output) -> None:
    """The table, then what differs."""
    answer = model.ClusterServices(nodes=compared.nodes, services=compared.services, problems=compared.problems)
    output.document |= msgspec.to_builtins(answer)
    output.lines(HEAD, [_row(each, compared.nodes) for each in compared.services])
    say_differences(compared, output)


def _row(service: model.ClusterService, nodes: Sequence[str]) -> list[str]:
    return [
        service.name,
        service.protocol,
        f"IPv{service.family}",
        listed((each.partition(" ")[0] for each in service.frontends), 2),
        str(len(service.endpoints)),
        f"{len(service.nodes)} of {len(nodes)}",
    ]


def say_differences(compared: Compared, output: Output) -> None:
    """One line for each difference and each node without an answer, then a summary."""
    for service in compared.services:
        key = key_of(service)
        for each in service.differences:
            why = " (topology hints)" if each.expected else ""
            output.say(f"{'expected' if each.expected else 'differs '}  {key}: {each.node} {each.text}{why}")
    for problem in compared.problems:
        output.say(f"no answer  {problem.node}: {problem.text}")
    wrong = {each.node for service in compared.services for each in service.differences if not each.expected}
    differ = "differs" if len(wrong) == 1 else "differ"
    verdict = f"{len(wrong)} {differ}: {listed(sorted(wrong))}" if wrong else "no node differs"
    ports, nodes = counted(len(compared.services), "service port"), counted(len(compared.nodes), "node")
    output.say(f"{ports} on {nodes}: {verdict}")
