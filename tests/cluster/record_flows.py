# SPDX-License-Identifier: Apache-2.0
"""Runs every flow of the fixed scenarios with the real kube-proxy; part of ``make record``.

``python -m tests.cluster.record_flows NAME …`` runs only those scenarios, and keeps the recordings of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tests.flows import recordings
from tests.flows.flow import Flow, Seen
from tests.flows.kube_proxy import KubeProxy
from tests.flows.scenarios import MODES, all_scenarios
from tests.flows.world import LONG, FlowWorld, new_world
from tests.support import reference
from tests.support.apiserver import ApiServer


def ask_all(
    mode: str, world: FlowWorld, proxy: KubeProxy, names: list[str]
) -> Iterator[tuple[str, list[tuple[Flow, Seen]]]]:
    """Every scenario of a mode, with the results of its flows. ``names``: run only these, and keep the others'
    results.
    """
    _, before = recordings.read(mode) if names else ("", {})
    for scenario in all_scenarios(mode):
        if names and scenario.name not in names and scenario.name in before:
            known = before[scenario.name]
            yield scenario.name, [(flow, known[flow.key]) for flow in scenario.flows()]
            continue
        proxy.start(mode, scenario)
        try:
            flows = list(scenario.flows())
            yield scenario.name, list(zip(flows, world.ask(flows, LONG), strict=True))
        finally:
            proxy.stop()


def main() -> int:
    release = reference.version(reference.kube_proxy())
    with ApiServer() as server, new_world() as world:
        proxy = KubeProxy(world, server)
        try:
            for mode in MODES:
                count = recordings.write(mode, release, dict(ask_all(mode, world, proxy, sys.argv[1:])))
                print(f"{count} flows of {release}, mode {mode}, written to {recordings.path(mode)}", flush=True)
        finally:
            proxy.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
