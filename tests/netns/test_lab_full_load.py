# SPDX-License-Identifier: Apache-2.0
"""The agent is restarted, killed, replaced by one with another map layout, and removed, all under full load.

2000 new connections a second and 200 long ones, TCP and UDP, both families, from a pod, from the node and from outside:
none is lost, and none is moved to another endpoint. On a slow machine the load is smaller, and each test prints it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.layout import LAYOUT_VERSION
from pyebpf_proxy.lab.cluster import Lab
from tests import ROOT
from tests.changes.load import LASTING, Outcome
from tests.changes.load_world import LoadWorld
from tests.support.lab_tools import wait_until
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf, pytest.mark.alone]


@pytest.fixture
def world() -> Iterator[LoadWorld]:
    """A separate lab for the test: conntrack would still know flows of other loads. Its agent runs."""
    with Lab() as lab, LoadWorld(lab) as made:
        made.start()
        yield made


def report(outcome: Outcome, capsys: pytest.CaptureFixture[str], until: float = float("inf")) -> None:
    """Print the load; fail if a connection was lost or moved, or had to retransmit a packet."""
    with capsys.disabled():
        print(f"\n  {outcome.size(until)}")
    outcome.report(until)


def test_a_restart(world: LoadWorld, capsys: pytest.CaptureFixture[str]) -> None:
    agent = world.node.agent
    with world.load() as load:
        world.gets_fast(load)
        assert agent.stop() == 0
        load.wait_progress()
        world.start()
        world.gets_fast(load)
        report(load.end(), capsys)


def test_kill_9(world: LoadWorld, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent is away until the fast path turns itself off, and comes back."""
    with world.load() as load:
        world.gets_fast(load)
        world.node.agent.kill()
        before = world.count("stack_no_agent")
        wait_until(lambda: world.count("stack_no_agent") > before + 100, "new flows take the slow path")
        load.wait_progress()
        world.start()
        world.gets_fast(load)
        report(load.end(), capsys)


def former_version(folder: Path, other_flows: bool) -> Path:
    """A version of the agent with map layout 1, to be imported from the returned folder.

    ``other_flows``: the entries of the flow table differ too.
    """
    for name in ("pyebpf_proxy", "bpf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    layout = folder / "pyebpf_proxy" / "datapath" / "loader" / "layout.py"
    layout.write_text(layout.read_text().replace(f"LAYOUT_VERSION = {LAYOUT_VERSION}", "LAYOUT_VERSION = 1"))
    if other_flows:
        header = folder / "bpf" / "flow_maps.h"
        text, count = re.subn(r"(?<=\nstruct flow \{\n)", "\t__u64 former;\n", header.read_text())
        assert count == 1
        header.write_text(text)
        shutil.copy(ROOT / "Makefile", folder)
        subprocess.run(["make", "-s", "-C", folder, "-W", "bpf/flow_maps.h", "objects"], check=True)
    return folder


@pytest.mark.parametrize("other_flows", [False, True], ids=["same-entries", "other-entries"])
def test_an_upgrade_to_another_layout(
    world: LoadWorld, other_flows: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old version's young flows are promoted before its programs are replaced."""
    agent = world.node.agent
    agent.stop()
    agent.cleanup()
    agent.tree = former_version(tmp_path / "former", other_flows)
    agent.start()
    agent.wait_synced()
    former = agent.pin("flows").parents[1]
    assert former.name == "v1"
    log = Log(agent).from_now()
    with world.load() as load:
        world.gets_fast(load)
        assert agent.stop() == 0
        agent.tree = None
        world.start()
        world.gets_fast(load)
        outcome = load.end()
    report(outcome, capsys)
    assert not former.exists()
    drained = re.search(r"promoted=(\d+) left=(\d+)", log.only(Message.FAST_PATH_DRAINED).text)
    assert drained is not None
    # At least half of the long flows of a second. Flows of the node itself are not young.
    assert int(drained[1]) > LASTING * outcome.wanted / 2
    assert int(drained[2]) <= int(drained[1]) / 10


def test_uninstall(world: LoadWorld, capsys: pytest.CaptureFixture[str]) -> None:
    """After stop and ``--cleanup`` there is no Service, but existing connections continue to their end.

    kube-proxy's own ``--cleanup`` removes its rules and leaves conntrack alone, so connections continue there too.
    """
    agent = world.node.agent
    with world.load() as load:
        world.gets_fast(load)
        assert agent.stop() == 0
        asked = time.monotonic()
        agent.cleanup()
        over = time.monotonic()
        # A connection attempt fails after four seconds.
        load.wait_progress(0.05)
        outcome = load.end()
    report(outcome, capsys, until=asked)
    later = [flow.record for flow in outcome.new if flow.record.begun > over]
    # A datagram from a port that was used belongs to the old flow, which conntrack still has.
    answered = [record for record in later if record.name]
    assert len(answered) < len(later) / 4, "a proxy still serves"
    # They were young when the programs were removed.
    assert [flow for flow in outcome.new if flow.record.begun < asked and flow.record.ended > over]
