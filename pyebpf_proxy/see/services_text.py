# SPDX-License-Identifier: Apache-2.0
"""The answers of ``services``, ``backends`` and ``frontends`` as text."""

from __future__ import annotations

from pyebpf_proxy.config.addresses import join_host_port
from pyebpf_proxy.see import model
from pyebpf_proxy.see.text import Cell, Terminal, duration, fields, table, wrapped

_REFUSED = "no endpoints: refused (port unreachable)"


def services_text(answer: model.Services, terminal: Terminal, details: bool) -> list[str]:
    """The services as a table, or with ``details`` each service port in full."""
    lines: list[str] = []
    if details:
        for view in answer.services:
            lines += [*([""] if lines else []), *_details(view, terminal)]
    else:
        head = ["NAME", "PROTO", "CLUSTER-IP", "OTHER ADDRESSES", "NODEPORT", "ENDPOINTS", "POLICY", "AFFINITY"]
        lines += table(terminal, head, [_row(view) for view in answer.services])
    for view in answer.services if not details else ():
        for text in view.differences:
            lines += wrapped(terminal, f"{view.name} {view.protocol} IPv{view.family}: {text}", colour="yellow")
    for text in answer.not_served:
        lines += wrapped(terminal, f"warning: {text}", colour="yellow")
    if answer.objects_missing:
        lines += wrapped(
            terminal, f"endpoints that are not used are not shown: {answer.objects_missing}", colour="yellow"
        )
    for problem in answer.problems:
        lines += wrapped(terminal, f"warning: {problem}", colour="red")
    return lines or ["no services"]


def _row(view: model.ServiceView) -> list[Cell | str]:
    def those(*kinds: str) -> str:
        return ", ".join(_place(each) for each in view.frontends if each.kind in kinds)

    return [
        Cell(view.name, "yellow" if view.differences else ""),
        view.protocol,
        those("ClusterIP") or "-",
        those("ExternalIP", "LoadBalancer"),
        those("NodePort"),
        _count(view),
        _policy(view),
        duration(view.affinity_seconds) if view.affinity_seconds else "",
    ]


def _place(view: model.FrontendView) -> str:
    if view.kind == "NodePort":
        return str(view.port)
    return join_host_port(view.address, view.port)


def _count(view: model.ServiceView) -> Cell:
    used = [endpoint for endpoint in view.endpoints if endpoint.lists]
    local = sum(endpoint.local for endpoint in used)
    return Cell(f"{len(used)} ({local} local)" if local else str(len(used)), "" if used else "red")


def _policy(view: model.ServiceView) -> str:
    parts = ["internal Local"] * (view.internal_traffic_policy == "Local")
    parts += ["external Local"] * (view.external_traffic_policy == "Local")
    parts += [f"{len(view.source_ranges)} source ranges"] * bool(view.source_ranges)
    return ", ".join(parts)


def _details(view: model.ServiceView, terminal: Terminal) -> list[str]:
    title = f"{view.name}  {view.protocol}  IPv{view.family}"
    lines = [terminal.paint(title, "bold")]
    pairs: list[tuple[str, str | Cell]] = [(each.kind, _place(each)) for each in view.frontends]
    pairs += [
        ("policies", f"internal {view.internal_traffic_policy}, external {view.external_traffic_policy}"),
        ("affinity", f"ClientIP, {duration(view.affinity_seconds)}" if view.affinity_seconds else "none"),
        (
            "sources",
            f"LoadBalancer addresses: only from {', '.join(view.source_ranges)}" if view.source_ranges else "any",
        ),
        ("in the kernel", f"service {view.id}, configuration {view.config}" if view.id else "no"),
    ]
    pairs += [("endpoints", note) for note in view.endpoint_notes]
    lines += fields(terminal, pairs)
    lines += [f"  difference: {text}" for text in view.differences]
    if not view.endpoints or view.no_endpoints:
        nothing = "no endpoints here, but on other nodes: dropped" if view.any_endpoints else _REFUSED
        lines += wrapped(terminal, nothing, indent="  ", colour="red")
        lines += wrapped(terminal, view.no_endpoints, indent="  ", colour="red") if view.no_endpoints else []
    if not view.endpoints:
        return lines
    inner = Terminal(max(terminal.width - 2, 10), terminal.colour)
    rows: list[list[Cell | str]] = [
        [
            each.address,
            each.pod,
            "local" if each.local else "remote",
            Cell(each.left_out, "yellow") if each.left_out else _used_for(view, each),
            str(each.backend or ""),
        ]
        for each in view.endpoints
    ]
    head = ["ENDPOINT", "POD", "NODE", "USED FOR", "BACKEND"]
    return lines + ["  " + line for line in table(inner, head, rows)]


def _used_for(view: model.ServiceView, endpoint: model.EndpointView) -> str:
    if "cluster" in endpoint.lists and "local" in endpoint.lists:
        return "all traffic"
    if "local" in endpoint.lists:
        return "traffic policy Local"
    policies = (view.internal_traffic_policy, view.external_traffic_policy)
    return "traffic policy Cluster" if "Local" in policies else "all traffic"


def backends_text(answer: model.Backends, terminal: Terminal) -> list[str]:
    """The backends as a table."""
    rows: list[list[Cell | str]] = [
        [str(v.id), v.address, v.pod, v.protocol, v.service, "local" if v.local else "remote"] for v in answer.backends
    ]
    head = ["ID", "ENDPOINT", "POD", "PROTO", "SERVICE", "NODE"]
    return table(terminal, head, rows) if rows else ["no endpoints"]


def frontends_text(answer: model.Frontends, terminal: Terminal) -> list[str]:
    """The frontends as a table."""
    rows: list[list[Cell | str]] = [[_place(v), v.protocol, v.kind, v.service] for v in answer.frontends]
    return table(terminal, ["ADDRESS", "PROTO", "KIND", "SERVICE"], rows) if rows else ["no addresses"]
