# SPDX-License-Identifier: Apache-2.0
"""What every command may end with: exit statuses, and the one line that says why there is no answer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Answered, and all is right.
RIGHT = 0
#: Answered, and something is not right: a warning, a difference, a packet that is refused.
NOT_RIGHT = 1
#: The question cannot be understood: usage, an unknown or ambiguous name, a wrong family.
QUESTION = 2
#: No answer can be had: nothing is installed, no permission, maps of another layout, no agent where one is needed.
NO_ANSWER = 3


class SeeError(Exception):
    """There is no answer; one line says why and what to do."""

    status = NO_ANSWER


class QuestionError(SeeError):
    """The question cannot be understood."""

    status = QUESTION


def near(wrong: str, known: Iterable[str]) -> str:
    """Words for a message: what may have been meant, or nothing."""
    found = difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def listed(names: Iterable[str], most: int = 5) -> str:
    """Names for one line, the first few of them."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
