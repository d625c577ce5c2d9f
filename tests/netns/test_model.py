# SPDX-License-Identifier: Apache-2.0
"""Two hundred streams of random events against the slow model (tests/model). ``make test-model`` runs more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.namespace import die_with_parent
from tests import ROOT
from tests.model.preloaded import Preloaded
from tests.model.stream import shrink

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]
STREAMS, JOBS = 100, 4
#: Streams in which the agent is not killed and restarted cost a third, because the kernel verifies the programs at each
#: start. They are so fast that programs are not detached there, either: after ten times in a minute the agent waits for
#: a minute. Two of 25 streams leave nothing out.
SPARING = ("--without", "kill,restart,detach", "--with-all", "2")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, STREAMS])
def test_the_kernel_agrees_with_the_model_after_every_step(seed: int) -> None:
    options = {"streams": STREAMS, "seed": seed, "jobs": JOBS, "shrink": 60}
    command = [sys.executable, "-m", "tests.model", *(f"--{name}={value}" for name, value in options.items()), *SPARING]
    done = subprocess.run(
        command, cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
    )
    output = done.stdout.decode()
    assert done.returncode == 0, output
    assert f"{STREAMS} streams of 50 steps from seed {seed}: 0 failed" in output


def test_a_stream_is_reduced_to_the_relevant_steps() -> None:
    tried: list[list[int]] = []

    def fails(numbers: object) -> bool:
        tried.append(list(numbers))  # type: ignore[call-overload]
        return {7, 31} <= set(tried[-1])

    assert shrink(fails, range(50)) == [7, 31]
    assert len(tried) <= 60


def test_a_forked_agent_is_like_the_process_of_the_command() -> None:
    with Lab(nodes=1) as lab, Preloaded(lab.nodes[0].namespace) as preloaded:
        agent = lab.nodes[0].agent
        for agent.launch in (None, preloaded.start):
            agent.start()
            agent.wait_synced()
            assert agent.process is not None
            pid = agent.process.pid
            assert os.getsid(pid) == pid
            assert os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink(f"/proc/{os.getpid()}/ns/mnt")
            assert os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(lab.nodes[0].namespace.path).st_ino
            assert agent.stop() == 0
            agent.start()
            agent.kill()
            agent.start({"mode": "wrong"})
            assert agent.wait_ended() == 1
        assert agent.log().count("stopped; attached programs continue") == 2
        agent.start()
    # The lab has ended it.
