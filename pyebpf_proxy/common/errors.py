# SPDX-License-Identifier: Apache-2.0
"""Errors that cross packages. Their text is one line with the cause and the remedy."""

from __future__ import annotations


class FatalError(Exception):
    """The program cannot continue. It logs the error and exits with status 1."""


class DatapathError(Exception):
    """The kernel rejected an operation. At the start this is fatal; later, the sync is repeated."""
