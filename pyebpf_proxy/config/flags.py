# SPDX-License-Identifier: Apache-2.0
"""The command line: one table of flags, read by the rules of kube-proxy's own parser (spec/configuration §4, §4.4).

``--flag=value`` or ``--flag value``; a boolean takes its value only with ``=``; ``_`` may stand for ``-``. argparse
cannot be taught these rules, and ``--version`` need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

DEFAULT_DIRECTORY = "/run/pyebpf-proxy"


class UsageError(Exception):
    """A command line that cannot be read; the text is one line."""


class Flag(NamedTuple):
    """One flag: its name, the type that ``--help`` prints, its default, help text, how its value is read."""

    name: str
    type: str
    default: object
    help: str
    read: Callable[[str], object] = str
    #: Value of ``--flag`` without ``=``; None: a value must follow.
    alone: str | None = None
    short: str = ""


class Flags(NamedTuple):
    """The flags' values, and which of them were given."""

    config: str
    manifests: str
    directory: str
    lane: str
    log_format: str
    hostname_override: str
    cleanup: bool
    version: str
    help: bool
    given: frozenset[str]


def _boolean(text: str) -> bool:
    if text in ("1", "t", "T", "true", "TRUE", "True"):
        return True
    if text in ("0", "f", "F", "false", "FALSE", "False"):
        return False
    raise ValueError(f'strconv.ParseBool: parsing "{text}": invalid syntax')


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text

    return read


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


FLAGS = (
    Flag("config", "string", "", "The path to the configuration file."),
    Flag("manifests", "string", "", "Take Services, EndpointSlices and Nodes from the files of this folder."),
    Flag(
        "directory",
        "string",
        DEFAULT_DIRECTORY,
        "Run folder. Instances with different folders share nothing: pins, nft table and lock hang on it.",
        _not_empty,
    ),
    Flag(
        "lane",
        "auto|netfilter",
        "auto",
        "How first packets are carried: by conntrack kfuncs where the kernel has them, or always by netfilter.",
        _one_of("auto", "netfilter"),
    ),
    Flag("log-format", "text|json", "", "Format of the log.", _one_of("text", "json")),
    Flag("hostname-override", "string", "", "Name of this Node, in the place of the host's name."),
    Flag("cleanup", "", False, "Take away everything that the proxy attached or made, and exit.", _boolean, "true"),
    Flag("version", "version[=true]", "", "Print the version and quit.", alone="true"),
    Flag("help", "", False, "Print this text and quit.", _boolean, "true", short="h"),
)

_BY_NAME = {flag.name: flag for flag in FLAGS}
_BY_SHORT = {flag.short: flag for flag in FLAGS if flag.short}


def parse(arguments: Sequence[str]) -> Flags:
    """The values of ``arguments``; UsageError with kube-proxy's words when they cannot be read."""
    values: dict[str, object] = {flag.name: flag.default for flag in FLAGS}
    given: set[str] = set()
    positional: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            positional += rest
            break
        if not argument.startswith("-") or argument == "-":
            positional.append(argument)
            continue
        text, equals, value = argument.partition("=")
        flag, shown = _named(text)
        if not equals:
            if flag.alone is not None:
                value = flag.alone
            elif rest:
                value = rest.pop(0)
            else:
                raise UsageError(f"flag needs an argument: {shown}")
        try:
            values[flag.name] = flag.read(value)
        except ValueError as error:
            raise UsageError(f'invalid argument "{value}" for "{shown}" flag: {error}') from None
        given.add(flag.name)
    if positional and not values["help"]:
        listed = " ".join(f'"{word}"' for word in positional)
        raise UsageError(f'"pyebpf-proxy" does not take any arguments, got [{listed}]')
    fields = {name.replace("-", "_"): value for name, value in values.items()}
    return Flags(**fields, given=frozenset(given))  # type: ignore[arg-type]


def _named(text: str) -> tuple[Flag, str]:
    if text.startswith("--"):
        name = text[2:].replace("_", "-")
        if name not in _BY_NAME:
            raise UsageError(f"unknown flag: {text}")
        return _BY_NAME[name], f"--{name}"
    if text[1:] not in _BY_SHORT:
        raise UsageError(f"unknown shorthand flag: '{text[1]}' in {text}")
    flag = _BY_SHORT[text[1:]]
    return flag, f"-{flag.short}, --{flag.name}"


def usage() -> str:
    """The text of ``--help``."""
    lines = [
        "Carries Kubernetes Services with BPF, in the place of kube-proxy.",
        "",
        "Usage:",
        "  pyebpf-proxy [flags]",
        "  pyebpf-proxy lab ...      a cluster of network namespaces to play with",
        "",
        "Flags:",
    ]
    left = []
    for flag in FLAGS:
        short = f"-{flag.short}, " if flag.short else "    "
        left.append(f"  {short}--{flag.name} {flag.type}".rstrip())
    width = max(map(len, left)) + 3
    for flag, start in zip(FLAGS, left, strict=True):
        default = f" (default {flag.default})" if flag.default else ""
        lines.append(f"{start:{width}}{flag.help}{default}")
    return "\n".join(lines)
