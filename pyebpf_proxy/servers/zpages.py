# SPDX-License-Identifier: Apache-2.0
"""``/flagz``, ``/statusz`` and ``/debug/flags``: debugging pages of one agent (spec/service-semantics §11.3)."""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable, Iterable, Mapping

from pyebpf_proxy import KUBERNETES_VERSION
from pyebpf_proxy.common.digits import bounded_int
from pyebpf_proxy.servers.http import Handler, Request, Response
from pyebpf_proxy.servers.negotiation import negotiate, not_acceptable, structured

_TEXT = (("Content-Type", "text/plain; charset=utf-8"),)
_HEADER = """
kube-proxy {name}
Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for \
debugging purposes only.
"""
#: One of these is chosen at random, to discourage programs from parsing the text.
_SEPARATORS = (":", ": ", "=", " ")

_FLAGS_PAGE = """<html>
<head>
<title>/debug/flags/</title>
</head>
<body>
/debug/flags/<br>
<br>
flags:<br>
<table>
<tr>v<br>
</table>
<br>
full flags configurable<br>
</body>
</html>
"""


def flagz(flags: Mapping[str, str]) -> Handler:
    """Every flag with its value."""
    separator = random.choice(_SEPARATORS)
    lines = [f"{name}{separator}{value}\n" for name, value in sorted(flags.items())]
    text = Response(200, _TEXT, (_HEADER.format(name="flagz") + "".join(lines)).encode())

    def answer(request: Request) -> Response:
        form = negotiate(request, "Flagz")
        if form is None:
            return not_acceptable(request)
        return structured(form, "Flagz", {"flags": dict(sorted(flags.items()))}) if form.version else text

    return answer


def statusz(paths: Iterable[str], start: float, clock: Callable[[], float] = time.time) -> Handler:
    """Uptime, version and a list of paths. ``start`` and ``clock`` are in seconds since 1970."""
    start = int(start)
    folders = sorted({f"/{path.split('/')[1]}" for path in paths})
    version = KUBERNETES_VERSION.removeprefix("v")
    emulated = ".".join(version.split(".")[:2])
    runtime = f"{platform.python_implementation()} {platform.python_version()}"

    def answer(request: Request) -> Response:
        form = negotiate(request, "Statusz")
        if form is None:
            return not_acceptable(request)
        up = max(0, int(clock() - start))
        if form.version:
            value = {
                "startTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start)),
                "uptimeSeconds": up,
                "goVersion": runtime,
                "binaryVersion": version,
                "emulationVersion": emulated,
                "paths": folders,
            }
            return structured(form, "Statusz", value)
        rows = {
            "Started": time.strftime("%a %b %e %H:%M:%S UTC %Y", time.gmtime(start)),
            "Up": f"{up // 3600} hr {up // 60 % 60:02} min {up % 60:02} sec",
            "Go version": runtime,
            "Binary version": version,
            "Emulation version": emulated,
            "Paths": " ".join(folders),
        }
        separator = random.choice(_SEPARATORS)
        lines = [f"{name}{separator} {value}\n" for name, value in rows.items()]
        return Response(200, _TEXT, (_HEADER.format(name="statusz") + "\n" + "".join(lines)).encode())

    return answer


def debug_flags(request: Request) -> Response:
    """The flags that may be set at run time: v."""
    return Response(200, (("Content-Type", "text/html; charset=utf-8"),), _FLAGS_PAGE.encode())


def verbosity(set_to: Callable[[int], None]) -> Handler:
    """``PUT /debug/flags/v``: set the log verbosity."""

    def answer(request: Request) -> Response:
        if request.method != "PUT":
            return _plain(406, "unsupported http method")
        text = request.body.decode("utf-8", "replace")
        if not (text.isascii() and text.isdigit()):
            return _plain(400, f'strconv.ParseUint: parsing "{text[:100]}": invalid syntax')
        level = bounded_int(text, 1 << 32)
        if level == 1 << 32:
            return _plain(400, f'strconv.ParseUint: parsing "{text[:100]}": value out of range')
        set_to(level)
        return _plain(200, f"successfully set klog.logging.verbosity to {text}")

    return answer


def no_profiles(request: Request) -> Response:
    """The answer for Go's profiles, which do not exist here."""
    return Response(
        404,
        (("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff")),
        b"no profiles are served: this is a Python program, use py-spy to profile its process\n",
    )


def _plain(status: int, text: str) -> Response:
    headers = (("Content-Type", "text/plain"), ("X-Content-Type-Options", "nosniff"))
    return Response(status, headers, f"{text}\n".encode())
