# SPDX-License-Identifier: Apache-2.0
"""Layouts of C structs, and values of enums, read from the BTF of a BPF object.

The C headers are the only definition of the maps' contents; nothing here repeats an offset. The format:
Documentation/bpf/btf.rst of the kernel.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from pyebpf_proxy.common.errors import FatalError

_MAGIC = 0xEB9F
_INT, _PTR, _ARRAY, _STRUCT, _UNION, _ENUM, _TYPEDEF = 1, 2, 3, 4, 5, 6, 8
_VOLATILE, _CONST, _RESTRICT, _FUNC_PROTO, _VAR, _DATASEC = 9, 10, 11, 13, 14, 15
_FLOAT, _DECL_TAG, _TYPE_TAG, _ENUM64 = 16, 17, 18, 19
_TRANSPARENT = {_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _TYPE_TAG}
# Bytes after struct btf_type: fixed, and for each of vlen members.
_TRAILING = {
    _INT: (4, 0),
    _ARRAY: (12, 0),
    _STRUCT: (0, 12),
    _UNION: (0, 12),
    _ENUM: (0, 8),
    _FUNC_PROTO: (0, 8),
    _VAR: (4, 0),
    _DATASEC: (0, 12),
    _DECL_TAG: (4, 0),
    _ENUM64: (0, 12),
}
_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


class StaleObjectError(FatalError):
    """The object and this program do not match: one has a name that the other lacks."""

    def __init__(self, origin: str, what: str) -> None:
        super().__init__(f"{origin} was built from other sources ({what}): run make build")
        self.what = what


class _Type(NamedTuple):
    kind: int
    name: str
    vlen: int
    flag: bool
    size: int  # or the referenced type
    at: int  # where its trailing data begins


class Field(NamedTuple):
    """``code``: for struct; arrays of bytes, and everything that is not a number, are bytes."""

    name: str
    offset: int
    size: int
    code: str


class Layout:
    """One struct. Numbers are ints, byte arrays are bytes, in the machine's byte order."""

    def __init__(self, name: str, size: int, fields: list[Field], origin: str) -> None:
        self.name = name
        self.origin = origin
        self.size = size
        self.fields = {field.name: field for field in fields}
        self._packers = {field.name: struct.Struct("=" + field.code) for field in fields}

    def packer(self, *names: str) -> struct.Struct:
        """A struct.Struct for these fields (in the order of the C declaration); all other bytes are zero."""
        form, at = "=", 0
        for name in names:
            field = self._field(name)
            if field.offset < at:
                raise ValueError(f"struct {self.name}: {name} stands before the field named before it")
            form += f"{field.offset - at}x{field.code}"
            at = field.offset + field.size
        return struct.Struct(f"{form}{self.size - at}x")

    def pack(self, **values: int | bytes) -> bytes:
        """Bytes of the struct; fields that are not named are zero."""
        raw = bytearray(self.size)
        for name, value in values.items():
            at = self._field(name).offset
            self._packers[name].pack_into(raw, at, value)
        return bytes(raw)

    def unpack(self, raw: bytes) -> dict[str, Any]:
        """All fields by name."""
        if len(raw) != self.size:
            raise ValueError(f"struct {self.name} has {self.size} bytes, not {len(raw)}")
        return {f.name: struct.unpack_from("=" + f.code, raw, f.offset)[0] for f in self.fields.values()}

    def _field(self, name: str) -> Field:
        try:
            return self.fields[name]
        except KeyError:
            raise StaleObjectError(self.origin, f"struct {self.name} has no field {name}") from None


class Btf:
    """The types of one object. Raises ValueError for invalid BTF, StaleObjectError for missing names.

    ``origin``: the object's path, for that error.
    """

    def __init__(self, raw: bytes, origin: str) -> None:
        self.origin = origin
        if len(raw) < 24 or struct.unpack_from("=H", raw)[0] != _MAGIC:
            raise ValueError(f"not BTF of a {sys.byteorder}-endian machine")
        _, _, _, header, type_at, type_size, string_at, string_size = struct.unpack_from("=HBBIIIII", raw)
        self._types_raw = raw[header + type_at : header + type_at + type_size]
        self._strings = raw[header + string_at : header + string_at + string_size]
        self._types = [_Type(0, "void", 0, False, 0, 0), *self._read()]
        self._layouts: dict[str, Layout] = {}

    def _string(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(0, offset)].decode()

    def _read(self) -> Iterator[_Type]:
        at = 0
        while at < len(self._types_raw):
            if at + 12 > len(self._types_raw):
                raise ValueError("BTF ends within a type")
            name, info, size = struct.unpack_from("=III", self._types_raw, at)
            kind, vlen = info >> 24 & 0x1F, info & 0xFFFF
            yield _Type(kind, self._string(name), vlen, bool(info >> 31), size, at + 12)
            fixed, each = _TRAILING.get(kind, (0, 0))
            at += 12 + fixed + each * vlen
        if at > len(self._types_raw):
            raise ValueError("BTF ends within a type")

    @cached_property
    def _structs(self) -> dict[str, int]:
        return {t.name: i for i, t in enumerate(self._types) if t.kind == _STRUCT and t.name}

    def struct(self, name: str) -> Layout:
        """The layout of ``struct name``."""
        if name not in self._layouts:
            try:
                number = self._structs[name]
            except KeyError:
                raise StaleObjectError(self.origin, f"no struct {name}") from None
            self._layouts[name] = self._layout(number)
        return self._layouts[name]

    def _layout(self, number: int) -> Layout:
        t = self._types[number]
        fields = []
        for i in range(t.vlen):
            name, kind, offset = struct.unpack_from("=III", self._types_raw, t.at + 12 * i)
            if t.flag and offset >> 24:
                raise ValueError(f"struct {t.name}: {self._string(name)} is a bit field")
            size, code = self._code(kind)
            fields.append(Field(self._string(name), (offset & 0xFFFFFF if t.flag else offset) // 8, size, code))
        return Layout(t.name, t.size, fields, self.origin)

    def _resolve(self, number: int) -> int:
        for _ in self._types:
            if number >= len(self._types):
                break
            if self._types[number].kind not in _TRANSPARENT:
                return number
            number = self._types[number].size
        raise ValueError("a type of BTF refers to none, or to itself")

    def _code(self, number: int) -> tuple[int, str]:
        t = self._types[self._resolve(number)]
        if t.kind == _INT:
            signed = struct.unpack_from("=I", self._types_raw, t.at)[0] >> 24 & 1
            return t.size, _number(t, signed)
        if t.kind in (_ENUM, _ENUM64):
            return t.size, _number(t, t.flag)
        size = self._size(number)
        return size, f"{size}s"

    def _size(self, number: int, depth: int = 0) -> int:
        t = self._types[self._resolve(number)]
        if t.kind == _ARRAY:
            if depth > len(self._types):
                raise ValueError("an array of BTF contains itself")
            element, _, count = struct.unpack_from("=III", self._types_raw, t.at)
            return self._size(element, depth + 1) * int(count)
        return 8 if t.kind == _PTR else t.size

    def enum(self, name: str) -> Mapping[str, int]:
        """Names and values of ``enum name``."""
        for t in self._types:
            if t.kind == _ENUM and t.name == name:
                return {
                    self._string(text): value
                    for text, value in struct.iter_unpack("=Ii", self._types_raw[t.at : t.at + 8 * t.vlen])
                }
        raise StaleObjectError(self.origin, f"no enum {name}")

    def offset(self, struct_name: str, *path: str) -> int:
        """Bytes from the beginning of a struct to a member, a member of that, …; unnamed members are searched."""
        number, offset = self._structs.get(struct_name, 0), 0
        for name in path:
            found = self._member(number, name)
            if found is None:
                raise StaleObjectError(self.origin, f"struct {struct_name} has no {'.'.join(path)}")
            number, bits = found
            offset += bits // 8
        return offset

    def _member(self, number: int, wanted: str) -> tuple[int, int] | None:
        """Type, and offset in bits, of a member."""
        t = self._types[self._resolve(number)]
        if t.kind not in (_STRUCT, _UNION):
            return None
        for i in range(t.vlen):
            name, kind, offset = struct.unpack_from("=III", self._types_raw, t.at + 12 * i)
            at = offset & 0xFFFFFF if t.flag else offset
            if name and self._string(name) == wanted:
                return kind, at
            inner = None if name else self._member(kind, wanted)
            if inner is not None:
                return inner[0], at + inner[1]
        return None

    def has_variable(self, section: str, name: str) -> bool:
        """Whether the global variable exists."""
        try:
            self.variable(section, name)
        except StaleObjectError:
            return False
        return True

    def variable(self, section: str, name: str) -> tuple[int, int]:
        """Offset and size of a global variable in its section (".rodata"). StaleObjectError if it is missing."""
        for t in self._types:
            if t.kind != _DATASEC or t.name != section:
                continue
            members = self._types_raw[t.at : t.at + 12 * t.vlen]
            for number, offset, size in struct.iter_unpack("=III", members):
                if self._types[number].name == name:
                    return offset, size
        raise StaleObjectError(self.origin, f"no variable {name} in {section}")


def _number(t: _Type, signed: bool) -> str:
    """The code of a number for struct. ValueError if it has none."""
    if t.size not in _CODES:
        raise ValueError(f"{t.name}: BTF has a number of {t.size} bytes")
    return _CODES[t.size] if signed else _CODES[t.size].upper()
