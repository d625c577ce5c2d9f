# SPDX-License-Identifier: Apache-2.0
"""The lines of ``trace``: text, JSON, or a name. Pure."""

from __future__ import annotations

import textwrap
from datetime import datetime

import msgspec

from pyebpf_proxy.common.printable import printable, printable_json
from pyebpf_proxy.see import model
from pyebpf_proxy.see.text import Colour, Terminal

Line = model.Decision | model.KernelDrop | model.TcpState | model.Lost

_COLOURS: dict[str, Colour] = {"refused": "red", "dropped": "red", "replaced": "dim"}


def printed(line: Line, form: str, terminal: Terminal) -> str:
    """The line in a format, ``table``, ``json`` or ``name``; "" if the format omits it."""
    if form == "json":
        return printable_json(msgspec.json.encode(line).decode())
    if form == "name":
        return printable(line.service) if isinstance(line, model.Decision) else ""
    if isinstance(line, model.Decision):
        text, colour = _decision(line)
    elif isinstance(line, model.Lost):
        text, colour = _lost(line)
    else:
        text, colour = _kernel(line)
    text = printable(f"{_clock(line.time)} {text}")
    parts = [text]
    if len(text) > terminal.width:
        parts = textwrap.wrap(text, terminal.width, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(terminal.paint(part, colour) for part in parts)


def _clock(utc: str) -> str:
    return datetime.fromisoformat(utc).astimezone().strftime("%H:%M:%S.%f")[:-3]


def _decision(decision: model.Decision) -> tuple[str, Colour]:
    where = decision.device or f"{decision.process}[{decision.pid}]"
    if decision.hook == "xdp":
        where += "(xdp)"
    # When a socket connects, it has no port yet.
    source = decision.source.removesuffix(":0")
    words = [f"{where} {_named(source, decision.source_name)} > {decision.destination} {decision.protocol}"]
    if decision.service:
        words.append(decision.service)
    if decision.endpoint:
        words.append(f"to {_named(decision.endpoint, decision.endpoint_name)}")
    if decision.path:
        words.append(f"{decision.path} ({decision.slow})" if decision.slow else decision.path)
    if decision.masquerade:
        words.append("masqueraded" + (f" as {decision.masqueraded_as}" if decision.masqueraded_as else ""))
    if decision.verdict in ("refused", "dropped"):
        words.append(decision.verdict.upper())
    words.append(decision.reason)
    return ", ".join(words), _COLOURS.get(decision.verdict, "")


def _named(place: str, pod: str) -> str:
    return f"{place} ({pod})" if pod else place


def _kernel(line: model.KernelDrop | model.TcpState) -> tuple[str, Colour]:
    words = [f"kernel{f' (netns {line.netns})' if line.netns else ''}: {line.source} > {line.destination}"]
    words[0] += f" {line.protocol}"
    if isinstance(line, model.KernelDrop):
        words.append(f"dropped by {line.where}: {line.reason}" + (f" on {line.device}" if line.device else ""))
    else:
        words.append(f"{line.before} to {line.now}")
    if (line.client, line.frontend) != (line.source, line.destination):
        words.append(f"of {line.client.removesuffix(':0')} > {line.frontend}")
    if line.service:
        words.append(line.service)
    return ", ".join(words), "yellow" if isinstance(line, model.KernelDrop) else "dim"


def _lost(lost: model.Lost) -> tuple[str, Colour]:
    return f"{lost.count} {lost.what} lost: the buffer was full; use a FILTER or a larger --buffer", "yellow"
