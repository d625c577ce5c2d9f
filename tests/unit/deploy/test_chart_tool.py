# SPDX-License-Identifier: Apache-2.0
"""tools/chart.py: a change in deploy/ that it cannot express is an error. tests/cluster/test_chart.py runs Helm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tool_module import TOOLS, tool

PATH = "/spec/template/spec/containers/0/securityContext/capabilities/add/-"


def test_capabilities_in_another_form_are_an_error() -> None:
    """Without it, the value would change nothing."""
    chart = tool("chart")
    operation = {"op": "add", "path": PATH, "value": "NET_RAW"}
    text = "              add: [NET_ADMIN]\n"
    assert chart.added(text, operation, "x") == "              add: [NET_ADMIN{{ if .Values.x }}, NET_RAW{{ end }}]\n"
    with pytest.raises(chart.ChartError, match="capabilities have no list"):
        chart.added("              add:\n                - NET_ADMIN\n", operation, "x")


def test_the_chart_is_built_without_kubectl(tmp_path: Path) -> None:
    """No Debian package of `make setup` has it."""
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, TOOLS / "chart.py", tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--keep-kube-proxy-rules" in (tmp_path / "pyebpf-proxy" / "templates" / "daemonset.yaml").read_text()
