# SPDX-License-Identifier: Apache-2.0
"""The pods of ``cluster test``: each answers, and asks Services. Needs nothing of the kubernetes library.

What is asked is in the environment (``PEER_PLAN``: a list of rows as JSON). Each row becomes one line of JSON on
stdout, then ``done``. A row is repeated until it succeeds or its time is over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

PORT = 8080
DONE = "done"
_SECONDS = 3.0
_PATIENCE = 30.0
#: How often a row that wants one certain endpoint of several is asked, each time by a new connection.
_TRIES = 200


def main(environment: dict[str, str] | None = None) -> int:
    """Serve, if PEER_NAME is set; ask the rows; go on serving until SIGTERM. Status 1: a row failed."""
    environment = dict(os.environ) if environment is None else environment
    name = environment.get("PEER_NAME", "")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if name:
        serve(name)
    failed = 0
    for row in json.loads(environment.get("PEER_PLAN", "[]")):
        answer = ask(row)
        failed += answer["ok"] is False
        print(json.dumps(answer), flush=True)
    print(DONE, flush=True)
    if name:
        signal.pause()
    return 1 if failed else 0


# ---- asking --------------------------------------------------------------------------------------------------------


def ask(row: dict[str, Any], patience: float = _PATIENCE) -> dict[str, Any]:
    """The row with ``ok``, and ``detail``: the server that answered, or the reason why none did.

    ``ok`` is None if the row may lack a route (``unreachable``), and does.
    """
    end = time.monotonic() + patience
    while True:
        try:
            who = _wanted(row)
        except (OSError, ValueError) as error:
            detail = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if row.get("unreachable") and getattr(error, "errno", 0) == errno.ENETUNREACH:
                return row | {"ok": None, "detail": "the node has no route to this address"}
            if time.monotonic() > end:
                return row | {"ok": False, "detail": detail}
            time.sleep(0.3)
        else:
            return row | {"ok": True, "detail": who}


def _wanted(row: dict[str, Any]) -> str:
    """Who answered: the endpoint that the row wants, if it wants one."""
    only, seen = row.get("only", ""), set()
    for _ in range(_TRIES if only and not row.get("always") else 1):
        who = _once(row)
        if not only or who == only:
            return who
        seen.add(who)
    raise ValueError(f"{', '.join(sorted(seen))} answered, not {only}")


def _once(row: dict[str, Any]) -> str:
    place = (row["address"], int(row["port"]))
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    payload = b"x" * int(row.get("size", 1))
    if row["protocol"] == "UDP":
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_SECONDS)
            sock.connect(place)
            sock.send(payload)
            return sock.recv(65536).decode()
    with socket.create_connection(place, _SECONDS) as sock:
        sock.sendall(payload)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while data := sock.recv(65536):
            answer += data
    name, _, echo = answer.partition(b"\n")
    if echo != payload:
        raise ValueError(f"{len(echo)} of {len(payload)} bytes came back")
    return name.decode()


# ---- answering -----------------------------------------------------------------------------------------------------


def serve(name: str, port: int = PORT) -> None:
    """Answer in threads of this process: TCP with the name and what was sent, UDP with the name."""
    for kind, answer in ((socket.SOCK_STREAM, _tcp), (socket.SOCK_DGRAM, _udp)):
        sock = _listening(kind, port)
        threading.Thread(target=answer, args=(sock, name.encode()), daemon=True).start()


def _listening(kind: socket.SocketKind, port: int) -> socket.socket:
    """For both families; for IPv4 where there is no IPv6."""
    try:
        sock = socket.socket(socket.AF_INET6, kind)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        place = "::"
    except OSError:
        sock, place = socket.socket(socket.AF_INET, kind), "0.0.0.0"
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((place, port))
    if kind == socket.SOCK_STREAM:
        sock.listen(128)
    return sock


def _tcp(listener: socket.socket, name: bytes) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_echo, args=(connection, name), daemon=True).start()


def _echo(connection: socket.socket, name: bytes) -> None:
    with contextlib.suppress(OSError), connection:
        connection.settimeout(_SECONDS)
        sent = b""
        while data := connection.recv(65536):
            sent += data
        connection.sendall(name + b"\n" + sent)


def _udp(sock: socket.socket, name: bytes) -> None:
    while True:
        try:
            _, who = sock.recvfrom(65536)
            sock.sendto(name, who)
        except OSError as error:
            # An ICMP error of an earlier answer.
            print(f"UDP: {error}", file=sys.stderr)
