# SPDX-License-Identifier: Apache-2.0
"""Which tests of a run with workers belong together (``workers``)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_LANE = re.compile(r"\[(?:.*-)?(direct|netfilter)(?:-.*)?\]$")


class Modules(LoadScopeScheduling):
    """A module stays on one worker, with its lab and its agents; one with a lab for each lane is as good as two."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        lane = _LANE.search(nodeid)
        return f"{module} {lane[1]}" if lane and module.startswith("tests/netns/") else module
