# SPDX-License-Identifier: Apache-2.0
"""The binding to libbpf: maps, programs, pins, and mainly the messages when the kernel refuses something."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.datapath.loader import _libbpf, _map, libbpf, programs
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Map, Object, SkBuff, load_object
from pyebpf_proxy.datapath.loader.programs import Settings, load
from tests.packet.compiled import build

pytestmark = pytest.mark.needs_bpf

SIZES = {"service_configs": 300, "counters": 40, "slots": 1000}


def u32(number: int) -> bytes:
    return number.to_bytes(4, sys.byteorder)


@pytest.fixture(scope="module")
def opened(bpf_objects: Path) -> Iterator[Object]:
    with Object.open(bpf_objects / "tc.bpf.o", max_entries=SIZES) as o:
        yield o.load()


# ---- maps ---------------------------------------------------------------------------------------------------


def test_single_entries(opened: Object) -> None:
    table = opened.maps["service_configs"]
    value = bytes(range(table.value_size))
    assert table.lookup(u32(7)) is None
    assert table.delete(u32(7)) is False
    table.update(u32(7), value)
    assert table.lookup(u32(7)) == value
    assert list(table.items()) == [(u32(7), value)]
    assert table.delete(u32(7)) is True
    assert list(table.items()) == []


def test_sizes_are_checked_before_the_kernel_reads_memory(opened: Object) -> None:
    table = opened.maps["service_configs"]
    with pytest.raises(ValueError, match="map service_configs: key of 3 bytes instead of 4"):
        table.lookup(bytes(3))
    with pytest.raises(ValueError, match="map service_configs: value of 3 bytes instead of"):
        table.update(u32(1), bytes(3))
    with pytest.raises(ValueError, match="do not match"):
        table.update_batch(u32(1) + u32(2), bytes(table.value_size))
    with pytest.raises(ValueError, match="no whole number of keys"):
        table.delete_batch(bytes(7))


def test_batches(opened: Object) -> None:
    table = opened.maps["service_configs"]
    numbers = range(1, 201)
    table.update_batch(b"".join(map(u32, numbers)), b"".join(u32(n) + bytes(table.value_size - 4) for n in numbers))
    assert {key: value[:4] for key, value in table.items()} == {u32(n): u32(n) for n in numbers}
    # Missing keys, also at both ends, are skipped.
    assert table.delete_batch(b"".join(map(u32, [999, *range(1, 100), 998, 997, *range(100, 150), 996]))) == 149
    assert sorted(int.from_bytes(key, sys.byteorder) for key, _ in table.items()) == list(range(150, 201))
    assert table.delete_batch(table.dump()[0]) == 51
    table.update_batch(b"", b"")
    assert table.delete_batch(b"") == 0


def test_a_full_map_reports_the_number_of_written_entries(opened: Object) -> None:
    table = opened.maps["service_configs"]
    with pytest.raises(BpfError) as caught:
        table.update_batch(b"".join(map(u32, range(400))), bytes(400 * table.value_size))
    assert (caught.value.errno, caught.value.done) == (errno.E2BIG, 300)
    assert str(caught.value) == "write 400 entries to map service_configs: Argument list too long (E2BIG)"
    table.delete_batch(table.dump()[0])


def test_a_dump_of_more_than_one_batch(opened: Object) -> None:
    frontends = opened.maps["frontends4"]
    keys = b"".join(n.to_bytes(8, "little") for n in range(10_000))
    frontends.update_batch(keys, bytes(10_000 * frontends.value_size))
    found, values = frontends.dump()
    assert len(values) == 10_000 * frontends.value_size
    assert {found[i : i + 8] for i in range(0, len(found), 8)} == {keys[i : i + 8] for i in range(0, len(keys), 8)}
    assert frontends._dump_singly()[0] == found
    frontends.delete_batch(found)


def test_a_dump_in_batches_smaller_than_a_bucket(opened: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    table = opened.maps["service_configs"]
    table.update_batch(b"".join(map(u32, range(300))), bytes(300 * table.value_size))
    monkeypatch.setattr(_map, "_BATCH", 1)
    assert {key for key, _ in table.items()} == {u32(n) for n in range(300)}
    table.delete_batch(table.dump()[0])


def test_prefixes(opened: Object) -> None:
    ranges = opened.maps["source_ranges4"]
    key = u32(32 + 8) + u32(1) + bytes((10, 0, 0, 0))
    ranges.update(key, u32(1))
    assert list(ranges.items()) == [(key, u32(1))]
    assert ranges.lookup(u32(64) + u32(1) + bytes((10, 9, 8, 7))) == u32(1)
    assert ranges.lookup(u32(64) + u32(2) + bytes((10, 9, 8, 7))) is None
    assert ranges.delete_batch(key) == 1


def test_per_cpu_counters(opened: Object) -> None:
    counters = opened.maps["counters"]
    cpus = _libbpf.possible_cpus()
    counters.update(u32(3), b"".join(n.to_bytes(8, sys.byteorder) for n in range(cpus)))
    assert counters.lookup_cpus(u32(3)) == [n.to_bytes(8, sys.byteorder) for n in range(cpus)]
    assert counters.lookup_cpus(u32(40)) is None


def test_memory_mapped(opened: Object) -> None:
    slots = opened.maps["slots"]
    words = slots.mmap().cast("Q")
    assert len(words) == 1000
    words[999] = 0x0102030405060708
    assert slots.lookup(u32(999)) == (0x0102030405060708).to_bytes(8, sys.byteorder)
    words[999] = 0
    with pytest.raises(BpfError, match="mmap map service_configs: "):
        opened.maps["service_configs"].mmap()


# ---- programs -----------------------------------------------------------------------------------------------


def test_a_run_with_its_context(tmp_path: Path) -> None:
    source = """
    SEC("tc") int change(struct __sk_buff *skb)
    {
        __u8 byte = 0xee;
        skb->mark += 1;
        skb->priority = skb->ifindex << 16 | skb->ingress_ifindex;
        skb->cb[4] = skb->len;
        bpf_skb_store_bytes(skb, 0, &byte, 1, 0);
        return -1;
    }"""
    with Object.open(build(tmp_path, "context", source)) as o:
        o.load()
        result = o.programs["change"].test_run(bytes(60), SkBuff(mark=41, ifindex=1), repeat=1)
        assert result.retval == -1
        assert result.data == b"\xee" + bytes(59)
        assert result.skb is not None
        assert (result.skb.mark, result.skb.priority, result.skb.cb[4]) == (42, 1 << 16, 60)
        assert o.programs["change"].test_run(bytes(60)).skb is None
        assert o.programs["change"].test_run(bytes(60), repeat=1000).duration > 0
        with pytest.raises(BpfError, match=r"test run of program change: Invalid argument \(EINVAL\)"):
            o.programs["change"].test_run(bytes(3))


def test_the_context_survives_packing_and_unpacking() -> None:
    skb = SkBuff(1, 2, 3, 4, (5, 6, 7, 8, 9), 10, 11, 12)
    assert SkBuff.unpack(skb.pack()) == skb


def test_constants_take_effect(bpf_objects: Path) -> None:
    loaded = load(Settings(netns_cookie=0x1122334455667788, masquerade_mark=0x8000), objects=bpf_objects)
    for o in (loaded.tc, loaded.sock):
        raw = next(m for name, m in o.maps.items() if name.endswith(".rodata")).lookup(u32(0))
        assert raw is not None
        offset, size = o.btf.variable(".rodata", "settings")
        values = o.btf.struct("settings").unpack(raw[offset : offset + size])
        assert (values["netns_cookie"], values["masquerade_mark"]) == (0x1122334455667788, 0x8000)
    loaded.close()


def test_a_constant_behind_another(tmp_path: Path) -> None:
    source = """
    const volatile __u64 first SEC(".rodata") = 1;
    const volatile __u32 second SEC(".rodata") = 2;
    SEC("tc") int sum(struct __sk_buff *skb) { return first * 100 + second; }"""
    path = build(tmp_path, "constants", source)
    for rodata, expected in (({}, 102), ({"second": u32(7)}, 107), ({"first": bytes(8), "second": u32(7)}, 7)):
        with Object.open(path, rodata=rodata) as o:
            assert o.load().programs["sum"].test_run(bytes(60)).retval == expected
    with pytest.raises(ValueError, match="second has 4 bytes, not 8"):
        Object.open(path, rodata={"second": bytes(8)})


def test_the_verifiers_message_is_reported(tmp_path: Path) -> None:
    source = 'SEC("tc") int wrong(struct __sk_buff *skb) { return *(volatile int *)(long)(skb->len & 4096); }'
    with Object.open(build(tmp_path, "wrong", source)) as o, pytest.raises(BpfError) as caught:
        o.load()
    text = str(caught.value)
    assert text.startswith("load wrong.bpf.o: Permission denied (EACCES): ")
    assert "R1 invalid mem access 'scalar'" in text
    assert "\n" not in text
    assert "processed" not in text
    assert "BEGIN PROG LOAD LOG" in caught.value.log


@contextlib.contextmanager
def interrupted(until: threading.Event) -> Iterator[None]:
    """Every few milliseconds this thread gets a signal, as a process does that the cgroup freezer stops."""
    thread = threading.get_ident()

    def interrupt() -> None:
        while not until.wait(0.003):
            signal.pthread_kill(thread, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        yield
    finally:
        until.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def test_an_object_is_loaded_again_if_signals_interrupt_the_verifier(bpf_objects: Path) -> None:
    """The kernel has not refused the programs: without them, there would be no fast path until the next start."""
    opened, over = 0, threading.Event()

    def open_again() -> Object:
        nonlocal opened
        opened += 1
        if opened == 3:
            over.set()
        return Object.open(bpf_objects / "tc.bpf.o", max_entries=SIZES)

    with interrupted(over), load_object(open_again) as o:
        assert o.maps
    assert opened == 3


def test_an_interrupted_load_is_no_refusal(bpf_objects: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def load_once(opened: Callable[[], Object]) -> Object:
        try:
            return load_object(opened)
        finally:
            over.set()

    monkeypatch.setattr(libbpf, "_TRIES", 2)
    monkeypatch.setattr(programs, "load_object", load_once)
    with interrupted(over), pytest.raises(BpfError) as caught:
        load(Settings(netns_cookie=1, fast_path=True), sizes=SIZES, objects=bpf_objects)
    assert caught.value.errno == errno.EAGAIN


def test_a_lack_of_descriptors_is_no_refusal(bpf_objects: Path) -> None:
    """There would be no conntrack lookup, or no fast path, until the next start."""
    child = os.fork()
    if child == 0:
        # Enough to open the object and to create some of its maps: the next descriptor is the lowest one.
        limit = os.dup(1) + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            load(Settings(netns_cookie=1, fast_path=True), sizes=SIZES, objects=bpf_objects)
        except BpfError as error:
            os._exit(0 if error.errno == errno.EMFILE and "load tc.bpf.o" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_rights(bpf_objects: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            Object.open(bpf_objects / "tc.bpf.o").load()
        except BaseException as error:
            os.write(writing, f"{type(error).__name__} {error}".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading) as pipe:
        output = pipe.read()
    needed = "root, or CAP_BPF with CAP_NET_ADMIN, is needed"
    assert output == f"BpfError load tc.bpf.o: Operation not permitted (EPERM); {needed}"


def test_no_object_and_no_libbpf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FatalError, match=r"nothing.bpf.o is missing: run make build"):
        Object.open(tmp_path / "nothing.bpf.o")
    (tmp_path / "text.bpf.o").write_text("no ELF file")
    with pytest.raises(BpfError, match=r"open BPF object .*/text.bpf.o: .*ELF"):
        Object.open(tmp_path / "text.bpf.o")
    missing = _libbpf.ffi.dlopen

    class WithoutLibbpf:
        @staticmethod
        def dlopen(name: str | None) -> object:
            return missing("libbpf-is-not-here.so.1" if name else None)

    monkeypatch.setattr(_libbpf, "ffi", WithoutLibbpf)
    with pytest.raises(FatalError, match=r"libbpf 1.x is missing \(.*\): apt-get install libbpf1"):
        _libbpf.lib.__wrapped__()


# ---- pins ---------------------------------------------------------------------------------------------------


def test_pinned_maps_are_shared_and_outlive_the_process(bpf_objects: Path, bpffs: Path) -> None:
    pins = bpffs / "instance" / "maps"
    loaded = load(Settings(netns_cookie=1), pin_dir=pins, sizes=SIZES, objects=bpf_objects)
    value = bytes(loaded.maps["service_configs"].value_size)
    loaded.maps["service_configs"].update(u32(5), value)
    assert not any("." in pin.name for pin in pins.iterdir()), "constants are not pinned"
    loaded.close()
    again = load(Settings(netns_cookie=1), pin_dir=pins, sizes=SIZES, objects=bpf_objects)
    assert again.maps["service_configs"].lookup(u32(5)) == value
    again.close()
    pinned = Map.open_pinned(pins / "service_configs")
    assert (pinned.name, pinned.key_size, pinned.max_entries) == ("service_configs", 4, 300)
    assert pinned.lookup(u32(5)) == value
    pinned.close()
    with pytest.raises(BpfError, match=r"open pinned map .*/nothing: No such file or directory \(ENOENT\)"):
        Map.open_pinned(pins / "nothing")


def test_the_error_names_a_pin_of_another_type(bpf_objects: Path, bpffs: Path) -> None:
    pins = bpffs / "maps"
    load(Settings(netns_cookie=1), pin_dir=pins, sizes=SIZES, objects=bpf_objects).close()
    (pins / "slots").rename(pins / "service_configs")
    before = sorted(bpffs.rglob("*"))
    with pytest.raises(BpfError) as caught:
        load(Settings(netns_cookie=1), pin_dir=pins, sizes=SIZES, objects=bpf_objects)
    assert (
        f"pinned map service_configs ({pins}/service_configs) does not match: type 2 instead of 1, value_size 8"
        in str(caught.value)
    )
    assert sorted(bpffs.rglob("*")) == before


def test_a_pin_of_another_type_does_not_turn_the_fast_path_off(bpf_objects: Path, bpffs: Path) -> None:
    """Without the fast path nothing would use this map, so loading would succeed."""
    pins = bpffs / "maps"
    settings = Settings(netns_cookie=1, fast_path=True)
    load(settings, pin_dir=pins, sizes=SIZES, objects=bpf_objects).close()
    (pins / "slots").rename(pins / "flows")
    with pytest.raises(BpfError, match=r"pinned map flows \(.*\) does not match: type 2 instead of"):
        load(settings, pin_dir=pins, sizes=SIZES, objects=bpf_objects)


# ---- what the kernel refuses --------------------------------------------------------------------------------

SOCKETS = 'SEC("cgroup/connect4") int connect4(struct bpf_sock_addr *ctx) { return 1; }'
MAPS = "__u32 zero = 0; bpf_map_lookup_elem(&service_configs, &zero);"
WRONG = "return *(volatile int *)(long)(skb->len & 4096);"


def test_this_kernel_has_every_feature_or_a_reason(bpf_objects: Path) -> None:
    loaded = load(Settings(netns_cookie=1, fast_path=True), objects=bpf_objects)
    assert loaded.settings.conntrack_lookup == (loaded.why_no_lookup == "")
    assert loaded.settings.fast_path == (loaded.why_not_fast == "")
    assert loaded.settings.fast_path == ("tc_egress" in loaded.tc.programs)
    loaded.close()


def build_tc(folder: Path, source: str) -> None:
    """Both objects of tc: one of them is loaded on kernels without the kernel functions."""
    object_file = build(folder, "tc", source)
    object_file.with_name("tc_without_lookup.bpf.o").write_bytes(object_file.read_bytes())


OBSERVER = 'SEC("tc") int tc_egress(struct __sk_buff *skb) { return -1; }'


def test_a_kernel_without_conntrack_lookup(tmp_path: Path) -> None:
    body = f"{MAPS} if (settings.conntrack_lookup) {{ {WRONG} }} return -1;"
    build_tc(tmp_path, f'SEC("tc") int tc_ethernet(struct __sk_buff *skb) {{ {body} }} {OBSERVER}')
    build(tmp_path, "sock", SOCKETS)
    loaded = load(Settings(netns_cookie=1, fast_path=True), objects=tmp_path)
    assert (loaded.settings.conntrack_lookup, loaded.settings.fast_path, loaded.why_not_fast) == (False, True, "")
    output = "the kernel does not accept it: load tc.bpf.o: Permission denied (EACCES): "
    assert loaded.why_no_lookup.startswith(output)
    assert loaded.refusals.keys() == {"conntrack lookup"}
    assert loaded.tc.programs["tc_ethernet"].test_run(bytes(60)).retval == -1
    loaded.close()


def test_a_kernel_without_support_for_the_fast_path(tmp_path: Path) -> None:
    body = f"{MAPS} if (settings.fast_path) {{ {WRONG} }} return -1;"
    build_tc(tmp_path, f'SEC("tc") int tc_ethernet(struct __sk_buff *skb) {{ {body} }} {OBSERVER}')
    build(tmp_path, "sock", SOCKETS)
    loaded = load(Settings(netns_cookie=1, fast_path=True), objects=tmp_path)
    assert (loaded.settings.conntrack_lookup, loaded.settings.fast_path, loaded.why_no_lookup) == (True, False, "")
    output = "the kernel does not accept it: load tc_without_lookup.bpf.o: Permission denied (EACCES): "
    assert loaded.why_not_fast.startswith(output)
    assert loaded.tc.programs.keys() == {"tc_ethernet"}, "no program is attached at egress"
    loaded.close()


def test_an_object_without_an_observer_has_no_fast_path(tmp_path: Path) -> None:
    build_tc(tmp_path, f'SEC("tc") int tc_ethernet(struct __sk_buff *skb) {{ {MAPS} return -1; }}')
    build(tmp_path, "sock", SOCKETS)
    loaded = load(Settings(netns_cookie=1, fast_path=True), objects=tmp_path)
    assert (loaded.settings.fast_path, loaded.refusals) == (False, {"fast path": "tc.bpf.o has no program tc_egress"})
    loaded.close()


@pytest.mark.parametrize("culprit", ["tc", "sock"])
def test_a_failed_load_leaves_no_pins(tmp_path: Path, bpffs: Path, culprit: str) -> None:
    wrong = f'SEC("tc") int other(struct __sk_buff *skb) {{ {MAPS} {WRONG} }}'
    right = f'SEC("tc") int other(struct __sk_buff *skb) {{ {MAPS} return -1; }}'
    build_tc(tmp_path, wrong if culprit == "tc" else right)
    build(tmp_path, "sock", wrong if culprit == "sock" else SOCKETS)
    with pytest.raises(BpfError, match=rf"load {culprit}\w*.bpf.o: Permission denied"):
        load(Settings(netns_cookie=1), pin_dir=bpffs / "maps", objects=tmp_path)
    assert list((bpffs / "maps").iterdir()) == []
