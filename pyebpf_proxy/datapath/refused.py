# SPDX-License-Identifier: Apache-2.0
"""The base of this room's errors for what the kernel refuses."""

from __future__ import annotations


class RefusedError(OSError):
    """``errno`` for code, ``str()`` for people: one line that says what was tried and why it was refused."""

    def __init__(self, number: int | None, text: str) -> None:
        super().__init__(number, text)
        self.text = text

    def __str__(self) -> str:
        return self.text
