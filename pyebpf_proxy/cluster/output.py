# SPDX-License-Identifier: Apache-2.0
"""What the commands print: plain lines as they go, or one JSON document at the end."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pyebpf_proxy.common.closed_pipe import closed_pipe
from pyebpf_proxy.see import text as texts
from pyebpf_proxy.see.answers import NOT_RIGHT

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
    """Lines are written at once. ``document``: what ``-o json`` prints at the end.

    When the reader closes the pipe, or the disk is full, the command goes on without output: a node that is being taken
    over must not be left halfway.
    """

    def __init__(self, as_json: bool, terminal: texts.Terminal | None = None) -> None:
        self.as_json = as_json
        self.terminal = texts.terminal() if terminal is None else terminal
        self.document: dict[str, Any] = {}
        #: Exit status if the command itself is successful: 0, or that of a closed pipe.
        self.status = 0
        self._bar: Progress | None = None
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A message of the API server may have characters that the terminal's encoding lacks.
            sys.stdout.reconfigure(errors="backslashreplace")

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
            self.status = closed_pipe()
            if error.errno != errno.EIO:  # the terminal was closed
                self.status = NOT_RIGHT
                text = f"Error: stdout cannot be written: {error.strerror}; the command continues without output"
                with contextlib.suppress(OSError):
                    print(text, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """One line or several; none with -o json."""
        if not self.as_json:
            # Names and messages come from the cluster.
            self._print("\n".join(map(texts.safe, text.split("\n"))))

    @contextlib.contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Callable[[], None]]:
        """A bar below the lines, on a terminal only. The result is called after each of ``total`` steps.

        None: their number is not known; 0: no bar.
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
