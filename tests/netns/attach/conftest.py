# SPDX-License-Identifier: Apache-2.0
"""Tests of attachment. Each one runs in a new network namespace, which this process enters and leaves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.node.devices import MAPS
from tests.netns.attach.router import CLONE_NEWNET, Router, Shell, check, libc


@pytest.fixture
def shell() -> Shell:
    """Run a script and return its output; a failing line fails the test."""

    def run(script: str) -> str:
        done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script}: {done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def namespace(shell: Shell) -> Iterator[None]:
    """A nameless network namespace. It ends with its last descriptor, also if the test is killed."""
    before = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    check(libc.unshare(CLONE_NEWNET))
    try:
        shell("ip link set lo up")
        yield
    finally:
        check(libc.setns(before, CLONE_NEWNET))
        os.close(before)


@pytest.fixture(scope="session")
def loaded(bpf_objects: Path) -> Iterator[Object]:
    """The tc object. Its programs take the verifier long, so all tests share them."""
    with Object.open(bpf_objects / "tc.bpf.o") as opened:
        yield opened.load()


@pytest.fixture
def programs(loaded: Object) -> Iterator[Object]:
    """The tc object with maps that are not pinned. Those of the node are empty."""
    for name in MAPS:
        loaded.maps[name].delete_batch(loaded.maps[name].dump()[0])
    real = dict(loaded.maps)
    yield loaded
    loaded.maps.update(real)


@pytest.fixture
def router(namespace: None, shell: Shell) -> Iterator[Router]:
    made = Router(shell)
    try:
        made.make()
        yield made
    finally:
        made.remove()


@pytest.fixture
def table(namespace: None) -> Table:
    return Table()
