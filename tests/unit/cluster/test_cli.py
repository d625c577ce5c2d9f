# SPDX-License-Identifier: Apache-2.0
"""The question whether this is the cluster that was meant."""

from __future__ import annotations

import argparse
import io

import pytest

from pyebpf_proxy.cluster import cli
from pyebpf_proxy.cluster.errors import ClusterError


@pytest.mark.parametrize("stdin", [None, io.StringIO("y\n")], ids=["closed", "no terminal"])
def test_without_a_terminal_the_cluster_is_not_confirmed(
    monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO | None
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    options = argparse.Namespace(yes=False, command="install")
    with pytest.raises(ClusterError, match="context here, https://x: not confirmed, because stdin is not a terminal"):
        cli._ask("here", "https://x", options)
