# SPDX-License-Identifier: Apache-2.0
"""Credentials from a program: the exec plugins of kubeconfigs (client.authentication.k8s.io)."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pyebpf_proxy.kube.api.access import Access, ExecPlugin
from pyebpf_proxy.kube.api.trouble import TroubleError

#: Seconds after which a program without an answer is killed.
TIMEOUT = 60.0


class Credential(NamedTuple):
    """The result: a token, a client certificate with its key (PEM), or both."""

    token: str
    certificate: str
    key: str
    expires: datetime | None


def run(plugin: ExecPlugin, access: Access) -> Credential:
    """Run the program; a TroubleError names it."""
    request: dict[str, Any] = {
        "kind": "ExecCredential",
        "apiVersion": plugin.api_version,
        "spec": {"interactive": False},
    }
    if plugin.provide_cluster_info:
        request["spec"]["cluster"] = _cluster(plugin, access)
    environment = {**os.environ, **dict(plugin.environment), "KUBERNETES_EXEC_INFO": json.dumps(request)}
    try:
        ran = subprocess.run(
            [plugin.command, *plugin.arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _trouble(plugin, f"has not answered in {TIMEOUT:.0f} s") from None
    except (OSError, ValueError) as error:
        hint = f"; {' '.join(plugin.install_hint.split())}" if plugin.install_hint else ""
        raise _trouble(plugin, f"cannot be run: {getattr(error, 'strerror', None) or error}{hint}") from None
    if ran.returncode != 0:
        stderr = " ".join(ran.stderr.decode(errors="replace").split())[-200:]
        raise _trouble(plugin, f"failed with exit code {ran.returncode}: {stderr}")
    return _read(plugin, ran.stdout)


def _cluster(plugin: ExecPlugin, access: Access) -> dict[str, Any]:
    tls = access.tls
    cluster: dict[str, Any] = {"server": access.server}
    if tls.server_name:
        cluster["tls-server-name"] = tls.server_name
    if tls.insecure:
        cluster["insecure-skip-tls-verify"] = True
    if tls.has_ca:
        data = tls.ca_data
        if not data:
            with open(tls.ca_file, "rb") as file:
                data = file.read()
        cluster["certificate-authority-data"] = base64.b64encode(data).decode()
    if access.proxy_url:
        cluster["proxy-url"] = access.proxy_url
    if plugin.cluster_config is not None:
        cluster["config"] = plugin.cluster_config
    return cluster


def _read(plugin: ExecPlugin, output: bytes) -> Credential:
    try:
        answer = json.loads(output)
        kind, version = answer.get("kind"), answer.get("apiVersion")
        status = answer.get("status") or {}
        token = status.get("token") or ""
        certificate, key = status.get("clientCertificateData") or "", status.get("clientKeyData") or ""
        expires = status.get("expirationTimestamp")
        end = datetime.fromisoformat(expires) if expires else None
        if not all(isinstance(value, str) for value in (token, certificate, key)):
            raise TypeError("a value is not a string")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _trouble(plugin, f"printed something that is not an ExecCredential ({error})") from None
    if kind != "ExecCredential" or version != plugin.api_version:
        what = f"is configured to use API version {plugin.api_version}, but returned {kind} of version {version}"
        raise _trouble(plugin, what)
    if not token and not certificate:
        raise _trouble(plugin, "gave neither a token nor a client certificate")
    if bool(certificate) != bool(key):
        raise _trouble(plugin, "gave only one of certificate and key")
    if end is not None and end.tzinfo is None:
        end = end.replace(tzinfo=UTC)
    return Credential(token, certificate, key, end)


def _trouble(plugin: ExecPlugin, what: str) -> TroubleError:
    return TroubleError(f"the exec plugin {plugin.command} {what}", shared=True)
