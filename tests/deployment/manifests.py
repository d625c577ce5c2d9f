# SPDX-License-Identifier: Apache-2.0
"""The manifests of deploy/, as ``kubectl kustomize`` builds them."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"

Object = dict[str, Any]


@functools.cache
def build(folder: Path) -> tuple[Object, ...]:
    """Every object of a kustomization, in the order in which it would be applied. RuntimeError in kustomize's words."""
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"kubectl kustomize {folder}: {done.stderr.strip()}")
    return tuple(yaml.safe_load_all(done.stdout))


def base() -> tuple[Object, ...]:
    return build(DEPLOY / "base")


def one(objects: tuple[Object, ...], kind: str, name: str = "pyebpf-proxy") -> Object:
    """The one object of that kind and name."""
    (found,) = (each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def container(daemon_set: Mapping[str, Any]) -> Object:
    """The one container of a DaemonSet."""
    (only,) = daemon_set["spec"]["template"]["spec"]["containers"]
    return dict(only)


def capabilities(daemon_set: Mapping[str, Any]) -> list[str]:
    """The names that the container adds, without ``CAP_``."""
    return list(container(daemon_set)["securityContext"]["capabilities"]["add"])
