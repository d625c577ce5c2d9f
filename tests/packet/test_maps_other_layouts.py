# SPDX-License-Identifier: Apache-2.0
"""What maps of another layout have: flows of their table, and which endpoints clients and sockets use."""

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
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.services.model import IPFamily, Protocol, ServicePort, ServicePortName
from tests.packet.service_plans import name_of, service, slot_backends
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


class Sockets:
    """Unconnected UDP sockets. Writers of both layouts have the same service ports, whose ids differ."""

    KIND = 3

    def __init__(self, instance: Instance, names: list[ServicePortName]) -> None:
        self._instance = instance
        self.writers = [Writer(_as_loaded(each)) for each in (instance.former, instance.present)]
        for writer, order in zip(self.writers, (names, names[::-1]), strict=True):
            for name in order:
                writer.apply({name: _plan(name)})
        self._former, self._present = (each.maps["socket_flows"] for each in (instance.former, instance.present))
        self._key = instance.present.btf.struct("socket_flow_key")
        self._value = instance.present.btf.struct("affinity")

    def ids(self, which: int, name: ServicePortName) -> tuple[int, list[int]]:
        """Those of the service port and of its endpoints: in the former maps (0), or in the present ones (1)."""
        loaded: Any = _as_loaded((self._instance.former, self._instance.present)[which])
        return self.writers[which].service_id(name), slot_backends(loaded, self.writers[which], name)

    def write(self, which: int, cookie: int, service_id: int, backend: int, last_used: int = 5) -> None:
        key = self._key.pack(cookie=cookie, service=service_id, kind=self.KIND if service_id else 0)
        value = self._value.pack(last_used=last_used, backend=backend, position=77)
        (self._former, self._present)[which].update(key, value)

    def take_over(self) -> dict[tuple[int, int, int], tuple[int, int, int]]:
        """Cookie, service, kind → last use, backend, position."""
        OtherLayouts(self._instance.pins, _as_loaded(self._instance.present), self.writers[1]).take_over()
        return {
            tuple(self._key.unpack(key)[n] for n in ("cookie", "service", "kind")): tuple(
                self._value.unpack(value)[n] for n in ("last_used", "backend", "position")
            )
            for key, value in self._present.items()
        }


def _as_loaded(opened: Object) -> Any:
    return SimpleNamespace(maps=opened.maps, tc=opened)


def _plan(name: ServicePortName) -> ServicePort:
    octet = 1 + ["dns", "log"].index(name.name)
    if name.family == IPFamily.IPV6:
        return service(name, (f"fd00:96::{octet}",), f"[fd00:{octet}::1]:53", f"[fd00:{octet}::2]:53")
    return service(name, (f"10.96.0.{octet}",), f"10.{octet}.0.1:53", f"10.{octet}.0.2:53")


@pytest.fixture(params=IPFamily)
def names(request: pytest.FixtureRequest) -> list[ServicePortName]:
    return [name_of(each, request.param, protocol=Protocol.UDP) for each in ("dns", "log")]


def test_unconnected_sockets_keep_their_endpoints(instance: Instance, names: list[ServicePortName]) -> None:
    """Also without session affinity: a session of a UDP application is nothing that the Service knows."""
    sockets = Sockets(instance, names)
    expected = {}
    for cookie, name in enumerate(names * 2):
        (former_id, former), (present_id, present) = (sockets.ids(which, name) for which in (0, 1))
        assert former_id != present_id
        sockets.write(0, cookie, former_id, former[cookie // 2])
        expected[cookie, present_id, Sockets.KIND] = (5, present[cookie // 2], 77)
    assert sockets.take_over() == expected
    # Again, when the new programs are attached: they may have chosen meanwhile, or the former ones.
    name = names[0]
    (former_id, former), (present_id, present) = (sockets.ids(which, name) for which in (0, 1))
    sockets.write(0, 0, former_id, former[1], last_used=6)
    sockets.write(1, 2, present_id, present[0], last_used=7)
    expected[0, present_id, Sockets.KIND] = (6, present[1], 77)
    expected[2, present_id, Sockets.KIND] = (7, present[0], 77)
    assert sockets.take_over() == expected


def test_sockets_of_what_is_gone_are_left_out(instance: Instance, names: list[ServicePortName]) -> None:
    """Their ids mean other services and endpoints by now."""
    sockets = Sockets(instance, names)
    dns, log = names
    (dns_id, endpoints), (log_id, others) = (sockets.ids(0, name) for name in names)
    for cookie, backend in enumerate(endpoints):
        sockets.write(0, cookie, dns_id, backend)
    sockets.write(0, 2, log_id, others[0])
    sockets.write(0, 3, 999, others[0])
    sockets.write(0, 4, dns_id, 999)
    fewer = _plan(dns)
    left = ServicePort(dns, fewer.frontends, fewer.cluster[1:])
    sockets.writers[1].apply({dns: left, log: None})
    new_id, (new,) = sockets.ids(1, dns)
    assert sockets.take_over() == {(1, new_id, Sockets.KIND): (5, new, 77)}


def test_sockets_keep_an_endpoint_that_only_still_serves(instance: Instance, names: list[ServicePortName]) -> None:
    sockets = Sockets(instance, names)
    name = names[0]
    (former_id, former), (present_id, present) = (sockets.ids(which, name) for which in (0, 1))
    sockets.write(0, 1, former_id, former[0])
    plan = _plan(name)
    for cluster in (plan.cluster, plan.cluster[1:]):
        sockets.writers[1].apply({name: ServicePort(name, plan.frontends, cluster, serving=plan.cluster)})
    assert sockets.take_over() == {(1, present_id, Sockets.KIND): (5, present[0], 77)}


def test_marks_and_sockets_that_were_left_to_tc_stay_so(instance: Instance, names: list[ServicePortName]) -> None:
    """A mark tells that the proxy set the masquerade bit of the socket: without it, no message would clear the bit."""
    sockets = Sockets(instance, names)
    sockets.write(0, 1, 0, 0)
    sockets.write(0, 2, sockets.ids(0, names[0])[0], 0)
    assert sockets.take_over() == {
        (1, 0, 0): (5, 0, 77),
        (2, sockets.ids(1, names[0])[0], Sockets.KIND): (5, 0, 77),
    }


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
    monkeypatch.setattr(devices, "attach_xdp", lambda *arguments: done.append("attached"))
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
