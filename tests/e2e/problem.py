# SPDX-License-Identifier: Apache-2.0
"""The error that ends a command early."""

from __future__ import annotations


class E2EError(Exception):
    """One line: what is missing or failed, and the remedy."""
