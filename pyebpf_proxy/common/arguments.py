# SPDX-License-Identifier: Apache-2.0
"""Parsing of command lines: an error is one line and an exit status."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import Any, NoReturn

from pyebpf_proxy.common.printable import printable


class HelpFormatter(argparse.HelpFormatter):
    """Lines break at spaces only, so that paths and names of options can be copied from the help."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = self._split_lines(text, width - len(indent))
        return "\n".join(indent + line for line in lines)


class RawHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Description and epilog keep their lines."""

    _fill_text = argparse.RawDescriptionHelpFormatter._fill_text


class Parser(argparse.ArgumentParser):
    """An error prints one line, with the problem and the command that shows the help, instead of the usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        raise SystemExit(fail(f"{message}; see {self.prog} --help", 2))  # argparse's own status


def fail(text: str, status: int) -> int:
    """Print the error. The result is the status."""
    print(f"Error: {printable(text)}", file=sys.stderr)
    return status
