# SPDX-License-Identifier: Apache-2.0
"""Parsing of command lines: an error is one line and an exit status."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from pyebpf_proxy.common.printable import printable


class Parser(argparse.ArgumentParser):
    """An error prints one line, with the problem and the command that shows the help, instead of the usage."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(fail(f"{message}; see {self.prog} --help", 2))  # argparse's own status


def fail(text: str, status: int) -> int:
    """Print the error. The result is the status."""
    print(f"Error: {printable(text)}", file=sys.stderr)
    return status
