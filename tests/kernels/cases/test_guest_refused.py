# SPDX-License-Identifier: Apache-2.0
"""A kernel that cannot run the data plane: the agent logs that in one line, ends, and leaves no state."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyebpf_proxy.lab.cluster import Lab
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.logs import Log
from tests.support.see_tools import answer

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns]

WEB = Kind("web", 1)


def test_the_agent_refuses_this_kernel_in_one_line() -> None:
    if not os.environ.get("REFUSED"):
        pytest.skip("this kernel is not one that has to be refused")
    with Lab(nodes=1) as lab:
        (node,) = lab.nodes
        write_nodes(lab)
        write_services(lab, WEB)
        node.agent.start()
        process = node.agent.process
        assert process is not None
        assert process.wait(120) == 1, node.agent.log()
        line = Log(node.agent).only(level="error")
        Log(node.agent).none("Traceback")
        assert f"this kernel, {os.uname().release}, is older than " in line.text or "the kernel has no BTF" in line.text
        bad = [each for each in answer(node, "doctor", status=1)["findings"] if each["state"] == "bad"]
        # Doctor gives the same reason with the same remedy; the agent ends with the first one.
        assert any(f"{each['text']}; {each['remedy']}" in line.text for each in bad), bad
        assert "pyebpf" not in node.namespace.run("nft", "list", "ruleset")
        assert not list(Path(node.agent.directory, "bpf").rglob("*"))
        print(line.text)
