# SPDX-License-Identifier: Apache-2.0
"""Messages of the API server for a list and a watch, without the objects themselves. The functions are pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from pyebpf_proxy.common.nesting import decode_nested


class Event(msgspec.Struct, gc=False):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Annotations(msgspec.Struct, gc=False):
    """The only annotation of a bookmark that is used, as JSON. Others are skipped: there may be millions."""

    initial_events_end: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="k8s.io/initial-events-end")


class Meta(msgspec.Struct, rename="camel", gc=False):
    """Metadata of a bookmark."""

    resource_version: str = ""
    annotations: Annotations | None = None

    @property
    def ends_list(self) -> bool:
        """Whether the list at the beginning of a watch is complete."""
        return self.annotations is not None and bytes(self.annotations.initial_events_end) == b'"true"'


class Bookmark(msgspec.Struct, gc=False):
    """The object of an event BOOKMARK: all changes up to its version have been sent."""

    metadata: Meta


class Identity(msgspec.Struct, rename="camel", gc=False):
    """The metadata that identify an object."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class Identified(msgspec.Struct, gc=False):
    """Any object; only its identity is read."""

    metadata: Identity


class Status(msgspec.Struct, gc=False):
    """The object of an event ERROR."""

    code: int = 0
    message: str = ""


class PageMeta(msgspec.Struct, rename="camel", gc=False):
    """Metadata of a list."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct, gc=False):
    """One page of a list."""

    metadata: PageMeta
    items: list[msgspec.Raw] | None = None


class _Object(msgspec.Struct, gc=False):
    """Any object, without its content."""


class _Item(msgspec.Struct, gc=False):
    """An item of a page, without its content."""

    metadata: _Object


class _Items(msgspec.Struct, gc=False):
    """The items of a page, without their content."""

    items: list[_Item] | None = None


def is_earlier(version: str, other: str) -> bool:
    """Whether a resourceVersion is earlier than another one. The API server's are decimal numbers; others never are."""
    if not (version.isdecimal() and other.isdecimal() and version.isascii() and other.isascii()):
        return False
    one, two = version.lstrip("0"), other.lstrip("0")
    return (len(one), one) < (len(two), two)


#: A larger page may be refused for what is in its items.
_SMALL_PAGE = 1 << 20

_T = TypeVar("_T")


def _reader(kind: type[_T]) -> Callable[[bytes | msgspec.Raw], _T]:
    return partial(decode_nested, msgspec.json.Decoder(kind).decode)


read_event = _reader(Event)
read_bookmark = _reader(Bookmark)
read_identity = _reader(Identified)
read_status = _reader(Status)

_decode_page = msgspec.json.Decoder(Page).decode
_check_items = msgspec.json.Decoder(_Items).decode


def read_page(data: bytes) -> Page:
    """Read a page. Errors as of ``decode_nested``, also if an item of a large page is no object with metadata.

    The items become Python objects one by one, but each is one from the start: a page of millions of numbers would take
    thirty times its size.
    """

    def decode(data: bytes) -> Page:
        if len(data) > _SMALL_PAGE:
            _check_items(data)
        return _decode_page(data)

    return decode_nested(decode, data)
