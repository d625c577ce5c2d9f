# SPDX-License-Identifier: Apache-2.0
"""The reasons for which CI may skip a test: every reason in the tree is on the list, or fails CI."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.skips import ALLOWED, is_allowed, unexpected

#: What CI has, since `make setup` runs on Debian and installs the packages; and what the agent must do. Such a skip
#: fails CI.
FAILS_CI = {"not Debian: no box is built here", "apt is Debian's", "1 has no bcc: 1", "no program on 1"}
#: Where a reason is computed; the list has its possible texts.
COMPUTED = {
    "tests/conftest.py",
    "tests/netns/test_faults.py",
    "tests/netns/test_kube_proxy_leftovers.py",
    "tests/netns/test_lab_transparency.py",
    "tests/support/lab_tools.py",
}


def sources() -> Iterator[Path]:
    return (path for path in sorted((ROOT / "tests").rglob("*.py")) if path.name not in ("skips.py", "test_skips.py"))


def reasons(path: Path) -> Iterator[str]:
    """The reason of each skip of a module, with 1 for a placeholder; empty for a computed one."""
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in (
            *("pytest.skip", "pytest.mark.skip", "pytest.mark.skipif"),
            "CannotBeMadeError",  # of a fault, which is then skipped
        ):
            continue
        given = [keyword.value for keyword in call.keywords if keyword.arg == "reason"] or call.args[:1]
        yield "".join(map(_text, given))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


def test_t6_every_reason_in_the_tree_is_on_the_list_or_fails_ci() -> None:
    found = {(str(path.relative_to(ROOT)), reason) for path in sources() for reason in reasons(path)}
    assert {path for path, reason in found if not reason} == COMPUTED
    assert {reason for _, reason in found if reason and not is_allowed(reason)} == FAILS_CI


def test_t6_every_reason_on_the_list_is_used() -> None:
    texts = [path.read_text() for path in sources()]
    pieces = {each.reason: max(each.reason.split("*"), key=len) for each in ALLOWED}
    assert [reason for reason, piece in pieces.items() if not any(piece in text for text in texts)] == []
    assert all(each.why for each in ALLOWED)


@pytest.mark.parametrize(
    "reason",
    ["fish is missing: make setup, or apt-get install fish", "not root: run as root", "no program on eth0", ""],
)
def test_features_of_ci_are_no_reason(reason: str) -> None:
    assert unexpected(["ipip carries IPv4 only", reason]) == [reason]


def run(folder: Path, workers: tuple[str, ...], **variables: str) -> subprocess.CompletedProcess[str]:
    """Pytest in a process, with the hooks that the folder's conftest.py imports."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYEBPF_PROXY_STRICT": ""} | variables
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *workers, str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


SKIPS = """
import pytest
def test_passes(): ...
def test_skips(): pytest.skip("{}")
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
@pytest.mark.parametrize(
    ("strict", "reason", "status"),
    [("1", "the cat is ill", 1), ("1", "ipip carries IPv4 only", 0), ("", "the cat is ill", 0)],
)
def test_t6_an_unexpected_skip_fails_a_strict_run(
    tmp_path: Path, workers: tuple[str, ...], strict: str, reason: str, status: int
) -> None:
    hooks = ("pytest_configure", "pytest_sessionfinish", "pytest_terminal_summary")
    (tmp_path / "conftest.py").write_text(f"from tests.conftest import {', '.join(hooks)}\n")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers = alone: no other test meanwhile\naddopts = --import-mode=importlib\n"
    )
    (tmp_path / "test_it.py").write_text(SKIPS.format(reason))
    done = run(tmp_path, workers, PYEBPF_PROXY_STRICT=strict)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("UNEXPECTED, not in tests/support/skips.py: the cat is ill" in done.stdout) == bool(status)
    assert "1 passed, 1 skipped" in done.stdout


PRIVILEGED = """
import pytest
@pytest.mark.needs_root
def test_root(): ...
@pytest.mark.needs_netns
def test_netns(): ...
def test_passes(): ...
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
@pytest.mark.parametrize("user", [0, 1000])
def test_t6_a_run_without_root_ends_with_how_many_tests_sent_no_packet(
    tmp_path: Path, workers: tuple[str, ...], user: int
) -> None:
    """The number of skips alone looks like success (finding T6)."""
    hooks = ("pytest_configure", "pytest_collection_modifyitems", "pytest_terminal_summary")
    (tmp_path / "conftest.py").write_text(
        "from tests import conftest\n"
        f"conftest.os.geteuid = lambda: {user}\n"
        "conftest.NEEDS['needs_netns'] = conftest._not_root\n"
        f"from tests.conftest import {', '.join(hooks)}\n"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  alone: no other test meanwhile\n  needs_root: root\n  needs_netns: network namespaces\n"
        "addopts = --import-mode=importlib\n"
    )
    (tmp_path / "test_it.py").write_text(PRIVILEGED)
    done = run(tmp_path, workers)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last, _ = filter(None, done.stdout.splitlines())
    if user:
        assert last == "NOT TESTED: 2 tests need rights that this run has not; no packet was sent in them"
    else:
        assert "3 passed" in done.stdout
        assert "NOT TESTED" not in done.stdout
