# SPDX-License-Identifier: Apache-2.0
"""``cluster sysdump``: one archive for a bug report. Secrets are not read, and credentials are blotted out."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

from pyebpf_proxy import __version__
from pyebpf_proxy.cluster import agents, ask, check, status
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
from pyebpf_proxy.cluster.errors import ClusterError, StoppedError
from pyebpf_proxy.cluster.model import View
from pyebpf_proxy.cluster.objects import DATAPATH, KUBE_PROXY, NAME, NAMESPACE, PROXIES, container_of
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.common.blotted import BLOT, blotted, is_option, names_credential, names_secret_variable
from pyebpf_proxy.see import model
from pyebpf_proxy.see.answers import QUESTION
from pyebpf_proxy.see.text import Terminal

#: Of each log, the beginning, which has the start, and the end.
_FIRST_BYTES, _LAST_BYTES, _LAST_LINES = 64 << 10, 8 << 20, 20_000
#: A node with more entries in conntrack is not asked for its flows: it would cost its processor, and the answer is big.
_MOST_FLOWS = 20_000
#: Services in the summary of flows.
_MOST_SERVICES = 50

Part = tuple[str, Callable[[], Any]]


def write(api: Api, output: Output, path: str, nodes: str, seconds: float) -> list[str]:
    """Write the archive. The result: parts that are missing from it, each with the reason.

    ``nodes``: the selector of those whose agents are asked.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = f"pyebpf-proxy-sysdump-{stamp}"
    target = Path(path or f"{folder}.tar.gz")
    missing: list[str] = []
    with _archive(target) as archive:
        with output.progress("parts of the archive", None) as step:
            for name, read in _parts(api, nodes, seconds):
                step()
                try:
                    content = read()
                except StoppedError as stopped:  # each request would wait as long again
                    missing.append(f"{name} and all later parts: {stopped}")
                    break
                except (RefusedError, ClusterError) as error:
                    missing.append(f"{name}: {error}")
                    continue
                _add(archive, f"{folder}/{name}", _text(content))
        _add(archive, f"{folder}/missing.txt", "".join(f"{line}\n" for line in missing))
    output.document |= {"file": str(target), "missing": missing}
    for line in missing:
        output.say(f"missing: {line}")
    output.say(f"{target}: {target.stat().st_size} bytes; review it before you share it")
    return missing


@contextlib.contextmanager
def _archive(target: Path) -> Iterator[tarfile.TarFile]:
    """A new archive; one that exists is not replaced. One that could not be completed is removed."""
    try:
        with tarfile.open(target, "x:gz") as archive:
            target.chmod(0o600)
            yield archive
    except FileExistsError:
        raise ClusterError(f"{target} already exists", QUESTION) from None
    except BaseException as error:
        with contextlib.suppress(OSError):
            target.unlink()
        if isinstance(error, OSError):
            raise ClusterError(f"{target} cannot be written: {error.strerror}") from None
        raise


def _parts(api: Api, nodes: str, seconds: float) -> Iterator[Part]:
    yield "version.yaml", lambda: {"client": __version__, "server": api.request("GET", "/version"), "url": api.url}
    yield from _asked(api, nodes, seconds)
    yield from _objects(api)
    for place in (KUBE_PROXY, NAME, DATAPATH):
        yield f"{place}.config.yaml", partial(_config_map, api, place)
    try:
        pods = api.objects(PODS, NAMESPACE, PROXIES)
    except RefusedError as error:
        yield "logs", partial(_fail, error)
        return
    for pod in pods:
        name, container = pod["metadata"]["name"], container_of(pod)["name"]
        yield f"logs/{name}.log", partial(_log, api, name, container)
        if any(each.get("restartCount") for each in pod.get("status", {}).get("containerStatuses") or ()):
            yield f"logs/{name}.previous.log", partial(_log, api, name, container, previous=True)


def _objects(api: Api) -> Iterator[Part]:
    lists: dict[str, tuple[Kind, str, str]] = {
        "nodes": (NODES, "", ""),
        "services": (SERVICES, "", ""),
        "endpointslices": (SLICES, "", ""),
        "daemonsets": (DAEMON_SETS, NAMESPACE, ""),
        "pods": (PODS, NAMESPACE, PROXIES),
        "leases": (LEASES, NAMESPACE, ""),
        "events": (EVENTS, NAMESPACE, ""),
    }
    for name, (kind, namespace, labels) in lists.items():
        yield f"{name}.yaml", partial(api.objects, kind, namespace, labels)


def _log(api: Api, pod: str, container: str, previous: bool = False) -> str:
    """A proxy's log; of a long one the beginning and the end."""
    last = api.log(pod, NAMESPACE, container, _LAST_BYTES, previous, _LAST_LINES)
    if last.count("\n") < _LAST_LINES:
        return last
    first = api.log(pod, NAMESPACE, container, _FIRST_BYTES, previous).rpartition("\n")[0]
    return f"{first}\n\n[...]\n\n{last}"


def _config_map(api: Api, name: str) -> Object:
    return api.get(CONFIG_MAPS, _mounted(api, name) if name == DATAPATH else name, NAMESPACE) or {}


def _mounted(api: Api, name: str) -> str:
    """The ConfigMap of this name that the agents' pods mount: kustomize appends a hash to the name."""
    daemon_set = api.get(DAEMON_SETS, NAME, NAMESPACE)
    volumes = daemon_set["spec"]["template"]["spec"].get("volumes") or () if daemon_set else ()
    found = [str((each.get("configMap") or {}).get("name", "")) for each in volumes]
    return next((each for each in found if each.startswith(f"{name}-")), name)


def _fail(error: Exception) -> None:
    raise error


def _same(content: Any) -> Any:
    return content


def _asked(api: Api, nodes: str, seconds: float) -> Iterator[Part]:
    """What ``cluster status`` prints, and what each agent says of itself."""
    try:
        found = check.selected(api, nodes)
        asked = agents.ask_all(api, found, seconds)
    except (RefusedError, ClusterError) as error:
        yield "status.txt", partial(_fail, error)
        return
    yield "status.txt", lambda: _status(found, asked)
    if asked.why:
        yield "agents", partial(_fail, ClusterError(asked.why))
    for problem in asked.problems:
        yield f"agents/{problem.node}", partial(_fail, ClusterError(problem.text))
    for node, answer in asked.answers.items():
        yield f"agents/{node}/status.yaml", partial(msgspec.to_builtins, answer)
    yield from _more(api, found, asked, seconds)


def _more(api: Api, found: View, asked: agents.Asked, seconds: float) -> Iterator[Part]:
    """Of the nodes that answer: drops, and flows in short."""
    busy = [
        node
        for node, answer in asked.answers.items()
        if answer.conntrack is not None and answer.conntrack.used > _MOST_FLOWS
    ]
    for node in busy:
        text = f"conntrack has more than {_MOST_FLOWS} entries: flows were not collected"
        yield f"agents/{node}/flows.yaml", partial(_fail, ClusterError(text))
    kinds: tuple[tuple[str, type[model.Answer], list[str]], ...] = (
        ("drops", model.Drops, []),
        ("flows", model.Flows, busy),
    )
    for what, kind, left_out in kinds:
        wanted = found._replace(agents={node: found.agents[node] for node in asked.answers if node not in left_out})
        if not wanted.agents:
            continue
        try:
            answers, problems = ask.everywhere(api, wanted, [what], kind, seconds)
        except (RefusedError, ClusterError) as error:
            yield f"agents/{what}", partial(_fail, error)
            continue
        for problem in problems:
            yield f"agents/{problem.node}/{what}.yaml", partial(_fail, ClusterError(problem.text))
        for node, answer in answers.items():
            content = summary(answer.flows) if isinstance(answer, model.Flows) else msgspec.to_builtins(answer)
            yield f"agents/{node}/{what}.yaml", partial(_same, content)


def summary(flows: Sequence[model.FlowView]) -> dict[str, Any]:
    """How many flows there are of each kind; addresses of clients stay on the node."""
    services = Counter(each.service for each in flows).most_common(_MOST_SERVICES)
    return {
        "flows": len(flows),
        "byService": dict(services),
        **{f"by{name.title()}": dict(Counter(getattr(each, name) for each in flows)) for name in _SUMMED},
    }


_SUMMED = ("protocol", "state", "age", "path")


def _status(found: View, asked: agents.Asked) -> str:
    lines: list[str] = []

    class Collected(Output):
        def say(self, text: str) -> None:
            lines.append(text)

    try:
        status.show(found, asked, Collected(as_json=False, terminal=Terminal()))
    except ClusterError as error:  # the agent was not installed by these commands
        lines.append(str(error))
    return "\n".join(lines) + "\n"


class _Blocks(yaml.SafeDumper):
    """Texts of several lines as blocks."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _block)


def _text(content: Any) -> str:
    """As YAML, but for text; without credentials."""
    if isinstance(content, str):
        return blotted(content)
    return yaml.dump(_trimmed(content), Dumper=_Blocks, sort_keys=False)


def _trimmed(content: Any) -> Any:
    """Without copies of the object in its own metadata, and without credentials."""
    if isinstance(content, list):
        return [_trimmed(each) for each in content]
    item: Object = copy.deepcopy(content)
    metadata = item.get("metadata") or {}
    metadata.pop("managedFields", None)
    (metadata.get("annotations") or {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    data = item.get("data")
    if isinstance(data, dict):
        item["data"] = {name: _document(text) for name, text in data.items()}
    if isinstance(item.get("binaryData"), dict):
        item["binaryData"] = dict.fromkeys(item["binaryData"], BLOT)
    return _without_credentials(item)


def _document(text: str) -> str:
    """A text of a ConfigMap. A document that holds credentials, such as a kubeconfig, is written anew without them."""
    try:
        documents = list(yaml.safe_load_all(text))
        if not all(isinstance(each, dict | list) for each in documents):
            return text
        clean = [_without_credentials(each) for each in documents]
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date such as 2026-13-45
        return text
    return text if clean == documents else yaml.dump_all(clean, Dumper=_Blocks, sort_keys=False)


def _without_credentials(value: Any) -> Any:
    if isinstance(value, str):
        return blotted(_without_nested(value))
    if isinstance(value, list):
        # In the command of a container, an option's value may be the next word.
        return [
            BLOT if _is_option(before) and _is_word(each) else _without_credentials(each)
            for before, each in zip([None, *value], value, strict=False)
        ]
    if not isinstance(value, dict):
        return value
    clean = {
        name: BLOT if type(each) in (str, int) and names_credential(str(name)) else _without_credentials(each)
        for name, each in value.items()
    }
    # A variable of a container, or of the command of a kubeconfig.
    if isinstance(clean.get("value"), str) and names_secret_variable(str(clean.get("name", ""))):
        clean["value"] = BLOT
    return clean


def _is_option(word: Any) -> bool:
    """Whether the next word is a credential."""
    return type(word) is str and is_option(word)


def _is_word(word: Any) -> bool:
    return type(word) is str and not word.startswith("-")


def _without_nested(text: str) -> str:
    """An object that is a text of JSON, as tools keep one in an annotation, written anew if it holds credentials."""
    if text[:1] not in ("{", "["):
        return text
    try:
        item = json.loads(text)
        clean = _without_credentials(item)
    except (ValueError, RecursionError):
        return text
    return text if clean == item else json.dumps(clean)


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(data))
