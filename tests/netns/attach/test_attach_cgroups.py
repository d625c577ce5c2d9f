# SPDX-License-Identifier: Apache-2.0
"""The socket programs on a cgroup of the test's own: pinned, replaced in place, detached with their pins."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Object
from pyebpf_proxy.datapath.node import cgroups, mounts
from tests.netns.attach.router import Shell
from tests.support import socket_links

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    fd = mounts.open_cgroup2().descriptor
    path = Path(os.readlink(f"/proc/self/fd/{fd}")) / f"pep-test-{os.getpid()}"
    os.close(fd)
    path.mkdir()
    yield path
    path.rmdir()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in a bpffs of the test's own."""
    place = tmp_path / "bpf"
    place.mkdir()
    subprocess.run(["mount", "-t", "bpf", "bpf", place], check=True)
    yield place / "links"
    subprocess.run(["umount", place], check=True)


@pytest.fixture(scope="module")
def sock(bpf_objects: Path) -> Iterator[Object]:
    with Object.open(bpf_objects / "sock.bpf.o") as opened:
        yield opened.load()


def attach(sock: Object, cgroup: Path, folder: Path) -> None:
    fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        socket_links.attach(sock.programs, fd, folder)
    finally:
        os.close(fd)


def ids(shell: Shell, cgroup: Path) -> dict[str, int]:
    """Names and ids of the programs on a cgroup, from bpftool."""
    lines = [line.split() for line in shell(f"bpftool cgroup show {cgroup}").splitlines()]
    return {fields[-1]: int(fields[0]) for fields in lines if fields and fields[0].isdigit()}


def left(shell: Shell, cgroup: Path, count: int) -> int:
    """How many programs are attached, as soon as it is ``count``: the kernel detaches a link some time after its pin is
    gone.
    """
    deadline = time.monotonic() + 30
    while (found := len(ids(shell, cgroup))) != count and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_all_eight_programs_are_attached_and_pinned(sock: Object, cgroup: Path, folder: Path, shell: Shell) -> None:
    attach(sock, cgroup, folder)
    assert sorted(ids(shell, cgroup)) == sorted(cgroups.PROGRAMS)
    assert cgroups.attached(folder) == list(cgroups.PROGRAMS)
    cgroups.detach(folder)


def test_programs_outlive_the_loader_and_end_with_their_pins(
    bpf_objects: Path, cgroup: Path, folder: Path, shell: Shell
) -> None:
    with Object.open(bpf_objects / "sock.bpf.o") as opened:
        attach(opened.load(), cgroup, folder)
    assert len(ids(shell, cgroup)) == 8
    assert cgroups.detach(folder) == list(cgroups.PROGRAMS)
    assert left(shell, cgroup, 0) == 0
    assert cgroups.detach(folder) == []


def test_another_run_replaces_the_programs_in_the_same_links(
    sock: Object, bpf_objects: Path, cgroup: Path, folder: Path, shell: Shell
) -> None:
    attach(sock, cgroup, folder)
    before = ids(shell, cgroup)
    link = shell(f"bpftool -j link show pinned {folder}/connect4")
    with Object.open(bpf_objects / "sock.bpf.o") as opened:
        attach(opened.load(), cgroup, folder)
        after = ids(shell, cgroup)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    link_after = shell(f"bpftool -j link show pinned {folder}/connect4")
    assert link.split(",")[0] == link_after.split(",")[0], "the link is the same one"
    cgroups.detach(folder)


def test_a_link_to_a_removed_cgroup_is_created_again(sock: Object, cgroup: Path, folder: Path, shell: Shell) -> None:
    gone = cgroup.with_name(cgroup.name + "-gone")
    gone.mkdir()
    attach(sock, gone, folder)
    gone.rmdir()
    attach(sock, cgroup, folder)
    assert len(ids(shell, cgroup)) == 8
    cgroups.detach(folder)


def test_a_link_without_a_cgroup_is_detected(sock: Object, cgroup: Path, folder: Path, shell: Shell) -> None:
    gone = cgroup.with_name(cgroup.name + "-gone")
    gone.mkdir()
    attach(sock, gone, folder)
    assert socket_links.detached(folder) == []
    gone.rmdir()
    deadline = time.monotonic() + 30
    while socket_links.detached(folder) != list(cgroups.PROGRAMS):
        # The kernel detaches the programs some time after the cgroup is removed.
        assert time.monotonic() < deadline, socket_links.detached(folder)
        time.sleep(0.02)
    attach(sock, cgroup, folder)
    assert socket_links.detached(folder) == []
    shell(f"bpftool link detach pinned {folder}/connect6")
    assert socket_links.detached(folder) == ["connect6"]
    cgroups.detach(folder)


def test_links_to_another_cgroup_are_created_again(sock: Object, cgroup: Path, folder: Path, shell: Shell) -> None:
    other = cgroup.with_name(cgroup.name + "-other")
    other.mkdir()
    try:
        attach(sock, other, folder)
        attach(sock, cgroup, folder)
        assert len(ids(shell, cgroup)) == 8
        assert left(shell, other, 0) == 0
        cgroups.detach(folder)
    finally:
        other.rmdir()


def test_missing_links_are_added(sock: Object, cgroup: Path, folder: Path, shell: Shell) -> None:
    attach(sock, cgroup, folder)
    (folder / "sendmsg6").unlink()
    assert left(shell, cgroup, 7) == 7
    attach(sock, cgroup, folder)
    assert len(ids(shell, cgroup)) == 8
    cgroups.detach(folder)
    shutil.rmtree(folder)


def test_links_outlive_their_pins_and_are_pinned_again(sock: Object, cgroup: Path, folder: Path, shell: Shell) -> None:
    links = cgroups.SocketLinks(folder)
    fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    links.attach(sock.programs, fd)
    before = ids(shell, cgroup)
    (folder / "connect4").unlink()
    assert socket_links.detached(folder) == ["connect4"]
    shutil.rmtree(folder)
    assert links.detached() == []
    # The kernel takes a link off some time after its last pin.
    time.sleep(0.5)
    assert ids(shell, cgroup) == before
    assert links.pin() == list(cgroups.PROGRAMS)
    assert links.pin() == socket_links.detached(folder) == []
    shell(f"bpftool link detach pinned {folder}/connect6")
    assert links.detached() == ["connect6"]
    links.attach(sock.programs, fd)
    os.close(fd)
    links.close()
    assert socket_links.detached(folder) == []
    assert ids(shell, cgroup) == before
    cgroups.detach(folder)
