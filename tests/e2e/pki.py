# SPDX-License-Identifier: Apache-2.0
"""A CA for one cluster, the certificates of its programs, and kubeconfigs that contain them."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import yaml

from tests.e2e.layout import NODES, Network, node_name

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
          "kubernetes.default.svc.cluster.local")  # fmt: skip


def make(folder: Path, network: Network) -> None:
    """Create everything in an empty folder."""
    folder.mkdir(parents=True, mode=0o700)
    _run(folder, "openssl", "req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-days", "30",
         "-subj", "/CN=pep-e2e", "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
    addresses = [f"IP:{address}" for address in (network.api, "127.0.0.1", "10.96.0.1")]
    certificate(folder, "apiserver", "/CN=kube-apiserver", ",".join([*addresses, *(f"DNS:{name}" for name in _NAMES)]))
    certificate(folder, "kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client")
    certificate(folder, "front-proxy", "/CN=front-proxy-client")
    accounts = {
        "admin": "/O=system:masters/CN=admin",
        "kube-controller-manager": "/CN=system:kube-controller-manager",
        "kube-scheduler": "/CN=system:kube-scheduler",
    }
    for name, subject in accounts.items():
        certificate(folder, name, subject)
        kubeconfig(folder, name, network.server)
    for number in range(1, NODES + 1):
        node = node_name(number)
        names = ",".join([*(f"IP:{address}" for address in network.node(number)), f"DNS:{node}"])
        certificate(folder, node, f"/O=system:nodes/CN=system:node:{node}", names)
        kubeconfig(folder, node, network.server)
    _run(folder, "openssl", "genrsa", "-out", "accounts.key", "2048")
    _run(folder, "openssl", "rsa", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")


def certificate(folder: Path, name: str, subject: str, names: str = "") -> None:
    """NAME.crt and NAME.key, for servers and clients."""
    extensions = "extendedKeyUsage=serverAuth,clientAuth\n" + (f"subjectAltName={names}\n" if names else "")
    (folder / f"{name}.ext").write_text(extensions)
    _run(folder, "openssl", "req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
    _run(folder, "openssl", "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", "-CA", "ca.crt",
         "-CAkey", "ca.key", "-CAcreateserial", "-days", "30", "-extfile", f"{name}.ext")  # fmt: skip


def kubeconfig(folder: Path, name: str, server: str) -> None:
    """NAME.conf, with the certificate NAME."""

    def data(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    user = {"client-certificate-data": data(f"{name}.crt"), "client-key-data": data(f"{name}.key")}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "pep-e2e",
        "contexts": [{"name": "pep-e2e", "context": {"cluster": "pep-e2e", "user": "pep-e2e"}}],
        "clusters": [{"name": "pep-e2e", "cluster": {"server": server, "certificate-authority-data": data("ca.crt")}}],
        "users": [{"name": "pep-e2e", "user": user}],
    }
    path = folder / f"{name}.conf"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(content))


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
