# SPDX-License-Identifier: Apache-2.0
"""The helpers of tests/e2e: ginkgo's report, the table, the page."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import ROOT
from tests.e2e import churn, page, replacements, results, specs, switch
from tests.e2e.__main__ import main
from tests.e2e.cni import CNIS, DEFAULT_CNI
from tests.e2e.problem import E2EError
from tests.e2e.results import Spec
from tests.support.lab_tools import wait_until


def report(*specs: dict[str, object]) -> str:
    return json.dumps([{"SpecReports": list(specs)}])


def spec(state: str, *texts: str, message: str = "", kind: str = "It") -> dict[str, object]:
    *containers, leaf = texts
    failure = {"Failure": {"Message": message}} if message else {}
    return {
        "LeafNodeType": kind,
        "ContainerHierarchyTexts": containers,
        "LeafNodeText": leaf,
        "State": state,
        "RunTime": 1_500_000_000,
    } | failure


def test_the_report_keeps_specs_that_ran_or_skipped_themselves() -> None:
    read = results.read_report(
        report(
            spec("passed", "[sig-network] Services", "should serve"),
            spec("skipped", "[sig-network] Services", "should be left out by a filter"),
            spec("skipped", "[sig-network] Traffic", "should need zones", message="no\n  zones"),
            spec("timedout", "[sig-network] Networking", "Granular Checks: Services [Feature:X]", "should last"),
        )
    )
    assert read == [
        Spec("Networking Granular Checks: Services", "[sig-network] Networking Granular Checks: Services [Feature:X] "
             "should last", "failed", 1.5),
        Spec("Services", "[sig-network] Services should serve", "passed", 1.5),
        Spec("Traffic", "[sig-network] Traffic should need zones", "skipped", 1.5, "no zones"),
    ]  # fmt: skip


def test_specs_in_a_container_with_labels_only_have_a_group() -> None:
    labels = "[sig-network] [Feature:IPv6DualStack]"
    both = report(spec("passed", labels, "should"), spec("passed", labels, "Granular Checks: Services [X]", "should"))
    groups = [each.group for each in results.read_report(both)]
    assert groups == ["Dual stack", "Dual stack Granular Checks: Services"]


def test_suite_that_could_not_begin_is_a_failure() -> None:
    read = results.read_report(
        report(
            spec("failed", "", message="no API server", kind="SynchronizedBeforeSuite"),
            spec("passed", "", kind="ReportAfterSuite"),
        )
    )
    assert [(each.state, each.why) for each in read] == [("failed", "no API server")]


def test_only_failures_without_a_known_reason_count() -> None:
    specs = [Spec("a", "one works", "passed", 1), Spec("a", "two fails", "failed", 1), Spec("b", "three", "failed", 1)]
    assert results.unexpected(specs, {"^two": "a reason"}) == [specs[2]]
    assert results.unexpected(specs, {}) == specs[1:]


def test_some_specs_replace_their_own_results_only(tmp_path: Path) -> None:
    former = [Spec("a", "one", "failed", 1, "why"), Spec("b", "two", "passed", 2)]
    (tmp_path / "pyebpf-proxy.json").write_text(json.dumps({"specs": [dataclasses.asdict(each) for each in former]}))
    again = Spec("a", "one", "passed", 3)
    assert results.replaced("pyebpf-proxy", [again], tmp_path) == [again, former[1]]
    assert results.replaced("kube-proxy", [again], tmp_path) == [again]


def test_a_run_of_all_specs_keeps_the_results_that_need_a_load_balancer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    balanced = Spec("LoadBalancers", "[sig-network] LoadBalancers [Feature:LoadBalancer] should", "passed", 9)
    gone = Spec("Services", "[sig-network] Services of an older release", "passed", 1)
    results.save("pyebpf-proxy", [balanced, gone], {})
    ran = Spec("Services", "[sig-network] Services should serve", "passed", 2)
    monkeypatch.setattr(specs, "_run", lambda *_: [ran])
    made = SimpleNamespace(
        proxy="pyebpf-proxy",
        network=SimpleNamespace(dual=False),
        cni=CNIS[DEFAULT_CNI],
        cni_name=DEFAULT_CNI,
        fast_path=dict,
    )
    monkeypatch.setattr(specs, "STORE", tmp_path)
    assert specs._judge(cast(Any, made), specs.Choice(specs.FOCUS, 4), record=True) == 0
    assert results.load(tmp_path / "pyebpf-proxy.json")[1] == [balanced, ran]


def test_the_time_of_some_specs_is_not_that_of_all(tmp_path: Path) -> None:
    assert results.times("pyebpf-proxy", tmp_path) == {"seconds": None, "processes": None}
    (tmp_path / "pyebpf-proxy.json").write_text(json.dumps({"seconds": 700, "processes": 4, "specs": []}))
    assert results.times("pyebpf-proxy", tmp_path) == {"seconds": 700, "processes": 4}


def test_the_page_shows_times_and_the_steps_of_a_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"seconds": 690, "processes": 4}
    assert "pyebpf-proxy: 12 minutes, 4 specs at once" in page._times({"pyebpf-proxy": known, "kube-proxy": {}})
    assert "not recorded" in page._times({"pyebpf-proxy": {"seconds": None}})
    made = switch.Run(cast(Any, None), cast(Any, None))
    made.ready_seconds = {"oneByOne": 1.24, "atOnce": 2.0}
    made.steps = [switch.Step("pyebpf-proxy cluster test", 0, 12.3, 9000, 0), switch.Step("drained", None, 5, 1000, 1)]
    path = switch.save(made, "kube-proxy-nftables", tmp_path / "switch.json")
    about, steps = switch.load_record(path) or ({}, [])
    assert (about["rate"], list(steps)) == (1000, made.steps)
    monkeypatch.setattr(switch, "load_record", lambda: (about, steps))
    shown = page._switched()
    assert "| `pyebpf-proxy cluster test` | 0 | 12 | 9000 | 0 |" in shown
    assert "| drained | – | 5 | 1000 | 1 |" in shown
    assert "| **all** | | | 10000 | 1 |" in shown
    assert "Recorded with kube-proxy, nftables on 3 nodes" in shown
    assert "ready 1.2 s after its container had started" in shown.replace("\n", " ")
    assert "at once, it took 2.0 s: " in shown.replace("\n", " ")


class LoadedCluster:
    """kubectl of a cluster with the pods of the load. ``logs``: by pod, its last line; ``restarts``: by pod."""

    def __init__(self) -> None:
        self.logs = {"pod-a": "asked 100 failed 0", "node-b": "asked 50 failed 2"}
        self.restarts = dict.fromkeys(self.logs, 0)

    def kubectl(self, *arguments: str, check: bool = True) -> str:
        if "logs" in arguments:
            return "".join(f"[pod/{pod}/ask] {line}\n" for pod, line in self.logs.items())
        if "delete" in arguments:
            for pod in arguments[arguments.index("--force") + 1 :]:
                del self.logs[pod], self.restarts[pod]
            self.logs["pod-new"], self.restarts["pod-new"] = "asked 0 failed 0", 0
            return ""
        items = [
            {"metadata": {"name": pod}, "status": {"containerStatuses": [{"restartCount": count}]}}
            for pod, count in self.restarts.items()
            if "spec.nodeName=one" not in arguments or pod == "pod-a"
        ]
        return json.dumps({"items": items})


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> LoadedCluster:
    monkeypatch.setattr(switch, "LOGS_SECONDS", 0)
    monkeypatch.setattr(switch, "_AFTER", 0)
    monkeypatch.setattr(switch.time, "sleep", lambda seconds: None)
    return LoadedCluster()


def load_of(cluster: LoadedCluster) -> switch.Load:
    load = switch.Load(cast(Any, cluster))
    load.watch()
    return load


def test_connections_of_all_pods_are_counted(loaded: LoadedCluster) -> None:
    load = load_of(loaded)
    loaded.logs["of-before"] = "asked 7 failed 7"
    assert load.count() == (150, 2)
    loaded.logs["pod-a"] = "asked 120 failed 1"
    assert load.count() == (170, 3)


@pytest.mark.parametrize("line", ["", "asked 99 failed 0"], ids=["cannot be read", "another log"])
def test_what_cannot_be_counted_is_no_zero(loaded: LoadedCluster, line: str) -> None:
    """kubectl logs fails, and a run would end with "0 failed"."""
    load = load_of(loaded)
    load.count()
    loaded.logs["pod-a"] = line
    with pytest.raises(E2EError, match="the log of pod-a has fewer than before"):
        load.count()


def test_a_pod_that_was_restarted_has_lost_its_failures(loaded: LoadedCluster) -> None:
    load = load_of(loaded)
    loaded.restarts["node-b"] = 1
    with pytest.raises(E2EError, match="node-b was restarted or replaced"):
        load.count()
    del loaded.restarts["node-b"]
    with pytest.raises(E2EError, match="node-b was restarted or replaced"):
        load.count()


def test_a_node_may_leave_and_come_back_and_its_connections_count(loaded: LoadedCluster) -> None:
    load = load_of(loaded)
    loaded.logs["pod-a"] = "asked 110 failed 1"
    load.leave("one")
    # What happens there now is no failure of the proxy.
    loaded.logs["pod-a"], loaded.restarts["pod-a"] = "asked 900 failed 700", 1
    assert load.count() == (160, 3)
    load.join("one")
    loaded.logs["pod-new"] = "asked 20 failed 1"
    assert load.count() == (180, 4)
    loaded.logs["pod-new"] = "asked 19 failed 1"
    with pytest.raises(E2EError, match="the log of pod-new has fewer than before"):
        load.count()


def test_pauses_of_the_load_itself_are_shown(loaded: LoadedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    load = load_of(loaded)
    switch.show_failures(load)
    assert capsys.readouterr() == ("", "")
    loaded.logs |= {"pod-a": "stalled 520 ms", "node-b": "stalled 3120 ms"}
    switch.show_failures(load)
    assert capsys.readouterr() == ("the load itself stalled 2 times, for at most 3120 ms\n", "")


def test_a_step_without_a_connection_shows_nothing(loaded: LoadedCluster) -> None:
    made = switch.Run(cast(Any, None), load_of(loaded))
    with pytest.raises(E2EError, match="nothing: no connection was opened meanwhile"):
        made._step("nothing", lambda: None)

    def serve() -> None:
        loaded.logs["pod-a"] = "asked 130 failed 1"

    made._step("something", serve)
    assert [(step.connections, step.failed) for step in made.steps] == [(30, 1)]


def test_from_the_start_of_a_container_to_a_ready_agent() -> None:
    log = (
        "2026-11-23T10:00:01.500Z info pyebpf-proxy starts version=1\n"
        "2026-11-23T10:00:02.100Z info ready objects=30 service_ports=7 seconds=1.234\n"
    )
    assert switch.ready_after(log) == 1.234
    with pytest.raises(E2EError, match="does not say when it was ready"):
        switch.ready_after(log.splitlines()[0])


def test_a_pod_runs_since_its_container_has_started() -> None:
    running = {"status": {"containerStatuses": [{"state": {"running": {"startedAt": "2026-11-23T10:00:01Z"}}}]}}
    waiting = {"status": {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}}
    assert switch.runs_since(waiting) < switch.runs_since(running)


def test_filters_leave_out_specs_that_cannot_run_here() -> None:
    left_out = re.compile("|".join(specs.LEFT_OUT.values()))
    assert left_out.search("[sig-network] LoadBalancers [Feature:LoadBalancer] [Slow] should")
    assert not left_out.search("[sig-network] Services should be able to change the type from NodePort to ExternalName")


def test_only_with_a_load_balancer_run_its_specs_and_long_ones() -> None:
    names = ("[sig-network] LoadBalancers [Feature:LoadBalancer] should", "[sig-network] Services [Slow] should")
    for name in names:
        assert re.search("|".join(specs.left_out(False)), name)
        assert not re.search("|".join(specs.left_out(True)), name)
    assert re.search("|".join(specs.left_out(True)), "[sig-network] Netpol should")


@pytest.mark.parametrize(
    ("arguments", "choice"),
    [
        ([], specs.Choice(specs.FOCUS, 4)),
        (["--load-balancer"], specs.Choice(specs.BALANCED_FOCUS, 4, balanced=True)),
        (["--focus", "UDP", "--processes", "2"], specs.Choice("UDP", 2)),
        (["--focus", "UDP", "--load-balancer"], specs.Choice("UDP", 4, balanced=True)),
        (["--replace"], specs.Choice(specs.FOCUS, 4, replace=True)),
    ],
)
def test_which_specs_run(arguments: list[str], choice: specs.Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def run(*given: object) -> int:
        asked.append(given)
        return 0

    monkeypatch.setattr(specs, "run", run)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert main(["test", *arguments]) == 0
    assert [given[3] for given in asked] == [choice]


def test_a_spec_may_fail_only_where_it_was_recorded_that_it_does() -> None:
    """A reason that was never seen with a proxy would hide its first failure."""
    recorded = {
        path.stem: results.load(path)[1]
        for path in results.FOLDER.glob("*.json")
        if "specs" in json.loads(path.read_text())
    }
    for proxy, known in specs.KNOWN.items():
        ran = [*recorded.get(proxy, ()), *recorded.get(f"{proxy}-dual", ())]
        for pattern in known:
            assert any(each.state == "failed" and re.search(pattern, each.name) for each in ran), (proxy, pattern)
    # And a recorded failure has a reason.
    for name, ran in recorded.items():
        assert results.unexpected(ran, specs.KNOWN.get(name.removesuffix("-dual"), {})) == [], name


def test_missing_program_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e", "up"],
        cwd=ROOT,
        env={"PATH": "/usr/sbin:/usr/bin", "PYEBPF_PROXY_CACHE": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"e2e: .* (is missing|needs root).*\n", done.stderr)


def test_the_page_matches_the_results() -> None:
    assert (ROOT / "docs/kubernetes-e2e.md").read_text() == page.text(), "run python -m tests.e2e page"


class ReplacedCluster:
    """A cluster whose commands end with these statuses, one after the other, and then with 0."""

    proxy = "kube-proxy"
    kubeconfig = Path("admin.conf")

    def __init__(self, statuses: list[int]) -> None:
        self.statuses = statuses
        self.commands: list[str] = []

    def run(self, kubeconfig: Path, words: tuple[str, ...], show: Callable[[str], object]) -> tuple[int, str]:
        assert kubeconfig == self.kubeconfig
        self.commands.append(words[0])
        show(f"{words[0]} has ended\n")
        return (self.statuses.pop(0) if self.statuses else 0), ""


def replace_in(
    statuses: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ReplacedCluster, replacements.Replacements]:
    cluster = ReplacedCluster(statuses)
    monkeypatch.setattr(replacements, "run_command", cluster.run)
    monkeypatch.setattr(replacements, "STAY", 0)
    return cluster, replacements.Replacements(cast(Any, cluster), tmp_path / "log")


def test_the_proxy_is_replaced_until_the_specs_end_and_kube_proxy_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, done = replace_in([], tmp_path, monkeypatch)
    with done:
        wait_until(lambda: len(cluster.commands) >= 4, "a second round has begun")
    done.require_success()
    assert cluster.commands[:6] == ["install", "upgrade", "rollback"] * 2
    assert cluster.commands[-1] == "rollback"
    assert [each.what.split()[2] for each in done.made] == cluster.commands
    assert "$ pyebpf-proxy cluster rollback\nrollback has ended\n" in (tmp_path / "log").read_text()


def test_a_command_that_fails_ends_the_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, done = replace_in([0, 1], tmp_path, monkeypatch)
    with done:
        wait_until(lambda: len(done.made) == 2, "the second command has failed")
    with pytest.raises(E2EError, match=r"cluster upgrade .*: exit status 1"):
        done.require_success()
    assert cluster.commands == ["install", "upgrade"]


def test_specs_need_kube_proxy_for_a_replacement(tmp_path: Path) -> None:
    cluster = ReplacedCluster([])
    cluster.proxy = "pyebpf-proxy"
    with pytest.raises(E2EError, match="PROXY=kube-proxy"):
        replacements.Replacements(cast(Any, cluster), tmp_path / "log")


def test_the_page_shows_specs_during_replacements() -> None:
    commands = [
        {"what": f"pyebpf-proxy cluster {what}", "status": 0, "seconds": 30} for what in ("install", "rollback")
    ]
    about = {"replacements": commands, "seconds": 600}
    shown = page._replaced("kube-proxy", about, [Spec("a", "one", "passed", 1), Spec("a", "two", "failed", 1)])
    assert "1 times in 10 minutes: 1 of 2 specs passed." in shown.replace("\n", " ")


def web_pod(name: str, created: int, ready: bool = True, deleted: bool = False) -> dict[str, Any]:
    metadata = {"name": name, "creationTimestamp": f"2026-11-27T10:00:{created:02}Z"}
    metadata |= {"deletionTimestamp": "2026-11-27T11:00:00Z"} if deleted else {}
    return {"metadata": metadata, "status": {"conditions": [{"type": "Ready", "status": str(ready)}]}}


def test_churn_deletes_the_oldest_ready_pods_and_leaves_enough() -> None:
    pods = [web_pod(f"pod-{number}", 50 - number) for number in range(churn.FEWEST + 2)]
    pods += [web_pod("starting", 0, ready=False), web_pod("going", 0, deleted=True)]
    assert churn.oldest(pods) == [f"pod-{churn.FEWEST + 1}", f"pod-{churn.FEWEST}"]
    assert churn.oldest(pods[2:]) == []
    many = [web_pod(f"pod-{number}", number) for number in range(60)]
    assert len(churn.oldest(many)) == churn.RATE


def test_churn_reads_how_late_the_changes_of_all_nodes_are() -> None:
    name = "kubeproxy_network_programming_duration_seconds"
    head = f"# HELP {name} x\n# TYPE {name} histogram\n"
    lines = [f'{name}_bucket{{le="{bound}"}} ' for bound in ("0.25", "0.5", "+Inf")]
    first, second = ("".join(map("{}{}\n".format, lines, counts)) for counts in ((98, 100, 100), (99, 99, 100)))
    assert churn.quantile([head + first, head + second]) == 0.5
    assert churn.quantile([head + first, head + second], 0.98) == 0.25
    assert churn.quantile([head + first, head + second], 1) == float("inf")
    assert churn.quantile([head]) == 0


def test_the_page_shows_the_last_churn_with_each_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "churn.json"
    assert churn.load_record(path) == {}
    churn.save("kube-proxy", churn.Churn(600, 500, 600_000, 3), path)
    churn.save("kube-proxy", churn.Churn(602, 501, 600_002, 1, 2, "100m"), path)
    churn.save("pyebpf-proxy", churn.Churn(60, 50, 60_000, 1, request="100m"), path)
    churn.save("pyebpf-proxy", churn.Churn(601, 700, 600_001, 0, 0.25, "100m"), path)
    found = churn.load_record(path)
    monkeypatch.setattr(churn, "load_record", lambda: found)
    assert page._churned().endswith(
        "| kube-proxy | – | 500 | 600 | 600000 | 3 | – |\n"
        "| kube-proxy | 100m | 501 | 602 | 600002 | 1 | 2 s |\n"
        "| pyebpf-proxy | 100m | 700 | 601 | 600001 | 0 | 0.25 s |\n"
    )
