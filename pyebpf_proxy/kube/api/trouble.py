# SPDX-License-Identifier: Apache-2.0
"""Errors of requests to the API server, and their log: one line when a problem begins, one when it ends."""

from __future__ import annotations

import errno
import re
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Mapping

from urllib3 import exceptions

#: What urllib3 raises when a request or the reading of an answer fails.
HTTP_ERRORS = (exceptions.HTTPError, OSError, ValueError)
#: Seconds after which an outage with a changed cause is logged again.
STEADY_SECONDS = 30.0


class TroubleError(Exception):
    """A failed request. Its message is one line with the problem and the remedy.

    ``shared``: the problem affects the server, and so every resource. ``lost``: the server was not reachable, and the
    next connection may lead to another one. ``usual``: a server under load does this now and then, so only a failure
    that recurs is reported. ``code``: the HTTP status. ``seconds``: minimum delay before a retry.
    """

    def __init__(
        self,
        text: str,
        *,
        shared: bool = False,
        lost: bool = False,
        usual: bool = False,
        code: int = 0,
        seconds: float = 0.0,
    ) -> None:
        super().__init__(text)
        self.shared = shared
        self.lost = lost
        self.usual = usual
        self.code = code
        self.seconds = seconds


def unexpected(error: Exception) -> TroubleError:
    """An error that no caller handles: a fault of this program. A thread that must go on reports it."""
    where = traceback.extract_tb(error.__traceback__)[-1:]
    at = f" at {where[0].name}:{where[0].lineno}" if where else ""
    return TroubleError(f"unexpected {type(error).__name__}{at}, please report this: {error}")


class StoppedError(Exception):
    """The agent exits; raised in threads that wait."""


class GoneError(TroubleError):
    """The requested history has expired (410): list again."""


class TooLongError(TroubleError):
    """An answer is longer than what is read."""


def connection_trouble(host: str, error: Exception) -> TroubleError:
    """The TroubleError for an exception of the HTTP library."""
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
        text = f"{host} accepts the connection but does not answer: check whether the API server hangs or is overloaded"
    elif isinstance(cause, OSError) and cause.errno is not None:
        text = f"the connection to {host} broke: {cause.strerror}"
    else:
        text = f"the answer of {host} ended before its end or is not HTTP ({_in_short(cause)})"
    return TroubleError(text, shared=True, lost=True)


def status_trouble(host: str, code: int, reason: str, message: str, seconds: float, permission: str) -> TroubleError:
    """The TroubleError for an HTTP status. ``message`` is the server's, ``permission`` what RBAC must grant."""
    message = _in_short(message or reason)
    if code == 401:
        return TroubleError(
            f"{host} rejects the credentials (401 {message}): check token or client certificate",
            shared=True,
            code=code,
        )
    if code == 403:
        return TroubleError(f"403: {message}: grant {permission} by RBAC", code=code)
    if code == 404:
        return TroubleError(f"404: {message}: {host} does not serve this", code=code)
    if code == 410:
        return GoneError(f"410: {message}", code=code)
    return TroubleError(f"{host} answers {code}: {message}", shared=True, code=code, seconds=seconds)


def _root(error: BaseException) -> BaseException:
    """The innermost exception with a message."""
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
        return f"it rejects the client ({name}); check the client certificate"
    return _in_short(name)


def _in_short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else f"{text[:299]}…"


class Log:
    """Logs each problem when it begins and when it ends; a shared problem only once for all resources.

    If the cause of an outage changes, this is logged only if the new cause persists. Safe in any thread; ``failed``
    and ``well`` may be called repeatedly.
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
        #: Resources affected by the shared problem, the logged cause, and a changed cause with its start.
        self._shared: set[str] = set()
        self._logged = ""
        self._other = ""
        self._since = 0.0
        self._own: dict[str, str] = {}

    def failed(self, resource: str, trouble: TroubleError) -> None:
        """Listing or watching the resource failed."""
        text = str(trouble)
        with self._lock:
            if trouble.shared:
                self._shared.add(resource)
                self._fail(text)
            elif self._own.get(resource) != text:
                self._own[resource] = text
                self._error(
                    "a resource cannot be watched, retrying; programmed Services stay",
                    resource=resource,
                    error=text,
                )

    def well(self, resource: str) -> None:
        """The resource is being watched."""
        with self._lock:
            if self._own.pop(resource, None) is not None:
                self._info("the resource can be watched again", resource=resource)
            self._shared.discard(resource)
            if self._logged and not self._shared:
                self._logged = self._other = ""
                self._info("the API server is reachable again", server=self._server)

    def troubles(self) -> Mapping[str, str]:
        """The current problems, as logged, by resource; "" means the whole server."""
        with self._lock:
            return {**({"": self._logged} if self._logged else {}), **self._own}

    def _fail(self, text: str) -> None:
        if text == self._logged:
            self._other = ""
            return
        if self._logged and (text != self._other or self._now() - self._since < STEADY_SECONDS):
            if text != self._other:
                self._other, self._since = text, self._now()
            return
        then = None if self._logged else "retrying; programmed Services stay"
        self._logged, self._other = text, ""
        self._error("the API server fails", server=self._server, error=text, then=then)
