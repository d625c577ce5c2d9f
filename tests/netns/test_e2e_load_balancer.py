# SPDX-License-Identifier: Apache-2.0
"""The routes of tests/e2e/load_balancer.py, in a network namespace."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = pytest.mark.needs_netns

PREPARE = """
import socket, subprocess, time
from tests.e2e import load_balancer

def shell(script):
    return subprocess.run(["sh", "-ec", script], capture_output=True, text=True, check=True).stdout

def outcome(kind, address):
    with socket.socket(type=kind) as client:
        client.settimeout(0.5)
        try:
            client.connect((address, 80))
            if kind == socket.SOCK_DGRAM:
                client.send(b"1")
                # The error that the first datagram brings is that of the second one.
                time.sleep(0.1)
                client.send(b"2")
            client.recv(1)
        except OSError as error:
            return type(error).__name__
    return "answer"

shell("ip link set lo up; ip link add nodes0 type veth peer name node; ip addr add 192.168.77.1/24 dev nodes0; "
      "ip link set nodes0 up; ip link set node up")
load_balancer.prepare()
controller = load_balancer.Controller()
address = load_balancer.ADDRESSES[0]
"""


def inside(program: str) -> list[str]:
    """The lines that this program prints in a new network namespace."""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", PREPARE + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_released_address_is_silent() -> None:
    program = """
controller.route(address, ["192.168.77.11", "192.168.77.12"])
print("via 192.168.77.1" in shell(f"ip route get {address}"))
controller.unroute(address)
for each in address, load_balancer.ADDRESSES[1]:
    print(outcome(socket.SOCK_DGRAM, each), outcome(socket.SOCK_STREAM, each))
"""
    served, *after = inside(program)[1:]
    assert served == "True"
    assert after == ["TimeoutError TimeoutError"] * 2


def test_a_controller_that_starts_again_prepares_the_same() -> None:
    program = """
load_balancer.prepare()
print(shell(f"ip -brief link | grep -c silent; ip route show {load_balancer.RANGE}"))
"""
    count, route = [line for line in inside(program) if line]
    assert count == "2"
    assert route.split()[:3] == ["192.168.79.0/24", "dev", "silent"]


def test_connections_of_a_client_go_to_one_node_only_with_session_affinity() -> None:
    program = """
nodes = ["192.168.77.11", "192.168.77.12"]
for affinity in "None", "ClientIP":
    controller.route(address, load_balancer.chosen(nodes, {"sessionAffinity": affinity}))
    asked = f"ip route get {address} ipproto tcp dport 80 sport"
    print(len({shell(f"{asked} {port}").split(" via ")[1].split()[0] for port in range(40000, 40050)}))
"""
    assert [line for line in inside(program) if line.isdigit()] == ["2", "1"]
