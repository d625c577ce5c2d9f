# SPDX-License-Identifier: Apache-2.0
"""Faults of the proxy's process: its files, limits and clock; and its end."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.background import in_background
from tests.faults.ground import Ground, wait_until
from tests.faults.of_api import bulk
from tests.support.apiserver import replace
from tests.support.damage import CannotBeMadeError

_FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
#: Bytes that the proxy may still allocate, and Services that need more.
_MEMORY, _TOO_MANY = 4 << 20, 3000
#: Seconds between two steps of the clock.
_STEP_SECONDS = 1.5


@contextmanager
def disk_full(ground: Ground) -> Iterator[None]:
    big = ground.node.agent.directory / "big"
    with contextlib.suppress(OSError), big.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        big.unlink()


@contextmanager
def read_only(ground: Ground) -> Iterator[None]:
    """By a mount over it, since the agent's lock is open for writing; the bpffs below it does not change."""
    folder = str(ground.node.agent.directory)
    subprocess.run(["mount", "--rbind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", folder], check=True)
        # The first mount and its bpffs are below.


@contextmanager
def no_descriptors(ground: Ground) -> Iterator[None]:
    pid = ground.proxy.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # Fewer than it has: a descriptor that it closes cannot be used again.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def stopped(ground: Ground) -> Iterator[None]:
    os.kill(ground.proxy.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(ground.proxy.pid, signal.SIGCONT)


@contextmanager
def killed(ground: Ground) -> Iterator[None]:
    ground.proxy.kill()
    try:
        yield
    finally:
        ground.proxy.start()


@contextmanager
def small_quota(ground: Ground) -> Iterator[None]:
    """5 ms in 100 ms."""
    old = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "5000"}
    with cgroup("cpu", old, {"cpu.max": "5000 100000"}) as group:
        pid = str(ground.proxy.pid)
        former = _group_of(int(pid), "cpu", group)
        (group / "cgroup.procs").write_text(pid)
        try:
            yield
        finally:
            (former / "cgroup.procs").write_text(pid)


@contextmanager
def out_of_memory(ground: Ground) -> Iterator[None]:
    """The proxy reaches ``memory.max``, and the kernel kills it. It is started again without that limit."""
    old = {"memory.limit_in_bytes": str(_MEMORY)}
    with cgroup("memory", old, {"memory.max": str(_MEMORY), "memory.swap.max": "0"}) as group:
        pid = ground.proxy.pid
        former = _group_of(pid, "memory", group)
        (group / "cgroup.procs").write_text(str(pid))
        bulk(ground, _TOO_MANY)
        try:
            wait_until(lambda: _has_ended(pid), "the proxy was killed")
        except TimeoutError:
            (former / "cgroup.procs").write_text(str(pid))
            raise RuntimeError("the proxy needed no more memory than it had") from None
        events = next(each for each in ("memory.events", "memory.oom_control") if (group / each).exists())
        kills = dict(line.split() for line in (group / events).read_text().splitlines())
        if not int(kills["oom_kill"]):
            raise RuntimeError("the proxy ended, but not for lack of memory")
    ground.notes.append(f"killed with {_MEMORY >> 20} MiB more than before")
    ground.proxy.kill()
    try:
        yield
    finally:
        (ground.lab.manifests / "bulk.yaml").unlink(missing_ok=True)
        ground.proxy.start()


def _has_ended(pid: int) -> bool:
    """It stays a zombie until its parent waits for it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


@contextmanager
def cgroup(controller: str, old: dict[str, str], new: dict[str, str]) -> Iterator[Path]:
    """A cgroup with these settings of a controller, of version 1 or 2; removed when it is empty."""
    group = Path(f"/sys/fs/cgroup/{controller}/pep-faults-{os.getpid()}")
    settings = old
    if not group.parent.is_dir():
        group = Path(f"/sys/fs/cgroup/pep-faults-{os.getpid()}")
        settings = new
        if controller not in (group.parent / "cgroup.subtree_control").read_text().split():
            raise CannotBeMadeError(f"the root cgroup gives no {controller} controller to others")
    group.mkdir()
    try:
        for name, value in settings.items():
            if (group / name).exists() or not name.endswith("swap.max"):
                (group / name).write_text(value)
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


def _group_of(pid: int, controller: str, beside: Path) -> Path:
    """The cgroup of a process, in the hierarchy of another one."""
    second = (beside / "cgroup.controllers").exists()
    where = next(
        line.split(":", 2)[2]
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        if f",{controller}," in f",{line.split(':')[1]}," or (line.startswith("0::") and second)
    )
    return Path(f"{beside.parent}{where}")


@contextmanager
def clock_steps(ground: Ground) -> Iterator[None]:
    """A day forward, two days back, and so on until the end; only for the agent."""
    file, steps = _clock(), 0

    def work(stop: threading.Event) -> None:
        nonlocal steps
        while not stop.wait(_STEP_SECONDS):
            steps += 1
            replace(file, "+86400\n" if steps % 2 else "-86400\n")

    try:
        with in_background(work):
            yield
    finally:
        # Without this file the clock is right.
        file.unlink()
    if steps < 2:
        raise RuntimeError("the fault was too short for two steps")
    ground.notes.append(f"{steps} steps")


def _clock() -> Path:
    """The file that libfaketime reads. The lab's folder does not exist yet when the agent's environment is set."""
    return Path(tempfile.gettempdir()) / f"clock-of-faults-{os.getpid()}"


def clock_environment() -> tuple[str, ...]:
    if not _FAKETIME.exists():
        raise CannotBeMadeError("libfaketime is not installed")
    file = _clock()
    file.write_text("+0\n")
    return (
        f"LD_PRELOAD={_FAKETIME}",
        f"FAKETIME_TIMESTAMP_FILE={file}",
        "FAKETIME_NO_CACHE=1",
        "FAKETIME_DONT_FAKE_MONOTONIC=1",
    )
