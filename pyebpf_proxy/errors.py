# SPDX-License-Identifier: Apache-2.0
"""Errors that cross rooms. Their text is one line: what is missing or refused, and what to do about it."""

from __future__ import annotations


class FatalError(Exception):
    """The program cannot go on; it says so and ends with status 1."""


class DatapathError(Exception):
    """The kernel refused something. At start it is fatal, later the sync is repeated."""
