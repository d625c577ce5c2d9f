# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: plain lines during the work, or one JSON document at the end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pyebpf_proxy.common.closed_pipe import closed_pipe
from pyebpf_proxy.see import text as texts

if TYPE_CHECKING:
    from rich.progress import Progress

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
    """Writes lines at once, or with ``-o json`` the ``document`` at the end.

    If the reader closes the pipe, the command continues without output: the takeover of a node must not stop halfway.
    """

    def __init__(self, as_json: bool, terminal: texts.Terminal | None = None) -> None:
        self.as_json = as_json
        self.terminal = texts.terminal() if terminal is None else terminal
        self.document: dict[str, Any] = {}
        #: Exit status of a successful command: 0, or that of a closed pipe.
        self.status = 0
        self._bar: Progress | None = None

    def _print(self, text: str) -> None:
        try:
            if self._bar is None:
                print(text, flush=True)
            else:
                from rich.text import Text

                self._bar.console.print(Text.from_ansi(text), soft_wrap=True)
        except BrokenPipeError:
            self.status = closed_pipe()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.status = closed_pipe()  # the terminal was closed

    def say(self, text: str) -> None:
        """Print one or several lines; nothing with -o json."""
        if not self.as_json:
            # Names and messages of the cluster are untrusted.
            self._print("\n".join(map(texts.safe, text.split("\n"))))

    @contextlib.contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Callable[[], None]]:
        """Show a progress bar below the lines, only on a terminal. Call the result after each of ``total`` steps.

        ``total`` is None if the number is not known; 0: no bar.
        """
        if self.as_json or total == 0 or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            yield lambda: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
            task = bar.add_task(what, total=total)
            self._bar = bar
            try:
                yield lambda: bar.advance(task)
            finally:
                self._bar = None

    def findings(self, findings: list[Finding]) -> None:
        """Print all findings, and the remedies of those that are not good."""
        self.document["findings"] = [each._asdict() for each in findings]
        for each in findings:
            where = f"{each.where}: " if each.where else ""
            self.say(f"{each.state:7}  {where}{each.what}: {each.text}")
            if each.remedy and each.state != "good":
                self.say(f"         {each.remedy}")

    def table(self, name: str, head: list[str], rows: list[list[str]], keys: list[str]) -> None:
        """Print rows as a table; with -o json, they become objects with these keys."""
        self.document[name] = [dict(zip(keys, row, strict=True)) for row in rows]
        self.lines(head, rows)

    def lines(self, head: list[str], rows: list[list[str]]) -> None:
        """Print rows as a table that is not part of the document."""
        for line in texts.table(self.terminal, head, rows):
            self.say(line)

    def end(self) -> None:
        """Print the JSON document, with -o json."""
        if self.as_json:
            self._print(json.dumps(self.document, indent=2))
