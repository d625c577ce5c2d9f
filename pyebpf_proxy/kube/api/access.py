# SPDX-License-Identifier: Apache-2.0
"""What is known of the way to an API server: a kubeconfig, ``--master``, or the pod's own account, as one value.

Errors are told in kube-proxy's (client-go's) words, so that what people search for is found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from pyebpf_proxy.config.loader import content
from pyebpf_proxy.errors import FatalError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NOT_IN_CLUSTER = (
    "unable to load in-cluster configuration, KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT must be defined;"
    " outside a pod give --kubeconfig, or a folder of objects with --manifests"
)


@dataclass(frozen=True, slots=True)
class Tls:
    """Whom to trust and who we are. Data go before files; files are read again when they change."""

    ca_file: str = ""
    ca_data: bytes = field(default=b"", repr=False)
    certificate_file: str = ""
    certificate_data: bytes = field(default=b"", repr=False)
    key_file: str = ""
    key_data: bytes = field(default=b"", repr=False)
    #: The name in the server's certificate, where it is not that of the URL.
    server_name: str = ""
    #: Take any certificate.
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
    #: The extension of the cluster entry that is meant for the program, as it stands there.
    cluster_config: object = None


@dataclass(frozen=True, slots=True)
class Access:
    """The server and the credentials, nothing read yet but the kubeconfig itself."""

    #: ``scheme://host[:port][/prefix]`` without a slash at the end.
    server: str
    tls: Tls = Tls()
    token: str = field(default="", repr=False)
    token_file: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    #: Headers that ask to be taken for somebody else.
    impersonation: tuple[tuple[str, str], ...] = ()
    exec_plugin: ExecPlugin | None = None
    #: A proxy that the kubeconfig names; empty: that of the environment.
    proxy_url: str = ""
    compression: bool = True

    @property
    def host(self) -> str:
        """``host:port`` for messages and metrics."""
        return urlsplit(self.server).netloc.rpartition("@")[2]


def find(kubeconfig: str, master: str, environment: Mapping[str, str] = os.environ) -> Access:
    """Where the API server is: from the kubeconfig with ``master`` over it, ``master`` alone, or of the pod.

    Raises FatalError.
    """
    if not kubeconfig and not master:
        return in_cluster(environment)
    if not kubeconfig:
        return Access(server_url(master, tls=False))
    from .kubeconfig import load

    access = load(Path(kubeconfig), master)
    if access is not None:
        return access
    in_pod = environment.get("KUBERNETES_SERVICE_HOST") and environment.get("KUBERNETES_SERVICE_PORT")
    if in_pod and (SERVICE_ACCOUNT / "token").is_file():
        return in_cluster(environment)
    raise FatalError(
        f"{kubeconfig}: invalid configuration: no configuration has been provided,"
        " try setting KUBERNETES_MASTER environment variable"
    )


def in_cluster(environment: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT) -> Access:
    """The API server of the cluster that this pod runs in, with the pod's own account."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise FatalError(NOT_IN_CLUSTER)
    token, authority = folder / "token", folder / "ca.crt"
    for path in (token, authority):
        try:
            content(path)
        except ValueError as error:
            raise FatalError(str(error)) from None
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Access(server, Tls(ca_file=str(authority)), token_file=str(token))


def server_url(text: str, *, tls: bool) -> str:
    """The URL of a ``server`` or ``--master``: a URL, or host:port, which is https where anything speaks of TLS."""
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
    """As kube-proxy over plain HTTP: no credentials are sent where anybody could read them."""
    return replace(access, token="", token_file="", username="", password="", exec_plugin=None, tls=Tls())
