# SPDX-License-Identifier: Apache-2.0
"""Requests through the router, and a substitute for the programs' decisions in tests of the nft table."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import closing

from tests.netns.attach.router import Router, Shell

MARK = 0x4000
BACKEND = 0x123456
SECONDS = 5.0


def packed(text: str) -> bytes:
    return ipaddress.ip_address(text).packed


def af(family: int) -> int:
    return socket.AF_INET if family == 4 else socket.AF_INET6


def decide(shell: Shell, statement: str, match: str = "meta mark 0") -> None:
    """Set the mark or priority of the client's packets that match, as the programs do when they decide. Mark 8 is
    another program's.
    """
    shell(f"""nft -f - <<'END'
        table inet decision {{
            chain early {{
                type filter hook prerouting priority -300
                iifname c0 {match} {statement}
            }}
            chain late {{
                type filter hook postrouting priority 102
                oifname s0 meta mark & {MARK:#x} != 0 counter comment "proxy bit left"
                oifname s0 meta mark 8 counter comment "others kept"
            }}
        }}
END""")


def exchange(router: Router, family: int, protocol: str, destination: tuple[str, int]) -> tuple[str, str]:
    """One request from the client and its answer. Returns the source address that the server saw and the one that the
    client saw.
    """
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    with router.inside("server"):
        server = socket.socket(af(family), kind)
    with router.inside("client"):
        client = socket.socket(af(family), kind)
    with closing(server), closing(client):
        server.settimeout(SECONDS)
        client.settimeout(SECONDS)
        server.bind((router.SERVER[family], 8080))
        if protocol == "udp":
            client.sendto(b"question", destination)
            _, source = server.recvfrom(100)
            server.sendto(b"answer", source)
            _, answered = client.recvfrom(100)
            return source[0], answered[0]
        server.listen()
        client.connect(destination)
        connection, source = server.accept()
        with closing(connection):
            return source[0], client.getpeername()[0]
