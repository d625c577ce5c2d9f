# SPDX-License-Identifier: Apache-2.0
"""deploy/ with a real API server: it accepts every manifest, the page's commands work, the rights suffice."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.deployment import manifests
from tests.deployment.manifests import DEPLOY
from tests.support import kubeadm
from tests.support.apiserver import ADMIN_TOKEN, ApiError, ApiServer, Object

SYSTEM = "/api/v1/namespaces/kube-system"
DAEMON_SETS = "/apis/apps/v1/namespaces/kube-system/daemonsets"
Kubectl = Callable[..., str]


@pytest.fixture
def kubectl(server: ApiServer, tmp_path: Path) -> Kubectl:
    """Run the real kubectl as administrator in the repository's folder; returns its output. Fails with its error."""
    configuration = server.kubeconfig(tmp_path / "admin.conf", {"token": ADMIN_TOKEN})
    environment = {"KUBECONFIG": str(configuration), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            ["kubectl", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, f"kubectl {' '.join(map(str, arguments))}: {done.stderr}"
        return done.stdout

    return run


@pytest.fixture(params=["kubeadm", "apply", "server-side"])
def cluster(request: pytest.FixtureRequest, server: ApiServer, kubectl: Kubectl, tmp_path: Path) -> Iterator[ApiServer]:
    """kube-proxy's objects as kubeadm creates them, or as an administrator's apply does."""
    for item in (kubeadm.config_map("https://192.0.2.1:6443"), kubeadm.daemon_set()):
        if request.param == "kubeadm":
            server.create(item)
            continue
        (tmp_path / "item.yaml").write_text(yaml.safe_dump(item))
        kubectl("apply", *(["--server-side"] if request.param == "server-side" else []), "-f", tmp_path / "item.yaml")
    yield server
    for item in (kubeadm.config_map(""), kubeadm.daemon_set()):
        server.delete(item)


def daemon_set(server: ApiServer, name: str) -> Object:
    return server.request("GET", f"{DAEMON_SETS}/{name}")


def roll_out(server: ApiServer, name: str, desired: int) -> None:
    """Write the status that the controller writes when this generation's pods are ready on so many nodes."""
    generation = daemon_set(server, name)["metadata"]["generation"]
    numbers = ("desiredNumberScheduled", "currentNumberScheduled", "updatedNumberScheduled", "numberAvailable")
    status = {"observedGeneration": generation, "numberReady": desired, "numberMisscheduled": 0}
    status |= dict.fromkeys(numbers, desired)
    server.request("PATCH", f"{DAEMON_SETS}/{name}/status", {"status": status}, "application/merge-patch+json")


@pytest.mark.parametrize("cluster", ["kubeadm"], indirect=True)
@pytest.mark.parametrize("folder", manifests.kustomizations(), ids=lambda folder: str(folder.relative_to(DEPLOY)))
def test_every_manifest_is_accepted(cluster: ApiServer, kubectl: Kubectl, folder: Path) -> None:
    """By server-side apply, and the server must know every field."""
    output = kubectl("apply", "--server-side", "--validate=strict", "-k", folder)
    assert len(output.splitlines()) == len(manifests.build(folder))
    assert all(line.endswith("serverside-applied") for line in output.splitlines())
    again = kubectl("diff", "--server-side", "-k", folder)
    assert again == "", "the server has changed the object"
    for item in manifests.build(folder):
        cluster.delete(item)


def commands() -> list[list[str]]:
    """Every command of the page, in order."""
    text = (ROOT / "docs" / "migrating-from-kube-proxy.md").read_text()
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    return [shlex.split(line) for line in lines]


def test_the_commands_of_the_page_in_both_directions(cluster: ApiServer, kubectl: Kubectl) -> None:
    """Command by command. The test plays the controller's part in between, for there are no nodes."""
    original = daemon_set(cluster, "kube-proxy")
    configuration = cluster.request("GET", f"{SYSTEM}/configmaps/kube-proxy")
    seen: list[str] = []
    for program, *arguments in commands():
        assert program == "kubectl"
        if "status" in arguments:
            name = arguments[-2].removeprefix("daemonset/")
            roll_out(cluster, name, 2)
        output = kubectl(*arguments)
        action = " ".join(
            word
            for word in arguments
            if word in ("apply", "delete", "patch", "rollout", "restart") or word.startswith("deploy/")
        )
        seen.append(action)
        parked = "pyebpf-proxy/no-node" in daemon_set(cluster, "kube-proxy")["spec"]["template"]["spec"]["nodeSelector"]
        if "status" in arguments:
            assert "successfully rolled out" in output
        elif "--dry-run=server" in arguments:
            assert not parked
        elif action == "apply deploy/overlays/kubeadm":
            assert not parked, "not before the agents run"
            volumes = daemon_set(cluster, "pyebpf-proxy")["spec"]["template"]["spec"]["volumes"]
            assert {"name": "kube-proxy"} in [
                {"name": volume["configMap"]["name"]} for volume in volumes if "configMap" in volume
            ]
        elif action == "patch deploy/kube-proxy/park.yaml":
            assert parked
        elif action == "patch deploy/kube-proxy/unpark.yaml":
            assert not parked
            assert "livenessProbe" in manifests.container(daemon_set(cluster, "pyebpf-proxy")), (
                "the agents' DaemonSet is unchanged"
            )
        elif action == "apply deploy/overlays/kubeadm-back/cleanup":
            agent = manifests.container(daemon_set(cluster, "pyebpf-proxy"))
            assert agent.keys().isdisjoint({"livenessProbe", "startupProbe", "args"})
            assert agent["securityContext"]["capabilities"] == {"add": ["NET_ADMIN", "BPF"], "drop": ["ALL"]}
    assert [action for action in seen if action.startswith(("apply", "delete", "patch")) or "restart" in action] == [
        "apply deploy/overlays/kubeadm",
        "apply deploy/overlays/kubeadm",
        "patch deploy/kube-proxy/park.yaml",
        "rollout restart",
        "patch deploy/kube-proxy/unpark.yaml",
        "apply deploy/overlays/kubeadm-back/cleanup",
        "delete deploy/overlays/kubeadm-back/cleanup",
    ]
    back = daemon_set(cluster, "kube-proxy")
    assert back["metadata"]["uid"] == original["metadata"]["uid"]
    assert back["spec"] == original["spec"], "kubeadm's DaemonSet is unchanged"
    assert cluster.request("GET", f"{SYSTEM}/configmaps/kube-proxy")["data"] == configuration["data"]
    for path in (f"{DAEMON_SETS}/pyebpf-proxy", f"{SYSTEM}/serviceaccounts/pyebpf-proxy"):
        with pytest.raises(ApiError, match="not found"):
            cluster.request("GET", path)
