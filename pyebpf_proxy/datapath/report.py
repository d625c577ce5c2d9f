# SPDX-License-Identifier: Apache-2.0
"""The report of a clean-up."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Report:
    """What was removed, and what could not be removed, one line each."""

    removed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    #: Information for the operator although nothing has failed.
    warnings: list[str] = field(default_factory=list)
