# SPDX-License-Identifier: Apache-2.0
"""Whether the Debian package's service may start, whatever other users do on the node (deploy/deb/may-start.py)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns]

#: In a network namespace of its own: to other tests, a process of this name would be a kube-proxy of the node.
_SCRIPT = """
import ctypes, os, signal, socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
name, uid, port, host = sys.argv[2].encode("utf-8", "surrogateescape"), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
ready, wrote = os.pipe()
child = os.fork()
if child == 0:
    os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
    if port:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    os.write(wrote, b"1")
    signal.pause()
os.read(ready, 1)
try:
    sys.exit(subprocess.run([sys.executable, "-I", sys.argv[1]]).returncode)
finally:
    os.kill(child, signal.SIGKILL)
"""


def may_start(name: bytes, uid: int, port: int = 0, host: str = "127.0.0.1") -> tuple[int, str]:
    """Status and output while a process has this name and user, and listens at this port."""
    arguments = [str(ROOT / "deploy" / "deb" / "may-start.py"), os.fsdecode(name), str(uid), str(port), host]
    command = ["unshare", "--net", sys.executable, "-c", _SCRIPT, *arguments]
    # A service has no language; its Python then reads files as UTF-8.
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_process_name_that_is_not_utf_8_does_not_keep_the_service_from_starting() -> None:
    assert may_start(b"\xff\xfe", 65534) == (0, "")


def test_a_process_of_another_user_does_not_keep_the_service_from_starting() -> None:
    assert may_start(b"kube-proxy", 65534) == (0, "")
    assert may_start(b"other", 65534, 10256) == (0, "")


def test_kube_proxy_and_a_program_of_root_at_its_port_keep_the_service_from_starting() -> None:
    status, text = may_start(b"kube-proxy", 0)
    assert (status, text.startswith("not started: kube-proxy runs on this node (process ")) == (1, True), text
    status, text = may_start(b"other", 0, 10256)
    assert (status, text.startswith("not started: another proxy serves this node")) == (1, True), text


def test_a_health_server_on_the_ipv6_loopback_keeps_the_service_from_starting() -> None:
    """That of k3s, where the node's first address is IPv6."""
    assert may_start(b"other", 65534, 10256, "::1") == (0, "")
    status, text = may_start(b"other", 0, 10256, "::1")
    assert (status, text.startswith("not started: another proxy serves this node")) == (1, True), text
