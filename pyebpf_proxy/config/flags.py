# SPDX-License-Identifier: Apache-2.0
"""Parses the command line by the rules of kube-proxy's own parser (spec/configuration §4, §4.4).

``--flag=value`` or ``--flag value``; a boolean takes its value only with ``=``; ``_`` is accepted for ``-``. argparse
does not support these rules, and its import would slow down ``--version``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyebpf_proxy.config import gotext
from pyebpf_proxy.config.flag_table import DEFAULT_DIRECTORY, DEPRECATED, FLAGS, GROUPS, IGNORED, SILENT, Flag

_BY_NAME = {flag.name: flag for flag in (*FLAGS, *(flag for flag, _ in DEPRECATED.values()), *IGNORED)}
_BY_SHORT = {flag.short: flag for flag in FLAGS if flag.short}
_IGNORED = frozenset(flag.name for flag in IGNORED)


class UsageError(Exception):
    """A command line that cannot be parsed; the message is kube-proxy's."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The values on the command line, by flag, and the warnings about them."""

    values: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> str:
        """Configuration file, or ""."""
        return str(self.values.get("config", ""))

    @property
    def write_config_to(self) -> str:
        """The file to which the effective configuration is to be written, or ""."""
        return str(self.values.get("write-config-to", ""))

    @property
    def hostname_override(self) -> str:
        """The Node's name as on the command line, or ""."""
        return str(self.values.get("hostname-override", ""))

    @property
    def kubeconfig(self) -> str:
        """The kubeconfig file, or ""; it is used only without a configuration file."""
        return str(self.values.get("kubeconfig", ""))

    @property
    def master(self) -> str:
        """URL of the API server, or ""."""
        return str(self.values.get("master", ""))

    @property
    def cleanup(self) -> bool:
        """Whether to clean up and exit."""
        return bool(self.values.get("cleanup", False))

    @property
    def init_only(self) -> bool:
        """Whether to do only the privileged set-up and exit."""
        return bool(self.values.get("init-only", False))

    @property
    def help(self) -> bool:
        """Whether to print the help and exit."""
        return bool(self.values.get("help", False))

    @property
    def version(self) -> str:
        """true, raw, false or "", or the version to report."""
        return str(self.values.get("version", ""))

    @property
    def manifests(self) -> str:
        """Directory of manifests, or ""."""
        return str(self.values.get("manifests", ""))

    @property
    def datapath_config(self) -> str:
        """File of the DatapathConfiguration, or ""."""
        return str(self.values.get("datapath-config", ""))

    @property
    def directory(self) -> str:
        """Run folder."""
        return str(self.values.get("directory", DEFAULT_DIRECTORY))

    def fields(self) -> Iterator[tuple[str, Any]]:
        """Fields of the configuration that flags set: attribute path of the model, and value."""
        for flag in FLAGS:
            if flag.field and self.values.get(flag.name) is not None:
                yield flag.field, self.values[flag.name]


class _Parser:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.given: set[str] = set()
        self.warnings: list[str] = []
        self.positional: list[str] = []
        self.reported = ""

    def parse(self, arguments: Sequence[str]) -> None:
        rest = list(arguments)
        while rest:
            argument = rest.pop(0)
            if argument == "--":
                self.positional += rest
                return
            if argument.startswith("--"):
                self._long(argument, rest)
            elif argument.startswith("-") and argument != "-":
                letters = argument[1:]
                while letters:
                    letters = self._short(letters, rest)
            else:
                self.positional.append(argument)

    def _long(self, argument: str, rest: list[str]) -> None:
        text = argument[2:]
        if text[0] in "-=":
            raise UsageError(f"bad flag syntax: {argument}")
        name, equals, value = text.partition("=")
        flag = _BY_NAME.get(name.replace("_", "-"))
        if flag is None:
            raise UsageError(f"unknown flag: --{name}")
        if not equals:
            if flag.alone is not None:
                value = flag.alone
            elif rest:
                value = rest.pop(0)
            else:
                raise UsageError(f"flag needs an argument: {argument}")
        self._set(flag, value, name)

    def _short(self, letters: str, rest: list[str]) -> str:
        """Parse the first of ``letters``. The result: the remaining letters."""
        flag = _BY_SHORT.get(letters[0])
        if flag is None:
            raise UsageError(f"unknown shorthand flag: '{letters[0]}' in -{letters}")
        left = ""
        if letters[1:2] == "=" and len(letters) > 2:
            value = letters[2:]
        elif flag.alone is not None:
            value, left = flag.alone, letters[1:]
        elif len(letters) > 1:
            value = letters[1:]
        elif rest:
            value = rest.pop(0)
        else:
            raise UsageError(f"flag needs an argument: '{letters[0]}' in -{letters}")
        self._set(flag, value, flag.name)
        return left

    def _set(self, flag: Flag, text: str, typed: str) -> None:
        try:
            value = flag.read(text)
        except ValueError as error:
            shown = f"-{flag.short}, --{flag.name}" if flag.short else f"--{flag.name}"
            raise UsageError(f'invalid argument {gotext.quote(text)} for "{shown}" flag: {error}') from None
        known = self.values.get(flag.name)
        if isinstance(value, list) and known is not None:
            value = [*known, *value]
        elif isinstance(value, dict) and known is not None:
            value = {**known, **value}
        if flag.name == "version" and text.startswith("v"):
            self.reported = text
        if value is not None:
            self.values[flag.name] = value
        self.given.add(flag.name)
        if flag.name in DEPRECATED:
            self.warnings.append(f"Flag --{flag.name} has been deprecated, {DEPRECATED[flag.name][1]}")
        elif flag.name in _IGNORED and flag.name not in SILENT:
            self.warnings.append(f"Flag --{typed} is of an older release: accepted, without effect")


def parse(arguments: Sequence[str]) -> Flags:
    """Parse ``arguments``; UsageError with kube-proxy's message if this fails."""
    parser = _Parser()
    parser.parse(arguments)
    flags = Flags(parser.values, frozenset(parser.given), tuple(parser.warnings))
    if any(parser.positional) and not flags.help:
        listed = " ".join(map(gotext.quote, parser.positional))
        raise UsageError(f'"pyebpf-proxy" does not take any arguments, got [{listed}]')
    if parser.reported:
        flags.values["reported-version"] = parser.reported
    return flags


def usage(commands: Mapping[str, str]) -> str:
    """The text of ``--help``. ``commands``: the summary of each command, by name."""
    import textwrap
    from functools import partial

    # Paths and names of flags are not broken, so that they can be copied.
    wrap = partial(textwrap.wrap, width=100, break_on_hyphens=False)
    lines = [
        "eBPF replacement for kube-proxy.",
        "",
        "Usage:",
        "  pyebpf-proxy [flags]",
        "  pyebpf-proxy COMMAND ...  inspect this node, or manage a cluster; see COMMAND --help",
        "  pyebpf-proxy lab ...      a test cluster of network namespaces",
        "",
        "Commands:",
    ]
    for name, text in commands.items():
        lines += wrap(f"  {name:<12}{text}", subsequent_indent=" " * 14)
    for title, flags in GROUPS.items():
        lines += ["", f"{title}:"]
        for flag in flags:
            short = f"-{flag.short}, " if flag.short else ""
            default = f" (default {flag.default})" if flag.default not in ("", "0s", "false") else ""
            lines.append(f"  {short}--{flag.name} {flag.type}".rstrip())
            lines += wrap(flag.help + default, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)
