# SPDX-License-Identifier: Apache-2.0
"""``cluster sysdump``: one archive for a bug report. Secrets are not read, and credentials are blotted out."""

from __future__ import annotations

import copy
import io
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pyebpf_proxy import __version__
from pyebpf_proxy.cluster import status
from pyebpf_proxy.cluster.api import (
    CONFIG_MAPS,
    DAEMON_SETS,
    EVENTS,
    LEASES,
    NODES,
    PODS,
    SERVICES,
    SLICES,
    Api,
    Kind,
    Object,
    RefusedError,
)
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.model import view
from pyebpf_proxy.cluster.objects import KUBE_PROXY, NAME, NAMESPACE
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.see.answers import QUESTION
from pyebpf_proxy.see.text import Terminal

BLOT = "REDACTED"
#: Of each log, the beginning.
_LOG_BYTES = 4 << 20
#: Keys of a kubeconfig that hold credentials.
_CREDENTIALS = re.compile(
    r"^(\s*-?\s*\"?(?:token|password|client-key-data|client-certificate-data)\"?:).*$", re.MULTILINE
)
#: A signed token, wherever it stands.
_TOKEN = re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*")
_PROXIES = f"k8s-app in ({KUBE_PROXY},{NAME})"

Part = tuple[str, Callable[[], Any]]


def write(api: Api, output: Output, path: str) -> list[str]:
    """Write the archive. The result: parts that are missing from it, each with the reason."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = f"pyebpf-proxy-sysdump-{stamp}"
    target = Path(path or f"{folder}.tar.gz")
    missing: list[str] = []
    try:
        # "x": an archive that is there already is not replaced.
        with tarfile.open(target, "x:gz") as archive:
            target.chmod(0o600)
            for name, read in _parts(api):
                try:
                    content = read()
                except (RefusedError, ClusterError) as error:
                    missing.append(f"{name}: {error}")
                    continue
                _add(archive, f"{folder}/{name}", _text(content))
            _add(archive, f"{folder}/missing.txt", "".join(f"{line}\n" for line in missing))
    except FileExistsError:
        raise ClusterError(f"{target} exists already", QUESTION) from None
    except OSError as error:
        raise ClusterError(f"{target} cannot be written: {error.strerror}") from None
    output.document |= {"file": str(target), "missing": missing}
    for line in missing:
        output.say(f"missing: {line}")
    output.say(f"{target}: {target.stat().st_size} bytes; look at it before you publish it")
    return missing


def _parts(api: Api) -> Iterator[Part]:
    yield "version.yaml", lambda: {"client": __version__, "server": api.request("GET", "/version"), "url": api.url}
    yield "status.txt", lambda: _status(api)
    yield from _objects(api)
    for name, place in (("kube-proxy.config.yaml", KUBE_PROXY), ("pyebpf-proxy.config.yaml", NAME)):
        yield name, partial(_config_map, api, place)
    try:
        pods = api.objects(PODS, NAMESPACE, _PROXIES)
    except RefusedError as error:
        refused = error

        def fail() -> None:
            raise refused

        yield "logs", fail
        return
    for pod in pods:
        name = pod["metadata"]["name"]
        yield f"logs/{name}.log", partial(api.log, name, NAMESPACE, _LOG_BYTES)
        if any(each.get("restartCount") for each in pod.get("status", {}).get("containerStatuses") or ()):
            yield f"logs/{name}.previous.log", partial(api.log, name, NAMESPACE, _LOG_BYTES, previous=True)


def _objects(api: Api) -> Iterator[Part]:
    lists: dict[str, tuple[Kind, str, str]] = {
        "nodes": (NODES, "", ""),
        "services": (SERVICES, "", ""),
        "endpointslices": (SLICES, "", ""),
        "daemonsets": (DAEMON_SETS, NAMESPACE, ""),
        "pods": (PODS, NAMESPACE, _PROXIES),
        "leases": (LEASES, NAMESPACE, ""),
        "events": (EVENTS, NAMESPACE, ""),
    }
    for name, (kind, namespace, labels) in lists.items():
        yield f"{name}.yaml", partial(api.objects, kind, namespace, labels)


def _config_map(api: Api, name: str) -> Object:
    return api.get(CONFIG_MAPS, name, NAMESPACE) or {}


def _status(api: Api) -> str:
    lines: list[str] = []

    class Collected(Output):
        def say(self, text: str) -> None:
            lines.append(text)

    status.show(view(api), Collected(as_json=False, terminal=Terminal()))
    return "\n".join(lines) + "\n"


def _text(content: Any) -> str:
    """As YAML, but for text; without credentials."""
    text = content if isinstance(content, str) else yaml.safe_dump(_trimmed(content), sort_keys=False)
    return _blotted(text)


def _blotted(text: str) -> str:
    return _TOKEN.sub(BLOT, _CREDENTIALS.sub(rf"\1 {BLOT}", text))


def _trimmed(content: Any) -> Any:
    """Without copies of the object in its own metadata; texts in a ConfigMap as readable blocks."""
    if isinstance(content, list):
        return [_trimmed(each) for each in content]
    item: Object = copy.deepcopy(content)
    metadata = item.get("metadata") or {}
    metadata.pop("managedFields", None)
    (metadata.get("annotations") or {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    data = item.get("data")
    if isinstance(data, dict):
        # Line by line, or a quoted text hides its keys from the search for credentials.
        item["data"] = {name: _blotted(text) for name, text in data.items()}
    return item


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(data))
