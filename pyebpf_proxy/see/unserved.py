# SPDX-License-Identifier: Apache-2.0
"""Why a Service that exists is not in the kernel: headless ones, for example, are never served.

The agent does not know such Services: its watch excludes them. Only for a name that is not in the kernel, a command
looks for the object in the agent's source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyebpf_proxy.see import local
from pyebpf_proxy.see.answers import SeeError, UnknownServiceError
from pyebpf_proxy.see.names import split
from pyebpf_proxy.see.wanted import agent_settings, read_wanted
from pyebpf_proxy.services.frontends import why_unserved

if TYPE_CHECKING:
    from pyebpf_proxy.see.wanted import Wanted

#: Appended to an error about an unknown name if the source cannot be asked.
NOTE = " (the agent does not know headless Services, Services of type ExternalName, and Services of another proxy)"
_MOST = 3


def completed(directory: Path, error: UnknownServiceError) -> str:
    """The message for an unknown name: what the agent's source says about it, if it says something."""
    found = why(directory, (), None, error.wanted, None)
    return found or f"{error}{NOTE if found is None else ''}"


def why(directory: Path, flags: Sequence[str], wanted: Wanted | None, text: str, namespace: str | None) -> str | None:
    """Why the Services that ``[NAMESPACE/]NAME[:PORT]`` names exactly are not in the kernel.

    "" if there is none; None if that is not known. ``flags``: the source on the command line, as flags of the agent.
    ``namespace``: the only one to look in. ``wanted``: what has been read from the source already.
    """
    given, name = split(text)
    found = _services(directory, flags, wanted, name)
    if found is None:
        return None
    here = {key: reason for key, reason in found.items() if given in (None, key[0]) and namespace in (None, key[0])}
    return "; ".join(_text(directory, *key, reason) for key, reason in sorted(here.items())[:_MOST])


def _services(
    directory: Path, flags: Sequence[str], wanted: Wanted | None, name: str
) -> Mapping[tuple[str, str], str] | None:
    """By namespace and name, why the Services of this name are not served; "" for one that should be."""
    try:
        settings = agent_settings(directory, flags)
        if settings.manifests is not None:
            return (wanted or read_wanted(directory, flags)).named(name)
    except SeeError:
        return None
    from pyebpf_proxy.kube.api.lookup import services_named

    found = services_named(settings.api, name)
    return None if found is None else {key: why_unserved(service) for key, service in found.items()}


def _text(directory: Path, namespace: str, name: str, reason: str) -> str:
    which = f"Service {namespace}/{name}"
    if reason:
        return f"{which} is not served: {reason}"
    lost = local.losses(directory, [f"{namespace}/{name}"])
    return "; ".join(lost) or f"{which} exists, but is not in the kernel: pyebpf-proxy status shows warnings"
