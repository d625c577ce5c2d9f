# SPDX-License-Identifier: Apache-2.0
"""The answer of ``explain`` as text."""

from __future__ import annotations

from pyebpf_proxy.see import model
from pyebpf_proxy.see.text import Cell, Terminal, table, wrapped

_VERDICTS = {
    "served": ("green", "goes to one of these endpoints"),
    "refused": ("red", "is refused: ICMP port unreachable, or ECONNREFUSED"),
    "dropped": ("red", "is dropped"),
    "left": ("yellow", "is passed to the kernel: no service handles it"),
}


def text(view: model.Explanation, terminal: Terminal) -> list[str]:
    """The lines of the answer."""
    where = f"from {view.device}" if view.device else "from a process of this node"
    colour, verdict = _VERDICTS[view.verdict]
    lines = wrapped(terminal, f"{view.source} > {view.destination} {view.protocol}, {where}", colour="bold")
    for number, step in enumerate(view.steps, 1):
        lines += wrapped(terminal, f"{number}. {step}", indent="  ")
    lines += wrapped(terminal, f"It {verdict}" + (f" ({view.reason})" if view.reason else "") + ".", colour=colour)  # type: ignore[arg-type]
    if view.endpoints:
        head = ["ENDPOINT", "POD", "NODE", "PATH", "MASQUERADED AS", "EGRESS"]
        lines += ["", *table(terminal, head, list(map(_row, view.endpoints)))]
        for why, addresses in _whys(view).items():
            lines += wrapped(terminal, f"{', '.join(addresses)}{why}")
    if view.left_out:
        rows: list[list[Cell | str]] = [
            [e.address, e.pod, "local" if e.local else "remote", e.left_out] for e in view.left_out
        ]
        lines += ["", *table(terminal, ["EXCLUDED", "POD", "NODE", "WHY"], rows)]
    if view.objects_missing and view.service:
        what = f"endpoints that are not used are not shown: {view.objects_missing}"
        lines += ["", *wrapped(terminal, what, colour="yellow")]
    lines.append("")
    if not view.program.ran:
        return lines + wrapped(terminal, f"Not run: {view.program.why}.", colour="yellow")
    if view.xdp is not None:
        lines += wrapped(terminal, f"{_ran_text('XDP program', view.xdp, view)}.")
    ran = _ran_text("program" if view.xdp is None else "tc program", view.program, view)
    if not view.disagreements:
        return lines + wrapped(terminal, f"{ran}. It agrees with the rules.")
    lines += wrapped(terminal, f"{ran}.")
    for each in view.disagreements:
        lines += wrapped(terminal, f"disagreement: {each}", colour="red")
    return lines


def _ran_text(which: str, program: model.ProgramView, view: model.Explanation) -> str:
    counted = f", counted {', '.join(program.counted)}" if program.counted else ""
    chose = next((each.address for each in view.endpoints if each.backend == program.backend), "")
    verdict = program.verdict
    if which.startswith("XDP"):
        verdict = {
            "left": "passed to tc",
            "served": "selects the endpoint, tc opens the flow",
        }.get(verdict, verdict)
    return f"Dry run of the {which}: {verdict}" + (f" by {chose}" if chose else "") + counted


def _row(view: model.ChoiceView) -> list[Cell | str]:
    masquerade = view.masquerade_as or ("an address of this node" if view.masquerade else "-")
    return [view.address, view.pod, "local" if view.local else "remote", view.path, masquerade, view.egress]


def _whys(view: model.Explanation) -> dict[str, list[str]]:
    """Why a new flow takes its path: endpoints by reason. If there is only one reason, it has no endpoints."""
    found: dict[str, list[str]] = {}
    for each in view.endpoints:
        if each.path_why:
            reason = f" ({each.path_reason})" if each.path_reason else ""
            found.setdefault(f"{each.path}: {each.path_why}{reason}", []).append(each.address)
    if len(found) == 1:
        (why,) = found
        return {f"Path of a new flow: {why}": []}
    return {f" by {why}": addresses for why, addresses in found.items()}
