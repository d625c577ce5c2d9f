# SPDX-License-Identifier: Apache-2.0
"""The kernels that the agent runs on (docs/kernels.md). For messages: the agent itself tries features, not versions."""

from __future__ import annotations

#: Older kernels lack something that the agent cannot do without.
OLDEST_KERNEL = (5, 14)
#: Kernels from here on are tested.
TESTED_KERNEL = (6, 1)


def dotted(version: tuple[int, int]) -> str:
    """As in ``6.1``."""
    return ".".join(map(str, version))
