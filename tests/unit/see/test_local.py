# SPDX-License-Identifier: Apache-2.0
"""Answers of the agent's socket, whatever they are: a container of the agent may serve it."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.programs import Settings
from pyebpf_proxy.see import local, programs

Serve = Callable[[bytes], Path]
STATE = {
    "version": "",
    "refusals": {},
    "datapath": {},
    "source": {},
    "overLimit": {},
    "notServed": {},
    "notWritten": {},
}


class _Answer(http.server.BaseHTTPRequestHandler):
    """Reads the whole request: the end of a connection before that is an error of the client."""

    body = b""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET  # noqa: N815 - the name of http.server

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serves this body from now on; the result is the run folder."""

    def begin(content: bytes) -> Path:
        monkeypatch.setattr(_Answer, "body", content)
        return tmp_path

    with socketserver.UnixStreamServer(str(tmp_path / "agent.sock"), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield begin
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"version": ', b"\xff", b"5", b"1" * 10_000, b'{"version": "\\ud800"}'],
    ids=["deep", "cut", "bytes", "5", "long", "surrogate"],
)
def test_a_state_that_cannot_be_read_is_empty(serve: Serve, body: bytes) -> None:
    assert local.state(serve(body)) == STATE
    assert local.pods(serve(body), [bytes(4)]) == {}


def test_what_is_not_served_of_services(serve: Serve) -> None:
    body = b'{"shop/web": ["Service shop/web: a", "Service shop/web: b"], "shop/db": 5}'
    assert local.losses(serve(body), ["shop/web", "shop/db"]) == ["Service shop/web: a", "Service shop/web: b"]
    assert local.losses(serve(b"5"), ["shop/web"]) == []


def test_a_state(serve: Serve) -> None:
    assert local.state(serve(b'{"version": "1"}')) == {**STATE, "version": "1"}


@pytest.mark.parametrize(
    "datapath",
    [
        5,
        [],
        {"devices": []},
        {"devices": {"3": 5}},
        {"devices": {"3": {"others": "tcx"}}},
        {"devices": {"3": {"limit": 5}}},
        {"closed": {"4": {"reason": "stack_no_agent"}}},
        {"closed": {"4": "no"}},
        {"warnings": {"4": None}},
        {"promotion": {"failed": 5}},
        {"promotion": {"failed": {"a": "b"}}},
        {"repairs": {"lastMinute": {"pins": "many"}}},
        {"conntrackRefusals": {"lastMinute": 5}},
        {"pinsGone": {"why": "it"}},
        {"settings": {"nft_mode": []}},
    ],
)
def test_a_part_of_another_type_is_empty_and_the_others_are_kept(serve: Serve, datapath: object) -> None:
    """The agent's container may be hostile, and an agent of another version may differ."""
    body = json.dumps({"version": "1", "datapath": datapath, "source": {"": "refused"}, "overLimit": 5})
    assert local.state(serve(body.encode())) == {**STATE, "version": "1", "source": {"": "refused"}}


def test_settings_of_the_agent() -> None:
    """Commands without CAP_SYS_ADMIN take the programs' settings from it."""
    settings = Settings(1, nft_mode=True, pod_cidr4=b"\x0a\xf4\0\0")
    answer = {name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(settings).items()}
    assert programs._settings_of_agent({**answer, "of_a_later_version": 5}) == asdict(settings)
    for name, value in (("pod_cidr4", "0af400"), ("pod_cidr4", "ten"), ("pod_cidr4", 10), ("nft_mode", "00")):
        assert programs._settings_of_agent({**answer, name: value}) is None
    assert programs._settings_of_agent({}) is None


def test_metrics_that_are_no_numbers_are_left_out(serve: Serve) -> None:
    assert local.samples(serve(b'a 1\na NaN\nb x\nb +Inf\nb{c="d"} 2\n')) == {"a": [1.0], "b": [2.0]}


def test_an_endless_answer_is_none(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_MOST_BYTES", 1000)
    assert local.state(serve(b'{"version": "%s"}' % (b"1" * 1000))) is None
    assert local.state(serve(b'{"version": "1"}')) is not None
