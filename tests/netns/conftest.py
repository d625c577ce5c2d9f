# SPDX-License-Identifier: Apache-2.0
"""Labs as fixtures. A module's lab lives as long as the module; every test of it runs once per lane."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.lab.cluster import Lab

# Helper modules of this folder (lab_tools, lab_services) are imported by name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", params=("direct", "netfilter"))
def lane(request: pytest.FixtureRequest) -> str:
    """The lane that new flows must take; ``lab_tools.agent_lane`` says how the agent is told."""
    value: str = request.param
    return value


@pytest.fixture(params=(4, 6), ids=("ipv4", "ipv6"))
def family(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


@pytest.fixture(params=("tcp", "udp"))
def protocol(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A lab of the test's own: two nodes, no pods, no agents."""
    with Lab() as made:
        yield made
