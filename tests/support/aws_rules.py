# SPDX-License-Identifier: Apache-2.0
"""The rules that AWS VPC CNI has written (tests/netns/attach/rulesets/record.sh)."""

from __future__ import annotations

import re

from tests import ROOT

FOLDER = ROOT / "tests/netns/attach/rulesets/aws-vpc-cni"


def _parts(name: str) -> dict[str, str]:
    return dict(re.findall(r"^== (.+)\n((?:(?!==).*\n)*)", (FOLDER / f"{name}.txt").read_text(), re.MULTILINE))


def _ip_rules(name: str) -> list[tuple[int, str, str]]:
    """Family, priority and rule."""
    parts = _parts(name)
    lines = [(family, line) for family in (4, 6) for line in parts[f"ip -{family} rule"].splitlines()]
    return [(family, line.partition(":")[0], line.partition(":")[2]) for family, line in lines]


def commands(name: str, variant: str) -> str:
    """A shell script that loads a recording's rules, by iptables of this variant, and its ip rules."""
    parts = _parts(name)
    found = [f"iptables-{variant}-restore <<'END'\n{parts['iptables-save']}END", f"nft -f - <<'END'\n{parts['nft']}END"]
    found += [f"ip -{family} rule add priority {priority} {rule}" for family, priority, rule in _ip_rules(name)]
    return "\n".join(found)


def removal(name: str, variant: str) -> str:
    """A shell script that removes them."""
    found = [f"iptables-{variant}-restore <<'END'\n*nat\nCOMMIT\n*mangle\nCOMMIT\nEND"]
    if _parts(name)["nft"]:
        found.append("nft delete table ip aws-cni")
    found += [f"ip -{family} rule del priority {priority}" for family, priority, _ in _ip_rules(name)]
    return "\n".join(found)
