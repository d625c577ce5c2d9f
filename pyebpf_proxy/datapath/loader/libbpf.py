# SPDX-License-Identifier: Apache-2.0
"""BPF objects, programs, maps and links as Python objects, on libbpf.

with load_object(lambda: Object.open(path, pin_dir=pins, rodata={"settings": packed})) as o:
    o.maps["service_configs"].update(key, value)
    o.programs["tc_ethernet"].test_run(frame).retval
"""

from __future__ import annotations

import errno as errors
import os
import struct
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.datapath.loader import _libbpf, tcx
from pyebpf_proxy.datapath.loader._libbpf import BpfError, captured, checked, checked_pointer, ffi
from pyebpf_proxy.datapath.loader._map import Map
from pyebpf_proxy.datapath.loader.abilities import STORAGE_MAPS, of_kernel
from pyebpf_proxy.datapath.loader.btf import Btf

__all__ = ["BpfError", "Link", "Map", "Object", "Program", "RunResult", "SkBuff", "load_object", "run_program"]

#: A signal has interrupted the kernel: it has not judged the object, and may be asked again.
_INTERRUPTED = frozenset((errors.EAGAIN, errors.EINTR))
#: It has not judged the object either, but descriptors may be lacking for long. ENOMEM is not one of these: without
#: the fast path, an object needs less memory.
_NO_DESCRIPTOR = frozenset((errors.EMFILE, errors.ENFILE))
#: How often an object is loaded before an interruption is an error. Each time libbpf tries each program five times.
_TRIES = 20

_DATA_OUT_MAX = 65536
# include/uapi/linux/bpf.h, if_link.h
_ATTACH_XDP, _ATTACH_TCX_INGRESS = 37, 46
_BEFORE = 1 << 3
_XDP_GENERIC, _XDP_DRIVER = 2, 4


class SkBuff(NamedTuple):
    """The fields of struct __sk_buff that a test run reads and returns."""

    mark: int = 0
    priority: int = 0
    ifindex: int = 0
    ingress_ifindex: int = 0
    cb: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    tstamp: int = 0
    gso_segs: int = 0
    gso_size: int = 0

    def pack(self) -> bytes:
        raw = bytearray(_SK_BUFF_SIZE)
        struct.pack_into("=I", raw, 8, self.mark)
        struct.pack_into("=III", raw, 32, self.priority, self.ingress_ifindex, self.ifindex)
        struct.pack_into("=5I", raw, 48, *self.cb)
        struct.pack_into("=Q", raw, 152, self.tstamp)
        struct.pack_into("=I", raw, 164, self.gso_segs)
        struct.pack_into("=I", raw, 176, self.gso_size)
        return bytes(raw)

    @classmethod
    def unpack(cls, raw: bytes) -> SkBuff:
        (mark,) = struct.unpack_from("=I", raw, 8)
        priority, ingress, ifindex = struct.unpack_from("=III", raw, 32)
        cb = struct.unpack_from("=5I", raw, 48)
        (tstamp,) = struct.unpack_from("=Q", raw, 152)
        (segments,) = struct.unpack_from("=I", raw, 164)
        (size,) = struct.unpack_from("=I", raw, 176)
        return cls(mark, priority, ifindex, ingress, cb, tstamp, segments, size)


_SK_BUFF_SIZE = 192


class RunResult(NamedTuple):
    """The result of a test run. ``retval`` is signed, as TC_ACT_UNSPEC is; ``duration``: mean of all repeats in ns."""

    retval: int
    data: bytes
    duration: int
    skb: SkBuff | None


def run_program(
    fd: int, name: str, data: bytes, context: bytes = b"", context_out_bytes: int = 0, repeat: int = 1
) -> RunResult:
    """A test run of a loaded program. BpfError.

    ``context``: empty for the kernel's own. ``context_out_bytes``: of a struct __sk_buff that it returns.
    """
    out, context_out = ffi.new("char[]", _DATA_OUT_MAX), ffi.new("char[]", _SK_BUFF_SIZE)
    options = ffi.new(
        "struct test_run_options *",
        {
            "sz": ffi.sizeof("struct test_run_options"),
            "data_in": ffi.from_buffer(data),
            "data_size_in": len(data),
            "data_out": out,
            "data_size_out": _DATA_OUT_MAX,
            "repeat": repeat,
        },
    )
    if context:
        options.ctx_in, options.ctx_size_in = ffi.from_buffer(context), len(context)
    if context_out_bytes:
        options.ctx_out, options.ctx_size_out = context_out, context_out_bytes
    with captured():
        checked(_libbpf.lib().bpf_prog_test_run_opts(fd, options), f"test run of program {name}")
    return RunResult(
        int(ffi.cast("int32_t", options.retval)),
        bytes(ffi.buffer(out, options.data_size_out)),
        options.duration,
        SkBuff.unpack(bytes(ffi.buffer(context_out, _SK_BUFF_SIZE))) if context_out_bytes else None,
    )


class Program:
    """A program of an object."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self._lib = _libbpf.lib()
        self.name: str = ffi.string(self._lib.bpf_program__name(pointer)).decode()

    @property
    def fd(self) -> int:
        """The descriptor; it belongs to the object."""
        return checked(self._lib.bpf_program__fd(self.pointer), f"program {self.name}")

    def test_run(self, data: bytes, skb: SkBuff | None = None, repeat: int = 1) -> RunResult:
        """Run on a frame (with its Ethernet header), in the calling thread's network namespace."""
        context, out = (b"", 0) if skb is None else (skb.pack(), _SK_BUFF_SIZE)
        return run_program(self.fd, self.name, data, context, out, repeat)

    def run_frame(self, frame: bytes, ifindex: int = 0, repeat: int = 1) -> RunResult:
        """Run an XDP program on a frame from that device, which must have an XDP program; 0: the loopback device."""
        context = struct.pack("=6I", 0, len(frame), 0, ifindex, 0, 0) if ifindex else b""
        return run_program(self.fd, self.name, frame, context, 0, repeat)

    def attach_xdp(self, ifindex: int, generic: bool, pin: Path) -> None:
        """Attach to a device of this network namespace with a link that is pinned.

        In the driver, or after it with ``generic``. BpfError; EBUSY: the device already has an XDP program.
        """
        options = ffi.new("struct link_options *", {"sz": ffi.sizeof("struct link_options")})
        options.flags = _XDP_GENERIC if generic else _XDP_DRIVER
        with captured():
            what = f"attach program {self.name} to device {ifindex}"
            link = checked(self._lib.bpf_link_create(self.fd, ifindex, _ATTACH_XDP, options), what)
            try:
                checked(self._lib.bpf_obj_pin(link, os.fsencode(pin)), f"pin link {pin}")
            finally:
                os.close(link)

    def attach_tcx(self, ifindex: int) -> int:
        """Attach to a device's tc ingress, before all other programs; returns the descriptor of the link.

        The attachment ends when that is closed, also at exit. BpfError; EINVAL: a kernel before Linux 6.6.
        """
        options = ffi.new("struct link_options *", {"sz": ffi.sizeof("struct link_options"), "flags": _BEFORE})
        with captured():
            what = f"attach program {self.name} to device {ifindex}"
            return checked(self._lib.bpf_link_create(self.fd, ifindex, _ATTACH_TCX_INGRESS, options), what)

    def attach_cgroup(self, cgroup_fd: int) -> Link:
        """Attach as the program's section defines (cgroup/connect4, …)."""
        with captured():
            what = f"attach program {self.name} to cgroup"
            return Link(checked_pointer(self._lib.bpf_program__attach_cgroup(self.pointer, cgroup_fd), what), what)


class Link:
    """A program's attachment. Without a pin it ends with :meth:`close`."""

    def __init__(self, pointer: Any, name: str) -> None:
        self._pointer = pointer
        self._name = name
        self._lib = _libbpf.lib()

    @classmethod
    def open_pinned(cls, path: Path) -> Link:
        with captured():
            pointer = checked_pointer(_libbpf.lib().bpf_link__open(os.fsencode(path)), f"open pinned link {path}")
        return cls(pointer, str(path))

    @property
    def fd(self) -> int:
        return checked(self._lib.bpf_link__fd(self._pointer), self._name)

    def attached_to(self, key: str) -> int:
        """The kernel's number of the link's target for ``key`` (``ifindex``, ``cgroup_id``); 0 if it is gone."""
        return tcx.described(self.fd).get(key, 0)

    def pin(self, path: Path) -> None:
        with captured():
            checked(self._lib.bpf_link__pin(self._pointer, os.fsencode(path)), f"pin link {path}")

    def update(self, program: Program) -> None:
        """Replace the attached program atomically: there is always a program attached."""
        with captured():
            checked(
                self._lib.bpf_link__update_program(self._pointer, program.pointer),
                f"replace the program of {self._name} by {program.name}",
            )

    def detach(self) -> None:
        """Detach the program, even if pins or descriptors still hold the link."""
        with captured():
            checked(self._lib.bpf_link__detach(self._pointer), f"detach {self._name}")

    def close(self) -> None:
        if self._pointer is not None:
            self._lib.bpf_link__destroy(self._pointer)
            self._pointer = None


class Object:
    """A compiled BPF object file."""

    def __init__(self, pointer: Any, path: Path) -> None:
        self._pointer = pointer
        self._lib = _libbpf.lib()
        self.path = path
        size = ffi.new("uint32_t *")
        raw = self._lib.btf__raw_data(self._lib.bpf_object__btf(pointer), size)
        self.btf = Btf(bytes(ffi.buffer(raw, size[0])), str(path))
        self.programs: dict[str, Program] = {p.name: p for p in map(Program, self._each("program"))}
        self._maps = {ffi.string(self._lib.bpf_map__name(m)).decode(): m for m in self._each("map")}
        self.maps: dict[str, Map] = {}
        self._left_out: set[str] = set()

    @classmethod
    def open(
        cls,
        path: Path,
        pin_dir: Path | None = None,
        rodata: Mapping[str, bytes] | None = None,
        max_entries: Mapping[str, int] | None = None,
        reuse: Mapping[str, Map] | None = None,
        programs: Container[str] | None = None,
        without: Container[str] = (),
        resized: Path | None = None,
        renewed: Container[str] = (),
    ) -> Object:
        """Read an object file; nothing is loaded into the kernel before :meth:`load`.

        Maps are pinned under ``pin_dir`` by their names, and reused from there if they exist. ``rodata`` sets
        constants by variable name, ``max_entries`` the sizes of maps; ``reuse`` gives maps of other objects.
        ``programs``: only these are loaded. ``without``: maps that are not created; only code that the constants
        make dead may refer to them. ``resized``: a map whose pin has another size is created again and pinned in this
        folder; otherwise that is an error. ``renewed``: so is each of these that has a pin. Raises BpfError; FatalError
        if the file is missing.
        """
        if not path.exists():
            raise FatalError(f"{path} is missing: run make build")
        with captured():
            pointer = checked_pointer(
                _libbpf.lib().bpf_object__open_file(os.fsencode(path), ffi.NULL), f"open BPF object {path}"
            )
        opened = cls(pointer, path)
        try:
            opened._prepare(pin_dir, rodata or {}, max_entries or {}, reuse or {}, programs, without, resized, renewed)
        except BaseException:
            opened.close()
            raise
        return opened

    def _each(self, what: str) -> Iterator[Any]:
        following = getattr(self._lib, f"bpf_object__next_{what}")
        item = following(self._pointer, ffi.NULL)
        while item != ffi.NULL:
            yield item
            item = following(self._pointer, item)

    def _prepare(
        self,
        pin_dir: Path | None,
        rodata: Mapping[str, bytes],
        max_entries: Mapping[str, int],
        reuse: Mapping[str, Map],
        programs: Container[str] | None,
        without: Container[str],
        resized: Path | None,
        renewed: Container[str],
    ) -> None:
        abilities = of_kernel()
        if self.btf.has_variable(".rodata", "abilities"):
            self._set_rodata("abilities", self.btf.struct("abilities").pack(**abilities._asdict()))
        for name, value in rodata.items():
            self._set_rodata(name, value)
        for name, pointer in self._maps.items():
            if "." in name:  # .rodata and so on are private to this object
                continue
            if name in without or (name in STORAGE_MAPS and not abilities.socket_storage):
                checked(self._lib.bpf_map__set_autocreate(pointer, False), f"leave out map {name}")
                self._left_out.add(name)
                continue
            if name in max_entries:
                checked(self._lib.bpf_map__set_max_entries(pointer, max_entries[name]), f"size of map {name}")
            if name in reuse:
                checked(self._lib.bpf_map__reuse_fd(pointer, reuse[name].fd), f"share map {name}")
            elif pin_dir is not None:
                size = self._compare_with_pin(name, pointer, pin_dir / name, resized is not None)
                is_new = size is not None and (name in renewed or size != self._describe(name, pointer).max_entries)
                path = os.fsencode((resized if resized is not None and is_new else pin_dir) / name)
                checked(self._lib.bpf_map__set_pin_path(pointer, path), f"pin map {name}")
        for program in self.programs.values():
            if programs is not None and program.name not in programs:
                checked(self._lib.bpf_program__set_autoload(program.pointer, False), f"leave out {program.name}")

    def _set_rodata(self, variable: str, value: bytes) -> None:
        offset, size = self.btf.variable(".rodata", variable)
        if len(value) != size:
            raise ValueError(f"{self.path.name}: {variable} has {size} bytes, not {len(value)}")
        pointer = next(m for name, m in self._maps.items() if name.endswith(".rodata"))
        total = ffi.new("size_t *")
        start = checked_pointer(self._lib.bpf_map__initial_value(pointer, total), f"constant {variable}")
        ffi.memmove(start + offset, value, size)

    def _compare_with_pin(self, name: str, pointer: Any, path: Path, any_size: bool) -> int | None:
        """The size of the pin; None if there is none. libbpf would only report "parameter mismatch"."""
        try:
            pinned = Map.open_pinned(path)
        except BpfError as error:
            if error.errno == errors.ENOENT:
                return None
            raise
        pinned.close()
        wanted = self._describe(name, pointer)
        differences = [
            f"{what} {getattr(pinned, what)} instead of {getattr(wanted, what)}"
            for what in ("type", "key_size", "value_size", *(() if any_size else ("max_entries",)))
            if getattr(pinned, what) != getattr(wanted, what)
        ]
        if differences:
            raise BpfError(
                f"pinned map {name} ({path}) does not match: {', '.join(differences)}; "
                "run pyebpf-proxy --cleanup first",
                errors.EEXIST,
            )
        return pinned.max_entries

    @property
    def sizes(self) -> dict[str, int]:
        """The entries of each of :meth:`declared`."""
        return {name: each.max_entries for name, each in self.declared().items()}

    def declared(self) -> dict[str, Map]:
        """Each map that is not private to this object; without a descriptor before :meth:`load`."""
        return {name: self._describe(name, pointer) for name, pointer in self._maps.items() if "." not in name}

    def _describe(self, name: str, pointer: Any) -> Map:
        lib = self._lib
        return Map(
            lib.bpf_map__fd(pointer),
            name,
            lib.bpf_map__type(pointer),
            lib.bpf_map__key_size(pointer),
            lib.bpf_map__value_size(pointer),
            lib.bpf_map__max_entries(pointer),
        )

    def load(self) -> Self:
        """Create the maps, verify and load the programs. Raises BpfError with the verifier's last lines.

        It is EAGAIN, and no refusal, if a signal has interrupted the kernel. The cgroup freezer is a signal, too: a
        container that is paused, for example for a snapshot. See :func:`load_object`. Nor is a lack of descriptors.
        """
        try:
            with captured():
                checked(self._lib.bpf_object__load(self._pointer), f"load {self.path.name}")
        except BpfError as error:
            error.refused = error.errno not in _INTERRUPTED | _NO_DESCRIPTOR
            raise
        self.maps = {name: self._describe(name, m) for name, m in self._maps.items() if name not in self._left_out}
        return self

    def close(self) -> None:
        """Close all descriptors. Pinned and attached objects stay in the kernel."""
        if self._pointer is not None:
            self._lib.bpf_object__close(self._pointer)
            self._pointer = None
            self.maps = {}
            self.programs = {}

    def __enter__(self) -> Object:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_object(opened: Callable[[], Object]) -> Object:
    """The object that ``opened`` returns, with its programs loaded; again if the kernel was interrupted.

    BpfError, as :meth:`Object.load`.
    """
    tries = 0
    while True:
        made = opened()
        try:
            return made.load()
        except BaseException as error:
            made.close()
            tries += 1
            # libbpf cannot load an object twice.
            if not isinstance(error, BpfError) or error.errno not in _INTERRUPTED or tries == _TRIES:
                raise
