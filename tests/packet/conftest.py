# SPDX-License-Identifier: Apache-2.0
"""One node per family for each module of program tests, one set of maps for each of map tests; fresh for every test."""

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
    """The slow path alone, a detector by CIDR."""
    node.forget_flows()
    node.settings = {}
    node.load()
    return node


@pytest.fixture(params=["tc", "xdp"])
def hooks(request: pytest.FixtureRequest, node: ProgramNode) -> ProgramNode:
    """tc alone, and XDP before tc: for what must not depend on the hook."""
    node.forget_flows()
    node.settings = {"xdp": 1} if request.param == "xdp" else {}
    node.load()
    return node


@pytest.fixture(scope="module")
def kernel(bpf_objects: Path) -> Iterator[Loaded]:
    """The maps of the services, small; their tests share one load."""
    loaded = load(Settings(netns_cookie=1), sizes=SIZES, objects=bpf_objects)
    yield loaded
    loaded.close()


@pytest.fixture
def loaded(kernel: Loaded) -> Iterator[Loaded]:
    """The same with empty maps; what a test puts in a map's place is taken out again."""
    wipe(kernel)
    real = dict(kernel.maps)
    yield kernel
    kernel.maps.update(real)


@pytest.fixture
def writer(loaded: Loaded) -> Writer:
    return Writer(loaded)
