# SPDX-License-Identifier: Apache-2.0
"""A real folder and real inotify events, in the ways in which files really change."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from inotify_simple import INotify

from pyebpf_proxy.errors import FatalError
from pyebpf_proxy.kube import manifests
from pyebpf_proxy.kube.manifests import ManifestSource
from pyebpf_proxy.kube.objects import Service
from pyebpf_proxy.kube.source import Batch

DEADLINE = 20.0


def text(*ports: int, **named: int) -> str:
    named |= {f"s{port}": port for port in ports}
    documents = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": port}]},
        }
        for name, port in named.items()
    ]
    return "\n---\n".join(map(json.dumps, documents)) + "\n"


class Watcher:
    """A running source, and what it delivered."""

    def __init__(self, directory: Path) -> None:
        self.said: list[str] = []
        self.batches: list[Batch] = []
        self.history: list[tuple[str, int | None]] = []
        self.ports: dict[str, int] = {}
        self.source = ManifestSource(directory, self.said.append, self.said.append)
        self.reads: list[str] = []
        read = self.source._read

        def counting(name: str) -> None:
            self.reads.append(name)
            read(name)

        self.source._read = counting  # type: ignore[method-assign]

    def deliver(self, batch: Batch) -> None:
        self.batches.append(batch)
        for change in batch.changes:
            port = None
            if change.object is None:
                del self.ports[change.name]
            else:
                assert isinstance(change.object, Service)
                assert change.object.spec.ports is not None
                port = change.object.spec.ports[0].port
                assert port is not None
                self.ports[change.name] = port
            self.history.append((change.name, port))

    async def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, (self.ports, self.said)
            await asyncio.sleep(0.002)

    async def shows(self, **ports: int) -> None:
        await self.until(lambda: self.ports == ports)

    async def settled(self, directory: Path) -> None:
        """Everything that happened until now has been seen: a change made now is, and deletions are final."""
        marker = directory / "marker.json"
        marker.write_text(text(marker=1))
        await self.until(lambda: self.ports.get("marker") == 1)
        marker.unlink()
        await self.until(lambda: "marker" not in self.ports)


def run(directory: Path, scenario: Callable[[Watcher], Coroutine[Any, Any, None]]) -> Watcher:
    watcher = Watcher(directory)

    async def main() -> None:
        task = asyncio.create_task(watcher.source.run(watcher.deliver))
        body = asyncio.create_task(scenario(watcher))
        try:
            await asyncio.wait({task, body}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task  # its error is the finding
            await body
        finally:
            for each in (task, body):
                each.cancel()
            await asyncio.gather(task, body, return_exceptions=True)

    asyncio.run(main())
    return watcher


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

    assert run(tmp_path, scenario).said == []


def test_an_empty_folder_is_complete(tmp_path: Path) -> None:
    async def scenario(watcher: Watcher) -> None:
        await watcher.until(lambda: watcher.batches)
        assert watcher.batches == [Batch([], True)]

    run(tmp_path, scenario)


def test_a_change_costs_its_file_only(tmp_path: Path) -> None:
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
    """As sed -i, and most programs that are careful."""
    temporary = path.with_name("sedX1y2")
    temporary.write_text(content)
    temporary.replace(path)


def backup_then_write(path: Path, content: str) -> None:
    """As vim with its usual settings: the old file is renamed away, a new one is written slowly."""
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

    assert run(tmp_path, scenario).said == []


def test_a_file_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(text(x=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(x=1)
        (tmp_path / "b.yaml").rename(tmp_path / "a.json")
        await watcher.settled(tmp_path)
        assert [port for name, port in watcher.history if name == "x"] == [1]
        (tmp_path / "a.json").rename(tmp_path / "a.off")
        await watcher.shows()

    assert run(tmp_path, scenario).said == []


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


def swap(directory: Path, revision: str, files: dict[str, str]) -> None:
    """What the kubelet does to a ConfigMap volume: a new hidden folder, and ``..data`` renamed over to it."""
    data = directory / f"..{revision}"
    data.mkdir()
    for name, content in files.items():
        (data / name).write_text(content)
    (directory / "..data_tmp").symlink_to(data.name)
    old = (directory / "..data").resolve() if (directory / "..data").exists() else None
    (directory / "..data_tmp").rename(directory / "..data")
    for name in files:
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    for path in directory.iterdir():
        if path.is_symlink() and not path.name.startswith("..") and path.name not in files:
            path.unlink()
    if old is not None:
        for path in old.iterdir():
            path.unlink()
        old.rmdir()


def test_a_config_map_volume(tmp_path: Path) -> None:
    swap(tmp_path, "1", {"a.yaml": text(a=1), "b.yaml": text(b=1), "c.yaml": text(c=1)})

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1, b=1, c=1)
        swap(tmp_path, "2", {"a.yaml": text(a=2), "b.yaml": text(b=1), "d.yaml": text(d=1)})
        await watcher.shows(a=2, b=1, d=1)
        swap(tmp_path, "3", {"a.yaml": text(a=3), "b.yaml": text(b=3), "d.yaml": text(d=3)})
        await watcher.shows(a=3, b=3, d=3)
        assert [port for name, port in watcher.history if name == "b"] == [1, 3]

    assert run(tmp_path, scenario).said == []


def test_a_swap_reads_only_what_changed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text(**{name: 1}))
        os.utime(path, (1, 1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1, b=1)
        (tmp_path / "..1").mkdir()
        (tmp_path / "..1" / "c.yaml").write_text(text(c=1))
        (tmp_path / "c.yaml").symlink_to("..data/c.yaml")
        watcher.reads.clear()
        (tmp_path / "..data").symlink_to("..1")
        await watcher.shows(a=1, b=1, c=1)
        assert set(watcher.reads) == {"c.yaml"}

    run(tmp_path, scenario)


def test_the_stamp_of_a_file_just_written_is_not_trusted(tmp_path: Path) -> None:
    """It may be written again within one tick of the kernel's clock for files, and keep its stamp."""
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


def test_bad_files_cost_nothing_else(tmp_path: Path) -> None:
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
    assert sorted(watcher.said) == [
        "b.json: bad JSON: Input data was truncated; the objects that were in the file stay",
        "c.yaml: cannot be read: not a regular file; the objects that were in it stay",
        "f.yaml: cannot be read: Too many levels of symbolic links; the objects that were in it stay",
    ]


def test_what_is_no_file_is_said_at_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text(text(b=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(b=1)
        watcher.reads.clear()
        (tmp_path / "..data").symlink_to("..1")
        await watcher.until(lambda: "a.yaml" in watcher.reads)  # looked at again, and nothing new to say
        await watcher.settled(tmp_path)

    said = run(tmp_path, scenario).said
    assert said == ["a.yaml: cannot be read: not a regular file; the objects that were in it stay"]


def test_a_file_that_becomes_unreadable_and_readable_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal itself is made here; the events are the kernel's."""
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
        await watcher.until(lambda: watcher.said)
        await watcher.settled(tmp_path)
        assert watcher.ports == {"a": 1}
        path.chmod(0o644)
        await watcher.shows(a=2)

    said = run(tmp_path, scenario).said
    assert said == ["a.yaml: cannot be read: Permission denied; the objects that were in it stay"]


def test_the_folder_goes_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "manifests"
    folder.mkdir(parents=True)
    (folder / "a.yaml").write_text(text(a=1, b=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1, b=1)
        folder.parent.rename(tmp_path / "elsewhere")
        await watcher.until(lambda: watcher.said)
        assert watcher.ports == {"a": 1, "b": 1}
        folder.mkdir(parents=True)
        (folder / "a.yaml").write_text(text(a=2))
        await watcher.shows(a=2)
        (folder / "a.yaml").write_text(text(a=3))
        await watcher.shows(a=3)
        (tmp_path / "elsewhere" / "manifests" / "a.yaml").write_text(text(a=4))
        await watcher.settled(folder)
        assert watcher.ports == {"a": 3}

    said = run(folder, scenario).said
    assert said == [f"{folder}: the manifests folder is not there; what was in it stays until it is back"]


def test_the_folder_is_removed_with_everything_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files go one by one first, but a folder that is not there says nothing about what shall be."""
    monkeypatch.setattr(manifests, "DELETION_DELAY", 2.0)
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "a.yaml").write_text(text(a=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1)
        shutil.rmtree(folder)
        await watcher.until(lambda: watcher.said and not watcher.source._leaving)
        assert watcher.ports == {"a": 1}
        folder.mkdir()
        await watcher.shows()

    run(folder, scenario)


def test_the_folder_is_a_symbolic_link_that_is_turned(tmp_path: Path) -> None:
    for revision in ("1", "2"):
        (tmp_path / revision).mkdir()
        (tmp_path / revision / "a.yaml").write_text(text(a=int(revision)))
    link = tmp_path / "manifests"
    link.symlink_to("1")

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1)
        (tmp_path / "new").symlink_to("2")
        (tmp_path / "new").rename(link)
        await watcher.shows(a=2)
        (tmp_path / "2" / "a.yaml").write_text(text(a=3))
        await watcher.shows(a=3)

    run(link, scenario)


def test_nothing_is_complete_before_the_folder_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"

    async def scenario(watcher: Watcher) -> None:
        await watcher.until(lambda: watcher.batches)
        assert watcher.batches == [Batch([], False)]
        folder.mkdir(parents=True)
        await watcher.until(lambda: len(watcher.batches) == 2)
        assert watcher.batches[1] == Batch([], True)
        (folder / "a.yaml").write_text(text(a=1))
        await watcher.shows(a=1)

    run(folder, scenario)


def test_more_events_than_the_kernel_keeps(tmp_path: Path) -> None:
    """The queue overflows while nobody reads it: everything is looked at, nothing is missed."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 50_000:
        pytest.skip(f"fs.inotify.max_queued_events is {limit}: filling that takes too long")
    (tmp_path / "gone.yaml").write_text(text(gone=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(gone=1)
        (tmp_path / "z.yaml").write_text(text(z=1))
        await watcher.shows(gone=1, z=1)
        watcher.reads.clear()
        for i in range(limit // 2 + 1):  # two events each, in the one step in which the source cannot run
            (tmp_path / f"{i}.txt").touch()
        (tmp_path / "a.yaml").write_text(text(a=1))
        (tmp_path / "gone.yaml").unlink()
        z_written = (tmp_path / "z.yaml").stat()
        os.utime(tmp_path / "z.yaml", ns=(0, z_written.st_mtime_ns + 1))  # no event of its own
        await watcher.shows(a=1, z=1)
        assert "z.yaml" in watcher.reads  # so everything was looked at

    run(tmp_path, scenario)


def test_a_deletion_waits_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow an editor is between renaming the old file away and closing the new one."""
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


def test_no_inotify_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node full of watchers: one line that says what to raise."""

    def refusing(**_: object) -> INotify:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(manifests, "INotify", refusing)
    with pytest.raises(FatalError, match=r"cannot be watched: Too many open files; raise fs\.inotify\."):
        asyncio.run(ManifestSource(tmp_path, print).run(print))
