# SPDX-License-Identifier: Apache-2.0
"""The desired state while the API server fails: a command must not keep the user waiting, and says why it fails."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pytest

from pyebpf_proxy.see import model, run_services
from pyebpf_proxy.see.answers import SeeError
from pyebpf_proxy.see.services_text import services_text
from pyebpf_proxy.see.text import Terminal
from pyebpf_proxy.see.wanted import SILENT, read_wanted
from tests.support.ports import free_port
from tests.support.scripted_api import ScriptedApi, node, service

DEADLINE = 10.0


def flags(url: str) -> list[str]:
    return [f"--master={url}", "--hostname-override=node1"]


def test_a_server_that_refuses_connections_is_named_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    port = free_port()
    with pytest.raises(SeeError, match=rf"the objects cannot be read: 127\.0\.0\.1:{port} refuses the connection"):
        read_wanted(tmp_path, flags(f"http://127.0.0.1:{port}"))
    assert time.monotonic() - begin < DEADLINE
    assert capfd.readouterr() == ("", "")  # an error is one line


def test_a_server_that_hangs_does_not_keep_a_command_waiting(tmp_path: Path) -> None:
    with ScriptedApi() as api:
        api.script("services", lambda e: e.hold())
        api.script("endpointslices", lambda e: e.hold())
        api.script("nodes", lambda e: e.hold())
        begin = time.monotonic()
        with pytest.raises(SeeError, match="has not delivered everything after 5 s"):
            read_wanted(tmp_path, flags(api.url), SILENT)
        assert time.monotonic() - begin < DEADLINE


def test_missing_rights_are_named(tmp_path: Path) -> None:
    with ScriptedApi() as api:
        api.has("nodes", node())
        api.script("services", *[lambda e: e.status(403, "forbidden")] * 20)
        with pytest.raises(SeeError, match=r"cannot be read: 403: forbidden: grant list and watch on services"):
            read_wanted(tmp_path, flags(api.url))


def test_a_supplement_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``services NAME`` and ``explain`` answer from the kernel, and say what is missing."""
    asked = argparse.Namespace(directory=tmp_path, config=None, manifests=None, hostname_override=None)
    monkeypatch.setattr(run_services, "running_agent", lambda directory: object())

    def fail(*_: object) -> None:
        raise SeeError("the objects cannot be read: 403")

    monkeypatch.setattr("pyebpf_proxy.see.wanted.read_wanted", fail)
    assert run_services.maybe_wanted(asked, 1) == (None, "the objects cannot be read: 403")
    answer = model.Services(services=[], objects_missing="the objects cannot be read: 403")
    lines = services_text(answer, Terminal(120, False), details=True)
    assert lines == ["endpoints that are not used are not shown: the objects cannot be read: 403"]


def test_objects_of_a_server_that_answers(tmp_path: Path) -> None:
    with ScriptedApi() as api:
        api.has("nodes", node())
        api.has("services", service("web"))
        wanted = read_wanted(tmp_path, flags(api.url), SILENT)
    assert {name.name for name in wanted.ports} == {"web"}
