# SPDX-License-Identifier: Apache-2.0
"""What the agent sets for its own process."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from pyebpf_proxy.agent.run import OPEN_FILES, allow_open_files


@pytest.fixture
def limit() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_of_open_files_is_raised(limit: tuple[int, int]) -> None:
    """Tenants' health check node ports must not use up the 1024 descriptors that a process often has."""
    _, hard = limit
    wanted = min(OPEN_FILES, hard) if hard != resource.RLIM_INFINITY else OPEN_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    if hard > OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES + 1, hard))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (OPEN_FILES + 1, hard)
