# SPDX-License-Identifier: Apache-2.0
"""Failures of the API server: delivered objects stay, one line reports the cause and one the end, metrics show it, and
everything recovers without a restart.
"""

from __future__ import annotations

import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pyebpf_proxy.kube.api.connect import find
from pyebpf_proxy.kube.api.observer import Silent
from tests.cluster.api_source import ACCOUNT, RULES, TIMING, kubeconfig, node, server, service, slice_of
from tests.support.apiserver import ApiServer
from tests.support.logs import Message
from tests.support.scripted_api import Following
from tests.support.spoiling_proxy import Mode, Proxy

__all__ = ["kubeconfig", "server"]

LONG = 60.0
#: Seconds for which a frozen API server must not answer.
FROZEN = 5.0


class Numbers(Silent):
    """Counts the metrics that the source reports."""

    def __init__(self) -> None:
        self.retries: Counter[str] = Counter()
        self.lists: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.is_connected: dict[str, bool] = {}

    def requested(self, method: str, host: str, code: str, seconds: float) -> None:
        self.codes[code] += 1

    def connected(self, resource: str, connected: bool) -> None:
        self.is_connected[resource] = connected

    def listed(self, resource: str) -> None:
        self.lists[resource] += 1

    def retried(self, resource: str) -> None:
        self.retries[resource] += 1

    @property
    def all_connected(self) -> bool:
        return len(self.is_connected) == 4 and all(self.is_connected.values())


@pytest.fixture
def proxy(server: ApiServer) -> Iterator[Proxy]:
    with Proxy(server.port, server.folder) as proxy:
        yield proxy


@pytest.fixture
def through(server: ApiServer, kubeconfig: Path, proxy: Proxy) -> Path:
    """A kubeconfig that uses the proxy."""
    return server.kubeconfig(kubeconfig.with_name("through"), {"tokenFile": "token"}, proxy.url)


def following(path: Path, watch: float = 3600.0, answer: float = 15.0) -> tuple[Following, Numbers]:
    numbers = Numbers()
    timing = replace(TIMING, window=3.0, answer=answer, settle=12.0, watch=(watch, watch), grace=2.0)
    return Following(find(str(path), ""), timing, observer=numbers), numbers


def still_there(source: Following) -> None:
    """No delivered object has been withdrawn."""
    assert {"kubernetes", "web"} <= source.names("Service"), source.changes
    assert source.names("EndpointSlice") == {"web-1"}


def one_line(source: Following, *words: str) -> None:
    """Exactly one line about the failure, with these words, and one about its end."""
    failures = [line for line in source.errors() if "fail" in line or "follow" in line]
    assert len(failures) == 1, source.lines
    failed = failures[0]
    for word in words:
        assert word in failed, failed
    assert len(over(source)) == 1, source.lines


def over(source: Following) -> list[str]:
    """The lines that report the end of a failure."""
    return [line for line in list(source.lines) if line.startswith("info") and "again" in line]


@pytest.fixture
def objects(server: ApiServer, kubeconfig: Path) -> None:
    server.create(service("web"))
    server.create(slice_of("web"))


SPOILT: list[tuple[Mode, str]] = [
    ("slow", "too slowly: less than 32 KiB in 3 s"),
    ("mute", "no answer within 3 s"),
    ("garbage", "cannot be parsed"),
    ("truncated", "ended before its end"),
    ("refuse", "127.0.0.1"),
]


@pytest.mark.usefixtures("objects")
@pytest.mark.parametrize(("mode", "words"), SPOILT)
def test_spoilt_answers(server: ApiServer, proxy: Proxy, through: Path, mode: Mode, words: str) -> None:
    source, numbers = following(through, answer=3.0 if mode == "mute" else 15.0)
    with source:
        source.until(lambda: source.complete and numbers.all_connected)
        still_there(source)
        before = numbers.retries["services"]
        proxy.set(mode)
        server.create(service("api"))
        logged = words if mode == "mute" else "error"
        source.until(lambda: numbers.retries["services"] >= before + 3 and source.logged(logged), LONG)
        still_there(source)
        proxy.set("through")
        source.until(lambda: "api" in source.names("Service"), LONG)
        source.until(lambda: numbers.all_connected and over(source), LONG)
        still_there(source)
        if mode == "garbage":
            # For one resource at a time.
            counted = Counter(line.partition("'resource': ")[2].split(",")[0] for line in source.logged(words))
            assert set(counted.values()) == {1}, source.lines
        elif mode == "mute":
            # Cutting the connections is a separate failure, which may be noticed first.
            assert words in source.errors()[-1]
            assert len(source.errors()) <= 2
        else:
            one_line(source, words)


@pytest.mark.usefixtures("objects")
def test_frozen_for_a_while(server: ApiServer, kubeconfig: Path) -> None:
    """Nothing was lost meanwhile: the connections continue where they were (finding T4)."""
    source, numbers = following(kubeconfig)
    with source:
        source.until(lambda: source.complete and numbers.all_connected)
        server.freeze()
        try:
            # The running server answers clients without TLS at once, in plain text.
            with socket.create_connection(("127.0.0.1", server.port), timeout=FROZEN) as asking:
                asking.sendall(b"GET / HTTP/1.0\r\n\r\n")
                with pytest.raises(TimeoutError):
                    asking.recv(1)
            still_there(source)
            assert not source.errors()
            assert numbers.all_connected
        finally:
            server.thaw()
        server.create(service("api"))
        source.until(lambda: "api" in source.names("Service"), LONG)
        assert source.errors() == []


@pytest.mark.usefixtures("objects")
def test_frozen_for_long(server: ApiServer, kubeconfig: Path) -> None:
    """The agent gives up watches that should have ended; new ones get no answer."""
    source, numbers = following(kubeconfig, watch=3.0, answer=3.0)
    with source:
        source.until(lambda: source.complete and numbers.all_connected)
        server.freeze()
        try:
            source.until(lambda: source.logged("no answer within"), LONG)
            still_there(source)
        finally:
            server.thaw()
        server.create(service("api"))
        source.until(lambda: "api" in source.names("Service") and over(source), LONG)
        one_line(source, "no answer within 3 s")


@pytest.mark.usefixtures("objects")
def test_killed_and_restarted_with_other_objects(server: ApiServer, kubeconfig: Path) -> None:
    source, numbers = following(kubeconfig)
    with source:
        source.until(lambda: source.complete and numbers.all_connected)
        server.clear()
        source.until(lambda: source.logged("refuses the connection"), LONG)
        still_there(source)
        server.start()
        server.account(ACCOUNT, RULES)
        # Another cluster has other keys: the account gets a new token, in its file.
        (kubeconfig.parent / "token").write_text(server.token(ACCOUNT))
        server.apply(node())
        server.create(service("other"))
        source.until(lambda: source.names("Service") == {"kubernetes", "other"}, LONG)
        source.until(lambda: not source.names("EndpointSlice") and numbers.all_connected, LONG)
        server.delete(service("other"))
        source.until(lambda: over(source), LONG)
        assert source.logged("refuses the connection: check that the API server runs")


@pytest.mark.usefixtures("objects")
def test_history_is_compacted_while_disconnected(server: ApiServer, proxy: Proxy, through: Path) -> None:
    source, numbers = following(through)
    with source:
        source.until(lambda: source.complete and numbers.all_connected)
        before = numbers.lists["services"]
        server.kill()
        source.until(lambda: source.errors(), LONG)
        server.start()
        server.delete(slice_of("web"))
        server.create(service("api"))
        server.compact()
        source.until(lambda: "api" in source.names("Service") and not source.names("EndpointSlice"), LONG)
        assert numbers.lists["services"] > before


@pytest.mark.usefixtures("objects")
def test_a_token_is_rotated_and_expires(server: ApiServer, proxy: Proxy, through: Path) -> None:
    token = through.parent / "token"
    source, numbers = following(through)
    with source:
        source.until(lambda: source.complete and numbers.all_connected)
        good = token.read_text()
        token.write_text("expired.or.wrong")
        source.client.credentials.refused()
        proxy.cut()
        source.until(lambda: numbers.codes["401"] >= 5, LONG)
        still_there(source)
        token.write_text(good)
        source.until(lambda: numbers.all_connected and over(source), LONG)
        one_line(source, "rejects the credentials (401 Unauthorized)", "check token or client certificate")


@pytest.mark.usefixtures("objects")
def test_permission_for_one_resource_is_removed(server: ApiServer, proxy: Proxy, through: Path) -> None:
    source, numbers = following(through)
    with source:
        source.until(lambda: source.complete and numbers.all_connected)
        server.account(ACCOUNT, RULES[:2])
        # The next request needs the permission. The server applies the removal a moment later.
        while not numbers.codes["403"]:
            before = numbers.retries.total()
            proxy.cut()
            source.until(lambda n=before: numbers.retries.total() > n, LONG)  # type: ignore[misc]
            source.until(lambda: numbers.all_connected or numbers.codes["403"], LONG)
        # Not "403": a port number may contain it.
        source.until(lambda: source.logged("is forbidden"), LONG)
        server.create(service("api"))
        source.until(lambda: "api" in source.names("Service"), LONG)
        still_there(source)
        server.account(ACCOUNT, RULES)
        source.until(lambda: numbers.all_connected, LONG)
        source.until(lambda: source.logged(Message.RESOURCE_BACK), LONG)
        (line,) = source.logged("is forbidden")
        assert 'grant list and watch on endpointslices (apiGroup "discovery.k8s.io") by RBAC' in line


@pytest.mark.usefixtures("objects")
def test_names_cannot_be_resolved(server: ApiServer, proxy: Proxy, kubeconfig: Path) -> None:
    name = "no-such-api-server.invalid"
    path = server.kubeconfig(kubeconfig.with_name("by-name"), {"tokenFile": "token"}, f"https://{name}:{proxy.port}")
    source, _ = following(path)
    with source:
        source.until(lambda: source.logged("cannot be resolved"), LONG)
        (line,) = source.errors()
        assert f"the name {name} cannot be resolved" in line
        assert "check DNS" in line
        assert not source.complete


def test_unknown_authority_and_wrong_name(server: ApiServer, kubeconfig: Path, tmp_path: Path) -> None:
    """The right server with another name in its certificate is not accepted (finding T5)."""
    key = tmp_path / "other.key"
    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=other"]
    other = tmp_path / "other.crt"
    subprocess.run(["openssl", *new, "-keyout", key, "-out", other], check=True, capture_output=True)
    text = kubeconfig.read_text()
    kubeconfig.write_text(text.replace(str(server.ca), str(other)))
    source, _ = following(kubeconfig)
    with source:
        source.until(lambda: source.logged("certificate-authority of the kubeconfig must be that of this cluster"))
        assert len(source.errors()) == 1
    # The authority of the server's certificate is right, but the name in it is another.
    assert text.count("    server: ") == 1
    kubeconfig.write_text(text.replace("    server: ", "    tls-server-name: other.example\n    server: "))
    source, numbers = following(kubeconfig)
    with source:
        source.until(lambda: source.logged("tls-server-name of the kubeconfig names what it is to hold"))
        (line,) = source.errors()
        assert "is not accepted" in line
        assert "other.example" in line
        assert not any(numbers.is_connected.values())
        assert not source.changes
