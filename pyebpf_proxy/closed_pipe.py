# SPDX-License-Identifier: Apache-2.0
"""What a command does whose reader went away."""

from __future__ import annotations

import os
import signal
import sys


def closed_pipe() -> int:
    """The exit status. Python would complain once more when it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
