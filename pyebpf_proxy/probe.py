# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy probe live|ready``: the kubelet's probes, answered by the agent's socket in the run folder.

A probe does not use the agent's ports. They can be flooded, or another process can bind them and answer instead.
A probe is a new process every few seconds, so it imports little: the entry point calls :func:`probe` before it reads
the table of commands (``commands.py``), which handles all other arguments.
"""

from __future__ import annotations

import os
import socket
import sys
import time

PAGES = {"live": "/livez", "ready": "/readyz"}
_SECONDS = 4.0
#: How long to ask again while the agent starts, or has not programmed the node. The kubelet allows a probe 5 s.
_RETRY_SECONDS = 3.0
_PAUSE = 0.05
_MOST_BYTES = 64 << 10


def probe(what: str, folder: str = "") -> int:
    """Ask the agent; ``what``: a key of PAGES. 0: yes; 1: no, or the agent does not answer (stderr has the reason).

    It waits a little for an agent that starts, or that is about to program the node: the kubelet's next probe is a
    second or more away.
    """
    folder = folder or os.environ.get("PYEBPF_PROXY_DIRECTORY") or "/run/pyebpf-proxy"
    end = time.monotonic() + _RETRY_SECONDS
    while True:
        again = False
        try:
            status, body, again = _ask(folder, PAGES[what])
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            status, body = 0, f"the agent of {folder} does not answer: {reason}"
            # The socket is missing until the agent serves it; a killed agent leaves one that refuses.
            again = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
        if not again or time.monotonic() > end:
            break
        time.sleep(_PAUSE)
    print(body, file=sys.stdout if status == 200 else sys.stderr)
    return 0 if status == 200 else 1


def _ask(folder: str, page: str) -> tuple[int, str, bool]:
    """Status and body, and whether to ask again soon."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(_SECONDS)
            asking.connect(f"/proc/self/fd/{descriptor}/agent.sock")
            asking.sendall(f"GET {page} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b""
            while len(answer) < _MOST_BYTES and (data := asking.recv(4096)):
                answer += data
    finally:
        os.close(descriptor)
    head, _, body = answer.decode("utf-8", "replace").partition("\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2:
        raise ValueError("it closed the connection")
    return int(words[1]), body.strip(), "\r\nretry-after:" in head.lower()
