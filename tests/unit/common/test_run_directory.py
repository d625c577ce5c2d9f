# SPDX-License-Identifier: Apache-2.0
"""Small parts of the agent: the run folder's lock, the pod network, the log."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pyebpf_proxy.common import log, run_directory
from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.run_directory import RunDirectory


def packed(text: str) -> bytes:
    return ipaddress.ip_address(text).packed


# ---- run folder


def test_two_agents_cannot_have_one_folder(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run")
    first.acquire()
    output = rf"another agent \(process {os.getpid()}: .*\) runs on {tmp_path}/run; stop it"
    with pytest.raises(FatalError, match=output):
        RunDirectory(tmp_path / "run").acquire()
    first.release()
    second = RunDirectory(tmp_path / "run")
    second.acquire()
    second.release()


def test_a_killed_agent_leaves_no_lock(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from pyebpf_proxy.common.run_directory import RunDirectory;"
        "RunDirectory(Path(sys.argv[1])).acquire(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=False).returncode == -9
    directory = RunDirectory(tmp_path / "run")
    directory.acquire()
    directory.release()


def test_an_unused_folder_is_removed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "b")
    directory.acquire()
    directory.release(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_in_the_folder_stay(tmp_path: Path) -> None:
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


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FatalError, match=r"cannot be used: Not a directory; name another one with --directory"):
        RunDirectory(tmp_path / "file" / "run").acquire()


def test_a_full_file_system_does_not_keep_the_agent_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    directory = RunDirectory(tmp_path / "run")
    directory.acquire()
    with pytest.raises(FatalError, match="another agent"):
        RunDirectory(tmp_path / "run").acquire()
    directory.release()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """A container of the agent can put a link there; a command on the node must not write the file that it names."""
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(victim)
    with pytest.raises(FatalError, match=r"cannot be used: Too many levels of symbolic links; name another one"):
        RunDirectory(tmp_path / "run").acquire()
    assert victim.read_text() == "as it was"


def test_a_socket_that_is_a_link_is_not_asked(tmp_path: Path) -> None:
    """A container of the agent can put a link there, and commands on the node may reach sockets that it may not."""
    other, run = tmp_path / "other", tmp_path / "run"
    other.mkdir()
    run.mkdir()
    with run_directory.listening_socket(other):
        run_directory.connected(other, 5.0).close()
        (run / "agent.sock").symlink_to(other / "agent.sock")
        with pytest.raises(OSError, match="Socket operation on non-socket"):
            run_directory.connected(run, 5.0)


@contextmanager
def as_other_user(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A local user's program, standard library only; returns when it has printed a line."""
    started = subprocess.Popen(
        [sys.executable, "-I", "-c", program, *arguments], stdout=subprocess.PIPE, text=True, user=65534, group=65534
    )
    assert started.stdout is not None
    started.stdout.readline()
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


HOLD = (
    "import fcntl, sys, time\n"
    "try:\n    fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "except OSError as error:\n    print(error.strerror, flush=True)\n"
    "else:\n    print('has it', flush=True)\n    time.sleep(600)\n"
)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may open: pytest's own are only for root."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def modes(path: Path) -> tuple[int, int]:
    return path.stat().st_mode & 0o777, (path / "lock").stat().st_mode & 0o777


@pytest.mark.needs_root
def test_no_other_user_can_take_the_lock(open_folder: Path) -> None:
    """It would keep an agent from starting (finding S7)."""
    directory = RunDirectory(open_folder / "run")
    directory.acquire()
    assert modes(directory.path) == (0o700, 0o600)
    directory.release()
    with as_other_user(HOLD, str(directory.path / "lock")) as user:
        assert user.wait(20) == 0  # Permission denied
    directory.acquire()
    directory.release()


@pytest.mark.needs_root
def test_permissions_of_an_older_releases_folder_and_lock_are_fixed_while_held(open_folder: Path) -> None:
    path = open_folder / "run"
    path.mkdir(mode=0o755)
    (path / "lock").touch(mode=0o644)
    with as_other_user(HOLD, str(path / "lock")) as user:
        directory = RunDirectory(path)
        directory.acquire()
        assert user.poll() is None  # it still has its lock, which no other process has
        assert modes(path) == (0o700, 0o600)
        with pytest.raises(FatalError, match="another agent"):
            RunDirectory(path).acquire()
        directory.release()


@pytest.mark.parametrize("listens", [False, True], ids=["seen", "unseen"])
def test_a_former_release_s_agent_keeps_its_lock(
    tmp_path: Path, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    with (path / "lock").open("w") as former:
        (path / "lock").chmod(0o644)
        fcntl.flock(former, fcntl.LOCK_EX)
        if listens:  # in its own container: its process cannot be seen
            listener = run_directory.listening_socket(path)
            monkeypatch.setattr(run_directory, "lock_holder", lambda lock: None)
        with pytest.raises(FatalError, match="another agent"):
            RunDirectory(path).acquire()
        if listens:
            listener.close()


def test_a_folder_with_another_purpose_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "foreign").touch()
    tmp_path.chmod(0o755)
    directory = RunDirectory(tmp_path)
    directory.acquire()
    assert modes(tmp_path) == (0o755, 0o600)
    directory.release()


@pytest.mark.needs_root
def test_why_the_folder_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_directory.obstacle(tmp_path) == ""
    assert run_directory.obstacle(tmp_path / "none") == ""
    # Block size, blocks, free blocks, those for other users, inodes, free inodes, those for other users, flags, name
    # length.
    for fields, why in (
        ((4096, 4096, 256, 15, 0, 100, 9, 9, 0, 255), "its file system is full"),
        ((4096, 4096, 256, 16, 0, 100, 9, 9, 0, 255), ""),
        ((4096, 4096, 256, 99, 99, 100, 0, 0, 0, 255), "its file system has no inode left"),
        # A file system without its own blocks or inodes, as some overlays.
        ((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255), ""),
        ((4096, 4096, 256, 99, 99, 100, 9, 9, os.ST_RDONLY, 255), "it is read-only"),
    ):
        monkeypatch.setattr(os, "statvfs", lambda path, fields=fields: os.statvfs_result(fields))
        assert run_directory.obstacle(tmp_path) == why


def test_an_agent_in_another_container_is_named_by_its_command_line(tmp_path: Path) -> None:
    """Its process number has no meaning outside its PID namespace, and /proc/locks does not have it there."""
    directory = RunDirectory(tmp_path / "run")
    directory.acquire()
    program = (
        "import sys; from pathlib import Path; from pyebpf_proxy.common.run_directory import RunDirectory;"
        "RunDirectory(Path(sys.argv[1])).acquire()"
    )
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program, str(tmp_path / "run")]
    ran = subprocess.run(inside, capture_output=True, text=True, check=False)
    directory.release()
    assert re.search(r"another agent \(in another container: \S*python.*\) runs on ", ran.stderr), ran.stderr


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
