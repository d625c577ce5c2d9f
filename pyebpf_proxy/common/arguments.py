# SPDX-License-Identifier: Apache-2.0
"""Command lines of commands: an error is one line, and an exit status."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from pyebpf_proxy.common.printable import printable


class Parser(argparse.ArgumentParser):
    """Instead of the usage, one line names the error and the command that shows the help."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(fail(f"{message}; see {self.prog} --help", 2))  # the status that argparse has


def fail(text: str, status: int) -> int:
    """Print the error. The result is the status."""
    print(f"Error: {printable(text)}", file=sys.stderr)
    return status
