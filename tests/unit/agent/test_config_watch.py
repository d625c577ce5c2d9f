# SPDX-License-Identifier: Apache-2.0
"""Changes of the configuration file, and which of them end the agent (spec/configuration §6)."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from inotify_simple import Event, INotify, flags

from pyebpf_proxy.agent import config_watch
from pyebpf_proxy.agent.config_watch import ConfigWatch
from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.config.loader import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("kind: KubeProxyConfiguration\n")
    return path


def write(file: Path) -> None:
    with file.open("r+") as opened:
        opened.write("K")


def append(file: Path) -> None:
    with file.open("a") as opened:
        opened.write("mode: nftables\n")


def empty(file: Path) -> None:
    os.truncate(file, 0)


def rename(file: Path) -> None:
    file.rename(file.with_suffix(".old"))


def rename_and_put_another_there(file: Path) -> None:
    """As vim does with ``backupcopy=no``."""
    rename(file)
    file.write_text("kind: another\n")


def chmod(file: Path) -> None:
    file.chmod(stat.S_IRUSR)


def touch(file: Path) -> None:
    os.utime(file)


def create_another(file: Path) -> None:
    (file.parent / "other.yaml").write_text("x")


def remove(file: Path) -> None:
    file.unlink()


def rename_over(file: Path) -> None:
    """As most programs replace a file."""
    new = file.with_suffix(".new")
    new.write_text("kind: another\n")
    new.replace(file)


def read(file: Path) -> None:
    file.read_text()


async def outcome(watch: ConfigWatch, act: Callable[[], None]) -> str:
    """The error that ends the wait; "" if the change was seen and has no effect."""
    waiting = asyncio.create_task(watch.wait())
    await asyncio.sleep(0)
    act()
    for _ in range(10):  # an event that has arrived is delivered in the next iteration of the loop
        await asyncio.sleep(0)
        if waiting.done():
            break
    if not waiting.done():
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return ""
    return str(waiting.exception())


@pytest.mark.parametrize("act", [write, append, empty, rename, rename_and_put_another_there])
def test_a_write_or_rename_ends_the_agent(file: Path, act: Callable[[Path], None]) -> None:
    watch = ConfigWatch(file)
    shown = asyncio.run(outcome(watch, lambda: act(file)))
    assert shown == "content of the proxy server's configuration file was updated"
    watch.close()


@pytest.mark.parametrize("act", [chmod, touch, create_another, remove, rename_over, read])
def test_everything_else_does_nothing(file: Path, act: Callable[[Path], None]) -> None:
    watch = ConfigWatch(file)
    assert asyncio.run(outcome(watch, lambda: act(file))) == ""
    watch.close()


def test_a_write_before_the_wait_is_seen(file: Path) -> None:
    watch = ConfigWatch(file)
    append(file)
    assert asyncio.run(outcome(watch, lambda: None)) == config_watch.UPDATED
    watch.close()


def test_the_file_is_watched_that_a_link_leads_to(file: Path) -> None:
    """A ConfigMap volume: the path is a link to a link to the file."""
    data = file.parent / "..2026"
    data.mkdir()
    target = data / "proxy.conf"
    file.rename(target)
    (file.parent / "..data").symlink_to(data.name)
    link = file.parent / "proxy.conf"
    link.symlink_to("..data/proxy.conf")
    watch = ConfigWatch(link)
    assert asyncio.run(outcome(watch, lambda: append(target))) == config_watch.UPDATED
    watch.close()


def test_a_kubelet_that_updates_a_volume_does_not_end_the_agent(file: Path) -> None:
    """It writes a new folder, renames a link to it, and removes the old one (docs/deploy.md says what to do)."""
    folder = file.parent
    for name in ("..old", "..new"):
        (folder / name).mkdir()
        (folder / name / file.name).write_text(name)
    file.unlink()
    (folder / "..data").symlink_to("..old")
    file.symlink_to(f"..data/{file.name}")

    def update() -> None:
        (folder / "..data_tmp").symlink_to("..new")
        (folder / "..data_tmp").rename(folder / "..data")
        shutil.rmtree(folder / "..old")

    watch = ConfigWatch(None, file)
    assert asyncio.run(outcome(watch, update)) == ""
    assert file.read_text() == "..new"
    watch.close()


@pytest.mark.parametrize("both", [True, False])
def test_the_datapath_file_is_watched_too(file: Path, both: bool) -> None:
    own = file.with_name("datapath.yaml")
    own.write_text("kind: DatapathConfiguration\n")
    watch = ConfigWatch(file if both else None, own)
    assert asyncio.run(outcome(watch, lambda: append(own))) == "content of the datapath configuration file was updated"
    if both:
        assert asyncio.run(outcome(watch, lambda: append(file))) == config_watch.UPDATED
    watch.close()


@pytest.mark.parametrize("what", ["overflow", "read error"])
def test_an_error_of_the_watch_ends_the_agent(file: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ConfigWatch(file)

    def broken(self: INotify, timeout: int | None = None) -> list[Event]:
        if what == "overflow":
            return [Event(-1, flags.Q_OVERFLOW, 0, "")]
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(INotify, "read", broken)
    expected = "fsnotify: queue or buffer overflow" if what == "overflow" else "Input/output error"
    assert expected in asyncio.run(outcome(watch, lambda: append(file)))
    watch.close()


def test_a_file_that_cannot_be_watched(file: Path) -> None:
    file.unlink()
    with pytest.raises(ConfigError, match=r"failed complete: no such file or directory \(the configuration file"):
        ConfigWatch(file)


def test_errors_of_the_watch_are_agent_errors(file: Path) -> None:
    watch = ConfigWatch(file)
    append(file)

    async def wait() -> None:
        async with asyncio.timeout(5):
            await watch.wait()

    with pytest.raises(FatalError):
        asyncio.run(wait())
    watch.close()
