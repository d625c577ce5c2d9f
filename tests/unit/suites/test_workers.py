# SPDX-License-Identifier: Apache-2.0
"""Runs with workers: what runs at the same time, and that tests that did not run are listed as in a run without."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.support import workers

CONFTEST = "from tests.conftest import pytest_configure, pytest_terminal_summary\n"
INI = "[pytest]\nmarkers = alone: no other test meanwhile\naddopts = --import-mode=importlib\n"
COMMON = """
import os, time
from pathlib import Path
import pytest
HERE = Path(__file__).parent
def note(text):
    with open(HERE / "notes", "a") as file:
        file.write(text + "\\n")
def noted(text):
    return text in (HERE / "notes").read_text().splitlines()
def wait_for(text, seconds):
    end = time.monotonic() + seconds
    while not noted(text):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
"""
TOGETHER = """
def test_both_are_there_at_once():
    note("{name} is there")
    assert wait_for("{other} is there", 60)
    note(f"{name} {{os.getpid()}}")
@pytest.mark.skip(reason="not today")
def test_skipped(): ...
def test_on_the_same_worker():
    assert noted(f"{name} {{os.getpid()}}")
def test_left_out(): ...
"""
ALONE = """
@pytest.mark.alone
@pytest.mark.parametrize("number", range(2))
def test_alone(number):
    before = (HERE / "notes").read_text() if (HERE / "notes").exists() else ""
    note("alone")
    # Another test would start this time.
    assert not wait_for("never", 0.3)
    assert (HERE / "notes").read_text() == before + "alone\\n"
"""
MANY = """
@pytest.mark.parametrize("number", range(200))
def test_many(number):
    note(f"{number} of {__name__}")
    time.sleep(0.005)
    note(f"{number} of {__name__} is done")
"""


def run(folder: Path, files: dict[str, str], *arguments: str, until: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(INI)
    for name, text in files.items():
        (folder / name).write_text(COMMON + text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, str(folder)],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT), "PYEBPF_PROXY_STRICT": "", workers.UNTIL: until},
        capture_output=True,
        text=True,
        check=False,
    )


def test_modules_run_at_once_and_tests_that_did_not_run_are_listed(tmp_path: Path) -> None:
    files = {
        "test_one.py": TOGETHER.format(name="one", other="two"),
        "test_two.py": TOGETHER.format(name="two", other="one"),
    }
    done = run(tmp_path, files, "-n", "2", "-k", "not left_out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "    2 × not today\n" in done.stdout
    for module in files:
        assert f"    1 × deselected on the command line: {module}\n" in done.stdout
    assert " 4 passed, 2 skipped" in done.stdout


def test_tests_marked_alone_run_alone(tmp_path: Path) -> None:
    files = {"test_alone.py": ALONE, "test_many.py": MANY, "test_more.py": MANY}
    done = run(tmp_path, files, "-n", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    notes = (tmp_path / "notes").read_text().split("\n")
    # And the tests of one module ran one after the other.
    assert notes[notes.index("alone") + 1] == "alone"


def test_modules_with_tests_that_run_alone_come_first(tmp_path: Path) -> None:
    """Otherwise all workers would wait for the longest test that happens to run."""
    done = run(tmp_path, {"test_a.py": MANY, "test_b.py": "def test_first(): note('first')\n" + ALONE}, "-n", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "notes").read_text().startswith("first\nalone\nalone\n0 of ")


def test_workers_store_what_they_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiles a part, and they read the rest, so this does not depend on the environment."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    modules = [f"test_{number}" for number in range(5)]
    text = "import sys\ndef test_it(): assert sys.dont_write_bytecode\n"
    done = run(tmp_path, {f"{name}.py": text for name in modules}, "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    stored = sorted(path.name.split(".")[0] for path in (tmp_path / "__pycache__").glob("test_*-pytest-*.pyc"))
    assert stored == modules


def test_tests_without_time_are_skipped_and_listed(tmp_path: Path) -> None:
    files = {"test_many.py": MANY}
    done = run(tmp_path, files, "-n", "2", until="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  200 × no time is left\n" in done.stdout
    assert not (tmp_path / "notes").exists()
    done = run(tmp_path, files, "-n", "2", until=str(time.time() + 3600))
    assert " 200 passed" in done.stdout


@pytest.mark.parametrize(("nodeid", "expected"), [("tests/netns/a.py::b", 300.0), ("tests/unit/a.py::b", 400.0)])
def test_labs_leave_time_for_other_tests(nodeid: str, expected: float) -> None:
    assert workers.last_begin(nodeid, 100.0, 400.0) == expected
    assert workers.last_begin(nodeid, 100.0, float("inf")) == float("inf")
