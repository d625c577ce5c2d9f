# SPDX-License-Identifier: Apache-2.0
"""Fixtures of several modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.commands import watched
from tests.cluster.simulated_nodes import SimulatedNodes
from tests.support.apiserver import ApiServer


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """The module's own API server, with the flag that kubeadm sets: kube-proxy is privileged, and needs it.

    A module that needs another server has its own fixture.
    """
    with ApiServer(("--allow-privileged",)) as started:
        yield started


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path) -> Iterator[SimulatedNodes]:
    """Three simulated nodes with kube-proxy, and a recorder that fails the test if a node is without a proxy."""
    with watched(server, tmp_path) as nodes:
        yield nodes
