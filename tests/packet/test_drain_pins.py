# SPDX-License-Identifier: Apache-2.0
"""The pinned programs with which a later agent drains the flow table, while another agent replaces them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.datapath.connections.drain import PROGRAMS, pin_programs, unpin_programs
from pyebpf_proxy.datapath.loader import tcx
from pyebpf_proxy.datapath.loader.libbpf import Program
from pyebpf_proxy.datapath.loader.programs import Settings, load
from tests.packet.service_maps import SIZES
from tests.packet.service_plans import Killed

pytestmark = pytest.mark.needs_bpf


@pytest.fixture
def programs(bpf_objects: Path) -> Iterator[Mapping[str, Program]]:
    loaded = load(Settings(netns_cookie=1, fast_path=True), sizes=SIZES, objects=bpf_objects)
    yield loaded.tc.programs
    loaded.close()


@pytest.mark.parametrize("before", ["the pin", "the rename"])
def test_an_agent_that_is_killed_leaves_the_former_programs(
    programs: Mapping[str, Program], bpffs: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    pin_programs(programs, bpffs)
    with monkeypatch.context() as context:
        if before == "the pin":
            context.setattr(tcx, "pin", _killed)
        else:
            context.setattr(Path, "rename", _killed)
        with pytest.raises(Killed):
            pin_programs(programs, bpffs)
    assert {"sweep_flows", "promote_flow"} <= {path.name for path in (bpffs / PROGRAMS).iterdir()}
    pin_programs(programs, bpffs)
    assert {"sweep_flows", "promote_flow"} == {path.name for path in (bpffs / PROGRAMS).iterdir()}


def test_nothing_is_left_after_a_kill_and_a_start_without_the_fast_path(
    programs: Mapping[str, Program], bpffs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(Path, "rename", _killed)
        with pytest.raises(Killed):
            pin_programs(programs, bpffs)
    unpin_programs(bpffs)
    assert not (bpffs / PROGRAMS).exists()


def _killed(*arguments: Any) -> None:
    raise Killed
