# SPDX-License-Identifier: Apache-2.0
"""Access to an API server from a kubeconfig, ``--master``, or the pod's service account, as one value.

Errors have the wording of kube-proxy (client-go), so that users find them with a search.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.loader import content

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NOT_IN_CLUSTER = (
    "unable to load in-cluster configuration, KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT must be defined;"
    " outside a pod give --kubeconfig, or a folder of objects with --manifests"
)


@dataclass(frozen=True, slots=True)
class Tls:
    """CA and client certificate. Inline data take precedence over files; changed files are read again."""

    ca_file: str = ""
    ca_data: bytes = field(default=b"", repr=False)
    certificate_file: str = ""
    certificate_data: bytes = field(default=b"", repr=False)
    key_file: str = ""
    key_data: bytes = field(default=b"", repr=False)
    #: The expected name in the server's certificate, if it differs from the URL's host.
    server_name: str = ""
    #: Accept any certificate.
    insecure: bool = False

    @property
    def has_ca(self) -> bool:
        return bool(self.ca_file or self.ca_data)

    @property
    def has_certificate(self) -> bool:
        return bool(self.certificate_file or self.certificate_data)


@dataclass(frozen=True, slots=True)
class ExecPlugin:
    """A program that prints credentials (client.authentication.k8s.io)."""

    command: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    api_version: str = ""
    install_hint: str = ""
    provide_cluster_info: bool = False
    #: The extension of the cluster entry for the program, unchanged.
    cluster_config: object = None


@dataclass(frozen=True, slots=True)
class Access:
    """The server and the credentials. Files that the kubeconfig names have not been read."""

    #: ``scheme://host[:port][/prefix]`` without a trailing slash.
    server: str
    tls: Tls = Tls()
    token: str = field(default="", repr=False)
    token_file: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    #: Impersonation headers.
    impersonation: tuple[tuple[str, str], ...] = ()
    exec_plugin: ExecPlugin | None = None
    #: The proxy in the kubeconfig; if empty, the environment variables apply.
    proxy_url: str = ""
    compression: bool = True

    @property
    def host(self) -> str:
        """``host:port`` for messages and metrics."""
        return urlsplit(self.server).netloc.rpartition("@")[2]


def in_cluster(environment: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT) -> Access:
    """The API server of this pod's cluster, with the pod's service account."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise FatalError(NOT_IN_CLUSTER)
    token, authority = folder / "token", folder / "ca.crt"
    try:
        content(token)
    except ValueError as error:
        raise FatalError(str(error)) from None
    tls = Tls(ca_file=str(authority))
    if problem := _authority_problem(authority):
        # As in client-go, which goes on: the system may trust the certificate of the API server, too.
        Logger("api").error(f"Expected to load root CA config from {authority}, but got err: {problem}")
        tls = Tls()
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Access(server, tls, token_file=str(token))


def load_authority(context: ssl.SSLContext, data: bytes) -> None:
    """Trust certificates in PEM. SSLError or ValueError if there is none."""
    # What is not ASCII is a comment beside the certificates. Python would refuse it with a TypeError.
    context.load_verify_locations(cadata=data.decode("ascii", errors="ignore"))


def _authority_problem(path: Path) -> str:
    """Why a file has no CA, in the words of client-go; empty if it has one."""
    try:
        data = content(path)
    except ValueError as error:
        return str(error)
    try:
        load_authority(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), data)
    except (ssl.SSLError, ValueError):
        return f"error creating pool from {path}: data does not contain any valid RSA or ECDSA certificates"
    return ""


def server_url(text: str, *, tls: bool) -> str:
    """The URL of ``server`` or ``--master``, which may also be host:port: then https if any TLS option is set."""
    url = text if "://" in text else f"{'https' if tls else 'http'}://{text}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise FatalError(f"the API server's address {text!r} cannot be read: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise FatalError(f"the API server's address {text!r}: unsupported protocol scheme {parts.scheme!r}")
    if not parts.hostname or ("://" not in text and parts.path not in ("", "/")):
        raise FatalError(f'host must be a URL or a host:port pair: "{text}"')
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def without_credentials(access: Access) -> Access:
    """The access without credentials: as in kube-proxy, none are sent over plain HTTP."""
    return replace(access, token="", token_file="", username="", password="", exec_plugin=None, tls=Tls())
