# SPDX-License-Identifier: Apache-2.0
"""What becomes of remembered clients when a service changes (spec/service-semantics §4.1, §13)."""

from __future__ import annotations

import sys

import pytest
from service_plans import name_of, service

from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.tables.writer import Writer
from pyebpf_proxy.services.model import ServicePort, ServicePortName

pytestmark = pytest.mark.needs_bpf


def test_affinity_that_is_switched_off_is_forgotten(loaded: Loaded, writer: Writer) -> None:
    """And nobody else's; another time-out forgets nothing."""
    web, other = name_of("web"), name_of("other")

    def sticky(name: ServicePortName, address: str, seconds: int) -> ServicePort:
        return service(name, (address,), "10.0.0.1:8080", "10.0.0.2:8080", affinity_seconds=seconds)

    writer.apply({web: sticky(web, "10.96.0.1", 600), other: sticky(other, "10.96.0.2", 600)})
    affinities, btf = loaded.maps["affinities"], loaded.tc.btf
    for client in range(40):
        for name in (web, other):
            key = btf.struct("affinity_key").pack(service=writer.service_id(name), client=bytes([10, 1, 1, client]))
            affinities.update(key, bytes(affinities.value_size))

    def remembered() -> dict[int, int]:
        found: dict[int, int] = {}
        keys, _ = affinities.dump()
        for at in range(0, len(keys), affinities.key_size):
            number = int.from_bytes(keys[at : at + 4], sys.byteorder)
            found[number] = found.get(number, 0) + 1
        return found

    ids = [writer.service_id(name) for name in (web, other)]
    writer.apply({web: sticky(web, "10.96.0.1", 300)})
    assert remembered() == dict.fromkeys(ids, 40)
    writer.apply({web: sticky(web, "10.96.0.1", 0)})
    assert remembered() == {ids[1]: 40}
    writer.apply({web: sticky(web, "10.96.0.1", 600)})
    assert remembered() == {ids[1]: 40}
