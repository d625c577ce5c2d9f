# SPDX-License-Identifier: Apache-2.0
"""Access to the API server: kubeconfigs with kube-proxy's messages, the pod's account, proxies, exec plugins,
limits.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import socket
import ssl
import sys
import threading
import time
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.limiter import Limiter
from pyebpf_proxy.kube.api import exec_plugin
from pyebpf_proxy.kube.api.access import Access, ExecPlugin, Tls, in_cluster, server_url
from pyebpf_proxy.kube.api.client import Client
from pyebpf_proxy.kube.api.connect import find
from pyebpf_proxy.kube.api.credentials import TOKEN_SECONDS, Credentials
from pyebpf_proxy.kube.api.environment import proxy_for
from pyebpf_proxy.kube.api.observer import Silent
from pyebpf_proxy.kube.api.trouble import TroubleError
from tests.support.scripted_api import QUICK, ScriptedApi, wait_until

CONTEXT = "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n"
SERVER = "clusters: [{name: c, cluster: {server: 'https://192.0.2.1:6443'}}]\n"
ANONYMOUS = "users: [{name: u, user: {}}]\n"


def cluster(fields: str) -> str:
    return f"{CONTEXT}clusters: [{{name: c, cluster: {{server: 'https://192.0.2.1', {fields}}}}}]\n{ANONYMOUS}"


def user(fields: str) -> str:
    return f"{CONTEXT}{SERVER}users: [{{name: u, user: {{{fields}}}}}]\n"


#: Each line contains the one before twice.
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 30))
#: kube-proxy v1.36.3's actual message about each file.
MISTAKES = {
    "": "invalid configuration: no configuration has been provided, try setting KUBERNETES_MASTER environment variable",
    "foo: [": "error loading config file",
    "kind: Pod": 'no kind "Pod" is registered for version "v1"',
    "current-context: x": "context was not found for specified context: x",
    f"{CONTEXT}clusters: [{{name: c, cluster: {{}}}}]\n{ANONYMOUS}": 'no server found for cluster "c"',
    cluster("certificate-authority: ca.crt"): "unable to read certificate-authority FOLDER/ca.crt for c due to"
    " open FOLDER/ca.crt: no such file or directory",
    cluster("certificate-authority-data: '###'"): "illegal base64 data",
    cluster("insecure-skip-tls-verify: true, certificate-authority-data: AAAA"): "specifying a root certificates file"
    " with the insecure flag is not allowed",
    cluster("proxy-url: 'ftp://x'"): 'invalid \'proxy-url\' "ftp://x" for cluster "c": unsupported scheme "ftp"',
    **{
        cluster(f"proxy-url: '{url}'"): f'invalid \'proxy-url\' "{url}" for cluster "c": could not parse: {url}'
        for url in ("http://[::1", "http://[]x:1", "http://x:abc")
    },
    user("client-certificate-data: AAAA"): "client-key-data or client-key must be specified for u to use the clientCert"
    " authentication method.",
    user("auth-provider: {name: oidc}"): 'no Auth Provider found for name "oidc"',
    user("tokenFile: nope"): "open FOLDER/nope: no such file or directory",
    user("exec: {command: foo}"): "invalid configuration: [apiVersion must be specified for u to use exec"
    " authentication plugin, interactiveMode must be specified for u to use exec authentication plugin]",
    user("exec: {apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never}"): "invalid configuration:"
    " command must be specified for u to use exec authentication plugin",
    user("token: a, username: b"): "more than one authentication method found for u; found [token basicAuth],"
    " only one is allowed",
    "a: &a [*a]": "yaml: anchor 'a' value contains itself",
    "a: &a {b: {c: *a}}": "yaml: anchor 'a' value contains itself",
    "a: !!bool x": "yaml: cannot decode !!str `x` as a !!bool",
    "a: !!timestamp x": "yaml: cannot decode !!str `x` as a !!timestamp",
    user("as-groups: [x]"): "requesting uid, groups or user-extra for u without impersonating a user",
    # Messages with other words, because kube-proxy names Go types.
    "clusters: 3": "clusters: expected array, got int",
    "[]": "it is not a mapping, so not a kubeconfig",
    LAUGHS: "yaml: document contains excessive aliasing",
    "[" * 5000: "error loading config file",
    # Here kube-proxy prints both users, with their tokens.
    "users: [{name: u, user: {token: SECRET}}, {name: u}]": 'config": users: duplicate name "u"',
    f"{SERVER}contexts: [{{name: a}}, {{name: b}}, {{name: a}}]": 'contexts: duplicate name "a"',
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_kubeconfig_with_a_mistake(tmp_path: Path, text: str) -> None:
    """Also with an anchor that contains itself: one line, no RecursionError (finding S9)."""
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(FatalError) as error:
        find(str(path), "", {})
    output = str(error.value)
    assert MISTAKES[text].replace("FOLDER", str(tmp_path)) in output
    assert str(path) in output or "tokenFile" in text
    assert "\n" not in output
    assert "SECRET" not in output


#: A merge copies the keys that it names: each line has ten times the keys of the one before.
_MERGES = "a0: &a0 {x: y, z: w}\n" + "".join(
    f"a{number}: &a{number}\n  <<: [{', '.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 6)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_MERGES, "document contains excessive aliasing"),
        (f"[{'x,' * 300_000}]", "the configuration holds too many values"),
        (f"a: &a [{'x,' * 9}]\nb: [{'*a,' * 12_000}]", "document contains excessive aliasing"),
    ],
)
def test_a_kubeconfig_with_very_many_values_takes_little_memory(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(FatalError, match=rf'^error loading config file "{path}": yaml: {problem}'):
            find(str(path), "", {})
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", ["kubeconfig", "certificate-authority", "tokenFile"])
def test_huge_files_are_not_read(tmp_path: Path, what: str) -> None:
    """A file of 1 GiB takes no memory (finding S10)."""
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 1 << 30)
    path = tmp_path / "kubeconfig"
    path.write_text(user(f"tokenFile: {large}") if what == "tokenFile" else cluster(f"certificate-authority: {large}"))
    tracemalloc.start()
    try:
        with pytest.raises(FatalError, match=rf"read {large}: larger than 1 MiB"):
            find(str(large if what == "kubeconfig" else path), "", {})
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [b"Content-Length: 536870912", b"Transfer-Encoding: chunked"])
def test_an_endless_answer_is_aborted(length: bytes) -> None:
    """With a length and without one (finding S10)."""

    def serve(listener: socket.socket) -> None:
        asking, _ = listener.accept()
        asking.recv(65536)
        with contextlib.suppress(OSError):
            asking.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n")
            while True:
                asking.sendall(b"100000\r\n" + b"x" * 0x100000 + b"\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        client = Client(Access(f"http://127.0.0.1:{listener.getsockname()[1]}"), Limiter(-1, 0), Silent())
        tracemalloc.start()
        try:
            with pytest.raises(TroubleError, match=r"^an answer of more than 128 MiB is not read$"):
                client.channel().request("GET", "/").read()
            assert tracemalloc.get_traced_memory()[1] < 200 << 20
        finally:
            tracemalloc.stop()


def test_an_answer_in_tiny_chunks_takes_little_memory() -> None:
    def serve(listener: socket.socket) -> None:
        asking, _ = listener.accept()
        asking.recv(65536)
        with contextlib.suppress(OSError):
            asking.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                asking.sendall(b"2\r\nxx\r\n" * 10_000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        client = Client(Access(f"http://127.0.0.1:{listener.getsockname()[1]}"), Limiter(-1, 0), Silent())
        answer = client.channel().request("GET", "/")
        tracemalloc.start()
        try:
            with pytest.raises(TroubleError, match=r"is not read$"):
                answer.read(512 << 10)
            assert tracemalloc.get_traced_memory()[1] < 3 << 20
        finally:
            tracemalloc.stop()


def test_a_server_that_hangs_after_a_slow_resolution_of_its_name_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for an answer is over before there is a connection that could be cut."""
    resolve = socket.getaddrinfo

    def slow(*arguments: Any, **more: Any) -> Any:
        time.sleep(0.5)
        return resolve(*arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    errors: queue.Queue[Exception] = queue.Queue()

    def ask(client: Client) -> None:
        try:
            client.channel().request("GET", "/")
        except TroubleError as error:
            errors.put(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        access = Access(f"http://127.0.0.1:{listener.getsockname()[1]}")
        client = Client(access, Limiter(-1, 0), Silent(), replace(QUICK, answer=0.2))
        threading.Thread(target=ask, args=(client,), daemon=True).start()
        end = time.monotonic() + 10
        while errors.empty() and time.monotonic() < end:
            client.look(time.monotonic())
            time.sleep(0.01)
        assert str(errors.get_nowait()) == f"{access.host}: no answer within 0.2 s"


def test_a_missing_kubeconfig() -> None:
    with pytest.raises(FatalError, match=r"^stat /nonexistent: no such file or directory$"):
        find("/nonexistent", "", {})


def test_a_kubeconfig_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FatalError) as error:
        find(str(tmp_path), "", {})
    assert str(error.value) == f'error loading config file "{tmp_path}": read {tmp_path}: is a directory'


def test_all_fields_of_a_kubeconfig_are_used(tmp_path: Path) -> None:
    for name in ("ca", "crt", "key", "token"):
        (tmp_path / name).write_text(name)
    (tmp_path / "kubeconfig").write_text(
        f"{CONTEXT}clusters: [{{name: other}}, {{name: c, cluster: {{server: 'https://192.0.2.1:6443/prefix/',"
        " tls-server-name: kubernetes, certificate-authority: ca, proxy-url: 'http://proxy:3128',"
        " disable-compression: true}}]\n"
        "users: [{name: u, user: {client-certificate: crt, client-key: key, tokenFile: token, as: visitor,"
        " as-uid: '7', as-groups: [g, h], as-user-extra: {k: [v]}, token: }}]\n"
    )
    access = find(str(tmp_path / "kubeconfig"), "", {})
    assert access == Access(
        "https://192.0.2.1:6443/prefix",
        Tls(
            ca_file=str(tmp_path / "ca"),
            certificate_file=str(tmp_path / "crt"),
            key_file=str(tmp_path / "key"),
            server_name="kubernetes",
        ),
        token_file=str(tmp_path / "token"),
        impersonation=(
            ("Impersonate-User", "visitor"),
            ("Impersonate-Uid", "7"),
            ("Impersonate-Group", "g"),
            ("Impersonate-Group", "h"),
            ("Impersonate-Extra-k", "v"),
        ),
        proxy_url="http://proxy:3128",
        compression=False,
    )
    assert access.host == "192.0.2.1:6443"
    assert "secret" not in repr(Access("https://x", token="secret", password="secret"))


def test_the_yaml_of_a_kubeconfig_is_read_as_by_kube_proxy(tmp_path: Path) -> None:
    """To other readers of YAML 1.1 these are dates, numbers to base 60 and a tag; only the first document counts."""
    path = tmp_path / "kubeconfig"
    fields = "command: !x go, args: [2024-01-01, 12:30, 1:2.5, =, 0x_, !!binary Z28=]"
    plugin = f"exec: {{{fields}, apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never}}"
    path.write_text(user(plugin).replace("name: a", "name: 2024-01-01").replace(": a", ": 2024-01-01") + "---\n{")
    access = find(str(path), "", {})
    assert access.exec_plugin is not None
    assert (access.exec_plugin.command, *access.exec_plugin.arguments) == (
        *("go", "2024-01-01", "12:30", "1:2.5", "=", "0x_", "go"),
    )


def test_master_overrides_the_kubeconfig_and_suffices_alone(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(user("token: t"))
    assert find(str(path), "https://192.0.2.9", {}) == Access("https://192.0.2.9", token="t")
    assert find("", "192.0.2.9:8080", {}) == Access("http://192.0.2.9:8080")
    # No credentials are sent over plain HTTP.
    assert find(str(path), "http://192.0.2.9", {}) == Access("http://192.0.2.9")


@pytest.mark.parametrize(
    ("field", "tls"),
    [
        ("certificate-authority-data: eA==", Tls(ca_data=b"x")),
        ("insecure-skip-tls-verify: true", Tls(insecure=True)),
    ],
)
def test_master_without_a_scheme_means_http_as_in_client_go(tmp_path: Path, field: str, tls: Tls) -> None:
    """Also if the kubeconfig has a CA: client-go chooses the scheme before it reads that."""
    path = tmp_path / "kubeconfig"
    path.write_text(cluster(field).replace("user: {}", "user: {token: t}"))
    assert find(str(path), "192.0.2.9:6443", {}) == Access("http://192.0.2.9:6443")
    assert find(str(path), "https://192.0.2.9:6443", {}) == Access("https://192.0.2.9:6443", tls, token="t")
    # The server of the kubeconfig itself.
    path.write_text(path.read_text().replace("https://192.0.2.1", "192.0.2.1:6443"))
    assert find(str(path), "", {}) == Access("https://192.0.2.1:6443", tls, token="t")


def test_master_has_a_certificate_with_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(cluster("tls-server-name: kubernetes"))
    assert find(str(path), "", {}).tls.server_name == "kubernetes"
    assert find(str(path), "https://192.0.2.9", {}).tls.server_name == ""


@pytest.mark.parametrize("text", ["ftp://x", "https://", "host/path", "https://x:port"])
def test_addresses_that_cannot_be_used(text: str) -> None:
    with pytest.raises(FatalError):
        server_url(text, tls=True)


def test_the_account_of_the_pod(tmp_path: Path) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(FatalError, match=f"open {tmp_path}/token: no such file or directory"):
        in_cluster(environment, tmp_path)
    (tmp_path / "token").write_text("t")
    access = Access("https://[fd00::1]:443", token_file=str(tmp_path / "token"))
    assert replace(in_cluster(environment, tmp_path), tls=Tls()) == access
    with pytest.raises(FatalError, match=r"^unable to load in-cluster configuration, KUBERNETES_SERVICE_HOST and"):
        find("", "", {})


def test_a_token_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    credentials = Credentials(Access("https://x", token_file=str(path)))
    assert credentials.headers() == [("Authorization", "Bearer first")]
    path.write_text("second")
    assert credentials.headers() == [("Authorization", "Bearer first")]
    credentials.refused()  # 401
    assert credentials.headers() == [("Authorization", "Bearer second")]
    path.write_text("")  # being written
    credentials.refused()
    assert credentials.headers() == [("Authorization", "Bearer second")]
    path.unlink()
    credentials.refused()
    assert credentials.headers() == [("Authorization", "Bearer second")]
    assert TOKEN_SECONDS <= 60


def test_a_missing_token_file_is_reported_and_does_not_end_the_agent(tmp_path: Path) -> None:
    with pytest.raises(TroubleError, match=r"the token file .* cannot be read"):
        Credentials(Access("https://x", token_file=str(tmp_path / "token"))).headers()


def test_user_and_password() -> None:
    (header,) = Credentials(Access("https://x", username="u", password="p")).headers()
    assert header == ("Authorization", "Basic " + base64.b64encode(b"u:p").decode())


@pytest.mark.parametrize("tls", [Tls(ca_data=b"nonsense"), Tls(certificate_data=b"nonsense", key_data=b"nonsense")])
def test_invalid_certificates(tls: Tls) -> None:
    with pytest.raises(TroubleError, match=r"no certificate as PEM|not usable"):
        Credentials(Access("https://x", tls)).context()


def test_a_context_that_threads_share_is_not_changed_by_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL frees the replaced context, while another thread's handshake may read it."""
    changed = []
    monkeypatch.setattr(ssl.SSLContext, "set_alpn_protocols", lambda _, protocols: changed.append(protocols))
    with ScriptedApi() as api:
        access = Access(api.url.replace("http:", "https:"), Tls(insecure=True))
        client = Client(access, Limiter(-1, 0), Silent(), QUICK)
        for _ in range(2):
            with pytest.raises(TroubleError, match="does not speak TLS"):
                client.channel().request("GET", "/version")
    assert changed == [["http/1.1"]]


# ---- exec plugins

VERSION = "client.authentication.k8s.io/v1"
#: Credentials: one of a form that is known, and one that only its variable's name shows.
SIGNED, OPAQUE = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl", "0f5c9a7d"


def plugin(tmp_path: Path, program: str, **fields: Any) -> Credentials:
    script = tmp_path / "plugin"
    script.write_text(f"#!{sys.executable}\nimport json, os, sys\nfrom pathlib import Path\n{program}\n")
    script.chmod(0o755)
    environment = (("COUNT", str(tmp_path / "count")), ("API_TOKEN", OPAQUE))
    given = ExecPlugin(str(script), ("an argument",), environment, VERSION, "install it so", **fields)
    return Credentials(Access("https://192.0.2.1", exec_plugin=given))


COUNTING = """
path = Path(os.environ["COUNT"])
count = int(path.read_text()) + 1 if path.exists() else 1
path.write_text(str(count))
"""


def answer(**status: Any) -> str:
    document = {"kind": "ExecCredential", "apiVersion": VERSION, "status": status}
    return f"print(json.dumps({document!r}).replace('COUNT', str(count)))"


def test_a_plugin_provides_a_token_and_runs_again_when_it_has_expired(tmp_path: Path) -> None:
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat().replace("+00:00", "Z")
    credentials = plugin(tmp_path, COUNTING + answer(token="tokenCOUNT", expirationTimestamp=past))
    assert [credentials.headers() for _ in range(2)] == [[("Authorization", f"Bearer token{n}")] for n in (1, 2)]


def test_a_plugin_does_not_run_before_its_answer_expires(tmp_path: Path) -> None:
    future = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    credentials = plugin(tmp_path, COUNTING + answer(token="tokenCOUNT", expirationTimestamp=future))
    assert credentials.headers() == credentials.headers() == [("Authorization", "Bearer token1")]
    credentials.refused()
    assert credentials.headers() == [("Authorization", "Bearer token2")]


def test_a_plugin_receives_its_cluster(tmp_path: Path) -> None:
    note = tmp_path / "note"
    program = f"""
Path({str(note)!r}).write_text(json.dumps([sys.argv[1:], json.loads(os.environ["KUBERNETES_EXEC_INFO"])]))
count = 1
""" + answer(token="t")
    plugin(tmp_path, program, provide_cluster_info=True, cluster_config={"some": "thing"}).headers()
    assert json.loads(note.read_text()) == [
        ["an argument"],
        {
            "kind": "ExecCredential",
            "apiVersion": VERSION,
            "spec": {"interactive": False, "cluster": {"server": "https://192.0.2.1", "config": {"some": "thing"}}},
        },
    ]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("sys.exit('no network\\nat all')", "failed with exit code 1: no network at all"),
        ("print('{')", "printed something that is not an ExecCredential"),
        ('print(\'{"kind": "ExecCredential", "apiVersion": "v2"}\')', "is configured to use API version"),
        ("count = 1\n" + answer(), "gave neither a token nor a client certificate"),
        ("count = 1\n" + answer(clientCertificateData="x"), "gave only one of certificate and key"),
        ("count = 1\n" + answer(token=7), "not an ExecCredential"),
        ("os.kill(os.getpid(), 9)", "was ended by signal 9"),
        (f'print(\'{{"kind": {{"token": "{OPAQUE}"}}, "apiVersion": "v2"}}\')', "returned a dict of version v2"),
        ("count = 1\n" + answer(token="t", expirationTimestamp=OPAQUE), "expirationTimestamp is not a time"),
        ("count = 1\n" + answer(token=f"{OPAQUE}\n"), "has a line break or another control character"),
        ("while True: os.write(1, b'x' * 65536)", "printed more than 1 MiB"),
        ("print(json.dumps({'kind': 'x' * 10000}))", f"but returned {'x' * 200} of version none"),
    ],
)
def test_a_failing_plugin_is_named(tmp_path: Path, program: str, words: str) -> None:
    with pytest.raises(TroubleError) as error:
        plugin(tmp_path, program).headers()
    assert words in str(error.value)
    assert f"the exec plugin {tmp_path}/plugin " in str(error.value)
    assert "\n" not in str(error.value)
    assert OPAQUE not in str(error.value)
    assert len(str(error.value)) < 500


def test_what_a_failing_plugin_wrote_is_short_and_without_credentials(tmp_path: Path) -> None:
    """Programs log their requests; the agent's log is read by more people than have the credentials."""
    wrote = f"{'x' * 100_000}\x1b[31m\nAuthorization: Bearer {SIGNED}\nclient_secret={OPAQUE[::-1]} \u202erefused "
    program = f"sys.exit({wrote!r} + os.environ['API_TOKEN'])"
    with pytest.raises(TroubleError) as error:
        plugin(tmp_path, program).headers()
    said = str(error.value).removeprefix(f"the exec plugin {tmp_path}/plugin failed with exit code 1: ")
    assert said.startswith("…xxx")
    assert said.endswith("x\\x1b[31m Authorization: REDACTED client_secret=REDACTED \\u202erefused REDACTED")
    assert len(said) < 250
    with pytest.raises(TroubleError, match=r"failed with exit code 3$"):
        plugin(tmp_path, "sys.exit(3)").headers()


def test_a_missing_plugin_is_reported_with_its_install_hint() -> None:
    given = ExecPlugin("/nonexistent/plugin", api_version=VERSION, install_hint="get it\nfrom there")
    with pytest.raises(TroubleError, match="cannot be run: No such file or directory; get it from there"):
        Credentials(Access("https://x", exec_plugin=given)).headers()


def test_what_a_plugin_has_started_is_ended_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the plugin's output, so the agent waits for it."""
    monkeypatch.setattr(exec_plugin, "TIMEOUT", 2.0)
    note = tmp_path / "note"
    program = f"import subprocess\nPath({str(note)!r}).write_text(str(subprocess.Popen(['sleep', '1000']).pid))"
    with pytest.raises(TroubleError, match="has not answered in 2 s"):
        plugin(tmp_path, program).headers()
    started = Path("/proc", note.read_text(), "stat")
    wait_until(lambda: not started.exists() or started.read_text().rpartition(")")[2].split()[0] == "Z", 10)


def test_a_plugin_that_closes_its_output_and_stays_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_plugin, "TIMEOUT", 2.0)
    with pytest.raises(TroubleError, match="has not answered in 2 s"):
        plugin(tmp_path, "import time\nos.close(1)\nos.close(2)\ntime.sleep(1000)").headers()


@pytest.mark.parametrize(("size", "words"), [(None, "no such file or directory"), ((1 << 20) + 1, "larger than 1 MiB")])
def test_the_root_certificates_for_a_plugin_are_read_within_bounds(
    tmp_path: Path, size: int | None, words: str
) -> None:
    authority = tmp_path / "ca.crt"
    if size is not None:
        authority.write_bytes(b"x" * size)
    given = ExecPlugin("/bin/true", api_version=VERSION, provide_cluster_info=True)
    access = Access("https://192.0.2.1", Tls(ca_file=str(authority)), exec_plugin=given)
    with pytest.raises(TroubleError, match=f"unable to load root certificates: .*{words}"):
        Credentials(access).headers()


def test_a_token_with_a_line_break_is_not_shown(tmp_path: Path) -> None:
    """Python's error for the header has its value, and went to the log."""
    file = tmp_path / "token"
    file.write_text("first-secret\nsecond-secret\n")
    client = Client(Access("http://127.0.0.1:1", token_file=str(file)), Limiter(-1, 0), Silent(), QUICK)
    with pytest.raises(TroubleError) as error:
        client.channel().request("GET", "/version")
    assert str(error.value) == f"the token of the file {file} has a line break or another control character"


# ---- proxies of the environment, limits


@pytest.mark.parametrize(
    ("url", "no_proxy", "expected"),
    [
        ("https://10.96.0.1", "", "http://proxy:3128"),
        ("https://10.96.0.1", "10.96.0.0/16", ""),
        ("https://10.97.0.1", "10.96.0.0/16", "http://proxy:3128"),
        ("https://10.96.0.1", "*", ""),
        ("https://10.96.0.1:6443", "10.96.0.1:6443", ""),
        ("https://10.96.0.1:6443", "10.96.0.1:443", "http://proxy:3128"),
        ("https://[fd00::1]:443", "fd00::/8", ""),
        ("https://[fd00::1]:443", "[fd00::1]", ""),
        ("https://kubernetes.default.svc", ".svc", ""),
        ("https://kubernetes.default.svc", "default.svc", ""),
        ("https://svc", ".svc", "http://proxy:3128"),
        ("https://notdefault.svc", "default.svc", "http://proxy:3128"),
        ("https://127.0.0.1", "", ""),
        ("https://localhost", "", ""),
        ("http://10.96.0.1", "", ""),
    ],
)
def test_proxies_of_the_environment_as_go_reads_them(url: str, no_proxy: str, expected: str) -> None:
    assert proxy_for(url, {"HTTPS_PROXY": "proxy:3128", "NO_PROXY": no_proxy}) == expected


@pytest.mark.parametrize("where", ["kubeconfig", "environment"])
@pytest.mark.parametrize(
    ("credentials", "sent"),
    [("", None), ("user:secret@", "user:secret"), ("us%20er:p%40:ss@", "us er:p@:ss"), ("user@", "user:")],
)
def test_a_proxy_gets_the_credentials_of_its_url(
    monkeypatch: pytest.MonkeyPatch, where: str, credentials: str, sent: str | None
) -> None:
    asked: queue.Queue[bytes] = queue.Queue()

    def serve(listener: socket.socket) -> None:
        asking, _ = listener.accept()
        asked.put(asking.recv(65536))
        asking.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        asking.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        url = f"http://{credentials}127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("HTTPS_PROXY", url if where == "environment" else "")
        access = Access("https://192.0.2.1:6443", proxy_url=url if where == "kubeconfig" else "")
        with pytest.raises(TroubleError, match=r"^the proxy on the way to 192\.0\.2\.1:6443 fails: "):
            Client(access, Limiter(-1, 0), Silent()).channel().request("GET", "/")
    request, *headers = asked.get(timeout=5).decode().split("\r\n")
    assert request.startswith("CONNECT 192.0.2.1:6443 ")
    given = [line.partition(": ")[2] for line in headers if line.lower().startswith("proxy-authorization:")]
    assert given == ([] if sent is None else [f"Basic {base64.b64encode(sent.encode()).decode()}"])


def test_the_limit_is_a_token_bucket() -> None:
    now = 0.0
    limiter = Limiter(2.0, 3, lambda: now)
    assert [limiter.take() for _ in range(5)] == [0, 0, 0, 0.5, 1.0]
    now = 10.0
    assert [limiter.take() for _ in range(4)] == [0, 0, 0, 0.5]
    assert [Limiter(-1, 1, lambda: now).take() for _ in range(100)] == [0.0] * 100
    standard = Limiter(0, 0, lambda: now)
    assert [standard.take() for _ in range(11)] == [0.0] * 10 + [0.2]
