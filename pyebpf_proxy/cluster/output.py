# SPDX-License-Identifier: Apache-2.0
"""What the commands print: plain lines as they go, or one JSON document at the end."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from pyebpf_proxy.common.closed_pipe import closed_pipe
from pyebpf_proxy.see import text as texts

State = Literal["good", "warning", "bad"]


class Finding(NamedTuple):
    """One result of a check. ``where``: a node's name, or "" for the cluster."""

    what: str
    state: State
    text: str
    remedy: str = ""
    where: str = ""


def counted(number: int, what: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


class Output:
    """Lines are written at once. ``document``: what ``-o json`` prints at the end.

    When the reader closes the pipe, the command goes on without output: a node that is being taken over must not be
    left halfway.
    """

    def __init__(self, as_json: bool, terminal: texts.Terminal | None = None) -> None:
        self.as_json = as_json
        self.terminal = texts.terminal() if terminal is None else terminal
        self.document: dict[str, Any] = {}
        #: Exit status if the command itself is successful: 0, or that of a closed pipe.
        self.status = 0

    def _print(self, text: str) -> None:
        try:
            print(text, flush=True)
        except BrokenPipeError:
            self.status = closed_pipe()

    def say(self, text: str) -> None:
        """One line or several; none with -o json."""
        if not self.as_json:
            # Names and messages come from the cluster.
            self._print("\n".join(map(texts.safe, text.split("\n"))))

    def findings(self, findings: list[Finding]) -> None:
        """All of them, the good ones too, and what to do about the others."""
        self.document["findings"] = [each._asdict() for each in findings]
        for each in findings:
            where = f"{each.where}: " if each.where else ""
            self.say(f"{each.state:7}  {where}{each.what}: {each.text}")
            if each.remedy and each.state != "good":
                self.say(f"         {each.remedy}")

    def table(self, name: str, head: list[str], rows: list[list[str]], keys: list[str]) -> None:
        """Rows of text; with -o json objects with these keys."""
        self.document[name] = [dict(zip(keys, row, strict=True)) for row in rows]
        self.lines(head, rows)

    def lines(self, head: list[str], rows: list[list[str]]) -> None:
        """Rows of text as a table; not part of the document."""
        for line in texts.table(self.terminal, head, rows):
            self.say(line)

    def end(self) -> None:
        """Print the JSON document, if that was asked for."""
        if self.as_json:
            self._print(json.dumps(self.document, indent=2))
