# SPDX-License-Identifier: Apache-2.0
"""Which requests are repeated, and what is wrong with a kubeconfig."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pyebpf_proxy.cluster import api as module
from pyebpf_proxy.cluster import ask
from pyebpf_proxy.cluster.api import DAEMON_SETS, LEASES, NODES, PODS, Api, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError, StoppedError
from pyebpf_proxy.cluster.model import pod_of
from pyebpf_proxy.see.model import Status
from tests.support import web_socket

CONFLICT = RefusedError(
    409, "Conflict", "the object has been modified; please apply your changes to the latest version"
)
BUSY = RefusedError(429, "TooManyRequests", "too many requests, please try again later")
POD = {"metadata": {"name": "task", "namespace": "kube-system"}}


class Answers:
    """An API server that answers so, and then with an object."""

    def __init__(self, api: Api, monkeypatch: pytest.MonkeyPatch, *answers: RefusedError) -> None:
        self.left = list(answers)
        monkeypatch.setattr(api, "_once", self._answer)

    def _answer(self, *_: object) -> Any:
        if self.left:
            raise self.left.pop(0)
        return {"metadata": {}}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    return _api(tmp_path, "https://192.0.2.1:6443")


def _api(folder: Path, url: str) -> Api:
    file = folder / "kubeconfig"
    server = {"name": "c", "cluster": {"server": url}}
    context = {"name": "c", "context": {"cluster": "c", "user": "c"}}
    user = {"name": "c", "user": {"token": "t"}}
    file.write_text(json.dumps({"clusters": [server], "contexts": [context], "users": [user], "current-context": "c"}))
    return Api(str(file))


def test_a_pod_whose_quota_is_used_by_others_at_the_same_time(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quota's object was modified: the server says so about the pod."""
    answers = Answers(api, monkeypatch, CONFLICT, CONFLICT)
    api.create(PODS, POD)
    assert not answers.left


def test_a_change_that_others_were_faster_with(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(api, monkeypatch, CONFLICT)
    api.patch(NODES, "n1", {"metadata": {"labels": {"a": "b"}}})
    assert not answers.left


def test_conflicts_do_not_last_for_ever(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    Answers(api, monkeypatch, *[CONFLICT] * 100)
    with pytest.raises(RefusedError, match="has been modified"):
        api.patch(DAEMON_SETS, "kube-proxy", {"spec": {}}, "kube-system")


def test_a_change_of_one_version_is_not_repeated(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(api, monkeypatch, CONFLICT, CONFLICT)
    with pytest.raises(RefusedError):
        api.patch(LEASES, "lease", {"metadata": {"resourceVersion": "7"}}, "kube-system")
    assert len(answers.left) == 1


def test_a_server_that_is_busy_at_first(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(api, monkeypatch, BUSY, BUSY)
    assert api.get(NODES, "n1") == {"metadata": {}}
    assert not answers.left


def test_a_change_is_not_repeated_for_a_command_that_has_lost_the_lease(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network was away for longer than the Lease lasts: the label would park kube-proxy on a node that another
    command has given back since.
    """
    answers = Answers(api, monkeypatch)
    api.get(NODES, "n1")
    answers.left = [RefusedError(0, "NoAnswer", "timed out"), RefusedError(0, "NoAnswer", "it was repeated")]
    asked = []

    def guard() -> None:
        asked.append(len(answers.left))
        if len(asked) > 1:
            raise StoppedError("another command has taken over")

    api.guard = guard
    with pytest.raises(StoppedError, match="another command has taken over"):
        api.patch(NODES, "n1", {"metadata": {"labels": {"a": "b"}}})
    assert asked == [2, 1]


def test_a_server_that_never_answers_is_not_waited_for(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    Answers(api, monkeypatch, RefusedError(0, "NoAnswer", "Connection refused"))
    with pytest.raises(StoppedError, match="does not answer: Connection refused"):
        api.get(NODES, "n1")


def test_credentials_that_expire_in_the_middle_stop_the_command(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can undo nothing either. From the beginning, it is a refusal."""
    refused = RefusedError(401, "Unauthorized", "Unauthorized")
    answers = Answers(api, monkeypatch, refused)
    with pytest.raises(RefusedError):
        api.get(NODES, "n1")
    api.get(NODES, "n1")
    answers.left = [refused, refused]
    with pytest.raises(StoppedError, match=r"^the API server no longer accepts the kubeconfig's credentials$"):
        api.get(NODES, "n1")


def test_credentials_that_expire_are_read_again(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's token lasts an hour, and its file has a new one before; but never those of another cluster."""
    file = tmp_path / "kubeconfig"
    answers = Answers(api, monkeypatch)
    api.get(NODES, "n1")
    refused = RefusedError(401, "Unauthorized", "Unauthorized")
    file.write_text(file.read_text().replace('"token": "t"', '"token": "newer"'))
    answers.left = [refused]
    api.get(NODES, "n1")
    assert token_of(api) == "Bearer newer"
    file.write_text(file.read_text().replace("192.0.2.1", "192.0.2.2"))
    answers.left = [refused]
    with pytest.raises(StoppedError, match=r"the kubeconfig now names another server: https://192.0.2.2:6443$"):
        api.get(NODES, "n1")
    file.unlink()
    answers.left = [refused]
    with pytest.raises(StoppedError, match=r"and cannot be read again: no kubeconfig: .* does not exist"):
        api.get(NODES, "n1")


def token_of(api: Api) -> str:
    """As it is sent."""
    return str(api._client.configuration.auth_settings()["BearerToken"]["value"])


def test_the_file_of_a_token_may_end_with_a_newline(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t\n")
    file = tmp_path / "kubeconfig"
    content = {
        "clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.1:6443"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        "users": [{"name": "c", "user": {"tokenFile": "token"}}],
    }
    file.write_text(json.dumps(content))
    assert token_of(Api(str(file), "c")) == "Bearer t"


@pytest.mark.parametrize("variable", [None, "", "{home}/other"])
def test_the_kubeconfig_is_found_as_kubectl_finds_it(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the variable if it is set and not empty, else the one in the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable is None:
        monkeypatch.delenv("KUBECONFIG", raising=False)
    else:
        monkeypatch.setenv("KUBECONFIG", variable.format(home=tmp_path))
    file = tmp_path / ("other" if variable else ".kube/config")
    with pytest.raises(ClusterError, match=r"^no kubeconfig: \S+ does not exist; specify one with"):
        Api()
    file.parent.mkdir(exist_ok=True)
    _api(tmp_path, "https://192.0.2.1:6443")
    (tmp_path / "kubeconfig").rename(file)
    assert Api().context == "c"


def test_a_kubeconfig_that_is_not_text_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match=f"^no kubeconfig: {file} is not UTF-8 text; specify one with"):
        Api(str(file))


def test_a_kubeconfig_with_broken_base64_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    cluster = {"server": "https://192.0.2.1:6443", "certificate-authority-data": "abc"}
    context = {"name": "c", "context": {"cluster": "c", "user": "c"}}
    file.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": cluster}],
                "contexts": [context],
                "users": [{"name": "c", "user": {"token": "t"}}],
                "current-context": "c",
            }
        )
    )
    with pytest.raises(ClusterError, match=f"^no kubeconfig: {file} has a field …-data that is not valid base64; "):
        Api(str(file))


@pytest.mark.parametrize("place", ["proxy-url", "environment"])
@pytest.mark.parametrize(
    ("proxy", "why"),
    [
        ("socks5://127.0.0.1:1080", "a SOCKS proxy needs the Python package PySocks"),
        ("127.0.0.1:3128", "Proxy URL had no scheme"),
        ("http://user:secret@127.0.0.1:port", "Failed to parse"),
    ],
)
def test_a_proxy_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str, why: str, place: str
) -> None:
    monkeypatch.setitem(sys.modules, "socks", None)  # it may be installed
    file = tmp_path / "kubeconfig"
    cluster = {"server": "https://192.0.2.1:6443"}
    if place == "environment":
        monkeypatch.setenv("HTTPS_PROXY", proxy)
    else:
        cluster["proxy-url"] = proxy
    content = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        "users": [{"name": "c", "user": {"token": "t"}}],
    }
    file.write_text(json.dumps(content))
    with pytest.raises(ClusterError, match=rf"^the proxy \(.*\) cannot be used: {why}") as raised:
        Api(str(file), "c")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("current", [None, "deleted"])
def test_a_kubeconfig_whose_current_context_is_missing(tmp_path: Path, current: str | None) -> None:
    """As after `kubectl config delete-context`. Another context can be used; without one, the error names those."""
    file = tmp_path / "kubeconfig"
    content = {
        "clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.1:6443"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        "users": [{"name": "c", "user": {"token": "t"}}],
    }
    file.write_text(json.dumps(content | ({"current-context": current} if current else {})))
    found = Api(str(file), "c")
    assert (found.context, found.url) == ("c", "https://192.0.2.1:6443")
    lacks = "no context deleted in the kubeconfig" if current else "has no current context; specify one with --context"
    with pytest.raises(ClusterError, match=f"{lacks}; it has: c$"):
        Api(str(file))


@pytest.mark.parametrize("renewed", [False, True])
def test_an_exec_plugin_that_fails_is_named_in_one_line(tmp_path: Path, renewed: bool) -> None:
    """The library prints what it wrote, line by line and as it is, and goes on without credentials."""
    plugin, ended = tmp_path / "plugin", tmp_path / "ended"
    status = {"token": "t", "expirationTimestamp": "2026-01-01T00:00:00Z"}
    answer = {"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": status}
    signed = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl"
    plugin.write_text(
        f"#!/bin/sh\n[ ! -e {ended} ] && echo '{json.dumps(answer)}' && exit\n"
        f"printf 'refused:\\n{signed}\\n' >&2\nexit 7\n"
    )
    plugin.chmod(0o755)
    file = tmp_path / "kubeconfig"
    user = {"exec": {"apiVersion": answer["apiVersion"], "command": str(plugin), "interactiveMode": "Never"}}
    content = {
        "clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.1:6443"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        "users": [{"name": "c", "user": user}],
    }
    file.write_text(json.dumps(content))
    if renewed:
        # The token has expired: the library runs the plugin again for each request.
        program = f"from pathlib import Path; from pyebpf_proxy.cluster.api import Api; api = Api({str(file)!r}, 'c')\n"
        program += f"Path({str(ended)!r}).touch(); print(api._client.configuration.auth_settings())"
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert ran.stderr == ""
        return
    ended.touch()
    words = ["cluster", "status", "--kubeconfig", str(file), "--context", "c"]
    program = f"from pyebpf_proxy.cli import main; main({words!r})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    why = "exec: process returned 7. refused: REDACTED"
    assert ran.stderr == f"Error: the exec plugin {plugin} gives no credentials: {why}\n"


def test_the_last_words_of_one_thread_do_not_hurry_the_others(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ``cluster check``, one node has failed, and its pod is deleted. Its other nodes and the Lease go on."""
    answers = Answers(api, monkeypatch)
    api.get(NODES, "n1")
    begun, ended = threading.Event(), threading.Event()

    def other() -> None:
        with api.last_words():
            begun.set()
            ended.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert begun.wait(30)
        answers.left = [BUSY]
        api.get(NODES, "n1")
    finally:
        ended.set()
        thread.join()
    with api.last_words():
        answers.left = [BUSY]
        api.get(NODES, "n1")
    assert answers.left == []


class Shouting(BaseHTTPRequestHandler):
    """An API server whose pods print zeros: a WebSocket with one channel."""

    #: Bytes that a command prints; then it ends.
    prints: ClassVar[float]

    def do_GET(self) -> None:
        web_socket.accept(self)
        with contextlib.suppress(OSError):
            sent = 0
            while sent < self.prints:
                web_socket.send(self, web_socket.BINARY, b"\1" + bytes(1 << 15))
                sent += 1 << 15
            web_socket.send(self, web_socket.BINARY, b"\3" + json.dumps({"status": "Success"}).encode())
            web_socket.send(self, web_socket.CLOSE, b"")
        self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass


@pytest.mark.parametrize("prints", [1 << 20, float("inf")], ids=["1 MiB", "without end"])
def test_a_command_in_a_pod_may_print_only_so_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: float
) -> None:
    """Otherwise a compromised agent could fill the memory of the administrator's machine."""
    monkeypatch.setattr(module, "_MOST_PRINTED", 4 << 20)
    monkeypatch.setattr(Shouting, "prints", prints, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Shouting) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            api = _api(tmp_path, f"http://127.0.0.1:{listener.server_port}")
            if prints == 1 << 20:
                assert api.execute("agent", "kube-system", "agent", ["true"], 60.0) == (0, "\0" * (1 << 20), "")
                return
            with pytest.raises(RefusedError, match="the command printed more than 4 MiB"):
                api.execute("agent", "kube-system", "agent", ["true"], 60.0)
        finally:
            listener.shutdown()


@pytest.mark.parametrize("hangs_up", [False, True], ids=["time limit", "Ctrl-C"])
def test_a_command_in_a_pod_whose_kubelet_does_not_answer(tmp_path: Path, hangs_up: bool) -> None:
    """The API server waits for the kubelet, and opens no WebSocket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        api = _api(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}")
        if hangs_up:
            threading.Timer(1.0, api.hang_up).start()
        begin = time.monotonic()
        with pytest.raises(RefusedError, match="the command did not finish within"):
            api.execute("agent", "kube-system", "agent", ["true"], 60.0 if hangs_up else 1.0)
        assert time.monotonic() - begin < 30


class Refusing(BaseHTTPRequestHandler):
    """An API server that passes on the status of a kubelet, which does not accept the API server's certificate."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("Content-Length", "12")
        self.end_headers()
        self.wfile.write(b"Unauthorized")

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass


def test_a_kubelet_that_refuses_is_the_problem_of_its_node(tmp_path: Path) -> None:
    """And not of the kubeconfig's credentials, which the API server has accepted."""
    pod = pod_of({"metadata": {"name": "a", "uid": "u"}, "spec": {"containers": [{"name": "c", "image": "i"}]}})
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            api = _api(tmp_path, f"http://127.0.0.1:{listener.server_port}")
            with pytest.raises(ClusterError, match=r"^Unauthorized$"):
                ask.one(api, pod, ["status"], Status, 10.0)
        finally:
            listener.shutdown()
