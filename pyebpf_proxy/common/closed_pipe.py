# SPDX-License-Identifier: Apache-2.0
"""Handling of a closed stdout pipe."""

from __future__ import annotations

import os
import signal
import sys


def closed_pipe() -> int:
    """The exit status for a closed pipe. Stdout is redirected: otherwise Python reports an error when it closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
