# SPDX-License-Identifier: Apache-2.0
"""Credentials for the API server: headers and the TLS context. Rotated files are read again.

Exec plugins do not need the ``kubernetes`` package, which would add 19 packages, 126 MB of disk and 42 MB of memory:
their protocol is an environment variable and one JSON document on standard output.
"""

from __future__ import annotations

import base64
import os
import re
import ssl
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from pyebpf_proxy.config.loader import content
from pyebpf_proxy.kube.api import exec_plugin
from pyebpf_proxy.kube.api.access import Access, Tls, load_authority
from pyebpf_proxy.kube.api.trouble import TroubleError

#: Interval of checking a token file, seconds; a rotated token remains valid for minutes.
TOKEN_SECONDS = 10.0
#: What no HTTP header may have.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_Stamp = tuple[int, int, int]


class Credentials:
    """The credentials of one Access. Safe in any thread. TroubleError if a program or file has no credentials."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._token = access.token
        self._token_read = -TOKEN_SECONDS
        self._exec: exec_plugin.Credential | None = None
        self._context: ssl.SSLContext | None = None
        self._stamps: tuple[object, ...] = ()

    def headers(self) -> list[tuple[str, str]]:
        """The authentication headers."""
        with self._lock:
            access = self._access
            headers = list(access.impersonation)
            token = self._current_token()
            if not token and (credential := self._current_exec()) is not None:
                token = credential.token
            if token:
                if _CONTROL.search(token):
                    # The HTTP library's own error would show it.
                    what = f"the token of {self._source} has a line break or another control character"
                    raise TroubleError(what, shared=True)
                headers.append(("Authorization", f"Bearer {token}"))
            elif access.username or access.password:
                pair = base64.b64encode(f"{access.username}:{access.password}".encode()).decode()
                headers.append(("Authorization", f"Basic {pair}"))
            return headers

    @property
    def _source(self) -> str:
        """Where the token comes from."""
        access = self._access
        if access.token_file:
            return f"the file {access.token_file}"
        if access.exec_plugin is not None and not access.token:
            return f"the exec plugin {access.exec_plugin.command}"
        return "the kubeconfig"

    def refused(self) -> None:
        """Called when the server rejects the credentials (401): the next request reads or requests them again."""
        with self._lock:
            self._token_read = -TOKEN_SECONDS
            self._exec = None

    def context(self) -> ssl.SSLContext:
        """The TLS context; a new one after a certificate file has changed."""
        with self._lock:
            tls = self._access.tls
            credential = self._current_exec()
            stamps = (
                *(_stamp(path) for path in (tls.ca_file, tls.certificate_file, tls.key_file)),
                credential.certificate if credential is not None else "",
            )
            if self._context is None or stamps != self._stamps:
                self._context = _context(tls, credential)
                self._stamps = stamps
            return self._context

    def _current_token(self) -> str:
        path = self._access.token_file
        now = time.monotonic()
        if path and now - self._token_read >= TOKEN_SECONDS:
            try:
                token = content(Path(path)).decode().strip()
            except ValueError as error:
                if not self._token:
                    raise TroubleError(f"the token file {path} cannot be read: {error}", shared=True) from None
            else:
                # An empty file is being written: keep the old token.
                self._token = token or self._token
                self._token_read = now
        return self._token

    def _current_exec(self) -> exec_plugin.Credential | None:
        plugin = self._access.exec_plugin
        if plugin is None:
            return None
        if self._exec is None or (self._exec.expires is not None and self._exec.expires <= datetime.now(UTC)):
            self._exec = exec_plugin.run(plugin, self._access)
        return self._exec


def _stamp(path: str) -> _Stamp | None:
    if not path:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


class _SharedContext(ssl.SSLContext):
    """A TLS context that channels of several threads share.

    urllib3 sets ALPN before every connection. OpenSSL then frees the old list, while another thread, which connects
    without Python's lock, may be copying it. That thread would send garbage that the server cannot decode.
    """

    def set_alpn_protocols(self, alpn_protocols: Iterable[str]) -> None:
        """Do nothing: ALPN is set once, before the context is shared."""


def _context(tls: Tls, credential: exec_plugin.Credential | None) -> ssl.SSLContext:
    context = _SharedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    ssl.SSLContext.set_alpn_protocols(context, ["http/1.1"])
    if not (tls.has_ca or tls.insecure):
        context.load_default_certs()
    # Go accepts certificates without key identifiers, and CAs of existing clusters may have none. It also trusts every
    # given certificate: the CA of a cluster may be an intermediate one, whose issuer is not given.
    context.verify_flags = context.verify_flags & ~ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    if tls.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        if tls.ca_data or tls.ca_file:
            load_authority(context, tls.ca_data or _read(tls.ca_file))
    except (ssl.SSLError, ValueError):
        what = tls.ca_file or "certificate-authority-data"
        raise TroubleError(
            f"unable to load root certificates: {what} holds no certificate as PEM", shared=True
        ) from None
    certificate = credential.certificate.encode() if credential is not None and credential.certificate else b""
    key = credential.key.encode() if credential is not None else b""
    if not certificate and tls.has_certificate:
        certificate = tls.certificate_data or _read(tls.certificate_file)
        key = tls.key_data or _read(tls.key_file)
    if certificate:
        try:
            _load_pair(context, certificate, key)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or "neither is empty, but they are no PEM"
            what = f"client certificate {tls.certificate_file}".rstrip()
            raise TroubleError(f"the {what} and its key are not usable: {reason}", shared=True) from None
    return context


def _read(path: str) -> bytes:
    try:
        return content(Path(path))
    except ValueError as error:
        raise TroubleError(str(error), shared=True) from None


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load the pair via memory files, which are closed at once: Python's ssl reads only files."""
    descriptors = [os.memfd_create(name) for name in ("certificate", "key")]
    try:
        for descriptor, data in zip(descriptors, (certificate, key), strict=True):
            os.write(descriptor, data)
        paths = [f"/proc/self/fd/{descriptor}" for descriptor in descriptors]
        # Without this, a key with a passphrase would cause a prompt on the terminal.
        context.load_cert_chain(paths[0], paths[1], password=lambda: "")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
