# SPDX-License-Identifier: Apache-2.0
"""The runner of ``make test-kernels``: its messages when something is missing or fails, and its clean-up."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pyebpf_proxy.lab.agent import FEW_RIGHTS
from tests import ROOT
from tests.kernels import __main__ as runner
from tests.kernels import debian, guest, inside, report
from tests.kernels.cpio import Archive
from tests.kernels.image import Kernel
from tests.kernels.problem import KernelsError
from tests.kernels.suites import Suite

KERNEL = Kernel("6.1", "6.1.0-1-cloud-amd64", Path("vmlinuz"), Path("modules.cpio"))


def qemu(folder: Path, script: str) -> guest.Machine:
    """A program instead of QEMU that behaves like a bad boot."""
    program = folder / "qemu"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return guest.Machine((str(program),), "tcg", "")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 0", r"it does not boot: no word on its console \(QEMU's exit status 0\)"),
        ("echo '[    1.2] Kernel panic - not syncing: VFS'", "Kernel panic - not syncing: VFS"),
        ("echo qemu-system-x86_64: no memory; exit 1", "qemu-system-x86_64: no memory"),
        ("echo Linux version 6; echo and then", "it ended before its tests did; last words: and then"),
        ("echo Linux version 6; exec sleep 60", "not done after 1 s"),
        ("echo VM_EXIT 1", "it ended before its tests did; last words: VM_EXIT 1"),
    ],
)
def test_a_failed_boot_is_reported_in_one_line(tmp_path: Path, script: str, problem: str) -> None:
    seconds = 1 if "sleep" in script else 60
    outcome = guest.run(qemu(tmp_path, script), tmp_path / "vmlinuz", None, tmp_path / "results", seconds)
    assert re.fullmatch(problem, outcome.problem)
    row = report.read(KERNEL, outcome, tmp_path / "results")
    assert row.failed
    assert outcome.problem in report.table([row])


_SENDS = """
    for word; do case $word in file:*) results=${{word#file:}}; esac; done
    for name in {names}; do tar -C {folder} -c $name >>$results; done
"""


def test_a_guest_that_ends_well_leaves_its_results(tmp_path: Path) -> None:
    """The second serial port is a file of QEMU: its content is a tar."""
    (tmp_path / "probe.json").write_text('{"path": "fast"}')
    script = _SENDS.format(folder=tmp_path, names="probe.json") + "echo VM_EXIT 0"
    outcome = guest.run(qemu(tmp_path, script), tmp_path / "vmlinuz", None, tmp_path / "results", 60)
    assert outcome.problem == ""
    assert report.read(KERNEL, outcome, tmp_path / "results").probe == {"path": "fast"}


def test_a_crashed_guest_leaves_the_results_of_finished_suites(tmp_path: Path) -> None:
    """The results of each suite are a separate tar."""
    (tmp_path / "probe.json").write_text('{"path": "fast"}')
    (tmp_path / "start.status").write_text("0")
    script = _SENDS.format(folder=tmp_path, names="probe.json start.status") + "echo Kernel panic"
    outcome = guest.run(qemu(tmp_path, script), tmp_path / "vmlinuz", None, tmp_path / "results", 60)
    row = report.read(KERNEL, outcome, tmp_path / "results")
    assert (row.problem, row.probe, list(row.suites)) == ("Kernel panic", {"path": "fast"}, ["start"])
    assert row.failed


def _boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> int:
    """The runner with such a QEMU, and everything else in the cache; returns its exit status."""
    count = f"echo x >>{tmp_path / 'boots'}\n"
    machine = qemu(tmp_path, count + script)
    for name in ("vmlinuz", "modules.cpio", "root.cpio"):
        (tmp_path / name).touch()
    kernel = Kernel("6.1", "6.1.0", tmp_path / "vmlinuz", tmp_path / "modules.cpio")
    monkeypatch.setenv("ACCEL", "tcg")
    monkeypatch.setattr(runner.image, "CACHE", tmp_path)
    monkeypatch.setattr(runner.image, "project", lambda path, environment, suites, kind: path.touch())
    monkeypatch.setattr(runner, "_fetch", lambda series, kind: (machine.command, [kernel], tmp_path / "root.cpio"))
    return runner._run(["6.1"], tmp_path)


@pytest.mark.parametrize(
    ("script", "boots"),
    [("exit 0", 2), ("echo guest: 6.1 is up", 1), ("echo guest: 6.1 is up; echo Kernel panic", 1)],
)
def test_only_silent_guests_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, boots: int
) -> None:
    assert _boot(tmp_path, monkeypatch, script) == 1
    assert (tmp_path / "boots").read_text() == "x\n" * boots


def test_results_of_another_run_stay_until_this_one_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent runs share the final place of results; each has its own place until then."""
    kept = tmp_path / "results" / "6.1" / "console.log"
    kept.parent.mkdir(parents=True)
    kept.write_text("words of another")
    _boot(tmp_path, monkeypatch, f"echo guest: 6.1 is up; cat {kept}; echo; echo words of this one")
    assert kept.read_text().splitlines()[1:] == ["words of another", "words of this one"]


def test_truncated_results_are_a_problem(tmp_path: Path) -> None:
    script = "for word; do case $word in file:*) echo x >${word#file:}; esac; done; echo VM_EXIT 0"
    outcome = guest.run(qemu(tmp_path, script), tmp_path / "vmlinuz", None, tmp_path / "results", 60)
    assert outcome.problem == "its results cannot be read"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_guest(tmp_path: Path, number: signal.Signals) -> None:
    """Also if it cannot clean up: the guest dies with its runner."""
    mark = tmp_path / "pid"
    machine = qemu(tmp_path, f"echo $$ >{mark}.new; mv {mark}.new {mark}; exec sleep 600")
    code = (
        "import signal, sys; from pathlib import Path; from tests.kernels import __main__ as main, guest\n"
        "signal.signal(signal.SIGTERM, main._interrupted)\n"
        f"machine = guest.Machine({machine.command!r}, 'tcg', '')\n"
        f"guest.run(machine, Path('vmlinuz'), None, Path({str(tmp_path / 'results')!r}), 600)"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    _wait(mark.exists)
    process = int(mark.read_text())
    runner.send_signal(number)
    assert runner.wait(60) != 0
    _wait(lambda: not Path(f"/proc/{process}").exists())


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"QEMU": "/nowhere/qemu"}, "QEMU=/nowhere/qemu: there is no such program"),
        ({"QEMU": "true", "ACCEL": "fast"}, "ACCEL=fast: kvm or tcg"),
    ],
)
def test_invalid_environment_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], words: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KernelsError) as error:
        guest.choose_machine(guest.find_qemu(tmp_path), tmp_path / "vmlinuz", tmp_path)
    assert str(error.value) == words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["6.12.1"], "KERNELS: 6.12.1 is no series: a number as 6.12, or newest"),
        (["--fetch", "../6.1"], "KERNELS: ../6.1 is no series: a number as 6.12, or newest"),
        (["6.1"], "SUITES: there is no packets; there are all, "),
        (["6.1"], "ARCH: arm is no architecture of the guests: amd64 or arm64"),
    ],
)
def test_unknown_words(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    """One line and status 2, and the run leaves no files."""
    monkeypatch.setenv("SUITES", "packets" if "SUITES" in words else "")
    monkeypatch.setenv("ARCH", "arm" if "ARCH" in words else "")
    monkeypatch.setattr(runner.image, "CACHE", tmp_path)
    monkeypatch.setattr(runner.os, "geteuid", lambda: 0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert runner.main(arguments) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"test-kernels: {words}")
    assert not list(tmp_path.iterdir())


def test_without_qemu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("QEMU", raising=False)
    with pytest.raises(KernelsError, match="there is no QEMU: install qemu-system-x86"):
        guest.find_qemu(tmp_path)


def test_without_kvm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If no kernel prints a line under /dev/kvm, the runner uses emulation and names the reason."""
    monkeypatch.delenv("ACCEL", raising=False)
    machine = guest.choose_machine(qemu(tmp_path, "exit 1").command, tmp_path / "vmlinuz", tmp_path)
    assert machine.accelerator == "tcg"
    assert machine.why
    monkeypatch.setenv("ACCEL", "kvm")
    with pytest.raises(KernelsError, match="ACCEL=kvm: "):
        guest.choose_machine(machine.command, tmp_path / "vmlinuz", tmp_path)


@pytest.mark.skipif(not Path("/usr/bin/apt-get").exists(), reason="apt is Debian's")
def test_without_a_mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "apt.conf"
    config.write_text('Dir::Etc::SourceList "/dev/null"; Dir::Etc::SourceParts "/dev/null";')
    monkeypatch.setenv("APT_CONFIG", str(config))
    debian.mirrors.cache_clear()
    try:
        with pytest.raises(KernelsError, match="this machine's apt has no mirror for "):
            debian.mirrors()
    finally:
        debian.mirrors.cache_clear()


def test_the_kernel_can_read_an_archive(tmp_path: Path) -> None:
    (tmp_path / "tree" / "left").mkdir(parents=True)
    (tmp_path / "tree" / "file").write_text("five!")
    os.utime(tmp_path / "tree" / "file", (1, 0x12345678))
    (tmp_path / "tree" / "link").symlink_to("/away")
    (tmp_path / "tree" / "left" / "out").write_text("")
    file = io.BytesIO()
    archive = Archive(file)
    archive.tree(tmp_path / "tree", "usr/some", lambda name: name == "left")
    archive.close()
    content = file.getvalue()
    assert len(content) % 512 == 0
    entries, at = {}, 0
    while at < len(content) and content[at : at + 6] == b"070701":
        fields = [int(content[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        size, length = fields[6], fields[11]
        name = content[at + 110 : at + 110 + length - 1].decode()
        at += 110 + length + -(110 + length) % 4
        entries[name] = fields[1], fields[5], content[at : at + size]
        at += size + -size % 4
    assert list(entries) == ["usr", "usr/some", "usr/some/file", "usr/some/link", "TRAILER!!!"]
    mode, modified, text = entries["usr/some/file"]
    assert (mode & 0o170000, modified, text) == (0o100000, 0x12345678, b"five!")
    assert entries["usr/some/link"][2] == b"/away"


def test_the_table_has_counts_and_reasons(tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text(json.dumps({"release": "x", "path": "slow", "XDP": "no links"}))
    (tmp_path / "start.status").write_text("1")
    (tmp_path / "start.xml").write_text(
        '<testsuites><testsuite time="2.4"><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure/></testcase>'
        '<testcase classname="a" name="worse"><error/></testcase>'
        '<testcase classname="a" name="left"><skipped message="no module sctp"/></testcase></testsuite></testsuites>'
    )
    row = report.read(KERNEL, guest.Outcome("", "", 1), tmp_path)
    assert row.failed
    shown = report.table([row])
    assert "| 6.1.0-1-cloud-amd64 | slow | start | 1 | 2 | 1 | 2 |" in shown
    assert "* 6.1.0-1-cloud-amd64: no XDP: no links" in shown
    assert "start: a::bad" in shown
    assert "start: 1 × no module sctp" in shown


@pytest.mark.parametrize(
    ("body", "limit", "failed"),
    [
        ("pass", 60, []),
        ("assert 0", 60, ["test_suite::test_one"]),
        ("__import__('os')._exit(7)", 60, ["pytest: exit status 7"]),
        ("__import__('time').sleep(60)", 1, ["out of time"]),
    ],
)
def test_a_suite_is_a_fork_and_its_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, limit: int, failed: list[str]
) -> None:
    """The code of the guest runs here: its results are sent, and are read as the runner does."""
    (tmp_path / "test_suite.py").write_text(f"def test_one(): {body}\n")
    monkeypatch.setattr(inside, "RESULTS", tmp_path)
    monkeypatch.setattr(inside, "_OUT", tmp_path / "sent.tar")
    monkeypatch.delenv("ARGS", raising=False)  # those of make test
    inside.run(Suite("start", (str(tmp_path / "test_suite.py"), f"--rootdir={tmp_path}"), limit=limit))
    (tmp_path / "results").mkdir()
    subprocess.run(["tar", "-C", tmp_path / "results", "-xf", tmp_path / "sent.tar"], check=True)
    (tmp_path / "results" / "probe.json").write_text("{}")
    row = report.read(KERNEL, guest.Outcome("", "", 1), tmp_path / "results")
    assert row.suites["start"].failed == failed


@pytest.mark.parametrize("few_rights", [False, True])
def test_agents_of_a_suite_have_few_rights_where_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_rights: bool
) -> None:
    """By a variable of the process that runs the suite; the next suite's process does not have it."""
    wanted = "1" if few_rights else None
    (tmp_path / "test_suite.py").write_text(
        f"import os\ndef test_one(): assert os.environ.get({FEW_RIGHTS!r}) == {wanted!r}\n"
    )
    monkeypatch.setattr(inside, "RESULTS", tmp_path)
    monkeypatch.setattr(inside, "_OUT", tmp_path / "sent.tar")
    for name in (FEW_RIGHTS, "ARGS"):
        monkeypatch.delenv(name, raising=False)
    arguments = (str(tmp_path / "test_suite.py"), f"--rootdir={tmp_path}")
    inside.run(Suite("start", arguments, limit=60, few_rights=few_rights))
    assert (tmp_path / "start.status").read_text() == "0"
    assert FEW_RIGHTS not in os.environ


def test_a_suite_that_ran_out_of_time_has_failed(tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text("{}")
    (tmp_path / "start.status").write_text("-1")
    row = report.read(KERNEL, guest.Outcome("", "", 1), tmp_path)
    assert row.suites["start"].failed == ["out of time"]
