# SPDX-License-Identifier: Apache-2.0
"""Messages of the API server for a list and a watch, without the objects themselves. The functions are pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from pyebpf_proxy.common.nesting import decode_nested


class Event(msgspec.Struct, gc=False):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Meta(msgspec.Struct, rename="camel", gc=False):
    """Metadata of a bookmark."""

    resource_version: str = ""
    annotations: dict[str, Any] | None = None


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


_T = TypeVar("_T")


def _reader(kind: type[_T]) -> Callable[[bytes | msgspec.Raw], _T]:
    return partial(decode_nested, msgspec.json.Decoder(kind).decode)


read_event = _reader(Event)
read_bookmark = _reader(Bookmark)
read_identity = _reader(Identified)
read_status = _reader(Status)
read_page = _reader(Page)
