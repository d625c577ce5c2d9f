# SPDX-License-Identifier: Apache-2.0
"""Each module of program tests shares one node per family, each module of map tests one set of maps. Every test starts
with empty maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.programs import Loaded, Settings, load
from pyebpf_proxy.datapath.maps.writer import Writer
from tests.packet.program_node import ProgramNode
from tests.packet.service_maps import SIZES, wipe
from tests.support.fixtures import bpffs

__all__ = ["bpffs"]


@pytest.fixture(scope="module", params=[4, 6], ids=["IPv4", "IPv6"])
def node(request: pytest.FixtureRequest) -> Iterator[ProgramNode]:
    world = ProgramNode(request.param)
    yield world
    world.close()


@pytest.fixture
def world(node: ProgramNode) -> ProgramNode:
    """Only the slow path, with a local detector by CIDR."""
    node.forget_flows()
    node.settings = {}
    node.load()
    return node


@pytest.fixture(params=["tc", "xdp"])
def hooks(request: pytest.FixtureRequest, node: ProgramNode) -> ProgramNode:
    """Once with tc alone and once with XDP before tc, for results that must not depend on the hook."""
    node.forget_flows()
    node.settings = {"xdp": 1} if request.param == "xdp" else {}
    node.load()
    return node


@pytest.fixture(scope="module")
def kernel(bpf_objects: Path) -> Iterator[Loaded]:
    """Small maps of the services; all their tests share one load."""
    loaded = load(Settings(netns_cookie=1), sizes=SIZES, objects=bpf_objects)
    yield loaded
    loaded.close()


@pytest.fixture
def loaded(kernel: Loaded) -> Iterator[Loaded]:
    """The same maps, empty; maps that a test replaces are restored."""
    wipe(kernel)
    real = dict(kernel.maps)
    yield kernel
    kernel.maps.update(real)


@pytest.fixture
def writer(loaded: Loaded) -> Writer:
    return Writer(loaded)
