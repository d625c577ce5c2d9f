# SPDX-License-Identifier: Apache-2.0
"""Labs as fixtures. A module's lab lives as long as the module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyebpf_proxy.lab.cluster import Lab
from tests.support.conversation import Conversation
from tests.support.fast_lab import FAR, Ask, FastWorld, build_fast_world, open_conversations
from tests.support.fixtures import bpffs, family, protocol

__all__ = ["bpffs", "family", "protocol"]


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A separate lab for the test: two nodes, no pods, no agents."""
    with Lab() as small:
        yield small


@pytest.fixture(scope="module")
def fast_world() -> Iterator[FastWorld]:
    """The module's lab with the fast path on."""
    with Lab() as lab:
        yield build_fast_world(lab)


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Starts conversations; they end with the test."""
    with open_conversations() as begin:
        yield begin


@pytest.fixture
def far(fast_world: FastWorld, ask: Ask) -> Conversation:
    """A pod's connection to a pod on the other node, on the fast path."""
    conversation = ask(fast_world.client.namespace, FAR.v4)
    fast_world.fast(conversation)
    return conversation
