# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with an API server, in words: one line when it begins, one when it is over."""

from __future__ import annotations

import errno
import re
import ssl
import threading
import time
from collections.abc import Callable

from urllib3 import exceptions

#: An outage that has looked otherwise for so long is told again.
STEADY_SECONDS = 30.0


class TroubleError(Exception):
    """A request that came to nothing. Its text is one line: what happened, and what to do.

    ``shared``: it concerns the server as a whole, so that every resource meets it. ``lost``: there was no server to
    talk to; what comes back may be another one. ``code``: the HTTP status. ``seconds``: do not come back sooner.
    """

    def __init__(
        self, text: str, *, shared: bool = False, lost: bool = False, code: int = 0, seconds: float = 0.0
    ) -> None:
        super().__init__(text)
        self.shared = shared
        self.lost = lost
        self.code = code
        self.seconds = seconds


class StoppedError(Exception):
    """The agent ends; whatever was being waited for does not matter any more."""


class GoneError(TroubleError):
    """The history that was asked for is not kept any more (410): everything is to be listed again."""


def connection_trouble(host: str, error: Exception) -> TroubleError:
    """The trouble behind an exception of the HTTP library."""
    cause = _root(error)
    if isinstance(error, exceptions.NameResolutionError):
        name = re.sub(r":\d+$", "", host)
        what = getattr(cause, "strerror", None) or cause
        text = f"the name {name} cannot be resolved ({what}): check DNS, or give an address in the kubeconfig"
    elif isinstance(cause, ssl.SSLCertVerificationError):
        text = f"the certificate of {host} is not accepted: {_certificate_problem(cause)}"
    elif isinstance(cause, ssl.SSLError):
        text = f"TLS with {host} fails: {_tls_problem(cause)}"
    elif isinstance(error, exceptions.ProxyError):
        text = f"the proxy on the way to {host} fails: {cause}"
    elif isinstance(cause, ConnectionRefusedError):
        text = f"{host} refuses the connection: check that the API server runs, and its address"
    elif isinstance(cause, OSError) and cause.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        text = f"there is no route to {host} ({cause.strerror}): check this node's routes, and the address"
    elif isinstance(error, exceptions.ConnectTimeoutError):
        text = f"{host} cannot be reached: no answer to connecting; check the address, routes and firewalls"
    elif isinstance(cause, TimeoutError):
        text = f"{host} takes the connection and does not answer: check whether the API server hangs or is overloaded"
    elif isinstance(cause, OSError) and cause.errno is not None:
        text = f"the connection to {host} broke: {cause.strerror}"
    else:
        text = f"the answer of {host} ended before its end or is no HTTP ({_in_short(cause)})"
    return TroubleError(text, shared=True, lost=True)


def status_trouble(host: str, code: int, reason: str, message: str, seconds: float, permission: str) -> TroubleError:
    """The trouble behind an HTTP status. ``message`` is the server's own, ``permission`` what RBAC must allow."""
    said = _in_short(message or reason)
    if code == 401:
        return TroubleError(
            f"{host} does not accept our credentials (401 {said}): check token or client certificate",
            shared=True,
            code=code,
        )
    if code == 403:
        return TroubleError(f"403: {said}: grant {permission} by RBAC", code=code)
    if code == 404:
        return TroubleError(f"404: {said}: {host} does not serve this", code=code)
    if code == 410:
        return GoneError(f"410: {said}", code=code)
    return TroubleError(f"{host} answers {code}: {said}", shared=True, code=code, seconds=seconds)


def _root(error: BaseException) -> BaseException:
    """The innermost exception that says something."""
    for _ in range(10):
        inner = getattr(error, "original_error", None) or getattr(error, "reason", None)
        if not isinstance(inner, BaseException):
            inner = next((value for value in error.args if isinstance(value, BaseException)), None)
        if inner is None:
            inner = error.__cause__
        if inner is None or inner is error:
            return error
        error = inner
    return error


def _certificate_problem(error: ssl.SSLCertVerificationError) -> str:
    problem = str(error.verify_message or error)
    if "match" in problem or "mismatch" in problem.lower():
        return f"{problem.rstrip('.')}; tls-server-name of the kubeconfig names what it is to hold"
    if "expired" in problem or "not yet" in problem:
        return f"{problem}; renew it, or set this machine's clock"
    return f"{problem}; certificate-authority of the kubeconfig must be that of this cluster"


def _tls_problem(error: ssl.SSLError) -> str:
    name = error.reason or str(error)
    if name in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"):
        return "what answers there does not speak TLS"
    if "ALERT" in name:
        return f"it refuses us ({name}); check the client certificate"
    return _in_short(name)


def _in_short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else f"{text[:299]}…"


class Log:
    """Tells troubles once: when one begins and when it is over. What is shared by all resources is told once.

    Of one outage, one line: what else it looks like on the way is told only if it goes on looking like that.
    Safe in any thread; ``failed`` and ``well`` are called as often as one likes.
    """

    def __init__(
        self,
        server: str,
        error: Callable[..., None],
        info: Callable[..., None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._error = error
        self._info = info
        self._now = now
        self._lock = threading.Lock()
        #: Resources that meet the shared trouble, what was told of it, and what else it seems to be, since when.
        self._shared: set[str] = set()
        self._told = ""
        self._other = ""
        self._since = 0.0
        self._own: dict[str, str] = {}

    def failed(self, resource: str, trouble: TroubleError) -> None:
        """Following the resource failed."""
        text = str(trouble)
        with self._lock:
            if trouble.shared:
                self._shared.add(resource)
                self._fail(text)
            elif self._own.get(resource) != text:
                self._own[resource] = text
                self._error(
                    "the API server does not let us follow a resource, tried again; what is programmed stays",
                    resource=resource,
                    error=text,
                )

    def well(self, resource: str) -> None:
        """The resource is followed."""
        with self._lock:
            if self._own.pop(resource, None) is not None:
                self._info("the resource can be followed again", resource=resource)
            self._shared.discard(resource)
            if self._told and not self._shared:
                self._told = self._other = ""
                self._info("the API server is right again", server=self._server)

    def _fail(self, text: str) -> None:
        if text == self._told:
            self._other = ""
            return
        if self._told and (text != self._other or self._now() - self._since < STEADY_SECONDS):
            if text != self._other:
                self._other, self._since = text, self._now()
            return
        then = None if self._told else "tried again until it works; what is programmed stays"
        self._told, self._other = text, ""
        self._error("the API server fails", server=self._server, error=text, then=then)


HTTP_ERRORS = (exceptions.HTTPError, OSError, ValueError)
