# SPDX-License-Identifier: Apache-2.0
"""The pages on how to change over with kubectl: their commands show, and delete, what the text says."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pyebpf_proxy.cluster.model import says_programmed
from tests import ROOT
from tests.deployment.manifests import DEPLOY, build, one

#: As the agent writes it while kube-proxy holds the ports, of which two lines come every five seconds.
READY = "2026-11-28T14:06:54.253Z info ready objects=0 service_ports=0 seconds=5.448"
OTHERS = """\
2026-11-28T14:06:54.240Z info the fast path is ready entries=131072
"""
RETRIES = """\
2026-11-28T14:07:03.807Z error health address cannot be bound, retrying error="…: address already in use" seconds=5
2026-11-28T14:07:03.807Z error metrics address cannot be bound, retrying error="…: address already in use" seconds=5
"""
KUBECTL = """#!/bin/sh
for option; do
    case $option in --tail=-1) exec cat log ;; --tail=*) exec tail -n "${option#--tail=}" log ;; esac
done
exec tail -n 10 log
"""


@pytest.mark.parametrize("page", ["migrating-from-kube-proxy", "install-k3s", "install-rke2", "install-eks"])
def test_ready_is_shown_however_long_ago_it_was_logged(page: str, tmp_path: Path) -> None:
    assert says_programmed(READY)
    (tmp_path / "log").write_text(f"{OTHERS}{READY}\n{RETRIES * 12 * 60}")
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    (command,) = re.findall(r"^ *(kubectl .* logs .*)$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shown = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert shown.stdout.splitlines() == [READY]


@pytest.mark.needs_kubectl
@pytest.mark.parametrize("page", ["install-k3s", "install-rke2", "install-eks"])
def test_the_way_back_deletes_what_was_installed(page: str) -> None:
    """The clean-up's folder lacks the ConfigMap that deploy/base has."""
    names = [
        {(each["kind"], each["metadata"]["name"]) for each in build(DEPLOY / folder)}
        for folder in ("base", "overlays/kubeadm-back/cleanup")
    ]
    assert names[0] - names[1] == {("ConfigMap", "pyebpf-proxy")}
    applied, deleted = (
        re.findall(rf"^ *kubectl {verb} -k (\S+)$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
        for verb in ("apply", "delete")
    )
    assert deleted == applied[:1] == ["OVERLAY"]


def test_the_page_names_what_the_unit_cannot_read() -> None:
    """With a kubeconfig in /root, root's own agent reports `permission denied`."""
    hidden = "ProtectHome=yes\n" in (DEPLOY / "deb" / "pyebpf-proxy.service").read_text()
    (row,) = re.findall(r"^\| objects \|.*", (ROOT / "docs" / "deploy.md").read_text(), re.MULTILINE)
    assert ("outside `/root` and `/home`" in row) == hidden


@pytest.mark.needs_kubectl
@pytest.mark.parametrize("component", ["crio", "selinux"])
def test_the_clean_up_needs_the_component_of_its_runtime(component: str, tmp_path: Path) -> None:
    """It calls bpf() and writes to the node's folders, as the agent does; the page says where to add the component."""
    up = "/".join([".."] * len(tmp_path.parts))
    cleanup = f"{up}{DEPLOY}/overlays/kubeadm-back/cleanup"
    for name, components in (("without", ""), ("with", f"components: [{up}{DEPLOY}/components/{component}]\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kustomization.yaml").write_text(f"resources: [{cleanup}]\n{components}")
        security = one(build(tmp_path / name), "DaemonSet")["spec"]["template"]["spec"]["securityContext"]
        assert (security != {"seccompProfile": {"type": "RuntimeDefault"}}) == bool(components)
    section = (ROOT / "docs" / "deploy.md").read_text().partition("## SELinux and CRI-O")[2].partition("\n## ")[0]
    assert "without them the clean-up's pods fail" in " ".join(section.split())
