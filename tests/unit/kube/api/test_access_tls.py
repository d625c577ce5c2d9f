# SPDX-License-Identifier: Apache-2.0
"""TLS to the API server as Go speaks it: which certificates it trusts, and which name it sends; and plain HTTP behind a
proxy.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import queue
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pyebpf_proxy.common.limiter import Limiter
from pyebpf_proxy.kube.api.access import Access, Tls, in_cluster
from pyebpf_proxy.kube.api.client import Client
from pyebpf_proxy.kube.api.credentials import Credentials
from pyebpf_proxy.kube.api.observer import Silent
from pyebpf_proxy.kube.api.trouble import TroubleError
from tests.support.logs import Log, Message


class Request(NamedTuple):
    target: str
    headers: dict[str, list[str]]


class Server:
    """Answers each request, and notes it and the server name of each TLS connection."""

    def __init__(self, certificates: Path | None = None) -> None:
        self.names: queue.Queue[str | None] = queue.Queue()
        self.requests: queue.Queue[Request] = queue.Queue()
        noted = self.requests

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                names = {name.lower() for name in self.headers}
                noted.put(Request(self.path, {name: self.headers.get_all(name, []) for name in names}))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that reject it
        if certificates is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
            context.sni_callback = lambda _, name, __: self.names.put(name)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root CA, an intermediate one, and a server's certificate of the latter."""
    folder = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    def signed(name: str, issuer: str, extensions: str) -> None:
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / f"{name}.ext").write_text(extensions)
        sign = ("-CA", f"{issuer}.crt", "-CAkey", f"{issuer}.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *sign, "-extfile", f"{name}.ext")

    openssl("req", "-x509", *key, "-keyout", "root.key", "-out", "root.crt", "-days", "2", "-subj", "/CN=root")
    signed("intermediate", "root", "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign\n")
    signed("server", "intermediate", "subjectAltName=IP:127.0.0.1,DNS:kubernetes\n")
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with contextlib.closing(Server(folder)) as server:
        yield server


def ask(access: Access, path: str = "/version") -> None:
    assert Client(access, Limiter(-1, 0), Silent()).channel().request("GET", path).read() == b"{}"


def test_the_ca_of_a_cluster_may_be_an_intermediate_one(server: Server, folder: Path) -> None:
    ask(Access(f"https://{server.host}", Tls(ca_file=str(folder / "intermediate.crt"))))
    # The root does not suffice: the server does not send the intermediate certificate.
    with pytest.raises(TroubleError, match="certificate"):
        ask(Access(f"https://{server.host}", Tls(ca_file=str(folder / "root.crt"))))


@pytest.mark.parametrize("comment", ["# Autorité – 認証局\n".encode(), "# Autorité\n".encode("latin-1"), b"\xff\xfe\n"])
def test_comments_in_a_ca_file_may_have_any_characters(server: Server, folder: Path, comment: bytes) -> None:
    ask(Access(f"https://{server.host}", Tls(ca_data=comment + (folder / "intermediate.crt").read_bytes() + comment)))


@pytest.mark.parametrize("data", ["nö", "\ufffd", "-----BEGIN CERTIFICATE-----\nö\n-----END CERTIFICATE-----\n"])
def test_a_ca_file_without_a_certificate_is_named(data: str) -> None:
    with pytest.raises(TroubleError, match="certificate-authority-data holds no certificate as PEM"):
        Credentials(Access("https://x", Tls(ca_data=data.encode()))).context()


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("name", ["", "kubernetes"])
def test_the_server_gets_the_name_of_the_kubeconfig(server: Server, folder: Path, name: str, insecure: bool) -> None:
    """Also if its certificate is not verified: a load balancer may choose the API server by this name."""
    authority = "" if insecure else str(folder / "intermediate.crt")
    ask(Access(f"https://{server.host}", Tls(ca_file=authority, server_name=name, insecure=insecure)))
    assert server.names.get(timeout=5) == (name or None)


def test_an_insecure_server_may_have_another_name(server: Server) -> None:
    ask(Access(f"https://{server.host}", Tls(server_name="other.example", insecure=True)))
    assert server.names.get(timeout=5) == "other.example"


@pytest.mark.parametrize("where", ["kubeconfig", "environment"])
@pytest.mark.parametrize("credentials", ["", "user:secret@"])
def test_a_proxy_gets_the_server_of_a_request_over_plain_http(
    monkeypatch: pytest.MonkeyPatch, where: str, credentials: str
) -> None:
    with contextlib.closing(Server()) as proxy:
        url = f"http://{credentials}{proxy.host}"
        monkeypatch.setenv("HTTP_PROXY", url if where == "environment" else "")
        ask(Access("http://192.0.2.1:8080/prefix", proxy_url=url if where == "kubeconfig" else ""), "/api?watch=1")
        request = proxy.requests.get(timeout=5)
    assert request.target == "http://192.0.2.1:8080/prefix/api?watch=1"
    assert request.headers["host"] == ["192.0.2.1:8080"]
    sent = f"Basic {base64.b64encode(b'user:secret').decode()}"
    assert request.headers.get("proxy-authorization", []) == ([sent] if credentials else [])


def test_a_proxy_may_be_secure_although_the_server_is_not(
    monkeypatch: pytest.MonkeyPatch, server: Server, folder: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "system.crt"))
    (folder / "system.crt").write_bytes((folder / "intermediate.crt").read_bytes() + (folder / "root.crt").read_bytes())
    ask(Access("http://192.0.2.1:8080", proxy_url=f"https://{server.host}"))
    assert server.requests.get(timeout=5).target == "http://192.0.2.1:8080/version"


@pytest.mark.parametrize(
    ("authority", "problem"),
    [
        (None, "open FOLDER/ca.crt: no such file or directory"),
        (b"", "error creating pool from FOLDER/ca.crt: data does not contain any valid RSA or ECDSA certificates"),
        (
            b"\xffca",
            "error creating pool from FOLDER/ca.crt: data does not contain any valid RSA or ECDSA certificates",
        ),
    ],
)
def test_a_pod_without_a_usable_ca_trusts_those_of_the_system(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, authority: bytes | None, problem: str
) -> None:
    """As client-go, which logs this and goes on."""
    environment = {"KUBERNETES_SERVICE_HOST": "192.0.2.1", "KUBERNETES_SERVICE_PORT": "443"}
    (tmp_path / "token").write_text("t")
    if authority is not None:
        (tmp_path / "ca.crt").write_bytes(authority)
    access = in_cluster(environment, tmp_path)
    assert access == Access("https://192.0.2.1:443", token_file=str(tmp_path / "token"))
    line = Log(caplog).only(Message.NO_ROOT_CA, level="error")
    assert problem.replace("FOLDER", str(tmp_path)) in line.text
    (tmp_path / "ca.crt").write_bytes((folder / "root.crt").read_bytes())
    assert in_cluster(environment, tmp_path).tls == Tls(ca_file=str(tmp_path / "ca.crt"))
