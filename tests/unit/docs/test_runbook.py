# SPDX-License-Identifier: Apache-2.0
"""docs/runbook.md: one section for each alert, and each alert links to its section."""

from __future__ import annotations

import re
from typing import Any

import yaml

from pyebpf_proxy.servers.client_metrics import ClientMetrics
from pyebpf_proxy.servers.metrics import DatapathNumbers, Metrics
from pyebpf_proxy.servers.registry import text
from tests import ROOT

PAGE = "docs/runbook.md"
SECTION = re.compile(r"^### (\w+)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "pyebpf-proxy.rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def sections() -> dict[str, str]:
    return dict(SECTION.findall((ROOT / PAGE).read_text()))


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    assert list(sections()) == [rule["alert"] for rule in rules()]


def test_every_alert_links_to_its_section() -> None:
    linked = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules()}
    assert linked == {name: f"{PAGE}#{name.lower()}" for name in sections()}


def test_every_section_has_the_required_headings() -> None:
    parts = ("**Meaning.**", "**Confirm", "**Likely causes", "**Do.**", "**Resolves**")
    # Sections that refer to another one combine these headings.
    joined = {"**Likely causes": "causes", "**Do.**": "what to do"}
    missing = {
        (name, part)
        for name, section in sections().items()
        for part in parts
        if part not in section and joined.get(part, part) not in section
    }
    assert missing == set()


def test_metrics_that_appear_only_in_trouble_exist() -> None:
    """A healthy agent with a folder of manifests, as in tests/netns/test_deploy_capabilities.py, does not
    expose them.
    """
    trouble = {"closed": {4: {"reason": "stack_rules"}}, "promotion": {"young": 0, "failed": {"full": 1}}}
    client = ClientMetrics()
    client.connected("services", False)
    registry = Metrics(DatapathNumbers(view=lambda: trouble)).registry
    registry.add(*client.families)
    exposed = text(registry).decode().splitlines()
    assert {
        'pyebpf_proxy_api_connected{resource="services"} 0.0',
        'pyebpf_proxy_fast_path_closed{family="IPv4",reason="stack_rules"} 1.0',
        'pyebpf_proxy_promotion_failures_total{outcome="full"} 1.0',
    } <= set(exposed)
