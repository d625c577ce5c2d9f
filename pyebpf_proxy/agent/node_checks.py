# SPDX-License-Identifier: Apache-2.0
"""Checks before the first sync: are configuration, Node and kernel consistent? (spec/configuration §5.3, §5.4)"""

from __future__ import annotations

from pathlib import Path

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config import families
from pyebpf_proxy.config.families import FamilyValues
from pyebpf_proxy.services.model import IPFamily
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("config")


def check(values: FamilyValues, facts: NodeFacts, proc: Path = Path("/proc")) -> None:
    """Warn about inconsistencies. FatalError for those with which kube-proxy does not start either."""
    primary = families.primary_family(facts.node_ips)
    pod_cidrs = list(facts.node_cidrs.values())
    _warn(families.node_ports(values, facts.node_ips, pod_cidrs))
    dual_stack = has_ipv6(proc)
    if primary == IPFamily.IPV6 and not dual_stack:
        raise FatalError('no support for primary IP family "IPv6"')
    finding = families.wrong_families(values, primary, dual_stack=dual_stack, pod_cidrs=pod_cidrs)
    if finding.fatal:
        raise FatalError(f"{families.INCORRECT}: {finding}")
    _warn(finding)
    stack = "dual-stack" if dual_stack else "single-stack"
    _log.info(f"running in {stack} mode", primary="IPv4" if primary == IPFamily.IPV4 else "IPv6")


def families_of_node(proc: Path = Path("/proc")) -> tuple[IPFamily, ...]:
    """The IP families of this network namespace."""
    return tuple(IPFamily) if has_ipv6(proc) else (IPFamily.IPV4,)


def has_ipv6(proc: Path = Path("/proc")) -> bool:
    """Whether this network namespace has IPv6: the kernel supports it, and ``disable_ipv6`` is not set for all."""
    try:
        if not (proc / "net/if_inet6").exists():
            return False
        return (proc / "sys/net/ipv6/conf/all/disable_ipv6").read_text().strip() != "1"
    except OSError:
        return True


def _warn(finding: families.Finding) -> None:
    if finding.texts:
        _log.warning(families.INCOMPLETE, error=finding)
