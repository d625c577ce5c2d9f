#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the PrometheusRule of deploy/ from the rule file. Run it after a change of deploy/prometheus.

tools/prometheus_rule.py           writes deploy/components/prometheus-operator/prometheusrule.yaml
tools/prometheus_rule.py --check   exit status 1 if it differs
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
TARGET = DEPLOY / "components" / "prometheus-operator" / "prometheusrule.yaml"
HEAD = """# The rules of deploy/prometheus, made by tools/prometheus_rule.py. Do not edit by hand.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: pyebpf-proxy
  namespace: kube-system
  labels:
    app.kubernetes.io/name: pyebpf-proxy
spec:
"""


def text() -> str:
    """The content of the file."""
    rules = (DEPLOY / "prometheus" / "pyebpf-proxy.rules.yaml").read_text()
    return HEAD + textwrap.indent(rules[rules.index("groups:") :], "  ")


def main(arguments: list[str]) -> int:
    """Write or check the file. The result is the exit status."""
    if arguments != ["--check"]:
        TARGET.write_text(text())
    elif TARGET.read_text() != text():
        print(f"{TARGET} differs from deploy/prometheus: run tools/prometheus_rule.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
