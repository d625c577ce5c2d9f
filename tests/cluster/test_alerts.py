# SPDX-License-Identifier: Apache-2.0
"""The alert rules, tested with promtool: each fires when it must and is silent when it must be."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests import CACHE, ROOT

FOLDER = ROOT / "deploy" / "prometheus"
RULES = FOLDER / "pyebpf-proxy.rules.yaml"
TESTS = FOLDER / "pyebpf-proxy.rules_test.yaml"
PROMTOOL = CACHE / "bin" / "promtool"


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROMTOOL, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def test_each_alert_fires_when_it_must() -> None:
    done = promtool("test", "rules", TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_for_firing_and_silence() -> None:
    asked = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    for rule in rules():
        expectations = [bool(case["exp_alerts"]) for case in asked if case["alertname"] == rule["alert"]]
        assert set(expectations) == {True, False}, rule["alert"]


def test_the_rule_tests_fail_for_silenced_rules(tmp_path: Path) -> None:
    """The rules' tests can fail: with every rule silenced, each of them does."""
    changed = yaml.safe_load(RULES.read_text())
    for group in changed["groups"]:
        for rule in group["rules"]:
            rule["expr"] = f"({rule['expr'].strip()}) and vector(0) == 1"
    (tmp_path / RULES.name).write_text(yaml.safe_dump(changed))
    (tmp_path / TESTS.name).write_text(TESTS.read_text())
    done = promtool("test", "rules", tmp_path / TESTS.name)
    assert done.returncode == 1
    failed = set(re.findall(r"alertname: (\w+)", done.stdout + done.stderr))
    assert failed == {rule["alert"] for rule in rules()}


def test_the_dashboards_queries_are_valid(tmp_path: Path) -> None:
    """Each one as a recording rule, with values for the variables."""
    panels = json.loads((ROOT / "deploy" / "grafana" / "pyebpf-proxy.json").read_text())["panels"]
    questions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    recorded = [
        {"record": f"question:{number}", "expr": re.sub(r"\$(job|instance)\b", ".*", question)}
        for number, question in enumerate(questions)
    ]
    file = tmp_path / "questions.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(questions)} rules found" in done.stdout
