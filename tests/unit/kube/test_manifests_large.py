# SPDX-License-Identifier: Apache-2.0
"""Large files are decoded in another thread, while other files and tasks go on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.kube import decode, manifests
from pyebpf_proxy.kube.decode import Decoded
from tests.unit.kube.manifest_watcher import Watcher, run, text

#: Comments make a file large.
FILLING = "# " + "x" * manifests.LARGE_BYTES + "\n"


class Gate:
    """Large files are decoded only when it is open."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()
        self._decode = decode.decode_yaml

    def decode(self, data: bytes) -> Iterator[Decoded]:
        if len(data) > manifests.LARGE_BYTES:
            self.begun.set()
            self.opened.wait(5)
        yield from self._decode(data)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(decode, "decode_yaml", gate.decode)
    yield gate
    gate.opened.set()


def test_other_files_are_read_while_a_large_one_is_decoded(tmp_path: Path, gate: Gate) -> None:
    async def scenario(watcher: Watcher) -> None:
        await watcher.until(lambda: watcher.batches)
        (tmp_path / "large.yaml").write_text(FILLING + text(1))
        await watcher.until(gate.begun.is_set)
        (tmp_path / "small.yaml").write_text(text(2))
        await watcher.shows(s2=2)
        gate.opened.set()
        await watcher.shows(s1=1, s2=2)

    assert run(tmp_path, scenario).messages == []


def test_the_first_batch_waits_for_large_files(tmp_path: Path, gate: Gate) -> None:
    """Otherwise their Services would be removed at a start."""
    for number in (1, 2):
        (tmp_path / f"large-{number}.yaml").write_text(FILLING + text(number))
    (tmp_path / "small.yaml").write_text(text(3))

    async def scenario(watcher: Watcher) -> None:
        await watcher.until(gate.begun.is_set)
        await asyncio.sleep(0.05)
        assert watcher.batches == []
        gate.opened.set()
        await watcher.shows(s1=1, s2=2, s3=3)
        assert [batch.complete for batch in watcher.batches] == [True]

    run(tmp_path, scenario)


@pytest.mark.parametrize("filling", ["", FILLING], ids=["small", "large"])
def test_the_last_text_of_a_file_counts(tmp_path: Path, gate: Gate, filling: str) -> None:
    """Also if it is written while the former one is decoded."""

    async def scenario(watcher: Watcher) -> None:
        await watcher.until(lambda: watcher.batches)
        (tmp_path / "a.yaml").write_text(FILLING + text(1))
        await watcher.until(gate.begun.is_set)
        (tmp_path / "a.yaml").write_text(filling + text(2))
        (tmp_path / "small.yaml").write_text(text(3))
        await watcher.until(lambda: watcher.ports.get("s3") == 3)
        gate.opened.set()
        await watcher.shows(s2=2, s3=3)
        await watcher.settled(tmp_path)
        assert watcher.ports == {"s2": 2, "s3": 3}

    run(tmp_path, scenario)


def test_an_object_that_moves_into_a_large_file_is_never_removed(tmp_path: Path, gate: Gate) -> None:
    (tmp_path / "small.yaml").write_text(text(1, 2))

    async def scenario(watcher: Watcher) -> None:
        await watcher.shows(s1=1, s2=2)
        (tmp_path / "large.yaml").write_text(FILLING + text(1))
        (tmp_path / "small.yaml").write_text(text(s2=20))
        await watcher.shows(s1=1, s2=20)
        gate.opened.set()
        await watcher.settled(tmp_path)
        assert ("s1", None) not in watcher.history
        (tmp_path / "large.yaml").unlink()
        await watcher.shows(s2=20)

    run(tmp_path, scenario)


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_a_file_that_is_deleted_while_it_is_decoded_is_gone(tmp_path: Path, gate: Gate, known: bool) -> None:
    if known:
        (tmp_path / "a.yaml").write_text(text(1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.until(lambda: watcher.batches)
        (tmp_path / "a.yaml").write_text(FILLING + text(1, 2))
        await watcher.until(gate.begun.is_set)
        (tmp_path / "a.yaml").unlink()
        await asyncio.sleep(manifests.DELETION_DELAY + 0.1)
        assert watcher.ports == ({"s1": 1} if known else {})
        gate.opened.set()
        await watcher.settled(tmp_path)
        assert watcher.ports == {}

    run(tmp_path, scenario)


def test_an_end_does_not_wait_for_a_large_file(tmp_path: Path, gate: Gate) -> None:
    (tmp_path / "a.yaml").write_text(FILLING + text(1))

    async def scenario(watcher: Watcher) -> None:
        await watcher.until(gate.begun.is_set)

    with contextlib.suppress(asyncio.CancelledError):
        run(tmp_path, scenario)
    assert not gate.opened.is_set()


def test_a_large_file_is_read_again_after_no_thread_could_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "RETRY_SECONDS", 0.05)
    start, refused = threading.Thread.start, []

    def refuse_once(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    async def scenario(watcher: Watcher) -> None:
        await watcher.until(lambda: watcher.batches)
        monkeypatch.setattr(threading.Thread, "start", refuse_once)
        (tmp_path / "a.yaml").write_text(FILLING + text(1))
        await watcher.shows(s1=1)

    (message,) = run(tmp_path, scenario).messages
    assert "no thread could be started" in message
