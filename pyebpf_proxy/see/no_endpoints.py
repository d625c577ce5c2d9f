# SPDX-License-Identifier: Apache-2.0
"""Why service ports have no usable endpoint, from the agent or from the source on the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyebpf_proxy.see import local
from pyebpf_proxy.services.model import ServicePortName

if TYPE_CHECKING:
    from pyebpf_proxy.see.wanted import Wanted


def reasons(
    directory: Path, wanted: Wanted | None, names: Collection[ServicePortName]
) -> Mapping[ServicePortName, str]:
    """The reasons that are known, for these service ports. ``names``: those without a usable endpoint."""
    services = {(name.namespace, name.name) for name in names}
    if wanted is None:
        known = local.no_endpoints(directory, map("/".join, services)) if services else {}
    else:
        known = {name: why for service in services for name, why in wanted.no_endpoints(*service).items()}
    return {name: known[str(name)] for name in names if str(name) in known}
