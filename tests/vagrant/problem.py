# SPDX-License-Identifier: Apache-2.0
"""What ends a run of the lab before it has tried what it is for: one line with the remedy."""

from __future__ import annotations


class VagrantError(Exception):
    """One line: what is missing or failed, and the remedy."""
