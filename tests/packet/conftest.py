# SPDX-License-Identifier: Apache-2.0
"""One node per family for each module; programs and maps fresh for every test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import World


@pytest.fixture(scope="module", params=[4, 6], ids=["IPv4", "IPv6"])
def node(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.close()


@pytest.fixture
def world(node: World) -> World:
    """The direct lane, a detector by CIDR: what most nodes have."""
    node.forget_flows()
    node.load()
    return node


@pytest.fixture(params=["direct", "netfilter"])
def lanes(request: pytest.FixtureRequest, node: World) -> World:
    """The same in both lanes: for what must not depend on the lane."""
    node.forget_flows()
    node.load(direct_lane=int(request.param == "direct"))
    return node
