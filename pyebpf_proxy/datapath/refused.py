# SPDX-License-Identifier: Apache-2.0
"""The base class of this package's errors from the kernel."""

from __future__ import annotations


class RefusedError(OSError):
    """``errno`` for code, ``str()`` for people: one line with what was tried and why it was refused."""

    def __init__(self, number: int | None, text: str) -> None:
        super().__init__(number, text)
        self.text = text

    def __str__(self) -> str:
        return self.text
