# SPDX-License-Identifier: Apache-2.0
"""A real API server with a real etcd on loopback: TLS with a new CA, RBAC, tokens of ServiceAccounts.

All files are in one temporary folder. The kernel ends both processes when this one ends, also when it is killed.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import http.client
import itertools
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests import CACHE
from tests.support.ports import free_port

#: The content type of a PATCH that merges.
MERGE = "application/merge-patch+json"
ADMIN_TOKEN = "the-tests-own-administrator"
SERVICE_RANGES = "10.96.0.0/16,fd00:10:96::/112"
START_SECONDS = 90.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

Object = dict[str, Any]
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
#: ``openssl ca`` alone can set an expiry time to the second.
_CLIENTS = """[ca]
default_ca = clients
[clients]
database = clients.txt
new_certs_dir = .
rand_serial = yes
default_md = sha256
unique_subject = no
policy = any
[any]
organizationName = optional
commonName = supplied
"""


class ApiError(Exception):
    """The API server rejected a request of the tests."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class ApiServer:
    """``with ApiServer() as server``. ``stop`` and ``start`` may follow each other; etcd keeps its data until
    ``clear``. ``program`` and ``etcd``: others than the usual release, and than Debian's etcd.
    """

    def __init__(
        self,
        arguments: tuple[str, ...] = (),
        program: Path = CACHE / "go" / "kube-apiserver",
        etcd: str | Path = "etcd",
    ) -> None:
        _remove_leftovers()
        self.folder = Path(tempfile.mkdtemp(prefix=f"apiserver-{os.getpid()}-"))
        self.port, self._etcd_port, self._etcd_peer = free_port(), free_port(), free_port()
        self._arguments = arguments
        self._programs = {"etcd": str(etcd), "kube-apiserver": str(program)}
        self._etcd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ApiServer:
        try:
            self._make_files()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def ca(self) -> Path:
        """The file with the CA of the server's certificate."""
        return self.folder / "ca.crt"

    @property
    def pid(self) -> int:
        """The API server's process."""
        assert self._server is not None
        return self._server.pid

    # ---- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start whichever of the two processes does not run, and wait until the server answers."""
        if self._etcd is None:
            self._etcd = self._run("etcd", *self._etcd_arguments())
            _wait_for("etcd", self._etcd_answers, self._etcd, self.folder / "etcd.log")
        if self._server is None:
            self._server = self._run("kube-apiserver", *self._server_arguments())
            _wait_for("kube-apiserver", self._is_ready, self._server, self.folder / "kube-apiserver.log")

    def kill(self) -> None:
        """End the API server at once; etcd continues."""
        if self._server is not None:
            _end(self._server, signal.SIGKILL)
            self._server = None

    def end(self) -> None:
        """End both processes; etcd's data stay."""
        self.kill()
        if self._etcd is not None:
            _end(self._etcd, signal.SIGKILL)
            self._etcd = None

    def clear(self) -> None:
        """End both processes and delete all data."""
        self.end()
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)

    def freeze(self) -> None:
        """Stop the process. Its threads stop one after another, so wait for the last of them."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        end = time.monotonic() + 30
        while not all(_is_stopped(task) for task in tasks.iterdir()):
            assert time.monotonic() < end, "the API server does not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def compact(self) -> None:
        """Make etcd compact its whole history."""
        revision = self._ask_etcd("/v3/maintenance/status")["header"]["revision"]
        self._ask_etcd("/v3/kv/compaction", {"revision": revision})

    def put(self, entries: Mapping[str, Object]) -> None:
        """Write objects directly into etcd, by their keys. The API server then shows them like all others.

        For tens of thousands of objects. Nothing is checked or allocated: a Service needs its IPAddress object too.
        """

        def text(value: str) -> str:
            return base64.b64encode(value.encode()).decode()

        puts = [{"requestPut": {"key": text(key), "value": text(json.dumps(each))}} for key, each in entries.items()]
        for first in range(0, len(puts), 100):
            self._ask_etcd("/v3/kv/txn", {"success": puts[first : first + 100]})

    # ---- objects -----------------------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: Object | str | None = None, content: str = "application/json"
    ) -> Object:
        """One request as administrator; raises ApiError."""
        context = ssl.create_default_context(cafile=str(self.ca))
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=context)
        try:
            data = body if isinstance(body, str) else json.dumps(body) if body is not None else None
            headers = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": content}
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        answer = json.loads(text) if text.startswith(b"{") else {"message": text.decode(errors="replace")}
        if response.status >= 300:
            raise ApiError(response.status, answer.get("message", ""))
        return dict(answer)

    def create(self, item: Object) -> Object:
        return self.request("POST", _collection(item), item)

    def apply(self, item: Object) -> Object:
        """Server-side apply, as ``kubectl apply --server-side --force-conflicts``; also applies the status, if there is
        one.
        """
        path = f"{_collection(item)}/{item['metadata']['name']}"
        query = "?fieldManager=tests&force=true"
        made = self.request("PATCH", path + query, json.dumps(item), "application/apply-patch+yaml")
        if "status" in item:
            made = self.request("PATCH", f"{path}/status{query}", json.dumps(item), "application/apply-patch+yaml")
        return made

    def patch(self, item: Object, change: Object) -> Object:
        path = f"{_collection(item)}/{item['metadata']['name']}"
        return self.request("PATCH", path, change, "application/merge-patch+json")

    def patch_status(self, item: Object) -> Object:
        """Write the status of an object: creating an object does not write it."""
        path = f"{_collection(item)}/{item['metadata']['name']}/status"
        return self.request("PATCH", path, {"status": item["status"]}, "application/merge-patch+json")

    def delete(self, item: Object) -> Object:
        return self.request("DELETE", f"{_collection(item)}/{item['metadata']['name']}")

    def load(self, path: Path) -> list[Object]:
        """Apply every object of a YAML file."""
        items = [item for item in yaml.safe_load_all(path.read_text()) if item]
        return [self.apply(item) for item in items]

    # ---- accounts ----------------------------------------------------------------------------------------------

    def account(self, name: str, rules: list[Object], namespace: str = "kube-system") -> None:
        """A ServiceAccount with exactly these ``rules``; a second call replaces them.

        New rights are in effect when this returns. A right that was removed may still be in effect for a moment.
        """
        self.apply(_object("v1", "ServiceAccount", name, namespace))
        role = _object("rbac.authorization.k8s.io/v1", "ClusterRole", name) | {"rules": rules}
        self.apply(role)
        binding = _object("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", name) | {
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }
        self.apply(binding)
        # The server learns of its own objects as its clients do: a moment later.
        end = time.monotonic() + START_SECONDS
        while not all(self._may(f"system:serviceaccount:{namespace}:{name}", rule) for rule in rules):
            if time.monotonic() > end:
                raise RuntimeError(f"the account {name} may still not do what it is to: {rules}")
            time.sleep(0.01)

    def _may(self, user: str, rule: Object) -> bool:
        """Whether the server allows this user everything in the rule."""
        for group, resource, verb in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"]):
            asked = {"group": group, "resource": resource, "verb": verb}
            review = {"user": user, "resourceAttributes": asked}
            body = _object("authorization.k8s.io/v1", "SubjectAccessReview", "") | {"spec": review}
            answer = self.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
            if not answer["status"]["allowed"]:
                return False
        return True

    def token(self, name: str, seconds: int = 3600, namespace: str = "kube-system") -> str:
        """A token of the ServiceAccount; the server issues none for less than 600 seconds."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        answer = self.request("POST", path, request | {"spec": {"expirationSeconds": seconds}})
        return str(answer["status"]["token"])

    def kubeconfig(self, path: Path, user: Object, server: str = "", authority: Path | None = None) -> Path:
        """Write a kubeconfig for ``user`` (its section) with this server, or with ``server``, a proxy before it.

        ``authority``: the file of the CA, if it is not this server's.
        """
        cluster = {"server": server or self.url, "certificate-authority": str(authority or self.ca)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": "tests", "user": user}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def client_certificate(self, path: Path, seconds: int = 86400) -> float:
        """Write a client certificate of an administrator into ``path``.crt and its key into ``path``.key.

        Returns when it expires, ``seconds`` from now, as ``time.time``. The files are replaced, first the key.
        """
        (self.folder / "clients.cnf").write_text(_CLIENTS)
        (self.folder / "clients.txt").write_text("")
        self._openssl(
            "req", *_KEY, "-keyout", "client.key", "-out", "client.csr", "-subj", "/O=system:masters/CN=proxy"
        )
        now = int(time.time())
        begin, end = (time.strftime("%Y%m%d%H%M%SZ", time.gmtime(each)) for each in (now - 3600, now + seconds))
        dates = ("-startdate", begin, "-enddate", end)
        sign = ("-cert", "first-ca.crt", "-keyfile", "first-ca.key")
        files = ("-in", "client.csr", "-out", "client.crt")
        self._openssl("ca", "-config", "clients.cnf", "-batch", "-notext", *sign, *dates, *files)
        for ending in ("key", "crt"):
            replace(path.with_name(f"{path.name}.{ending}"), (self.folder / f"client.{ending}").read_text())
        return float(now + seconds)

    def rotate_authority(self) -> None:
        """Give the server a certificate of a new CA, ``authority``. The running server reads it by itself.

        Client certificates of the first CA are still accepted, and ``ca`` holds both.
        """
        self._make_authority("next-ca")
        self.authority = self.folder / "next-ca.crt"
        replace(self.ca, self.ca.read_text() + self.authority.read_text())
        self._make_server("next", "next-ca")
        before = ssl.get_server_certificate(("127.0.0.1", self.port))
        for ending in ("key", "crt"):
            replace(self.folder / f"server.{ending}", (self.folder / f"next.{ending}").read_text())
        end = time.monotonic() + START_SECONDS
        while ssl.get_server_certificate(("127.0.0.1", self.port)) == before:
            if time.monotonic() > end:
                raise RuntimeError("the API server does not read its new certificate")
            time.sleep(0.1)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

    def _make_files(self) -> None:
        self._make_authority("first-ca")
        #: The CA of the server's certificate; ``ca`` may hold others too.
        self.authority = self.folder / "first-ca.crt"
        for ending in ("key", "crt"):
            shutil.copy(self.folder / f"first-ca.{ending}", self.folder / f"ca.{ending}")
        self._make_server("server", "first-ca")
        self._openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", "accounts.key")
        (self.folder / "tokens.csv").write_text(f"{ADMIN_TOKEN},tests,tests,system:masters\n")

    def _make_authority(self, name: str) -> None:
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.crt")
        self._openssl("req", "-x509", *_KEY, *files, "-days", "2", "-subj", f"/CN=tests-{name}", *usage)

    def _make_server(self, name: str, authority: str) -> None:
        self._openssl("req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=kube-apiserver")
        (self.folder / "server.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default.svc")
        sign = ("-CA", f"{authority}.crt", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2")
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *sign, "-extfile", "server.ext")

    def _etcd_arguments(self) -> list[str]:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._etcd_peer}"
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # The data need not outlive the test.
            "--unsafe-no-fsync",
        ]

    def _server_arguments(self) -> list[str]:
        folder = self.folder
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=192.0.2.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={folder / 'server.crt'}",
            f"--tls-private-key-file={folder / 'server.key'}",
            f"--client-ca-file={folder / 'ca.crt'}",
            f"--cert-dir={folder / 'certs'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'accounts.key'}",
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            f"--service-cluster-ip-range={SERVICE_RANGES}",
            # No controller creates the default ServiceAccount of a namespace.
            "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none",
            *self._arguments,
        ]

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [self._programs[name], *arguments]
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, preexec_fn=_end_with_parent)

    def _ask_etcd(self, path: str, body: Object | None = None) -> Object:
        connection = http.client.HTTPConnection("127.0.0.1", self._etcd_port, timeout=30)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body or {}))
            return dict(json.loads(connection.getresponse().read()))

    def _etcd_answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._etcd_port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200

    def _is_ready(self) -> bool:
        self.request("GET", "/readyz")
        # Objects of every cluster come a moment later: the roles that tokens need, the Service of the API server.
        self.request("GET", "/api/v1/namespaces/default")
        self.request("GET", "/api/v1/namespaces/kube-system")
        self.request("GET", "/api/v1/namespaces/default/services/kubernetes")
        return True


def replace(path: Path, text: str) -> None:
    """Replace a file atomically: no reader sees a part of it."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


def running() -> Iterator[ApiServer]:
    """For fixtures: ``yield from running()``."""
    with ApiServer() as server:
        yield server


def _object(version: str, kind: str, name: str, namespace: str | None = None) -> Object:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


_PLURALS = {"EndpointSlice": "endpointslices", "ServiceCIDR": "servicecidrs", "Ingress": "ingresses"}
_CLUSTER_WIDE = {"Node", "Namespace", "ClusterRole", "ClusterRoleBinding", "ServiceCIDR", "PriorityClass"}


def _collection(item: Object) -> str:
    """The path of an object's collection."""
    version, kind = item["apiVersion"], item["kind"]
    plural = _PLURALS.get(kind, f"{kind.lower()}s").replace("classs", "classes")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    if kind in _CLUSTER_WIDE:
        return f"{root}/{plural}"
    return f"{root}/namespaces/{item['metadata'].get('namespace', 'default')}/{plural}"


def _is_stopped(task: Path) -> bool:
    """A thread that has ended counts as stopped."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _remove_leftovers() -> None:
    """Remove the folders of runs that were killed; their processes ended with them."""
    for path in Path(tempfile.gettempdir()).glob("apiserver-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    process.send_signal(number)
    process.wait(timeout=30)


def _wait_for(name: str, ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        why: Exception | None = None
        try:
            if ready():
                return
        except (OSError, http.client.HTTPException, ApiError) as error:
            why = error
        if process.poll() is not None or time.monotonic() > end:
            tail = log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{name} does not come up ({why}); its log ends with:\n{tail}")
        time.sleep(0.1)
