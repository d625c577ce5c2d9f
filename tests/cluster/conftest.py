# SPDX-License-Identifier: Apache-2.0
"""Fixtures of several modules. Each module has its own API server, ``server``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.commands import watched
from tests.cluster.simulated_nodes import SimulatedNodes
from tests.support.apiserver import ApiServer


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path) -> Iterator[SimulatedNodes]:
    """Three simulated nodes with kube-proxy, and a recorder that fails the test if a node is without a proxy."""
    with watched(server, tmp_path) as nodes:
        yield nodes
