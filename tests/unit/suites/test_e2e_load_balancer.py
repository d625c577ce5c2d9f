# SPDX-License-Identifier: Apache-2.0
"""The routes of the load-balancer controller of tests/e2e, in a network namespace."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns]

SCRIPT = """
import socket, subprocess
from unittest import mock
from tests.e2e import load_balancer

def run(words):
    subprocess.run(words.split(), check=True)

run("ip link set lo up")
run("ip link add net type veth peer name net-peer")
run("ip addr add 192.0.2.1/24 dev net")
run("ip link set net-peer up")
run("ip link set net up")
load_balancer.prepare()
with mock.patch("kubernetes.client.CoreV1Api"):
    controller = load_balancer.Controller()
for nodes in (["192.0.2.11"], [], ["192.0.2.12"], [], []):
    controller.route("192.168.79.1", nodes)
    subprocess.run(["ip", "route", "show", "root", "192.168.79.1"], check=True)
with socket.socket() as client:
    client.settimeout(0.3)
    try:
        client.connect(("192.168.79.1", 80))
    except OSError as error:
        print(type(error).__name__)
"""


def test_an_address_without_healthy_nodes_is_silent() -> None:
    pytest.importorskip("kubernetes")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "unreachable" not in done.stdout
    assert done.stdout.count("nowhere") == 2
    assert done.stdout.splitlines()[-1] == "TimeoutError", "the client gets no error, and may try again"
