# SPDX-License-Identifier: Apache-2.0
"""The error that ends a run of the lab early: one line with the remedy."""

from __future__ import annotations


class VagrantError(Exception):
    """One line: what is missing or failed, and the remedy."""
