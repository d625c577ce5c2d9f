# SPDX-License-Identifier: Apache-2.0
"""Decodes YAML or JSON documents into valid objects, one by one. An invalid object causes a message, not an exception.

JSON is decoded directly into the structs. libyaml decodes YAML into plain values first, which is about ten times
slower: prefer JSON for large directories.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from sys import intern
from typing import Any, NamedTuple

import msgspec

from pyebpf_proxy.common.nesting import decode_nested
from pyebpf_proxy.kube import limits, validation, yaml_documents
from pyebpf_proxy.kube.limits import UnreadableError
from pyebpf_proxy.kube.objects import EndpointSlice, Node, Service, ServiceCIDR
from pyebpf_proxy.kube.source import Kind, Object


class ObjectKey(NamedTuple):
    """Identity of an object. A Node's namespace is empty."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


class Decoded(NamedTuple):
    """The result for one object.

    ``key`` is None if the object cannot be identified: then ``messages`` describes the error, or ``ignored`` names a
    kind that is not used. ``object`` is None if the object is refused; ``messages`` has the reason. ``uid`` is ""
    if it is not known. ``too_large``: it is refused for the number of its values.
    """

    key: ObjectKey | None = None
    object: Object | None = None
    messages: tuple[str, ...] = ()
    ignored: str | None = None
    uid: str = ""
    too_large: bool = False


class _Group(NamedTuple):
    type: type[Object]
    group: str
    bound: Callable[[Any], Iterator[validation.Finding]] | None
    check: Callable[[Any], Iterator[validation.Finding]]
    default: Callable[[Any], None] | None
    label: bool  # the name is a DNS label
    namespaced: bool


#: The kinds that are used.
KINDS: dict[str, _Group] = {
    "Service": _Group(
        Service, "", validation.bound_service, validation.check_service, validation.default_service, True, True
    ),
    "EndpointSlice": _Group(
        EndpointSlice,
        "discovery.k8s.io",
        None,
        validation.check_endpoint_slice,
        validation.default_endpoint_slice,
        False,
        True,
    ),
    "Node": _Group(Node, "", None, validation.check_node, None, False, False),
    "ServiceCIDR": _Group(ServiceCIDR, "networking.k8s.io", None, validation.check_service_cidr, None, False, False),
}

#: Maximum size of the annotations of one object, as the API server accepts it. Commas in them do not count.
_MOST_OF_ANNOTATIONS = 256 << 10
#: So many bytes of JSON cannot contain more values: only in larger objects are they counted.
_FEW_BYTES = limits.MOST_VALUES
_PIECE = 1 << 16
#: No kind, API version or UID is longer: such values are not decoded, since a list may have millions of others.
_LONGEST_WORD = 1000
#: Maximum of messages about one object.
MOST_MESSAGES = 100

_DEEPEST_LIST = 3

_read_any = msgspec.json.Decoder()
_READERS = {kind: msgspec.json.Decoder(group.type) for kind, group in KINDS.items()}


class _Name(msgspec.Struct, gc=False):
    """The name in ``metadata``."""

    name: str | None = None
    namespace: str | None = None
    uid: msgspec.Raw = msgspec.Raw(b"null")


class _RawHeader(msgspec.Struct, rename="camel", gc=False):
    """The fields that identify an object. All others are skipped, without Python objects for them."""

    api_version: msgspec.Raw = msgspec.Raw(b"null")
    kind: msgspec.Raw = msgspec.Raw(b"null")
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


class _Header(NamedTuple):
    """The same, decoded. A kind or an API version that no object has is None."""

    kind: object
    api_version: object
    metadata: msgspec.Raw


class _Annotated(msgspec.Struct, gc=False):
    """The annotations in ``metadata``, as a text."""

    annotations: msgspec.Raw = msgspec.Raw(b"")


class _Items(msgspec.Struct, gc=False):
    """The items of a list, as texts."""

    items: list[msgspec.Raw] | None = None


_read_name = msgspec.json.Decoder(_Name)
_read_annotated = msgspec.json.Decoder(_Annotated)
_read_raw_header = msgspec.json.Decoder(_RawHeader)
_read_items = msgspec.json.Decoder(_Items)


def _header(data: bytes | msgspec.Raw) -> _Header:
    """The header of a JSON text. msgspec.ValidationError: it is not an object."""
    raw = _read_raw_header.decode(data)
    return _Header(_word(raw.kind), _word(raw.api_version), raw.metadata)


def _word(value: msgspec.Raw) -> object:
    return _read_any.decode(value) if len(value) <= _LONGEST_WORD else None


def decode_json(data: bytes) -> Iterator[Decoded]:
    """Every object of a JSON text (one document, perhaps a List). Raises UnreadableError."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        return
    values = _count(data)
    if values > limits.MOST_VALUES_OF_FILE:
        raise UnreadableError(limits.TOO_MANY_OF_FILE)
    try:
        header = _header(data)
        kind = header.kind if isinstance(header.kind, str) else ""
        if values > limits.MOST_VALUES:
            yield from _large(header, data)
            return
        if kind in KINDS and header.api_version == _api_version(KINDS[kind]):
            yield _finish(kind, _READERS[kind].decode(data))
            return
    except msgspec.ValidationError:
        if values > limits.MOST_VALUES:
            yield _no_object(data)
            return
        # A field has a wrong type: decoding via plain values finds the field and its value.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableError(_json_message(data, error)) from None
    try:
        document = _read_any.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableError(_json_message(data, error)) from None
    yield from decode_document(document)


def _count(data: bytes | msgspec.Raw) -> int:
    """The values of a JSON text, if it may have too many for one object. Counts commas, also those within strings."""
    return 0 if len(data) <= _FEW_BYTES else _commas(data)


def _commas(data: bytes | msgspec.Raw) -> int:
    view = memoryview(data)
    pieces = (view[at : at + _PIECE].tobytes() for at in range(0, len(view), _PIECE))
    return sum(piece.count(b",") for piece in pieces)


def _large(header: _Header, data: bytes) -> Iterator[Decoded]:
    """Decode a JSON text with too many values for one object: the items of a list one by one, or a refusal."""
    kind, version = header.kind, header.api_version
    if not isinstance(kind, str) or not kind.endswith("List"):
        yield _too_large(header)
        return
    try:
        items = _read_items.decode(data).items or ()
    except msgspec.ValidationError:  # the items are no list
        yield _too_large(header)
        return
    default_kind = kind.removesuffix("List")
    default_version = version if default_kind and isinstance(version, str) else ""
    for item in items:
        if _count(item) <= limits.MOST_VALUES:
            yield from decode_document(_read_any.decode(item), default_kind, default_version, 1)
            continue
        try:
            header = _header(item)
        except msgspec.ValidationError:
            yield _no_object(item)
        else:
            version = header.api_version or default_version
            yield _too_large(header._replace(kind=header.kind or default_kind, api_version=version))


def _no_object(data: bytes | msgspec.Raw) -> Decoded:
    """The refusal of a JSON text with too many values that is not an object."""
    begin = memoryview(data)[:_LONGEST_WORD].tobytes().lstrip()
    return Decoded(messages=(f"{'a list' if begin.startswith(b'[') else 'a text'} is not an object",))


def _too_large(header: _Header) -> Decoded:
    """The refusal of an object of which only the header was read. A kind that is not used is ignored, as usual."""
    name: dict[str, str | None] = {}
    uid = ""
    try:
        found = _read_name.decode(header.metadata)
    except msgspec.ValidationError:
        pass
    else:
        name = {"name": found.name, "namespace": found.namespace}
        uid = _text(_word(found.uid))
    decoded = next(decode_document({"kind": header.kind, "apiVersion": header.api_version, "metadata": name}))
    if decoded.key is None:
        return decoded
    return Decoded(decoded.key, None, (f"{decoded.key}: {limits.TOO_MANY}",), uid=uid, too_large=True)


def decode_object(kind: Kind, data: bytes | msgspec.Raw) -> Decoded:
    """One object of a known kind, from the API server, whose lists omit the kind. Raises UnreadableError."""
    try:
        return decode_nested(partial(_decode_object, kind), data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableError(_json_message(bytes(data), error)) from None


def _decode_object(kind: Kind, data: bytes | msgspec.Raw) -> Decoded:
    if (number := _count(data)) > limits.MOST_VALUES:
        header = _header(data)
        if number - _commas_of_annotations(header) > limits.MOST_VALUES:
            return _too_large(header._replace(kind=kind, api_version=_api_version(KINDS[kind])))
    try:
        return _finish(kind, _READERS[kind].decode(data))
    except msgspec.ValidationError:
        document = _read_any.decode(data)  # decoding via plain values finds the error
    if isinstance(document, dict):
        document |= {"kind": kind, "apiVersion": _api_version(KINDS[kind])}
    return next(decode_document(document))


def _commas_of_annotations(header: _Header) -> int:
    try:
        annotations = _read_annotated.decode(header.metadata).annotations
    except msgspec.ValidationError:
        return 0
    return min(_commas(annotations), _MOST_OF_ANNOTATIONS)


def decode_yaml(data: bytes) -> Iterator[Decoded]:
    """Every object of a YAML text (several documents, Lists). UnreadableError after the objects before the error."""
    for document in yaml_documents.documents(data):
        if document is not None:
            yield from decode_document(document)


def decode_document(
    document: object, default_kind: str = "", default_version: str = "", depth: int = 0
) -> Iterator[Decoded]:
    """Every object of one document of plain values. The defaults are for the items of a typed list."""
    if not isinstance(document, dict):
        yield Decoded(messages=(f"{validation.quote(document)} is not an object",))
        return
    kind = document.get("kind", default_kind)
    version = document.get("apiVersion", default_version)
    if not isinstance(kind, str) or not kind:
        yield Decoded(messages=(_prefix("object", document) + "kind: missing",))
        return
    if kind.endswith("List") and isinstance(document.get("items"), list | None) and "items" in document:
        item_kind = kind.removesuffix("List")
        if depth == _DEEPEST_LIST:
            yield Decoded(messages=(f"{kind}: more than {_DEEPEST_LIST} lists inside each other",))
            return
        # The API server writes items of a typed list (ServiceList) without their kind; those of a List have one.
        item_version = version if item_kind and isinstance(version, str) else ""
        for item in document["items"] or ():
            yield from decode_document(item, item_kind, item_version, depth + 1)
        return
    group = KINDS.get(kind)
    if group is None or not _same_group(group, version):
        yield Decoded(ignored=f"{version}/{kind}" if version else kind)
        return
    if version != _api_version(group):
        what = f"{validation.quote(version)} is not {_api_version(group)}" if version else "missing"
        yield Decoded(_key_of(kind, document), None, (f"{_prefix(kind, document)}apiVersion: {what}",))
        return
    try:
        value = msgspec.convert(_with_text_keys(document), group.type)
    except (msgspec.ValidationError, RecursionError) as error:
        key = _key_of(kind, document)
        message = _prefix(kind, document) + _type_message(document, error)
        yield Decoded(key, None, (message,), uid=_uid_of(document))
        return
    yield _finish(kind, value)


def _with_text_keys(document: dict[Any, Any]) -> dict[Any, Any]:
    """Drop annotations whose keys are not text, which YAML allows. The annotations that are used have text keys."""
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(annotations := metadata.get("annotations"), dict):
        return document
    kept = {key: value for key, value in annotations.items() if isinstance(key, str)}
    return {**document, "metadata": {**metadata, "annotations": kept}}


def _finish(kind: str, value: Object) -> Decoded:
    """Check a decoded object's name, set defaults, and validate it."""
    group = KINDS[kind]
    metadata = value.metadata
    uid, metadata.uid = _text(metadata.uid), None
    if not group.namespaced:
        namespace = ""
    else:
        namespace = intern(metadata.namespace or "default")  # all objects of the namespace share one string
        if problem := validation.check_name(namespace, label=True):
            return Decoded(messages=(f"{kind} {validation.quote(metadata.name)}: metadata.namespace: {problem}",))
    if problem := validation.check_name(metadata.name, label=group.label):
        where = f"{kind} in namespace {namespace}" if namespace else kind
        return Decoded(messages=(f"{where}: metadata.name: {problem}",))
    key = ObjectKey(kind, namespace, metadata.name or "")  # type: ignore[arg-type]
    bound = tuple(group.bound(value)) if group.bound is not None else ()
    if group.default is not None:
        group.default(value)
    messages: list[str] = []
    number = refused = 0
    for number, finding in enumerate(chain(bound, group.check(value)), 1):
        refused += finding.refused
        if number <= MOST_MESSAGES:
            messages.append(f"{key}: {finding.text}")
    if number > MOST_MESSAGES:
        messages.append(f"{key}: {number - MOST_MESSAGES} more")
    return Decoded(key, None if refused else value, tuple(messages), uid=uid)


def _api_version(group: _Group) -> str:
    return f"{group.group}/v1" if group.group else "v1"


def _same_group(group: _Group, version: object) -> bool:
    """Whether the object is of the expected API group, in any version (a Knative Service is not a Service)."""
    if not isinstance(version, str) or not version:
        return True
    return version.rpartition("/")[0] == group.group


def _key_of(kind: str, document: dict[Any, Any]) -> ObjectKey | None:
    """The identity of an object that cannot be decoded; None if it is not known."""
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        return None
    name, namespace = metadata.get("name"), metadata.get("namespace") or "default"
    group = KINDS[kind]
    if not isinstance(name, str) or validation.check_name(name, label=group.label):
        return None
    if not isinstance(namespace, str) or validation.check_name(namespace, label=True):
        return None
    return ObjectKey(kind, namespace if group.namespaced else "", name)  # type: ignore[arg-type]


def _uid_of(document: dict[Any, Any]) -> str:
    metadata = document.get("metadata")
    return _text(metadata.get("uid")) if isinstance(metadata, dict) else ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _prefix(kind: str, document: dict[Any, Any]) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if kind in KINDS and (key := _key_of(kind, document)) is not None:
        return f"{key}: "
    return f"{kind} {validation.quote(name)}: " if name else f"{kind}: "


def _type_message(document: object, error: Exception) -> str:
    """msgspec's message "Expected `int`, got `str` - at `$.spec.ports[0].port`" with the path first and the value."""
    text, separator, path = str(error).rpartition(" - at ")
    if not separator:
        return str(error)
    key_of = path.startswith("`key` in ")
    path = path.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".")
    if key_of:
        return f"{path}: a key of it: {_lower(text)}"
    value: Any = document
    try:
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[int(index)] if index else value[name]
    except (KeyError, IndexError, TypeError):
        return f"{path}: {_lower(text)}"
    return f"{path}: {validation.quote(value)}: {_lower(text)}"


def _lower(text: str) -> str:
    text = text.replace("`", "").replace(" | null", "")
    return text[:1].lower() + text[1:]


def _json_message(data: bytes, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "bad JSON: nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"line {_line_of_bad_utf8(data)}: bad JSON: not UTF-8"
    text = str(error).removeprefix("JSON is malformed: ")
    if found := re.search(r" \(byte (\d+)\)$", text):
        line = data[: int(found[1])].count(b"\n") + 1
        return f"line {line}: bad JSON: {text[: found.start()]}"
    return f"bad JSON: {text}"


def _line_of_bad_utf8(data: bytes) -> int:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].count(b"\n") + 1
    return 1
