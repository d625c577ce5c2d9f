# SPDX-License-Identifier: Apache-2.0
"""The commands ``pyebpf-proxy lab …``, run as a user would."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from pyebpf_proxy.lab import leftovers
from pyebpf_proxy.lab.addresses import Dual, node_address, pod_address, pod_cidr
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.example import EXAMPLES

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]


def lab(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(), "lab", *arguments],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_examples_fit_the_address_plan() -> None:
    paths = (EXAMPLES / "manifests").glob("*.yaml")
    documents = [each for path in paths for each in yaml.safe_load_all(path.read_text())]
    nodes = {each["metadata"]["name"]: each for each in documents if each["kind"] == "Node"}
    for number in (1, 2):
        node = nodes[f"node{number}"]
        assert tuple(each["address"] for each in node["status"]["addresses"]) == node_address(number)
        assert tuple(node["spec"]["podCIDRs"]) == pod_cidr(number)
    pods: set[str] = set()
    for address in (pod_address(1, 0), pod_address(2, 0)):
        pods |= set(Dual(*address))
    slices = [each for each in documents if each["kind"] == "EndpointSlice"]
    assert len(slices) == 4
    for each in slices:
        assert {text for endpoint in each["endpoints"] for text in endpoint["addresses"]} < pods


def test_demo_fails_if_a_result_differs_from_the_rules(tmp_path: Path) -> None:
    """The demo has its own expectations: a service that is set up differently must be reported as wrong."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    file = tmp_path / "examples" / "manifests" / "web.yaml"
    text = file.read_text()
    assert "externalTrafficPolicy: Cluster" in text
    file.write_text(text.replace("externalTrafficPolicy: Cluster", "externalTrafficPolicy: Local"))
    done = lab("demo", "--examples", str(tmp_path / "examples"))
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = [line for line in done.stdout.splitlines() if "WRONG" in line]
    assert any("web LB VIP" in line for line in wrong)
    assert not any("ClusterIP" in line for line in wrong), wrong  # the policy does not apply to these


def test_demo_tears_down_when_it_is_interrupted() -> None:
    process = subprocess.Popen(
        [*command(), "lab", "demo"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "answered by" in line:
            break
    tag = f"pep-{process.pid}-1"
    assert leftovers.namespaces_of(tag)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(60) == 130, rest
    assert leftovers.namespaces_of(tag) == []
    assert not leftovers.folder_of(tag).exists()


def test_shell_runs_in_the_client_and_removes_the_lab(tmp_path: Path) -> None:
    script = tmp_path / "shell"
    script.write_text(
        "#!/bin/sh\n"
        "curl -s --max-time 5 http://203.0.113.20/; curl -s --max-time 5 'http://[2001:db8:3::20]/'\n"
        f"{' '.join(command())} lab exec toolbox curl -s --max-time 5 http://10.96.0.10/\n"
    )
    script.chmod(0o755)
    done = lab("shell", SHELL=str(script))
    assert done.returncode == 0, done.stderr
    assert '"peer": ["198.51.100.2"' in done.stdout
    assert '"peer": ["2001:db8:2::2"' in done.stdout
    assert '"peer": ["10.244.1.11"' in done.stdout
    tag = next(word for word in done.stdout.split() if word.startswith("pep-"))
    assert leftovers.namespaces_of(tag) == []


def guided(text: str) -> list[str]:
    """The commands that the guide shows, without those that do not end by themselves."""
    lines = [re.split(r" {3,}", line.strip())[0] for line in text.splitlines() if line.startswith("  ")]
    return [line for line in lines if not line.startswith(("$EDITOR", "tail")) and not line.endswith("exec client")]


def test_up_exec_and_down() -> None:
    up = lab("up")
    assert up.returncode == 0, up.stdout + up.stderr
    tag = next(word for word in up.stdout.split() if word.startswith("pep-"))
    try:
        namespace = f"{tag}-client"
        asked = subprocess.run(
            ["ip", "netns", "exec", namespace, "curl", "-s", "--max-time", "5", "http://203.0.113.10/"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert '"pod": "web-' in asked.stdout
        for shown in guided(up.stdout):
            done = lab("exec", "client", "bash", "-c", shown)
            assert done.returncode == (7 if "203.0.113.30" in shown else 0), (shown, done)
        refused = lab("exec", "client", "curl", "-s", "--max-time", "5", "http://203.0.113.30/")
        assert refused.returncode == 7, refused  # curl: connection refused
    finally:
        down = lab("down")
    assert f"{tag} removed" in down.stdout
    assert leftovers.namespaces_of(tag) == []
    assert not leftovers.folder_of(tag).exists()


def test_an_unknown_node() -> None:
    done = lab("exec", "node77", "true")
    assert done.returncode == 1
    assert "no running lab contains 'node77'" in done.stderr
