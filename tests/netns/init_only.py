# SPDX-License-Identifier: Apache-2.0
"""Run the agent with --init-only."""

from __future__ import annotations

import subprocess

from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.cluster import Node


def run_init_only(node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    name, folders = node.agent.node_name, (node.agent.manifests, node.agent.directory)
    program = [*command(), "--init-only", f"--hostname-override={name}", f"--manifests={folders[0]}", *arguments]
    return subprocess.run(
        ["ip", "netns", "exec", node.namespace.name, *program, f"--directory={folders[1]}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
