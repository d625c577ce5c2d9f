# SPDX-License-Identifier: Apache-2.0
"""The service maps with entries that no agent writes: they are reported, and the others are shown."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, cast

from pyebpf_proxy.see import partial_maps, state
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.services.model import FrontendKind, Protocol

TCP, UNKNOWN = int(Protocol.TCP), 200
VIP, POD = bytes([10, 96, 0, 10]), bytes([10, 244, 1, 10])
CONFIG = (1, 0, 1, 0, 0, 1, 0, 0, 0, 0)
ROWS: dict[str, list[tuple[tuple[Any, ...], tuple[Any, ...]]]] = {
    "service_names": [((1,), (b"default", b"web", b"http", 4, TCP))],
    "service_configs": [((7,), CONFIG)],
    "backends4": [((1,), (POD, 8080, TCP, 1, 1)), ((2,), (POD, 8081, UNKNOWN, 1, 1))],
    "frontends4": [
        ((VIP, 80, TCP), (1, int(FrontendKind.CLUSTER_IP))),
        ((VIP, 81, TCP), (1, 99)),
        ((VIP, 82, UNKNOWN), (1, int(FrontendKind.CLUSTER_IP))),
        ((VIP, 83, TCP), (1 << 31, int(FrontendKind.CLUSTER_IP))),
    ],
}


class Maps:
    """The maps of one service port."""

    def packer(self, struct: str, *fields: str) -> Struct:
        return Struct("=I")

    def rows(self, name: str, key: Struct, value: Struct) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        return iter(ROWS.get(name, []))

    def words(self, name: str) -> list[int]:
        return {"services": [0, 7], "slots": [1]}[name]


def test_unknown_numbers_in_maps_are_reported() -> None:
    found = state.read(Maps())
    (service,) = found.services.values()
    assert [(each.address, each.port) for each in service.frontends] == [(VIP, 80)]
    assert list(found.backends) == [1]
    assert found.problems == [
        f"backend 2 has the unknown protocol {UNKNOWN}",
        f"frontend 10.96.0.10:81 has the unknown kind 99 or protocol {TCP}",
        f"frontend 10.96.0.10:82 has the unknown kind 1 or protocol {UNKNOWN}",
    ]


def test_a_frontend_of_a_service_that_cannot_exist_is_left_out() -> None:
    assert partial_maps.reached(cast(Pinned, Maps()), VIP, Protocol.TCP).words("services") == [0, 7]
