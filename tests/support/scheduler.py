# SPDX-License-Identifier: Apache-2.0
"""Which tests must run on one worker (``workers``)."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.workers import module_of


class Modules(LoadScopeScheduling):
    """All tests of a module run on one worker, with their lab and agents."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return module_of(nodeid)
