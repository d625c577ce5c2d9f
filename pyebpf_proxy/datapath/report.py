# SPDX-License-Identifier: Apache-2.0
"""What a clean-up has to say."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Report:
    """What was removed, and what could not be, one line each."""

    removed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    #: What the operator should know though nothing has failed.
    warnings: list[str] = field(default_factory=list)
