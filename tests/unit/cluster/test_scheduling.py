# SPDX-License-Identifier: Apache-2.0
"""On which nodes a DaemonSet's pods run."""

from __future__ import annotations

from typing import Any

import pytest

from pyebpf_proxy.cluster.scheduling import selects

LABELS = {"kubernetes.io/os": "linux", "zone": "a", "rank": "5", "pyebpf-proxy/parked": "true"}
OURS = {"key": "pyebpf-proxy/parked", "operator": "DoesNotExist"}


def term(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("selector", "terms", "expected"),
    [
        ({}, None, True),
        ({"kubernetes.io/os": "linux"}, None, True),
        ({"example.org/proxy": "kube-proxy"}, None, False),
        ({}, [{"matchExpressions": [OURS]}], True),
        ({}, [term("zone", "In", "a", "b")], True),
        ({}, [term("zone", "NotIn", "a")], False),
        ({}, [term("other", "NotIn", "a")], True),
        ({}, [term("other", "Exists"), term("zone", "Exists")], True),
        ({}, [term("zone", "DoesNotExist")], False),
        ({}, [term("rank", "Gt", "4")], True),
        ({}, [term("rank", "Lt", "5")], False),
        ({}, [term("zone", "Gt", "4")], False),
        ({}, [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}], True),
        ({}, [{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]}], False),
        ({}, [{}], False),
    ],
)
def test_selector_and_affinity(selector: dict[str, str], terms: Any, expected: bool) -> None:
    specification: dict[str, Any] = {"nodeSelector": selector}
    if terms is not None:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        specification["affinity"] = {"nodeAffinity": required}
    node = {"metadata": {"name": "n1", "labels": LABELS}}
    assert selects({"spec": {"template": {"spec": specification}}}, node) is expected
