# SPDX-License-Identifier: Apache-2.0
"""The memory of an endpoint in the plan: with a hundred thousand of them, 100 bytes are 10 MB."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc

from bench import workload
from pyebpf_proxy.kube.decode import decode_object
from pyebpf_proxy.kube.source import Change, Kind
from pyebpf_proxy.services.planner import Planner, PlanSettings
from tests import ROOT

SERVICES = 20
#: 90 on a 64-bit machine: the endpoint 40, its address 37, its place in a list 8, in its slice 5.
MOST_BYTES = 110


def _bytes_kept(endpoints: int) -> int:
    """The memory of a planner with SERVICES slices of so many endpoints, after the objects are gone."""
    documents: list[tuple[Kind, bytes]] = []
    for number in range(SERVICES):
        service = workload.service(number)
        endpoint_slice = workload.endpoint_slice(number, number * endpoints, endpoints)
        # For UDP a second list is kept.
        service["spec"]["ports"][0]["protocol"] = endpoint_slice["ports"][0]["protocol"] = "TCP"
        documents.append(("Service", json.dumps(service).encode()))
        documents.append(("EndpointSlice", json.dumps(endpoint_slice).encode()))
    gc.collect()
    tracemalloc.start()
    try:
        planner = Planner(PlanSettings(node_name="node1"))
        for kind, data in documents:
            found = decode_object(kind, data)
            assert found.key is not None
            planner.update([Change(found.key.kind, found.key.namespace, found.key.name, found.object)])
        del found
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_an_endpoint_takes_little() -> None:
    # In a process of its own: in this one, earlier tests may have filled a table that doubles meanwhile.
    command = [sys.executable, "-m", "tests.unit.services.test_planner_memory"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    few, many = map(int, ran.stdout.split())
    assert (many - few) / (SERVICES * 500) < MOST_BYTES


if __name__ == "__main__":
    print(_bytes_kept(50), _bytes_kept(550))
