# SPDX-License-Identifier: Apache-2.0
"""docs/quick-start.md quotes the commands' real output."""

from __future__ import annotations

import re

from tests import ROOT

PAGE = (ROOT / "docs" / "quick-start.md").read_text()
SOURCES = "".join(path.read_text() for path in sorted((ROOT / "pyebpf_proxy" / "cluster").glob("*.py")))
#: Other lines of the commands, without names and numbers.
PARTS = (
    "to take over, ",
    "left to kube-proxy; to continue, run pyebpf-proxy cluster install",
    "to give back: ",
    "all objects of pyebpf-proxy are removed; kube-proxy's DaemonSet is restored",
    "sufficient for install, upgrade and rollback",
    "; pyebpf-proxy doctor on a node reads its configuration",
    "kubeadm's DaemonSet and ConfigMap, mode ",
    "the agent's pod is admitted (Pod Security of ",
    " runs, and the kernel has BTF",
)


def test_quoted_lines_are_those_of_the_commands() -> None:
    quoted = re.findall(r"^\[\d/\d\] node\d: (.+)$", PAGE, re.MULTILINE)
    assert len(quoted) >= 5
    assert [line for line in (*quoted, *PARTS) if line not in SOURCES] == []
    assert [part for part in PARTS if part not in PAGE] == []
