# SPDX-License-Identifier: Apache-2.0
"""How the slow model (tests/model) reads the service maps: entries that may stay, and damage."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from tests.model import kernel

SERVICE, CONFIG, FIRST = 3, 8, 40
UDP = 17


class Entries(dict[bytes, bytes]):
    """Entries with the interface of ``kernel.Map``."""

    def items(self) -> Any:
        return dict(self)


def maps(backends: dict[int, str], listed: list[int], serving: list[str], cluster: int | None = None) -> Any:
    """Maps with one UDP service port; ``cluster``: the number of slots, if it is damaged."""
    made = {name: Entries() for name in kernel.SHAPES}
    made["service_names"][kernel.U32.pack(SERVICE)] = kernel.NAME.pack(b"ns", b"dns", b"dns", 4, UDP)
    made["services"][kernel.U32.pack(SERVICE)] = kernel.WORD.pack(CONFIG, 0)
    number = len(listed) if cluster is None else cluster
    made["service_configs"][kernel.U32.pack(CONFIG)] = kernel.CONFIG.pack(SERVICE, FIRST, number, 0, 0, 1, 0, 0, 0, 0)
    for place, backend in enumerate(listed):
        made["slots"][kernel.U32.pack(FIRST + place)] = kernel.WORD.pack(backend, 0)
    for backend, address in backends.items():
        packed = ip_address(address).packed
        made["backends4"][kernel.U32.pack(backend)] = kernel.BACKEND[4].pack(packed, 53, UDP, SERVICE, 0)
        made["endpoints4"][kernel.ENDPOINT_KEY[4].pack(0, packed, 53, UDP)] = kernel.U32.pack(1)
    for address in serving:
        key = kernel.ENDPOINT_KEY[4].pack(SERVICE, ip_address(address).packed, 53, UDP)
        made["endpoints4"][key] = kernel.U32.pack(1)
    return made


def test_a_backend_that_udp_sockets_may_keep_is_no_leftover() -> None:
    """It has left the list, but its endpoint still serves (service-semantics §10)."""
    both = {1: "10.0.0.1", 2: "10.0.0.2"}
    assert kernel.services(maps(both, [1], ["10.0.0.1", "10.0.0.2"])).garbage == {}
    assert kernel.services(maps(both, [1], ["10.0.0.1"])).garbage == {"backends": 1}


def test_a_damaged_number_of_slots_is_reported() -> None:
    with pytest.raises(kernel.Broken, match="has 2147483648 slots"):
        kernel.services(maps({1: "10.0.0.1"}, [1], ["10.0.0.1"], cluster=1 << 31))
