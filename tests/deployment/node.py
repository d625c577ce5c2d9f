# SPDX-License-Identifier: Apache-2.0
"""The kubelet's work for the DaemonSet's pod on a node of the lab: volumes, the container, the probes."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.cluster import Node
from tests.deployment.container import Container
from tests.deployment.manifests import Object

ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


def pod_of(daemon_set: Mapping[str, Any], capabilities: Sequence[str] | None = None, without: str = "") -> Object:
    """The pod of a DaemonSet. ``capabilities``: instead of the manifest's. ``without``: a volume that is left out."""
    specification: Object = copy.deepcopy(daemon_set["spec"]["template"]["spec"])
    (container,) = specification["containers"]
    if capabilities is not None:
        container["securityContext"]["capabilities"]["add"] = list(capabilities)
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != without]
    return specification


def with_manifests(specification: Object, folder: Path) -> Object:
    """The same with a folder of manifests instead of the API server."""
    add_volume(specification, "manifests", folder, "/manifests")
    specification["containers"][0]["args"].append("--manifests=/manifests")
    return specification


def add_volume(specification: Object, name: str, folder: Path, place: str) -> None:
    """Add a folder or file of this machine, read-only."""
    specification["volumes"].append({"name": name, "hostPath": {"path": str(folder)}})
    mount = {"name": name, "mountPath": place, "readOnly": True}
    specification["containers"][0]["volumeMounts"].append(mount)


def use_folder(specification: Object, folder: Path) -> None:
    """Use this folder for every emptyDir, so that the test sees what the pod writes."""
    for volume in specification["volumes"]:
        if volume.pop("emptyDir", None) is not None:
            volume["hostPath"] = {"path": str(folder)}


def contained(
    node: Node,
    specification: Object,
    files: Mapping[str, str] | None = None,
    image: Path = Path("/"),
    entry_point: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Container:
    """The pod's container on the node; the lab's paths replace the machine's.

    ``files``: the contents of the ConfigMap, by default the lab's configuration. ``image``, ``entry_point``,
    ``environment``: by default this machine and the command that is installed here.
    """
    folder = node.agent.folder
    for name in ("config", "run"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, text in (files or {"config.conf": yaml.safe_dump(node.agent.configuration())}).items():
        (folder / "config" / name).write_text(text)
    pins = node.agent.directory / "bpf" / "pyebpf-proxy"
    pins.mkdir(exist_ok=True)  # DirectoryOrCreate
    substitutes = {"config": folder / "config", "run": folder / "run", "pins": pins}
    return Container(
        specification,
        node.namespace.name,
        folder,
        entry_point or command(),
        node.name,
        image=image,
        substitutes=substitutes,
        environment=environment or {},
    )


def wait_ready(node: Node, container: Container, deadline: float = 90.0) -> None:
    """Ask the container's probes as the kubelet does, until all succeed. A ready agent has programmed the node."""
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        container.wait_for(functools.partial(probe_succeeds, container, name), f"{name} succeeds", deadline)
    assert re.search(r"^\S+ info ready ", container.log(), re.MULTILINE), container.log()
    container.wait_for(lambda: len(_synced(node)) == 2, "the metrics have both families' syncs", deadline)


def _synced(node: Node) -> list[float]:
    return [stamp for stamp in node.agent.synced().values() if stamp]


def probe_succeeds(container: Container, name: str) -> bool:
    """Whether one of the container's probes succeeds now."""
    (agent,) = container.pod["containers"]
    program, *arguments = agent[name]["exec"]["command"]
    assert program == "pyebpf-proxy"
    return _probe(container.folder / "run", arguments)


def _probe(folder: Path, arguments: Sequence[str]) -> bool:
    """Whether a probe's command succeeds with this run folder."""
    environment = {**os.environ, "PYEBPF_PROXY_DIRECTORY": str(folder)}
    ran = subprocess.run([*command(), *arguments], env=environment, capture_output=True, check=False, timeout=30)
    return ran.returncode == 0


def image_of(folder: Path) -> tuple[Path, list[str], dict[str, str]]:
    """Root, entry point and environment of the result of ``make image-root`` in a folder."""
    how = json.loads((folder / "image.json").read_text())
    return folder / "root", how["entry_point"], how["environment"]
