# SPDX-License-Identifier: Apache-2.0
"""Files in a real folder with real inotify events, changed as programs do."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.kube import manifests
from pyebpf_proxy.kube.manifests import ManifestSource
from pyebpf_proxy.kube.source import Batch
from tests.unit.kube.manifest_watcher import Watcher, run, text


def test_first_batch_is_complete(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text(1, 2))
    (tmp_path / "b.yml").write_text(text(3))
    (tmp_path / "c.json").write_text(text(4))
    for name in ("d.txt", ".hidden.yaml", "e.yaml~", "README"):
        (tmp_path / name).write_text(text(9))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "f.yaml").write_text(text(9))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(s1=1, s2=2, s3=3, s4=4)
        assert [batch.complete for batch in watcher.batches] == [True]

    assert run(tmp_path, scenario).messages == []


def test_an_empty_folder_is_complete(tmp_path: Path) -> None:
    async def scenario(watcher: Watcher) -> None:
        await watcher.until(lambda: watcher.batches)
        assert watcher.batches == [Batch([], True)]

    run(tmp_path, scenario)


def test_a_change_reads_only_its_file(tmp_path: Path) -> None:
    for i in range(1, 40):
        (tmp_path / f"{i}.yaml").write_text(text(i))

    async def scenario(watcher: Watcher) -> None:
        await watcher.until(lambda: watcher.ports)
        watcher.reads.clear()
        (tmp_path / "7.yaml").write_text(text(s7=700))
        await watcher.until(lambda: watcher.ports["s7"] == 700)
        (tmp_path / "8.yaml").unlink()
        await watcher.until(lambda: "s8" not in watcher.ports)
        assert set(watcher.reads) == {"7.yaml"}
        assert len(watcher.batches) > 1
        assert all(len(batch.changes) == 1 for batch in watcher.batches[1:])

    run(tmp_path, scenario)


def in_place(path: Path, content: str) -> None:
    path.write_text(content)


def rename_into_place(path: Path, content: str) -> None:
    """As `sed -i` and most careful programs do."""
    temporary = path.with_name("sedX1y2")
    temporary.write_text(content)
    temporary.replace(path)


def backup_then_write(path: Path, content: str) -> None:
    """As vim with default settings: the old file is renamed, and a new one is written slowly."""
    path.rename(path.with_name(path.name + "~"))
    with path.open("w") as file:
        for character in content:
            file.write(character)
            file.flush()
    path.with_name(path.name + "~").unlink()


def delete_then_write(path: Path, content: str) -> None:
    path.unlink()
    path.write_text(content)


def hard_link(path: Path, content: str) -> None:
    other = path.with_name("other")
    other.write_text(content)
    path.unlink()
    path.hardlink_to(other)


def symbolic_link(path: Path, content: str) -> None:
    other = path.with_name("other")
    other.write_text(content)
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize(
    "write", [in_place, rename_into_place, backup_then_write, delete_then_write, hard_link, symbolic_link]
)
def test_a_file_is_replaced_without_a_gap(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text(x=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(x=1)
        await asyncio.to_thread(write, path, text(x=2))
        await watcher.shows(x=2)
        await watcher.settled(tmp_path)
        assert [port for name, port in watcher.history if name == "x"] == [1, 2]

    assert run(tmp_path, scenario).messages == []


def test_a_file_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(text(x=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(x=1)
        (tmp_path / "b.yaml").rename(tmp_path / "a.json")
        await watcher.settled(tmp_path)
        assert [port for name, port in watcher.history if name == "x"] == [1]
        (tmp_path / "a.json").rename(tmp_path / "a.off")
        await watcher.shows()

    assert run(tmp_path, scenario).messages == []


def test_a_quick_rewrite_of_equal_size_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text(x=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(x=1)
        for port in range(2, 10):
            status = path.stat()
            path.write_text(text(x=port))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            await watcher.shows(x=port)

    run(tmp_path, scenario)


def test_the_stamp_of_a_recently_written_file_is_not_trusted(tmp_path: Path) -> None:
    """The file may be written again within one tick of the file system's clock, and keep its stamp."""
    path = tmp_path / "a.yaml"
    source = ManifestSource(tmp_path, print)
    path.write_text(text(a=1))
    source._read("a.yaml")
    assert not source._is_unchanged("a.yaml")
    os.utime(path, (1, 1))
    source._read("a.yaml")
    assert source._is_unchanged("a.yaml")
    path.write_text(text(a=2))
    assert not source._is_unchanged("a.yaml")


def test_bad_files_affect_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text(a=1))
    (tmp_path / "b.json").write_text(text(b=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1, b=1)
        (tmp_path / "b.json").write_text("{")
        (tmp_path / "c.yaml").mkdir()
        os.mkfifo(tmp_path / "d.yaml")
        (tmp_path / "e.yaml").symlink_to("/nonexistent/e.yaml")
        (tmp_path / "f.yaml").symlink_to("f.yaml")
        (tmp_path / "a.yaml").write_text(text(a=2))
        await watcher.shows(a=2, b=1)
        (tmp_path / "a.yaml").write_text(text(a=3))
        await watcher.shows(a=3, b=1)
        await watcher.settled(tmp_path)

    watcher = run(tmp_path, scenario)
    assert watcher.ports == {"a": 3, "b": 1}
    assert sorted(watcher.messages) == [
        "b.json: bad JSON: Input data was truncated; the objects that were in the file stay",
        "c.yaml: cannot be read: not a regular file; the objects that were in it stay",
        "f.yaml: cannot be read: Too many levels of symbolic links; the objects that were in it stay",
    ]


def test_entries_that_are_no_files_are_reported_at_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text(text(b=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(b=1)
        watcher.reads.clear()
        (tmp_path / "..data").symlink_to("..1")
        await watcher.until(lambda: "a.yaml" in watcher.reads)  # read again, without a new message
        await watcher.settled(tmp_path)

    output = run(tmp_path, scenario).messages
    assert output == ["a.yaml: cannot be read: not a regular file; the objects that were in it stay"]


def test_a_file_that_becomes_unreadable_and_readable_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the test makes the refusal; the events are the kernel's."""
    path = tmp_path / "a.yaml"
    path.write_text(text(a=1))
    really_open = os.open

    def refusing(name: Any, mode: int, *rest: int) -> int:
        if Path(name) == path and path.stat().st_mode & 0o777 == 0:
            raise PermissionError(13, "Permission denied", name)
        return really_open(name, mode, *rest)

    monkeypatch.setattr(os, "open", refusing)

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1)
        other = tmp_path / "other"
        other.write_text(text(a=2))
        other.chmod(0)
        other.rename(path)
        await watcher.until(lambda: watcher.messages)
        await watcher.settled(tmp_path)
        assert watcher.ports == {"a": 1}
        path.chmod(0o644)
        await watcher.shows(a=2)

    output = run(tmp_path, scenario).messages
    assert output == ["a.yaml: cannot be read: Permission denied; the objects that were in it stay"]


@pytest.mark.parametrize("hidden", ["file", "folder"])
def test_a_change_missed_without_free_descriptors_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """No event reports that descriptors are available again. The test makes the kernel's refusal."""
    path = tmp_path / "a.yaml"
    path.write_text(text(a=1))
    # The link has no target yet: only a check of the folder shows when it has.
    (tmp_path / "b.yaml").symlink_to("..data/b.yaml")
    lacking = True

    def refused(name: Any) -> None:
        if lacking:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), name)

    def opening(name: Any, mode: int, *rest: int) -> int:
        if Path(name) == path and hidden == "file" and path.stat().st_size != len(text(a=1)):
            refused(name)
        return really_open(name, mode, *rest)

    def listing(name: Any) -> list[str]:
        if hidden == "folder" and (tmp_path / "..data").exists():
            refused(name)
        return really_list(name)

    really_open, really_list = os.open, os.listdir
    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "listdir", listing)

    async def scenario(watcher: Watcher) -> None:
        nonlocal lacking
        await watcher.shows(a=1)
        if hidden == "file":
            path.write_text(text(a=200))
        else:
            (tmp_path / "..1").mkdir()
            (tmp_path / "..1" / "b.yaml").write_text(text(b=200))
            (tmp_path / "..data").symlink_to("..1")
        await watcher.until(lambda: watcher.messages)
        lacking = False
        await watcher.shows(**({"a": 200} if hidden == "file" else {"a": 1, "b": 200}))

    (output,) = run(tmp_path, scenario).messages
    assert "Too many open files; the objects that were in it stay" in output


def test_a_deletion_waits_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long an editor takes between renaming the old file and closing the new one."""
    monkeypatch.setattr(manifests, "DELETION_DELAY", 0.01)
    path = tmp_path / "a.yaml"
    path.write_text(text(a=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1)
        path.unlink()
        with path.open("w") as file:
            await watcher.settled(tmp_path)
            assert watcher.ports == {"a": 1}
            file.write(text(a=2))
        await watcher.shows(a=2)
        path.unlink()
        await watcher.shows()
        assert [port for name, port in watcher.history if name == "a"] == [1, 2, None]

    run(tmp_path, scenario)


@pytest.mark.parametrize("turns", range(5))
def test_an_end_while_a_missing_file_is_awaited_counts_also_with_an_event(tmp_path: Path, turns: int) -> None:
    """A source that is not cancelled never ends, and its process ignores SIGTERM."""

    async def main() -> None:
        source = ManifestSource(tmp_path, lambda text: None, lambda text: None)
        source._leaving["a.yaml"] = time.monotonic() + 60
        readable = asyncio.Event()
        waiting = asyncio.create_task(source._wait(readable))
        await asyncio.sleep(0.01)
        readable.set()
        waiting_or_ended = asyncio.gather(waiting, return_exceptions=True)
        for _ in range(turns):
            await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
            assert isinstance((await waiting_or_ended)[0], asyncio.CancelledError)

    asyncio.run(main())
