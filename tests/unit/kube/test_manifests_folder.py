# SPDX-License-Identifier: Apache-2.0
"""The manifests folder as a whole: swapped, switched, removed and restored, with real inotify events."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path

import pytest
from inotify_simple import INotify

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.kube import manifests
from pyebpf_proxy.kube.manifests import ManifestSource
from pyebpf_proxy.kube.source import Batch
from tests.unit.kube.manifest_watcher import Watcher, run, text


def swap(directory: Path, revision: str, files: dict[str, str]) -> None:
    """As the kubelet updates a ConfigMap volume: a new hidden folder, and ``..data`` is renamed over to it."""
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

    assert run(tmp_path, scenario).messages == []


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


def test_the_folder_is_removed_and_restored(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "manifests"
    folder.mkdir(parents=True)
    (folder / "a.yaml").write_text(text(a=1, b=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1, b=1)
        folder.parent.rename(tmp_path / "elsewhere")
        await watcher.until(lambda: watcher.messages)
        assert watcher.ports == {"a": 1, "b": 1}
        folder.mkdir(parents=True)
        (folder / "a.yaml").write_text(text(a=2))
        await watcher.shows(a=2)
        (folder / "a.yaml").write_text(text(a=3))
        await watcher.shows(a=3)
        (tmp_path / "elsewhere" / "manifests" / "a.yaml").write_text(text(a=4))
        await watcher.settled(folder)
        assert watcher.ports == {"a": 3}

    output = run(folder, scenario).messages
    assert output == [f"{folder}: the manifests folder is not there; what was in it stays until it is back"]


def test_the_folder_is_removed_with_everything_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are removed one by one first, but a missing folder does not mean that objects were deleted."""
    monkeypatch.setattr(manifests, "DELETION_DELAY", 2.0)
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "a.yaml").write_text(text(a=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1)
        shutil.rmtree(folder)
        await watcher.until(lambda: watcher.messages and not watcher.source._leaving)
        assert watcher.ports == {"a": 1}
        folder.mkdir()
        await watcher.shows()

    run(folder, scenario)


def test_the_folder_is_a_symbolic_link_that_changes(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("target", ["releases/{}", "/releases/{}", "releases/../releases/{}", "latest"])
def test_a_symbolic_link_above_the_folder_that_changes(tmp_path: Path, target: str) -> None:
    """As a deployment by releases does it: the old one stays, so nothing in the folder changes."""
    for revision in ("1", "2", "3"):
        folder = tmp_path / "releases" / revision / "deploy" / "manifests"
        folder.mkdir(parents=True)
        (folder / "a.yaml").write_text(text(a=int(revision)))
        (folder / f"only{revision}.yaml").write_text(text(**{f"only{revision}": 1}))

    def switch(revision: str) -> None:
        name = "latest" if target == "latest" else "current"
        to = f"releases/{revision}" if target == "latest" else target.format(revision)
        (tmp_path / "new").symlink_to(f"{tmp_path}{to}" if to.startswith("/") else to)
        (tmp_path / "new").rename(tmp_path / name)

    switch("1")
    if target == "latest":
        (tmp_path / "current").symlink_to(target)

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1, only1=1)
        for revision in (2, 3):
            switch(str(revision))
            await watcher.shows(a=revision, **{f"only{revision}": 1})
        (tmp_path / "releases" / "3" / "deploy" / "manifests" / "a.yaml").write_text(text(a=4))
        await watcher.shows(a=4, only3=1)

    assert run(tmp_path / "current" / "deploy" / "manifests", scenario).messages == []


def test_a_symbolic_link_above_the_folder_leads_nowhere_for_a_while(tmp_path: Path) -> None:
    for revision in ("1", "2"):
        (tmp_path / revision / "manifests").mkdir(parents=True)
        (tmp_path / revision / "manifests" / "a.yaml").write_text(text(a=int(revision)))
    link = tmp_path / "current"
    link.symlink_to("1")

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1)
        link.unlink()
        await watcher.until(lambda: watcher.messages)
        assert watcher.ports == {"a": 1}
        link.symlink_to("nowhere")
        (tmp_path / "new").symlink_to("2")
        (tmp_path / "new").rename(link)
        await watcher.shows(a=2)

    run(link / "manifests", scenario)


def test_nothing_is_complete_before_the_folder_exists(tmp_path: Path) -> None:
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


def test_an_overflow_of_the_event_queue(tmp_path: Path) -> None:
    """The queue overflows while it is not read: then all files are read again, and no change is missed."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 50_000:
        pytest.skip(f"fs.inotify.max_queued_events is {limit}: filling that takes too long")
    (tmp_path / "gone.yaml").write_text(text(gone=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(gone=1)
        (tmp_path / "z.yaml").write_text(text(z=1))
        await watcher.shows(gone=1, z=1)
        watcher.reads.clear()
        for i in range(limit // 2 + 1):  # two events each, in one step in which the source cannot run
            (tmp_path / f"{i}.txt").touch()
        (tmp_path / "a.yaml").write_text(text(a=1))
        (tmp_path / "gone.yaml").unlink()
        z_written = (tmp_path / "z.yaml").stat()
        os.utime(tmp_path / "z.yaml", ns=(0, z_written.st_mtime_ns + 1))  # no separate event
        await watcher.shows(a=1, z=1)
        assert "z.yaml" in watcher.reads  # so every file was checked

    run(tmp_path, scenario)


def test_a_huge_file_is_not_read_and_affects_no_other(tmp_path: Path) -> None:
    """Manifests are read within bounds (finding S10)."""
    (tmp_path / "a.yaml").write_text(text(a=1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(a=1)
        (tmp_path / "b.yaml").touch()
        os.truncate(tmp_path / "b.yaml", 1 << 30)
        (tmp_path / "b.yaml").open("ab").close()
        (tmp_path / "c.yaml").write_text(text(c=1))
        await watcher.shows(a=1, c=1)

    assert run(tmp_path, scenario).messages == [
        "b.yaml: cannot be read: larger than 64 MiB; split it into several files; the objects that were in it stay"
    ]


def test_inotify_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with too many watches: one line names the limit to raise."""

    def refusing(**_: object) -> INotify:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(manifests, "INotify", refusing)
    with pytest.raises(FatalError, match=r"cannot be watched: Too many open files; raise fs\.inotify\."):
        asyncio.run(ManifestSource(tmp_path, print).run(print))
