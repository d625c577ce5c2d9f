# SPDX-License-Identifier: Apache-2.0
"""The state of the running data plane, for commands on the node and for metrics. Safe in any thread.

Commands read the kernel where they can. This has what the kernel does not show: why a device or a family is closed and,
without CAP_SYS_ADMIN, the settings that the programs were loaded with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from pyebpf_proxy.datapath.connections.promotion import Promoter
from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.node.devices import Node
from pyebpf_proxy.datapath.node.fast_path import FastPath

_ZERO = bytes(4)


class FlowTable(NamedTuple):
    """The result of the last sweep: entries (two per flow), capacity, and young flows."""

    entries: int
    capacity: int
    young: int


def flow_table(loaded: Loaded) -> FlowTable | None:
    """None: there is no fast path. OSError."""
    flows, results = loaded.maps.get("flows"), loaded.maps.get("sweep_results")
    if flows is None or results is None:
        return None
    layout = loaded.tc.btf.struct("sweep_result")
    entries, young = layout.packer("entries", "young").unpack(results.lookup(_ZERO) or bytes(layout.size))
    return FlowTable(entries, flows.max_entries, young)


def view(loaded: Loaded, node: Node, fast: FastPath | None, promoter: Promoter | None) -> dict[str, Any]:
    """Plain JSON values; addresses of settings as hexadecimal digits."""
    settings = {
        name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(loaded.settings).items()
    }
    answer: dict[str, Any] = {
        "settings": settings,
        "tcx": node.uses_tcx,
        "devices": {
            str(index): {
                "name": each.name,
                "program": each.program,
                "redirect": each.redirect,
                "limit": each.limit,
                "others": [*each.others.ingress, *each.others.egress],
                "qdisc": each.others.qdisc,
            }
            for index, each in node.devices.items()
        },
        "closed": {},
        "warnings": {},
        "draining": False,
    }
    if fast is not None:
        answer["closed"] = {
            str(family): {"reason": why.code.lower(), "text": why.text} for family, why in fast.closed.items()
        }
        answer["warnings"] = {str(family): text for family, text in fast.warnings.items()}
        answer["draining"] = fast.draining
    if promoter is not None:
        answer["promotion"] = promotion(promoter)
    return answer


def promotion(promoter: Promoter) -> dict[str, Any]:
    """What promotion has done since the agent's start."""
    statistics = promoter.statistics
    return {
        "promoted": statistics.promoted,
        "failed": {outcome.name.lower(): count for outcome, count in list(statistics.failed.items())},
        "lastError": statistics.last_error,
        "lastSeconds": statistics.last_seconds,
        "young": statistics.young,
    }


def closed(fast: FastPath | None) -> Mapping[str, str]:
    """Closed families, and the code of the reason."""
    return {} if fast is None else {f"IPv{family}": why.code.lower() for family, why in fast.closed.items()}
