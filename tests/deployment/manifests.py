# SPDX-License-Identifier: Apache-2.0
"""The manifests of deploy/, as ``kubectl kustomize`` builds them."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT

DEPLOY = ROOT / "deploy"

Object = dict[str, Any]


def build(folder: Path) -> tuple[Object, ...]:
    """Every object of a kustomization, in the order of apply. RuntimeError with kustomize's message."""
    return tuple(yaml.safe_load_all(_built(folder)))


@functools.cache
def _built(folder: Path) -> str:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"kubectl kustomize {folder}: {done.stderr.strip()}")
    return done.stdout


def base() -> tuple[Object, ...]:
    """The objects of ``deploy/base``."""
    return build(DEPLOY / "base")


def base_daemon_set() -> Object:
    """The base's DaemonSet from its file: kustomize only adds a namespace, labels and the image's version."""
    return dict(yaml.safe_load((DEPLOY / "base" / "daemonset.yaml").read_text()))


def kustomizations() -> list[Path]:
    """Every folder that can be applied."""
    found = DEPLOY.rglob("kustomization.yaml")
    return sorted(path.parent for path in found if "kind: Component" not in path.read_text())


def one(objects: tuple[Object, ...], kind: str, name: str = "pyebpf-proxy") -> Object:
    """The only object of that kind and name."""
    (found,) = (each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def container(daemon_set: Mapping[str, Any]) -> Object:
    """The only container of a DaemonSet."""
    (only,) = daemon_set["spec"]["template"]["spec"]["containers"]
    return dict(only)


def capabilities(daemon_set: Mapping[str, Any]) -> list[str]:
    """The names that the container adds, without ``CAP_``."""
    return list(container(daemon_set)["securityContext"]["capabilities"]["add"])
