# SPDX-License-Identifier: Apache-2.0
"""On which nodes a DaemonSet's pods run: node selector and required node affinity, as its controller reads them."""

from __future__ import annotations

from pyebpf_proxy.cluster.api import Object
from pyebpf_proxy.cluster.objects import PARKED


def selects(daemon_set: Object, node: Object) -> bool:
    """Whether the DaemonSet has a pod on the node as soon as the node is not parked. Taints are not considered."""
    specification = daemon_set["spec"]["template"]["spec"]
    metadata = node["metadata"]
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if key != PARKED}
    if any(labels.get(key) != value for key, value in (specification.get("nodeSelector") or {}).items()):
        return False
    affinity = ((specification.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if affinity is None:
        return True
    fields = {"metadata.name": metadata["name"]}
    return any(
        all(_matches(each, labels) for each in term.get("matchExpressions") or ())
        and all(_matches(each, fields) for each in term.get("matchFields") or ())
        for term in affinity["nodeSelectorTerms"]
        if term.get("matchExpressions") or term.get("matchFields")  # an empty term matches nothing
    )


def _matches(requirement: Object, values: dict[str, str]) -> bool:
    """One requirement of a term. An operator that is not known matches: the controller decides."""
    value, wanted = values.get(requirement["key"]), requirement.get("values") or []
    match requirement["operator"]:
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "In":
            return value in wanted
        case "NotIn":
            return value not in wanted
        case "Gt" | "Lt" as operator:
            if value is None or not value.lstrip("-").isdecimal():
                return False
            return int(value) > int(wanted[0]) if operator == "Gt" else int(value) < int(wanted[0])
    return True
