# SPDX-License-Identifier: Apache-2.0
"""The answer of pyebpf-proxy to a case: the real command line, in this process or in a separate one."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pyebpf_proxy import cli
from tests.parity.answer import Answer
from tests.parity.case import Case

_LINE = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z (\w+) (.*?)(?: file=\S+)?(?: error=(.*))?$")
_ENDED = "Error running ProxyServer"


def ask(case: Case, *, apart: bool = False) -> Answer:
    """Run the command line on the case; ``apart``: in a separate process."""
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        if case.file is not None:
            (Path(folder) / "config.yaml").write_bytes(case.file)
        arguments = [argument.replace("{dir}", folder) for argument in case.arguments]
        if apart:
            program = [sys.executable, "-m", "pyebpf_proxy", *arguments]
            ran = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
            status, output, errors = ran.returncode, ran.stdout, ran.stderr
        else:
            status, output, errors = _here(arguments)
        written = Path(folder) / "written.yaml"
        return _answer(status, output, errors, written.read_text() if written.is_file() else None, folder)


def _here(arguments: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    root, own = logging.getLogger(), logging.getLogger("pyebpf_proxy")
    before = root.handlers[:], root.level, own.level, logging.raiseExceptions
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.main(arguments)
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        own.setLevel(before[2])
        logging.raiseExceptions = before[3]
    return status, out.getvalue(), err.getvalue()


def _answer(status: int, output: str, errors: str, document: str | None, folder: str) -> Answer:
    error, warnings = "", []
    if errors.startswith("Error: "):
        error = errors.removeprefix("Error: ")
        errors = ""
    for line in errors.splitlines():
        severity, message = _parsed(line)
        if severity == "error":
            error = message
        elif severity == "warning":
            warnings.append(message)
        elif not severity:
            # A traceback, or another line that is not of the log: part of the answer, and certain to differ.
            error += "\n" + line
    shown = "usage" if "\nUsage:\n" in output else output.strip()
    clean = [text.replace(folder, "{dir}").strip() for text in (error, shown)]
    return Answer(status, clean[0], tuple(warning.replace(folder, "{dir}") for warning in warnings), clean[1], document)


def _parsed(line: str) -> tuple[str, str]:
    """Severity and message; for the end of a run, its reason."""
    if line.startswith('{"time": '):
        entry = json.loads(line)
        reason = entry["error"] if entry["message"] == _ENDED else entry["message"]
        return entry["level"], reason.replace("\n", "\\n")
    match = _LINE.match(line)
    if match is None:
        return "", line
    if match[2] != _ENDED:
        return match[1], match[2]
    return match[1], json.loads(match[3]) if match[3].startswith('"') else match[3]
