# SPDX-License-Identifier: Apache-2.0
"""Credentials from a program: the exec plugins of kubeconfigs (client.authentication.k8s.io)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pyebpf_proxy.common.printable import printable
from pyebpf_proxy.config.loader import content
from pyebpf_proxy.kube.api.access import Access, ExecPlugin
from pyebpf_proxy.kube.api.trouble import TroubleError

#: Seconds after which a program without an answer is killed.
TIMEOUT = 60.0
#: Maximum of bytes on its standard output.
MOST_BYTES = 1 << 20
#: How much of its errors is kept, in bytes, and how much of them is shown, in characters.
_MOST_ERRORS, _LONGEST = 16 << 10, 200


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
        process = subprocess.Popen(
            [plugin.command, *plugin.arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        hint = f"; {' '.join(plugin.install_hint.split())}" if plugin.install_hint else ""
        raise _trouble(plugin, f"cannot be run: {getattr(error, 'strerror', None) or error}{hint}") from None
    end = time.monotonic() + TIMEOUT
    with process:
        try:
            output, errors = _output(process, end)
            code = process.wait(max(0.0, end - time.monotonic()))
        except BaseException as error:
            # Also what the program has started, which may hold the pipes.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
                raise _trouble(plugin, f"has not answered in {TIMEOUT:.0f} s") from None
            if isinstance(error, OverflowError):
                raise _trouble(plugin, f"printed more than {MOST_BYTES >> 20} MiB") from None
            raise
    if code != 0:
        how = f"failed with exit code {code}" if code > 0 else f"was ended by signal {-code}"
        said = _said(plugin, errors)
        raise _trouble(plugin, f"{how}: {said}" if said else how)
    return _read(plugin, output)


def _output(process: subprocess.Popen[bytes], end: float) -> tuple[bytes, bytes]:
    """What it prints, and the end of its errors. TimeoutError; OverflowError if it is too much."""
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = process.stdout.fileno(), process.stderr.fileno()
    read = {output: bytearray(), errors: bytearray()}
    with selectors.DefaultSelector() as ready:
        for pipe in read:
            ready.register(pipe, selectors.EVENT_READ)
        while ready.get_map():
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in ready.select(left):
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    ready.unregister(key.fd)
                read[key.fd] += piece
                del read[errors][:-_MOST_ERRORS]
                if len(read[output]) > MOST_BYTES:
                    raise OverflowError
    return bytes(read[output]), bytes(read[errors])


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
            try:
                data = content(Path(tls.ca_file))
            except ValueError as error:
                raise TroubleError(f"unable to load root certificates: {error}", shared=True) from None
        cluster["certificate-authority-data"] = base64.b64encode(data).decode()
    if access.proxy_url:
        cluster["proxy-url"] = access.proxy_url
    if plugin.cluster_config is not None:
        cluster["config"] = plugin.cluster_config
    return cluster


def _said(plugin: ExecPlugin, errors: bytes) -> str:
    """The end of what the program has written to stderr, on one line. It may have logged its requests."""
    from pyebpf_proxy.common.blotted import BLOT, blotted_end, names_credential

    text = errors.decode(errors="replace")
    for name, value in plugin.environment:
        if value and names_credential(name):
            text = text.replace(value, BLOT)
    return printable(blotted_end(text, _LONGEST))


def _shown(value: object) -> str:
    """What the program returned as a name. Anything else may hold a credential."""
    if value is None:
        return "none"
    return printable(value[:_LONGEST]) if isinstance(value, str) else f"a {type(value).__name__}"


def _read(plugin: ExecPlugin, output: bytes) -> Credential:
    try:
        answer = json.loads(output)
        kind, version = answer.get("kind"), answer.get("apiVersion")
        status = answer.get("status") or {}
        token = status.get("token") or ""
        certificate, key = status.get("clientCertificateData") or "", status.get("clientKeyData") or ""
        expires = status.get("expirationTimestamp")
        end = _time(expires) if expires else None
        if not all(isinstance(value, str) for value in (token, certificate, key)):
            raise TypeError("a value is not a string")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _trouble(plugin, f"printed something that is not an ExecCredential ({error})") from None
    if kind != "ExecCredential" or version != plugin.api_version:
        returned = f"{_shown(kind)} of version {_shown(version)}"
        what = f"is configured to use API version {plugin.api_version}, but returned {returned}"
        raise _trouble(plugin, what)
    if not token and not certificate:
        raise _trouble(plugin, "gave neither a token nor a client certificate")
    if bool(certificate) != bool(key):
        raise _trouble(plugin, "gave only one of certificate and key")
    if end is not None and end.tzinfo is None:
        end = end.replace(tzinfo=UTC)
    return Credential(token, certificate, key, end)


def _time(text: Any) -> datetime:
    """ValueError without the text: it may be a credential in the wrong place."""
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise ValueError("expirationTimestamp is not a time") from None


def _trouble(plugin: ExecPlugin, what: str) -> TroubleError:
    return TroubleError(f"the exec plugin {plugin.command} {what}", shared=True)
