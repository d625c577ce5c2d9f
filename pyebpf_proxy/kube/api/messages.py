# SPDX-License-Identifier: Apache-2.0
"""Messages of the API server for a list and a watch, without the objects themselves. The functions are pure."""

from __future__ import annotations

from typing import Any

import msgspec


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


read_event = msgspec.json.Decoder(Event).decode
read_bookmark = msgspec.json.Decoder(Bookmark).decode
read_identity = msgspec.json.Decoder(Identified).decode
read_status = msgspec.json.Decoder(Status).decode
read_page = msgspec.json.Decoder(Page).decode
