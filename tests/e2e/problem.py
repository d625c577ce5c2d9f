# SPDX-License-Identifier: Apache-2.0
"""What ends a command before it has done its work."""

from __future__ import annotations


class E2EError(Exception):
    """One line: what is missing or failed, and the remedy."""
