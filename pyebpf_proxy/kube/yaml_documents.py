# SPDX-License-Identifier: Apache-2.0
"""Reads a YAML text of objects, with several documents, into plain values. (Configurations: config/yaml_text.py.)"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, NoReturn

import yaml

from pyebpf_proxy.kube import limits
from pyebpf_proxy.kube.limits import UnreadableError

_DEEPEST = 100
_MANY_BRACKETS = 1000
#: A list or a mapping is two events, a document another two; then the loader would stop, too.
_MOST_EVENTS = 2 * (limits.MOST_VALUES_OF_FILE + limits.MOST_DOCUMENTS)
_FAR_INDENTATION = re.compile(rb"(?:^|[\r\n])[ ?:\t\0-]{200}")


def documents(data: bytes) -> Iterator[Any]:
    """Every document of the text. UnreadableError after the documents before the error."""
    try:
        _check_depth(data)
        loader = _Loader(data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UnreadableError(_message(data, error)) from None
    try:
        while True:
            try:
                if not loader.check_data():  # type: ignore[no-untyped-call]
                    return
                document = loader.next_document()
            except (yaml.YAMLError, ValueError, RecursionError) as error:
                raise UnreadableError(_message(data, error)) from None
            except (LookupError, AttributeError):  # PyYAML's constructors of bool, int, float and timestamp
                raise UnreadableError("bad YAML: a value is not of the type that its tag names") from None
            yield document
    finally:
        loader.dispose()


def _check_depth(data: bytes) -> None:
    """Reject nesting that is so deep that libyaml's recursive composer could overflow the stack.

    Texts with few brackets and little indentation pass at once. For others, the depth is counted from parser events.
    """
    if data.count(b"[") + data.count(b"{") <= _MANY_BRACKETS and _FAR_INDENTATION.search(data) is None:
        return
    depth = 0
    for number, event in enumerate(yaml.parse(data, Loader=yaml.CSafeLoader)):
        if number > _MOST_EVENTS:
            raise UnreadableError(limits.TOO_MANY_OF_FILE)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEEPEST:
                where = f"line {event.start_mark.line + 1}: " if event.start_mark is not None else ""
                raise UnreadableError(f"{where}bad YAML: more than {_DEEPEST} levels of nesting")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _Loader(yaml.CSafeLoader):
    """The C loader without YAML 1.1's dates (creationTimestamp is a string) and without the ``=`` value type.

    It counts the values of each object, of each document and of the file, and stops at the limit, before it has created
    Python objects for all of them.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._depth = self._values = self._all_values = 0
        self._left = limits.MOST_VALUES_OF_FILE
        self._documents = 0
        self._in_items = False
        self._may_have_aliases = b"*" in data

    def descend_resolver(self, parent: Any, index: Any) -> None:
        """Called for each node, with its parent node, and its position or the node of its key in the parent."""
        self._depth += 1
        if self._depth == 1:
            self._left -= self._all_values
            self._values = self._all_values = 0
        elif self._depth == 2:
            self._in_items = getattr(index, "value", None) == "items"
        elif self._depth == 3 and self._in_items:
            self._values = 0  # the next object of a list
        self._values += 1
        self._all_values += 1
        if (
            self._values > limits.MOST_VALUES
            or self._all_values > limits.MOST_VALUES_OF_DOCUMENT
            or self._all_values > self._left
        ):
            self._too_many(parent)

    def _too_many(self, parent: Any) -> NoReturn:
        where = f"line {parent.start_mark.line + 1}: " if parent is not None else ""
        if self._values > limits.MOST_VALUES:
            raise UnreadableError(f"{where}{limits.TOO_MANY}")
        too_large = self._all_values > limits.MOST_VALUES_OF_DOCUMENT
        raise UnreadableError(f"{where}{limits.TOO_MANY_OF_DOCUMENT if too_large else limits.TOO_MANY_OF_FILE}")

    def ascend_resolver(self) -> None:
        """Called after each node."""
        self._depth -= 1

    def next_document(self) -> Any:
        """The plain values of the next document, which must exist. Raises UnreadableError."""
        self._documents += 1
        if self._documents > limits.MOST_DOCUMENTS:
            raise UnreadableError(limits.TOO_MANY_DOCUMENTS)
        node: Any = self.get_node()
        if self._may_have_aliases:
            # They are not passed to the methods above, and each may stand for any number of values.
            _count_values(node, self._all_values + limits.MOST_VALUES)
        return self.construct_document(node)


def _count_values(node: yaml.Node, most: int, known: dict[int, int] | None = None) -> int:
    """The number of values in a node, with those that aliases repeat. UnreadableError if there are more than ``most``.

    ``known``: the numbers of other nodes, by their ids.
    """
    known = {} if known is None else known
    if isinstance(node, yaml.ScalarNode):
        return 1
    number = known.get(id(node))
    if number is not None:
        if not number:
            raise UnreadableError(f"line {node.start_mark.line + 1}: bad YAML: a value contains itself")
        return number
    known[id(node)] = 0
    children = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
    number = 1
    for child in children:
        number += _count_values(child, most, known)
        if number > most:
            raise UnreadableError(f"line {node.start_mark.line + 1}: aliases add more than {limits.MOST_VALUES} values")
    known[id(node)] = number
    return number


def _decimal(regexp: re.Pattern[str]) -> re.Pattern[str]:
    """The same without YAML 1.1's numbers to base 60, of which an IPv6 address may be one: Go does not know them."""
    return re.compile(f"(?!.*:)(?:{regexp.pattern})", regexp.flags)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, _decimal(regexp) if tag.endswith((":int", ":float")) else regexp)
        for tag, regexp in resolvers
        if not tag.endswith((":timestamp", ":value"))
    ]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def _message(data: bytes, error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        text = error.problem or error.context or "bad YAML"
        return f"line {mark.line + 1}: bad YAML: {text}" if mark is not None else f"bad YAML: {text}"
    if isinstance(error, yaml.reader.ReaderError):
        line = data[: error.position].count(b"\n") + 1 if isinstance(error.position, int) else 1
        return f"line {line}: bad YAML: {error.reason}"
    if isinstance(error, RecursionError):
        return "bad YAML: nested too deeply"
    return f"bad YAML: {error}"
