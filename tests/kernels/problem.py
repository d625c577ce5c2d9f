# SPDX-License-Identifier: Apache-2.0
"""The error that ends a run before any kernel has been tried, or ends one kernel's: one line with the remedy."""

from __future__ import annotations


class KernelsError(Exception):
    """One line: what is missing or failed, and the remedy."""
