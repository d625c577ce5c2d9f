# SPDX-License-Identifier: Apache-2.0
"""YAML or JSON text to plain values, read as kube-proxy's Go library reads it (spec/configuration §1).

PyYAML's own rules differ in scalars that matter (``010``, ``1:20``, ``y``), and it keeps silent about duplicate
keys; the loader here resolves scalars with Go's rules and returns the duplicates.
"""

from __future__ import annotations

import re
from typing import ClassVar, NamedTuple

import yaml

_Base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Document(NamedTuple):
    """The first document of a text, and the duplicate keys that were found in it, in words."""

    value: object
    duplicates: list[str]


def load(text: str) -> Document:
    """Read the first document of ``text``; ValueError with the place when it is not YAML."""
    loader = _Loader(text)
    try:
        value = loader.get_data() if loader.check_data() else None
    except yaml.YAMLError as error:
        raise ValueError(f"yaml: {_one_line(error)}") from None
    except RecursionError:
        raise ValueError("yaml: nested too deeply") from None
    finally:
        loader.dispose()
    return Document(value, loader.duplicates)


class _Loader(_Base):  # type: ignore[misc, valid-type]
    #: Go's rules, filled below, in the place of PyYAML's.
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        # Before merge keys are folded in: a key that overrides a merged one is no duplicate.
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                self.duplicates.append(f'line {key.start_mark.line + 1}: key "{key.value}" already set in map')
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)  # type: ignore[no-any-return]


_BOOLEANS = {
    word: value
    for value, words in ((True, "y yes on true"), (False, "n no off false"))
    for lower in words.split()
    for word in (lower, lower.capitalize(), lower.upper())
}
_NUMBER = re.compile(
    r"[-+]?(?:0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+"
    r"|(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?)$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


def _resolver(tag: str, pattern: str | re.Pattern[str], first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_resolver("bool", "^(?:" + "|".join(_BOOLEANS) + ")$", "yYnNtTfFoO")
_resolver("float", _NUMBER, "-+0123456789.")
_resolver("null", "^(?:~|null|Null|NULL|)$", "~nN\0")
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^$"), [""])
_resolver("merge", "^(?:<<)$", "<")


def _boolean(loader: _Loader, node: yaml.ScalarNode) -> bool:
    return _BOOLEANS[node.value]


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    text = node.value.replace("_", "")
    try:
        return _integer(text)
    except ValueError:
        return float(text.replace(".", "", 1) if text.lstrip("+-").lower() in (".inf", ".nan") else text)


def _integer(text: str) -> int:
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits[0] == "0" and digits.isdigit():
        # 010 is octal; 08 is no integer at all, but a float to Go.
        return int(text, 8)
    return int(text, 0)


_Loader.add_constructor("tag:yaml.org,2002:bool", _boolean)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
_Loader.add_constructor("tag:yaml.org,2002:int", _number)


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem or error.context}"
    return " ".join(str(error).split())
