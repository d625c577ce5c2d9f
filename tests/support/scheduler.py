# SPDX-License-Identifier: Apache-2.0
"""Which tests of a run with workers belong together (``workers``)."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


class Modules(LoadScopeScheduling):
    """A module stays on one worker, with its lab and its agents."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]
