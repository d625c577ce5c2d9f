# SPDX-License-Identifier: Apache-2.0
"""What is reported about the rules of the iptables tools, without the tools."""

from __future__ import annotations

import pytest

from pyebpf_proxy.datapath.migration import iptables
from pyebpf_proxy.datapath.report import Report

RULES = (
    "*filter\n:INPUT DROP [0:0]\n:KUBE-NODEPORTS - [0:0]\n"
    '-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS\n{}COMMIT\n'
)


@pytest.mark.parametrize(
    ("count", "named"),
    [(1, " (now 32000),"), (10, ", 32009),"), (12, ", 32009 and 2 more),")],
)
def test_a_warning_names_a_few_ports(monkeypatch: pytest.MonkeyPatch, count: int, named: str) -> None:
    """Of hundreds of Services a line of the log would be too long."""
    ports = range(32000, 32000 + count)
    rules = RULES.format("".join(f"-A KUBE-NODEPORTS -p tcp -m tcp --dport {port} -j ACCEPT\n" for port in ports))
    monkeypatch.setattr(iptables, "VARIANTS", (iptables.Variant("nft", 4),))
    monkeypatch.setattr(iptables, "_tables", lambda variant: {"filter"})
    monkeypatch.setattr(iptables, "_run", lambda variant, action, *rest, **more: rules if action == "save" else "")
    report = Report()
    iptables.remove(report)
    (warning,) = report.warnings
    assert named in warning
