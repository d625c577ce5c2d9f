# SPDX-License-Identifier: Apache-2.0
"""Every authentication method of a kubeconfig, against the real API server."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import pytest
import yaml

from pyebpf_proxy.kube.api.access import in_cluster
from pyebpf_proxy.kube.api.connect import find
from tests.cluster.api_source import ACCOUNT, RULES, TIMING, node
from tests.support.apiserver import ADMIN_TOKEN, ApiServer, Object, running
from tests.support.scripted_api import Following

server = pytest.fixture(scope="module")(running)

EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}


@pytest.fixture
def folder(server: ApiServer, tmp_path: Path) -> Path:
    """A token of the account, and a client certificate of an administrator."""
    server.account(ACCOUNT, RULES)
    server.apply(node())
    (tmp_path / "token").write_text(server.token(ACCOUNT))
    (tmp_path / "ca.crt").write_text(server.ca.read_text())
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "user.key"]
    sign = ["-CA", server.folder / "ca.crt", "-CAkey", server.folder / "ca.key", "-CAcreateserial", "-days", "2"]
    for arguments in (
        ["req", *key, "-out", "user.csr", "-subj", "/O=system:masters/CN=tests-user"],
        ["x509", "-req", "-in", "user.csr", "-out", "user.crt", *sign],
    ):
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def gets_in(kubeconfig: Path) -> None:
    with Following(find(str(kubeconfig), ""), TIMING) as source:
        source.until(lambda: source.complete and "kubernetes" in source.names("Service"))
        assert source.errors() == []


@pytest.mark.parametrize("how", ["certificate files", "certificate data", "token", "exec token", "exec certificate"])
def test_client_authentication(server: ApiServer, folder: Path, how: str) -> None:
    certificate, key = folder / "user.crt", folder / "user.key"
    status: Object = {"token": ADMIN_TOKEN}
    if how == "exec certificate":
        status = {"clientCertificateData": certificate.read_text(), "clientKeyData": key.read_text()}
    credential = {"kind": "ExecCredential", "apiVersion": EXEC["apiVersion"], "status": status}
    (folder / "credential").write_text(json.dumps(credential))
    users: dict[str, Object] = {
        "certificate files": {"client-certificate": "user.crt", "client-key": "user.key"},
        "certificate data": {"client-certificate-data": data(certificate), "client-key-data": data(key)},
        "token": {"token": (folder / "token").read_text()},
        "exec token": {"exec": EXEC | {"command": "cat", "args": [str(folder / "credential")]}},
        "exec certificate": {"exec": EXEC | {"command": "cat", "args": [str(folder / "credential")]}},
    }
    gets_in(server.kubeconfig(folder / "kubeconfig", users[how]))


@pytest.mark.parametrize("how", ["data", "another name", "insecure", "name of the address"])
def test_server_authentication(server: ApiServer, folder: Path, how: str) -> None:
    clusters: dict[str, Object] = {
        "data": {"server": server.url, "certificate-authority-data": data(server.ca)},
        "another name": {
            "server": server.url,
            "certificate-authority": "ca.crt",
            "tls-server-name": "kubernetes.default.svc",
        },
        "insecure": {"server": server.url, "insecure-skip-tls-verify": True},
        "name of the address": {"server": f"https://localhost:{server.port}", "certificate-authority": "ca.crt"},
    }
    path = server.kubeconfig(folder / "kubeconfig", {"tokenFile": "token"})
    config = yaml.safe_load(path.read_text())
    config["clusters"][0]["cluster"] = clusters[how]
    path.write_text(yaml.safe_dump(config))
    gets_in(path)


def test_a_name_that_is_not_in_the_certificate(server: ApiServer, folder: Path) -> None:
    path = server.kubeconfig(folder / "kubeconfig", {"tokenFile": "token"})
    config = yaml.safe_load(path.read_text())
    config["clusters"][0]["cluster"]["tls-server-name"] = "other.example"
    path.write_text(yaml.safe_dump(config))
    with Following(find(str(path), ""), TIMING) as source:
        source.until(lambda: source.errors())
        assert "tls-server-name of the kubeconfig names what it is to hold" in source.errors()[0]
        assert not source.complete


def test_the_account_of_a_pod_in_the_cluster(server: ApiServer, folder: Path) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
    with Following(in_cluster(environment, folder), TIMING) as source:
        source.until(lambda: source.complete)
        assert source.errors() == []
