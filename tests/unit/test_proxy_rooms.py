# SPDX-License-Identifier: Apache-2.0
"""Small parts of the agent: the run folder's lock, the pod network, the log."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyebpf_proxy import log
from pyebpf_proxy.datapath.tables.pod_network import PodNetwork
from pyebpf_proxy.errors import FatalError
from pyebpf_proxy.run_directory import RunDirectory
from pyebpf_proxy.services.model import Family


def packed(text: str) -> bytes:
    return ipaddress.ip_address(text).packed


# ---- run folder


def test_two_agents_cannot_have_one_folder(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run")
    first.acquire()
    with pytest.raises(FatalError, match=rf"another agent \(process {os.getpid()}\) runs on {tmp_path}/run; stop it"):
        RunDirectory(tmp_path / "run").acquire()
    first.release()
    second = RunDirectory(tmp_path / "run")
    second.acquire()
    second.release()


def test_a_killed_agent_leaves_no_lock(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from pyebpf_proxy.run_directory import RunDirectory;"
        "RunDirectory(Path(sys.argv[1])).acquire(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=False).returncode == -9
    directory = RunDirectory(tmp_path / "run")
    directory.acquire()
    directory.release()


def test_a_folder_that_was_made_for_nothing_is_taken_away(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "b")
    directory.acquire()
    directory.release(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_what_others_keep_in_the_folder_stays(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.acquire()
    (tmp_path / "run" / "note").touch()
    directory.release(remove=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["note"]


def test_a_lock_that_a_cleanup_removed_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    cleaner = RunDirectory(path)
    cleaner.acquire()
    real, first = os.open, True

    def open_then_lose_the_race(name: str, *arguments: int) -> int:
        nonlocal first
        descriptor = real(name, *arguments)
        if first:
            first = False
            (path / "lock").unlink()
            cleaner.release()
        return descriptor

    monkeypatch.setattr(os, "open", open_then_lose_the_race)
    late = RunDirectory(path)
    late.acquire()
    with pytest.raises(FatalError, match="another agent"):
        RunDirectory(path).acquire()
    late.release()


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FatalError, match=r"cannot be used: Not a directory; name another one with --directory"):
        RunDirectory(tmp_path / "file" / "run").acquire()


# ---- pod network


def test_pods_are_in_the_ranges_and_nodes_never_are() -> None:
    network = PodNetwork()
    ranges = [ipaddress.ip_network("10.244.0.0/16"), ipaddress.ip_network("fd00::/48")]
    assert network.update(ranges, [packed("10.244.0.1")])
    assert network(Family.IPV4, packed("10.244.3.4"))
    assert not network(Family.IPV4, packed("10.244.0.1"))
    assert not network(Family.IPV4, packed("10.245.0.1"))
    assert network(Family.IPV6, packed("fd00::1"))
    assert not network(Family.IPV6, packed("fd00:0:1::1"))
    assert network.families == {Family.IPV4, Family.IPV6}


def test_without_a_range_nothing_is_in_the_pod_network() -> None:
    network = PodNetwork()
    assert not network(Family.IPV4, packed("10.0.0.1"))
    assert network.families == frozenset()


def test_only_new_knowledge_is_a_change() -> None:
    network = PodNetwork()
    ranges = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("11.0.0.0/8")]
    assert network.update(ranges, [])
    assert not network.update(reversed(ranges), [])
    assert network.update(ranges, [packed("10.0.0.1")])
    assert network.update(ranges[:1], [packed("10.0.0.1")])


# ---- log


@pytest.mark.usefixtures("restored_logging")
def test_text_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("text")
    log.Logger("x").warning("two words", device="eth0", text='a "b"', none=None, empty="", number=3)
    line = capsys.readouterr().err
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z warning two words device=eth0 text="a \\"b\\"" empty="" number=3\n',
        line,
    )


@pytest.mark.usefixtures("restored_logging")
def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("json")
    log.Logger().error("it\nbroke", path=Path("/x"), number=3)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {"level": "error", "message": "it\nbroke", "path": "/x", "number": 3}


@pytest.mark.usefixtures("restored_logging")
def test_a_message_over_several_lines_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("text")
    log.Logger().error("it\nbroke")
    logging.getLogger("some.library").warning("said %s", "so")
    logging.getLogger("some.library").info("chatter")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["error it\\nbroke", "warning said so"]
