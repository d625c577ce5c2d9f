# SPDX-License-Identifier: Apache-2.0
"""Exit statuses of the commands, and errors for missing answers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Answered, no problem found.
RIGHT = 0
#: Answered, a problem was found: a warning, a difference, a refused packet.
NOT_RIGHT = 1
#: Wrong usage: invalid arguments, an unknown or ambiguous name, different IP families.
QUESTION = 2
#: No answer: nothing is installed, no permission, maps of another layout, no agent where one is needed.
NO_ANSWER = 3


class SeeError(Exception):
    """There is no answer. The text is one line with the cause and the remedy."""

    status = NO_ANSWER


class OtherLayoutError(SeeError):
    """The pinned maps have another layout version."""


class QuestionError(SeeError):
    """The arguments are wrong."""

    status = QUESTION


class UnknownServiceError(QuestionError):
    """No Service that is served has the name. ``wanted``: the name, as on the command line."""

    def __init__(self, text: str, wanted: str) -> None:
        super().__init__(text)
        self.wanted = wanted


def near(wrong: str, known: Iterable[str]) -> str:
    """A hint for a message: similar names; empty if there are none."""
    found = difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first few names, on one line."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
