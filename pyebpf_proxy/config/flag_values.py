# SPDX-License-Identifier: Apache-2.0
"""Parsers of flag values, with the rules and messages of kube-proxy's flag types (spec/configuration §4.4)."""

from __future__ import annotations

import re

from pyebpf_proxy import KUBERNETES_VERSION
from pyebpf_proxy.config import durations, gotext

_SEMVER = re.compile(r"v(\d+)\.(\d+)\.(\d+)(.*)", re.DOTALL)
_SUFFIX = re.compile(r"(?:-[0-9A-Za-z.-]+)?(?:\+[0-9A-Za-z.-]+)?")


def int32(text: str) -> int:
    """A number in any notation of Go: 10, 0x10, 0o17, 1_000."""
    return gotext.parse_int(text, 32)


def level(text: str) -> int:
    """A log level: digits only."""
    return gotext.parse_uint(text, 31)


def ip(text: str) -> str | None:
    """An address; empty changes nothing."""
    from pyebpf_proxy.config import addresses

    if text and addresses.parse_ip(text) is None:
        raise ValueError(f"{gotext.quote(text)} is not a valid IP address")
    return text or None


def ip_port(text: str) -> str | None:
    """An address, or an address with a port; empty changes nothing."""
    from pyebpf_proxy.config import addresses

    if not text or addresses.parse_ip(text) is not None:
        return text or None
    try:
        host, port = addresses.split(text)
    except ValueError as error:
        raise ValueError(f"{gotext.quote(text)} is not in a valid format (ip or ip:port): {error}") from None
    if addresses.parse_ip(host) is None:
        raise ValueError(f"{gotext.quote(host)} is not a valid IP address")
    try:
        good = gotext.parse_uint(port, 16) >= 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{gotext.quote(port)} is not a valid number")
    return text


def strings(text: str) -> list[str]:
    """Comma-separated values, with CSV quoting; only the first line is used."""
    if not text:
        return []
    values: list[str] = []
    lines = [line for line in text.split("\n") if line not in ("", "\r")]
    if not lines:
        raise ValueError("EOF")
    rest, column, number = lines[0].removesuffix("\r"), 1, text.split("\n").index(lines[0]) + 1
    while True:
        if not rest.startswith('"'):
            value, comma, rest = rest.partition(",")
            if '"' in value:
                where = column + len(value[: value.index('"')].encode())
                raise ValueError(f'parse error on line {number}, column {where}: bare " in non-quoted-field')
            values.append(value)
            column += len(value.encode()) + 1
            if not comma:
                return values
            continue
        quoted = re.match(r'"((?:[^"]|"")*)"(,|$)', rest)
        if quoted is None:
            opened = re.match(r'"(?:[^"]|"")*"', rest)
            where = column + len((opened[0][:-1] if opened else rest).encode())
            raise ValueError(f'parse error on line {number}, column {where}: extraneous or missing " in quoted-field')
        values.append(quoted[1].replace('""', '"'))
        column += len(quoted[0].encode())
        rest = rest[quoted.end() :]
        if not quoted[2]:
            return values


def gates(text: str) -> dict[str, bool]:
    """``Name=true,Other=false``."""
    found: dict[str, bool] = {}
    for pair in filter(None, text.split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError("malformed pair, expect string=bool")
        name, value = name.strip(), value.strip()
        try:
            found[name] = gotext.parse_bool(value)
        except ValueError as error:
            raise ValueError(f"invalid value of {name}: {value}, err: {error}") from None
    return found


def vmodule(text: str) -> list[tuple[str, int]]:
    """``pattern=level,…``."""
    found = []
    for pair in filter(None, text.split(",")):
        parts = pair.split("=")
        if len(parts) != 2 or not parts[0] or not parts[1]:
            raise ValueError(f"{gotext.quote(pair)} does not have the pattern=N format")
        try:
            found.append((parts[0], level(parts[1])))
        except ValueError as error:
            raise ValueError(f"parsing verbosity in {gotext.quote(pair)}: {error}") from None
    return found


def quantity(text: str) -> str:
    """A quantity, in its canonical form."""
    from pyebpf_proxy.config import quantities

    return quantities.parse(text).text


def port_range(text: str) -> str:
    """A range of ports, in the syntax that the flag had in older releases."""
    from pyebpf_proxy.config import port_ranges

    try:
        return port_ranges.format(port_ranges.parse(text))
    except ValueError as error:
        raise ValueError(f"{gotext.quote(text)} is not a valid port range: {error}") from None


def version(text: str) -> str:
    """true, false, raw, or the version to report."""
    if text == "raw":
        return text
    if not text.startswith("v"):
        return "true" if gotext.parse_bool(text) else "false"
    match = _SEMVER.fullmatch(text)
    quoted = gotext.quote(text)
    if match is None:
        raise ValueError(f"illegal version string {quoted}")
    if not _SUFFIX.fullmatch(match[4]):
        raise ValueError(f"could not parse pre-release/metadata ({match[4]}) in version {quoted}")
    if f"v{match[1]}.{match[2]}.{match[3]}" != KUBERNETES_VERSION:
        default = gotext.quote(KUBERNETES_VERSION)
        raise ValueError(f"version {quoted} must match major/minor/patch of default version {default}")
    return text


def not_empty(text: str) -> str:
    """Any text but the empty one."""
    if not text:
        raise ValueError("must not be empty")
    return text


duration = durations.parse
boolean = gotext.parse_bool
float32 = gotext.parse_float32
