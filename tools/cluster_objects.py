#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Renders the objects of `pyebpf-proxy cluster` from deploy/. Run it after a change there. Needs kubectl.

tools/cluster_objects.py           writes pyebpf_proxy/cluster/*.yaml
tools/cluster_objects.py --check   exit status 1 if they differ from deploy/
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "pyebpf_proxy" / "cluster"
SOURCES = {"agent.yaml": "overlays/kubeadm", "cleanup.yaml": "overlays/kubeadm-back/cleanup"}
#: The operations in the only patch of a component.
PATCHES = {"datapath.yaml": "components/datapath-config"}
HEAD = "# deploy/{folder}, rendered by tools/cluster_objects.py. Do not edit by hand.\n"


def rendered(folder: str) -> str:
    """The content of the file for a kustomization of deploy/."""
    command = ["kubectl", "kustomize", str(ROOT / "deploy" / folder)]
    return HEAD.format(folder=folder) + subprocess.run(command, check=True, capture_output=True, text=True).stdout


def patch(folder: str) -> str:
    """The content of the file for a component of deploy/."""
    (found,) = yaml.safe_load((ROOT / "deploy" / folder / "kustomization.yaml").read_text())["patches"]
    return HEAD.format(folder=folder) + str(found["patch"])


def main(arguments: list[str]) -> int:
    """Write or check the files. The result is the exit status."""
    wrong = 0
    for name, folder in (SOURCES | PATCHES).items():
        text = patch(folder) if name in PATCHES else rendered(folder)
        if arguments != ["--check"]:
            (TARGET / name).write_text(text)
        elif not (TARGET / name).exists() or (TARGET / name).read_text() != text:
            print(f"{TARGET / name} differs from deploy/{folder}: run tools/cluster_objects.py", file=sys.stderr)
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
