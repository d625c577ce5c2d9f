# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's iptables rules: found without loading a module, removed with iptables' own tools.

A node may have two sets of iptables tables at once: those of iptables-legacy (``/proc/net/ip_tables_names`` lists the
existing ones) and those of iptables-nft (nftables tables of families ip and ip6). Only existing tables are queried,
because a query creates the table and loads its module.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyebpf_proxy.datapath.migration.nftables import FAMILIES, Ruleset
from pyebpf_proxy.datapath.migration.rules import CANARY, FORWARD, SERVICES, Plan, is_kube_proxys, plan
from pyebpf_proxy.datapath.report import Report

#: The rules may change between save and restore.
ATTEMPTS = 3
#: Seconds: rules of 10 000 services take the tools a while.
PATIENCE = 300
LOCK_PATIENCE = 10
#: Folders of the tools if PATH does not include them.
FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin:/usr/bin:/bin"
FORWARD_GONE = (
    "the built-in chain FORWARD drops by default, and kube-proxy's KUBE-FORWARD, which accepted packets of"
    " Services, was removed: add a rule that accepts them"
)
FORWARD_KEPT = (
    "the built-in chain FORWARD drops by default, so kube-proxy's KUBE-FORWARD, which accepts packets of Services,"
    " stays; --cleanup removes it"
)
#: The most ports that a warning names.
MOST_PORTS = 10


class ToolError(Exception):
    """A tool is missing or has failed; one line."""


@dataclass(frozen=True)
class Variant:
    """One set of iptables tables: of one family, in one of the two kernel interfaces."""

    kind: Literal["nft", "legacy"]
    family: int

    def __str__(self) -> str:
        return f"iptables-{self.kind} IPv{self.family}"

    @property
    def command(self) -> str:
        return "iptables" if self.family == 4 else "ip6tables"


VARIANTS = tuple(Variant(kind, family) for kind in ("nft", "legacy") for family in (4, 6))


def remove(report: Report, *, keep_forward: bool = False) -> bool:
    """Remove kube-proxy's chains and jumps of both families and variants. True if some were made by mode ipvs.

    ``keep_forward``: see ``rules.plan``.
    """
    ipvs = False
    for variant in VARIANTS:
        try:
            done = _remove(variant, keep_forward)
        except (ToolError, OSError) as error:
            report.problems.append(f"{variant}: {error}")
            continue
        if done.script:
            report.removed.append(f"{variant}: {done.chains} chains and {done.jumps} jumps")
        report.problems += [f"{variant}: {text}" for text in done.kept]
        if done.forward_drops:
            report.warnings.append(f"{variant}: {FORWARD_KEPT if keep_forward else FORWARD_GONE}")
        if done.input_drops:
            report.warnings.append(f"{variant}: {_health_checks_gone(done.health_check_ports)}")
        ipvs |= done.ipvs
    return ipvs


def running() -> bool:
    """Whether kube-proxy's canary exists; kube-proxy creates it again within its syncPeriod."""
    ruleset = Ruleset()
    if any(ruleset.has_chain(family, "mangle", CANARY) for family in FAMILIES.values()):
        return True
    return any(
        variant.kind == "legacy" and "mangle" in legacy_tables(variant.family) and _has_canary(variant)
        for variant in VARIANTS
    )


def serves(family: int) -> bool:
    """Whether kube-proxy has rules for Services in this family. True also if legacy tables cannot be read. NftError."""
    if SERVICES in Ruleset().chains(FAMILIES[family]).get("nat", ()):
        return True
    if "nat" not in legacy_tables(family):
        return False
    try:
        return f":{SERVICES} " in _run(Variant("legacy", family), "save", "-t", "nat")
    except ToolError:
        return True


def passes_invalid() -> bool:
    """Whether kube-proxy's rules lack the one that drops INVALID packets: with a liberal conntrack it makes none.

    True also if its rules may be in tables that cannot be read.
    """
    unreadable = drops = False
    for variant in VARIANTS:
        if "filter" not in _tables(variant):
            continue
        try:
            text = _run(variant, "save", "-t", "filter")
        except ToolError:
            unreadable = True
            continue
        if f":{FORWARD} " in text:
            if not re.search(rf"^-A {FORWARD} .*INVALID", text, re.MULTILINE):
                return True
            drops = True
    return unreadable and not drops


def legacy_tables(family: int) -> list[str]:
    """The tables of iptables-legacy in this network namespace; none if the kernel does not have it."""
    path = Path("/proc/net/ip_tables_names" if family == 4 else "/proc/net/ip6_tables_names")
    try:
        return path.read_text().split()
    except FileNotFoundError:
        return []


def saved(variant: Variant) -> str:
    """All rules as the variant's tool saves them; "" if none can be kube-proxy's. ToolError, OSError."""
    tables = _tables(variant)
    if not tables:
        return ""
    text = _run(variant, "save")
    if unreadable := _unreadable(variant, tables, text):
        raise ToolError("; ".join(unreadable))
    return text


def _tables(variant: Variant) -> set[str]:
    """The tables that may hold rules of kube-proxy."""
    if variant.kind == "legacy":
        return set(legacy_tables(variant.family))
    chains = Ruleset().chains(FAMILIES[variant.family])
    return {table for table, names in chains.items() if any(is_kube_proxys(table, name) for name in names)}


def _remove(variant: Variant, keep_forward: bool) -> Plan:
    """Reads and removes the rules of one variant; returns the last plan."""
    tables = _tables(variant)
    if not tables:
        return Plan()
    for attempt in range(ATTEMPTS):
        text = _run(variant, "save")
        planned = plan(text, keep_forward=keep_forward)
        planned.kept += _unreadable(variant, tables, text)
        if not planned.script:
            return planned
        try:
            _run(variant, "restore", "--noflush", "-w", str(LOCK_PATIENCE), script=planned.script)
        except ToolError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return planned
    raise AssertionError("unreachable")


def _health_checks_gone(ports: Sequence[int]) -> str:
    more = f" and {len(ports) - MOST_PORTS} more" if len(ports) > MOST_PORTS else ""
    now = f" (now {', '.join(map(str, ports[:MOST_PORTS]))}{more})" if ports else ""
    return (
        "the built-in chain INPUT drops by default, and kube-proxy's rules that accepted health check node ports were"
        f" removed: the node's firewall must accept TCP to the healthCheckNodePort of each Service{now}, otherwise"
        " probes of load balancers fail"
    )


def _unreadable(variant: Variant, tables: set[str], text: str) -> list[str]:
    """The tables that the tool left out: iptables-nft does so if it cannot read a rule. One line each."""
    if variant.kind == "legacy":
        return []
    left_out = [table for table in sorted(tables) if f"*{table}\n" not in text]
    return [f"table {table} holds rules that iptables cannot read; use nft" for table in left_out]


def _has_canary(variant: Variant) -> bool:
    try:
        tool = _tool(variant, "save")
    except ToolError:
        return False  # reported when the rules were to be removed
    return f":{CANARY} " in _execute([tool, "-t", "mangle"])


def _tool(variant: Variant, action: str) -> str:
    """Path of ``iptables-nft-save`` and so on; with only one variant the tool may have the plain name."""
    path = f"{os.environ.get('PATH', '')}:{FOLDERS}"
    if found := shutil.which(f"{variant.command}-{variant.kind}-{action}", path=path):
        return found
    plain = shutil.which(f"{variant.command}-{action}", path=path)
    if plain and ("nf_tables" in _execute([plain, "--version"])) == (variant.kind == "nft"):
        return plain
    raise ToolError(
        f"tables exist that may hold rules of kube-proxy, but there is no {variant.command}-{variant.kind}-{action}:"
        " install iptables"
    )


def _run(variant: Variant, action: str, *arguments: str, script: str | None = None) -> str:
    return _execute([_tool(variant, action), *arguments], script)


def _execute(command: list[str], script: str | None = None) -> str:
    name = os.path.basename(command[0])
    try:
        done = subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            timeout=PATIENCE,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise ToolError(f"{name} did not end within {PATIENCE} s") from None
    except OSError as error:
        raise ToolError(f"{name}: {(error.strerror or str(error)).lower()}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("#")]
        why = lines[0].strip() if lines else f"exit status {done.returncode}"
        # iptables-legacy opens a raw socket, iptables-nft does not.
        hint = "; iptables-legacy needs CAP_NET_RAW" if "you must be root" in why else ""
        raise ToolError(f"{name}: {why}{hint}")
    return done.stdout
