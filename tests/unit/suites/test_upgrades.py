# SPDX-License-Identifier: Apache-2.0
"""The suite of upgrades: which commits it chooses and builds, and what it finds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.changes.checker import ANSWERED, Record
from tests.changes.load import Flow, Outcome
from tests.upgrades.__main__ import row
from tests.upgrades.builds import PRESENT, BuildError, Repository
from tests.upgrades.checks import affinity_lost, differences, errors, layouts, without_clashes
from tests.upgrades.scenarios import SCENARIOS, Options, Result, Scenario

DAY = 86400
BEGUN = 1_000_000_000


def git(folder: Path, *arguments: str, date: int = BEGUN) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main")
    environment = {"PATH": "/usr/bin:/bin", "GIT_COMMITTER_DATE": f"{date} +0000", "HOME": str(folder)}
    done = subprocess.run(
        ["git", *who, "-C", folder, *arguments], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Commits a to g, of layouts 3, 3, 4, 4, 5, 5, 5; the last on the fifth day."""
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q")
    for name, layout, day in zip("abcdefg", (3, 3, 4, 4, 5, 5, 5), (0, 0, 0, 1, 2, 2.5, 4), strict=True):
        (folder / "layout.py").write_text(f"LAYOUT_VERSION = {layout}\n")
        (folder / "Makefile").write_text(f"objects:\n\t@echo {name} > made\n")
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", name, date=int(BEGUN + day * DAY))
    return folder


def subjects(clone: Path, commits: list[str]) -> str:
    return "".join(git(clone, "log", "-1", "--format=%s", each) for each in commits)


def test_the_commits_are_at_the_changes_of_the_layout_and_before_some_days(clone: Path) -> None:
    # The first of layout 5, the last of 4, and the last ones a day and two days before g.
    assert subjects(clone, Repository(clone).default_commits()) == "edf"


def test_a_shallow_clone_is_named(clone: Path, tmp_path: Path) -> None:
    former = git(clone, "rev-parse", "HEAD~3")
    git(tmp_path, "clone", "-q", "--depth", "2", f"file://{clone}", "shallow")
    for ask in (lambda each: each.default_commits(), lambda each: each.commit(former)):
        with pytest.raises(BuildError, match=r"the clone is shallow and lacks the commit .* run git fetch --unshallow"):
            ask(Repository(tmp_path / "shallow"))
    with pytest.raises(BuildError, match="has no commit nothing"):
        Repository(clone).commit("nothing")


def test_a_build_is_made_once_and_not_in_the_clone(clone: Path, tmp_path: Path) -> None:
    repository, cache = Repository(clone), tmp_path / "cache"
    commit = repository.commit("HEAD~3")
    build = repository.build(commit, cache)
    assert (build.layout, build.tree, (build.tree / "made").read_text()) == (4, cache / commit[:12], "d\n")
    (build.tree / "made").write_text("kept")
    assert repository.build(commit, cache) == build
    assert (build.tree / "made").read_text() == "kept"
    assert git(clone, "status", "--porcelain") == ""
    assert list(cache.iterdir()) == [build.tree]


def test_a_build_that_fails_leaves_nothing(clone: Path, tmp_path: Path) -> None:
    (clone / "Makefile").write_text("objects:\n\t@echo broken >&2; false\n")
    git(clone, "commit", "-q", "-a", "-m", "h")
    with pytest.raises(BuildError, match=r"make objects fails in .*:\nbroken"):
        Repository(clone).build(Repository(clone).commit("HEAD"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def flow(client: str, name: str, begun: float, udp: bool = False) -> Flow:
    record = Record(begun, begun + 0.1, 0, ANSWERED, name, 0)
    return Flow(record, f"from {client} to [10.96.0.33]:80", udp, frozenset({"near", "far"}))


def test_a_client_at_two_endpoints_has_lost_its_affinity() -> None:
    kept = [flow("pod", "near", 1.0), flow("pod", "near", 2.0), flow("pod", "far", 2.0, udp=True)]
    lost = [flow("node", "near", 1.0), flow("node", "far", 2.0)]
    outcome = Outcome([*kept, *lost], [], [], 1.0, 0.0, 3.0)
    assert affinity_lost(outcome, {"10.96.0.33"}) == [
        "affinity lost: TCP from node to [10.96.0.33]:80: 1 by near from 1.00 to 1.00 s, 1 by far from 2.00 to 2.00 s"
    ]
    assert affinity_lost(outcome, {"10.96.0.33"}, forgotten="node") == []
    assert affinity_lost(outcome, {"10.96.0.31"}) == []


def test_a_connection_waits_for_another_one_with_its_port() -> None:
    def with_port(each: Flow, port: int, count: int) -> Flow:
        return each._replace(record=each.record._replace(port=port, count=count))

    first, same, other = flow("pod", "far", 1.0), flow("pod", "near", 1.05), flow("node", "near", 1.05)
    young = with_port(first, 4000, 0)
    for each, left_out in (
        (with_port(same, 4000, 1), True),
        (with_port(same, 4000, 0), False),
        (with_port(same, 4001, 1), False),
        (with_port(other, 4000, 1), False),
        (with_port(flow("pod", "near", 20.0), 4000, 1), False),
        (with_port(same, 4000, 1)._replace(udp=True), False),
    ):
        outcome = Outcome([young, each], [], [], 1.0, 0.0, 3.0)
        rest, clashes = without_clashes(outcome)
        assert (rest.new, clashes) == (([young], 1) if left_out else ([young, each], 0))


def test_errors_of_the_log() -> None:
    good = "2026-11-30T09:23:13.706Z info ready objects=17\n2026-11-30T09:23:13.706Z warning no error here\n"
    bad = "Traceback (most recent call last):\n2026-11-30T09:23:13.706Z error Error running ProxyServer error=x\n"
    assert errors(good) == []
    assert errors(good + bad) == [
        "logged: Traceback (most recent call last):",
        "logged: error Error running ProxyServer error=x",
    ]


def test_pinned_layouts(tmp_path: Path) -> None:
    for name in ("v4/maps", "v5/maps", "tcx/veth0"):
        (tmp_path / "bpf" / "pyebpf-proxy" / "state" / name).mkdir(parents=True)
    assert layouts(tmp_path) == {4, 5}


def test_differences_after_a_clean_up() -> None:
    clean = {"pins": [], "settings": ["a = 0", "b = 0"]}
    assert differences(clean, clean) == []
    assert differences(clean, {"pins": ["v4"], "settings": ["a = 1", "b = 0"]}) == [
        "pins after the clean-up:\n+v4",
        "settings after the clean-up:\n+a = 1\n-a = 0",
    ]


def test_a_rollback_takes_the_options_back() -> None:
    scenario = Scenario("xdp", after=Options(own={"xdpDevices": ["eth0"]}))
    assert scenario.swapped() == Scenario("xdp", before=scenario.after)
    assert len({each.name for each in SCENARIOS}) == len(SCENARIOS)


def test_a_row() -> None:
    other = PRESENT._replace(name="b8f2c43d")
    line = row(other, PRESENT, SCENARIOS[0], Result(5000, 2, 1, 3, 12.34, ["2 lost", "1 moved"]))
    assert line.split() == ["b8f2c43d", "tree", "restart", "5000", "2", "1", "3", "12.3", "2", "findings"]
    assert row(other, PRESENT, SCENARIOS[0], Result(5000)).endswith("0.0  ok")
