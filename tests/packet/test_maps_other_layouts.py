# SPDX-License-Identifier: Apache-2.0
"""Flows in a flow table that the new programs do not use, because its layout or size differs."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyebpf_proxy.datapath.loader.libbpf import BpfError, Map, Object
from pyebpf_proxy.datapath.managers import devices
from pyebpf_proxy.datapath.maps import former_flows, other_layouts
from pyebpf_proxy.datapath.maps.other_layouts import OtherLayouts
from tests.support.logs import Log, Message

pytestmark = pytest.mark.needs_bpf

#: Room for 12 entries; a quarter stays free.
ENTRIES = 16


@pytest.fixture
def instance(bpf_objects: Path, bpffs: Path) -> Iterator[Instance]:
    with ExitStack() as stack:
        yield Instance(bpffs, bpf_objects, stack)


class Instance:
    """An instance with maps of an earlier layout, v0, and of the current one, v2, without programs."""

    def __init__(self, bpffs: Path, objects: Path, stack: ExitStack) -> None:
        self._objects, self._stack = objects, stack
        self.pins = bpffs / "instance" / "v2"
        self.former = self._opened(self.pins.with_name("v0"))
        self.present = self._opened(self.pins)
        self.flow = self.present.btf.struct("flow")

    def _opened(self, pins: Path) -> Object:
        (pins / "maps").mkdir(parents=True)
        opened = Object.open(
            self._objects / "tc.bpf.o", pin_dir=pins / "maps", max_entries={"flows": ENTRIES}, programs=()
        )
        self._stack.callback(opened.close)
        return opened.load()

    def key(self, port: int) -> bytes:
        return self.present.btf.struct("flow_key").pack(source_port=port, destination_port=80, protocol=17)

    def write(self, table: Map, port: int, tags: tuple[int, int] = (7, 7), **fields: int) -> None:
        rewrite = self.present.btf.struct("flow_rewrite").pack(source_port=port, tag=tags[0], tag_again=tags[1])
        table.update(self.key(port), self.flow.pack(rewrite=rewrite, **fields))

    @property
    def others(self) -> OtherLayouts:
        loaded: Any = SimpleNamespace(maps=self.present.maps, tc=self.present)
        return OtherLayouts(self.pins, loaded, writer=None)  # type: ignore[arg-type]

    def take_over(self) -> None:
        self.others.drain()

    def read(self) -> dict[int, dict[str, Any]]:
        """The entries of the current table by the client's port."""
        key = self.present.btf.struct("flow_key")
        found = self.present.maps["flows"].items()
        return {int(key.unpack(k)["source_port"]): dict(self.flow.unpack(value)) for k, value in found}


def test_a_flow_of_another_layout_belongs_to_no_service_of_the_new_maps(instance: Instance) -> None:
    """Its ids mean other services there: the first datagram would look up its endpoint in the wrong service."""
    instance.write(
        instance.former.maps["flows"],
        1000,
        service=7,
        backend=9,
        generation=3,
        confirmed_until=5,
        started=1,
        last_seen=2,
        packets=6,
    )
    instance.take_over()
    taken = instance.read()[1000]
    assert {name: taken[name] for name in ("service", "backend", "generation", "confirmed_until", "young")} == {
        "service": 0,
        "backend": 0,
        "generation": 0,
        "confirmed_until": 0,
        "young": 0,
    }
    assert [taken[name] for name in ("started", "last_seen", "packets")] == [1, 2, 6]


def test_young_flows_and_flows_of_the_current_table_are_not_copied(instance: Instance) -> None:
    for port, young in ((1000, 1), (1001, 0), (1002, 0)):
        instance.write(instance.former.maps["flows"], port, young=young, packets=1)
    instance.write(instance.present.maps["flows"], 1002, packets=2)
    instance.take_over()
    assert {port: flow["packets"] for port, flow in instance.read().items()} == {1001: 1, 1002: 2}


def test_an_entry_that_is_being_changed_is_not_copied(instance: Instance) -> None:
    """No program would find it in the new table, and no sweep delete it."""
    for port, tags in ((1000, (0, 0)), (1001, (7, 0)), (1002, (7, 7))):
        instance.write(instance.former.maps["flows"], port, tags)
    instance.take_over()
    assert instance.read().keys() == {1002}


def test_a_table_that_cannot_be_read_does_not_end_the_start(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(flows: Map, fast_path: Map) -> None:
        raise BpfError("types", errno.EMFILE)

    monkeypatch.setattr(former_flows, "types_of", refuse)
    instance.take_over()
    Log(caplog).only("could not be taken over", level="error")


def test_a_service_without_a_name_loses_only_its_affinity(instance: Instance) -> None:
    names = instance.former.maps["service_names"]
    names.update((1).to_bytes(4, "little"), b"\xff" * names.value_size)
    assert instance.others.take_over() == 0


@pytest.mark.parametrize("family", [4, 6])
def test_sockets_keep_their_translations(instance: Instance, family: int) -> None:
    """Else an answer comes from an address that its application does not know."""
    name = f"socket_revnat{family}"
    former, present = (each.maps[name] for each in (instance.former, instance.present))
    layout = instance.present.btf.struct(f"{name}_key")
    mine, both = (layout.pack(cookie=cookie, port=53, protocol=17) for cookie in (1, 2))
    old, new = b"\1" * former.value_size, b"\2" * former.value_size
    for key in (mine, both):
        former.update(key, old)
    present.update(both, new)
    instance.others.take_over()
    assert dict(present.items()) == {mine: old, both: new}


def test_xdp_programs_of_another_layout_leave_their_devices_first(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has one program, and their link belongs to a pin that this layout does not update."""
    done: list[object] = []
    monkeypatch.setattr(other_layouts, "release", done.append)
    monkeypatch.setattr(devices, "attach_frames", lambda *arguments: done.append("attached"))
    monkeypatch.setattr(devices, "xdp_config", lambda effective: None)
    of: Any = SimpleNamespace(pins=instance.pins, loaded=None, node=None)
    devices.XdpPrograms(of, of, of, of, instance.others.release_xdp).start(of, {})
    assert done == [instance.pins.with_name("v0") / "xdp", "attached"]


def test_flows_that_do_not_fit_are_left_out_and_logged(instance: Instance, caplog: pytest.LogCaptureFixture) -> None:
    for port in range(1000, 1000 + ENTRIES):
        instance.write(instance.former.maps["flows"], port)
    with caplog.at_level("INFO"):
        instance.take_over()
    assert len(instance.read()) == ENTRIES * 3 // 4
    line = Log(caplog).only(Message.FLOWS_TAKEN_OVER, level="info").text
    assert f"entries={ENTRIES * 3 // 4} no_room={ENTRIES // 4}" in line
