# SPDX-License-Identifier: Apache-2.0
"""Runs the commands on a node of the lab, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.cluster import Node

#: As in the agent's own pod: bpf(2) commands that need CAP_SYS_ADMIN fail.
NO_SYS_ADMIN = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")


def see(
    node: Node, *arguments: str, through: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run one command on a node, with its run folder from the environment. ``through``: a program that runs it."""
    # The environment of the tests may have COLUMNS, which would take effect.
    known = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    known["PYEBPF_PROXY_DIRECTORY"] = str(node.agent.directory)
    return subprocess.run(
        ["ip", "netns", "exec", node.namespace.name, *through, *command(), *arguments],
        env=known | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def answer(node: Node, *arguments: str, status: int = 0) -> dict[str, Any]:
    """The answer in JSON; the exit status must be ``status``."""
    ran = see(node, *arguments, "-o", "json")
    assert ran.returncode == status, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def error(node: Node, *arguments: str, status: int, **environment: str) -> str:
    """The one line with the reason why there is no answer."""
    ran = see(node, *arguments, **environment)
    assert (ran.returncode, ran.stdout) == (status, ""), ran.stdout + ran.stderr
    (line,) = ran.stderr.splitlines()
    return line.removeprefix("Error: ")
