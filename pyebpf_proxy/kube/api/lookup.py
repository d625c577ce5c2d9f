# SPDX-License-Identifier: Apache-2.0
"""Reads the Services of one name from the API server, for commands: the agent watches only those that it serves."""

from __future__ import annotations

import queue
import threading

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.limiter import Limiter
from pyebpf_proxy.config.effective import ApiServer
from pyebpf_proxy.kube import decode, validation
from pyebpf_proxy.kube.api import connect, resources
from pyebpf_proxy.kube.api.client import Client
from pyebpf_proxy.kube.api.observer import Silent
from pyebpf_proxy.kube.api.trouble import StoppedError, TroubleError
from pyebpf_proxy.kube.limits import UnreadableError
from pyebpf_proxy.kube.objects import Service

#: A user waits for the answer.
_SECONDS = 5.0
_MOST_BYTES = 8 << 20

Found = dict[tuple[str, str], Service]


def services_named(settings: ApiServer, name: str) -> Found | None:
    """By namespace and name, all Services of this name, served or not; None if the API server does not say."""
    if validation.check_name(name, label=True):
        return {}  # no Service has the name, and a selector must not contain it
    answers: queue.SimpleQueue[Found | None] = queue.SimpleQueue()
    try:
        client = Client(connect.find(settings.kubeconfig, settings.master), Limiter(0, 0), Silent())
    except FatalError:
        return None
    # Name resolution and programs for credentials may block, and cannot be interrupted.
    threading.Thread(target=lambda: answers.put(_list(client, name)), daemon=True).start()
    try:
        return answers.get(timeout=_SECONDS)
    except queue.Empty:
        client.stop()
        return None


def _list(client: Client, name: str) -> Found | None:
    every = resources.SERVICES
    try:
        answer = client.channel().request("GET", every.path, {"fieldSelector": f"metadata.name={name}"}, limited=False)
        decoded = list(decode.decode_json(answer.read(_MOST_BYTES)))
    except (FatalError, TroubleError, StoppedError, UnreadableError):
        return None
    return {(d.key.namespace, d.key.name): d.object for d in decoded if d.key and isinstance(d.object, Service)}
