# SPDX-License-Identifier: Apache-2.0
"""The pods of ``cluster test``: what counts as a failure."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from pyebpf_proxy.cluster import peer

ROW = {"address": "203.0.113.253", "port": 80, "protocol": "TCP"}


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node without a default route."""

    def refuse(row: dict[str, Any]) -> str:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(peer, "_once", refuse)


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize(("may", "ok"), [(True, None), (False, False)])
def test_a_node_may_lack_a_route_to_a_vip(may: bool, ok: bool | None) -> None:
    answer = peer.ask(ROW | {"unreachable": may}, patience=0)
    assert answer["ok"] is ok


@pytest.mark.usefixtures("unreachable")
def test_an_untestable_row_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peer.signal, "signal", lambda *_: None)
    assert peer.main({"PEER_PLAN": json.dumps([ROW | {"unreachable": True}])}) == 0
    row, done = capsys.readouterr().out.splitlines()
    assert (json.loads(row)["detail"], done) == ("the node has no route to this address", peer.DONE)
