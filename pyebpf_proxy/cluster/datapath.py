# SPDX-License-Identifier: Apache-2.0
"""``cluster install --datapath-config FILE``: the DatapathConfiguration of a cluster's agents, in a ConfigMap."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pyebpf_proxy.cluster import objects
from pyebpf_proxy.cluster.api import CONFIG_MAPS, Api
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.see.answers import QUESTION

_WHERE = f"ConfigMap {objects.NAMESPACE}/{objects.DATAPATH}: {objects.DATAPATH_KEY}"


def read(file: str) -> str:
    """The text of the file. ClusterError names every error of it, as an agent does."""
    from pyebpf_proxy.config import loader

    try:
        text = loader.content(Path(file)).decode()
    except UnicodeDecodeError:
        raise ClusterError(f"{file}: the file is not UTF-8, as a ConfigMap requires", QUESTION) from None
    except ValueError as error:
        raise ClusterError(f"--datapath-config: {error}", QUESTION) from None
    _check(text, file)
    return text


def stored(api: Api) -> str | None:
    """The text that the cluster has; None: it has none. ClusterError if no agent would start with it."""
    found = api.get(CONFIG_MAPS, objects.DATAPATH, objects.NAMESPACE)
    if found is None:
        return None
    text = (found.get("data") or {}).get(objects.DATAPATH_KEY)
    if text is None:
        raise ClusterError(f"{_WHERE}: the key is missing; specify another file with install --datapath-config")
    _check(str(text), _WHERE)
    return str(text)


def digest(text: str | None) -> str:
    """What changes whenever the text does; "" without a text."""
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]


def _check(text: str, where: str) -> None:
    from pyebpf_proxy.config import datapath_config
    from pyebpf_proxy.config.flag_table import DEFAULT_DIRECTORY

    try:
        found = datapath_config.decode_text(text.encode(errors="surrogatepass"))
    except ValueError as error:
        raise ClusterError(f"{where}: datapath configuration: {error}", QUESTION) from None
    if found.directory != DEFAULT_DIRECTORY:
        raise ClusterError(f"{where}: directory: must be {DEFAULT_DIRECTORY}, which the agent's pod mounts", QUESTION)
    if found.manifests:
        raise ClusterError(f"{where}: manifests: must be absent, because the agent's pod mounts no folder", QUESTION)
