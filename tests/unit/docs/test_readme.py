# SPDX-License-Identifier: Apache-2.0
"""README.md stays short and has the figures of the last measurement; there is one review checklist."""

from __future__ import annotations

import json
import re

import pytest

from tests import ROOT
from tests.unit.repository.files import own_files, relative

OURS, NFTABLES = "pyebpf-proxy (defaults)", "kube-proxy, nftables"
#: The start of the table's row → the figure, and the row of its results.
ROWS = {
    "short connections, pod → ClusterIP": ("connect", "connect-request-reset, pod → ClusterIP, same node, IPv4"),
    "short connections, client → NodePort, policy Cluster": (
        "connect",
        "connect-request-reset, client → NodePort, policy Cluster, IPv4",
    ),
    "request-response on one connection, pod → ClusterIP": (
        "exchange",
        "request-response, one connection, pod → ClusterIP, same node, IPv4",
    ),
    "DNS: one query and answer": ("dns", "a datagram and its answer, pod → ClusterIP, same node, IPv4"),
}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_only_one_page_is_a_review_checklist() -> None:
    lists = [
        relative(page)
        for page in own_files(".md")
        if any(line.startswith("#") and "review" in line.lower() for line in page.read_text().splitlines())
    ]
    assert lists == ["CONTRIBUTING.md", "docs/review-checklist.md"]


@pytest.mark.parametrize("words", ROWS)
def test_the_table_has_the_ratios_to_no_proxy(words: str) -> None:
    figure, what = ROWS[words]
    rows = json.loads((ROOT / "bench" / "results" / f"{figure}.json").read_text())["rows"]
    measured = {row["what"]: row["judged"]["median"] for row in rows if row["compared_with"] == "no proxy"}
    cells = re.findall(
        rf"^\| {re.escape(words)}[^|]*\| ([\d.]+) \| \*\*([\d.]+)\*\* \|$", (ROOT / "README.md").read_text(), re.M
    )
    assert cells == [tuple(f"{measured[f'{what}: {name}']:.2f}" for name in (NFTABLES, OURS))]
