# SPDX-License-Identifier: Apache-2.0
"""From what the configuration asks for to the kernel's settings, one by one (spec/service-semantics §12). Pure.

IPVS' timeouts are mapped to conntrack's, since it is conntrack that keeps the flows here: ``tcpTimeout`` is that of
established connections, ``tcpFinTimeout`` that of FIN_WAIT (the only state IPVS means by it), ``udpTimeout`` both of
UDP's. Where section conntrack names the same one, ipvs' wins: unlike conntrack's it has no default, so who gives it
means it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyebpf_proxy.config.kernel import Conntrack, Ipvs, KernelSettings

HASHSIZE = "sys/module/nf_conntrack/parameters/hashsize"
#: The same number by another name.
BUCKETS = "proc/sys/net/netfilter/nf_conntrack_buckets"
CONNTRACK_MAX = "proc/sys/net/netfilter/nf_conntrack_max"
#: Kube-proxy's limit of what maxPerCore and the number of CPUs come to.
MAX_SCALED = 1 << 20

_NETFILTER = "proc/sys/net/netfilter/nf_conntrack_"
_IPV4 = "proc/sys/net/ipv4/"


@dataclass(frozen=True, slots=True)
class Setting:
    """One file below / and what is to stand in it."""

    path: str
    value: int
    #: The field of the configuration that asks for it, and what to say there to have it left alone.
    field: str
    leave: str
    #: What is larger already is left as it is; otherwise the value must be this one.
    at_least: bool = False
    #: That it cannot be had ends the start; otherwise a line is logged.
    fatal: bool = True
    #: There need not be such a file.
    optional: bool = False
    #: One value for the whole machine: where this network namespace may not change it, it is left alone.
    machine_wide: bool = False

    @property
    def name(self) -> str:
        """As people write it: ``net/netfilter/nf_conntrack_max``, and with its folder what is not in /proc/sys."""
        return self.path.removeprefix("proc/sys/") if self.path.startswith("proc/sys/") else f"/{self.path}"


#: While the fast path is on: conntrack does not see every sequence number then.
LIBERAL = Setting(_NETFILTER + "tcp_be_liberal", 1, "fastPath", "fastPath: false")
#: The same for resets: those are checked even by a liberal conntrack, and what it refuses is not translated.
ANY_RESET = Setting(_NETFILTER + "tcp_ignore_invalid_rst", 1, "fastPath", "fastPath: false")


def wanted(settings: KernelSettings, cpus: int) -> list[Setting]:
    """All settings in the order in which they are written; no file is named twice."""
    by_path: dict[str, Setting] = {}
    for setting in _all(settings, cpus):
        by_path[setting.path] = setting  # the place of the first, the value of the last
    return list(by_path.values())


def conntrack_max(settings: Conntrack, cpus: int) -> int:
    """Entries of the connection table, 0: left alone (spec/service-semantics §12).

    As kube-proxy has it, what the CPUs come to is limited to 1048576, and that limit is above ``min``, too.
    """
    if settings.max_per_core <= 0:
        return 0
    scaled = settings.max_per_core * cpus
    return MAX_SCALED if scaled > MAX_SCALED else max(scaled, settings.min)


def count_cpus(root: Path, fallback: int) -> int:
    """CPUs that are in use, by /sys/devices/system/cpu; ``fallback`` where it does not tell."""
    count = 0
    for cpu in (root / "sys/devices/system/cpu").glob("cpu[0-9]*"):
        try:
            int((cpu / "topology/core_id").read_text())
            online = cpu / "online"  # the first CPU has no such file
            count += not online.exists() or online.read_text().strip() != "0"
        except (OSError, ValueError):
            continue
    return count or fallback


def _all(settings: KernelSettings, cpus: int) -> Iterator[Setting]:
    yield from _conntrack(settings.conntrack, cpus)
    if settings.route_localnet:
        leave = "iptables.localhostNodePorts: false"
        yield Setting(_IPV4 + "conf/all/route_localnet", 1, "iptables.localhostNodePorts", leave)
    if settings.ipvs is not None:
        yield from _ipvs(settings.ipvs)


def _conntrack(settings: Conntrack, cpus: int) -> Iterator[Setting]:
    entries = conntrack_max(settings, cpus)
    if entries:
        field, leave = "conntrack.maxPerCore", "conntrack.maxPerCore: 0"
        yield Setting(CONNTRACK_MAX, entries, field, leave, machine_wide=True)
        yield Setting(HASHSIZE, entries // 4, field, leave, at_least=True, machine_wide=True)
    for name, field, value in (
        ("tcp_timeout_established", "tcpEstablishedTimeout", settings.tcp_established),
        ("tcp_timeout_close_wait", "tcpCloseWaitTimeout", settings.tcp_close_wait),
        ("tcp_be_liberal", "tcpBeLiberal", 1 if settings.tcp_be_liberal else None),
        ("udp_timeout", "udpTimeout", settings.udp),
        ("udp_timeout_stream", "udpStreamTimeout", settings.udp_stream),
    ):
        if value is not None:
            off = "false" if field == "tcpBeLiberal" else "0s"
            yield Setting(_NETFILTER + name, value, f"conntrack.{field}", f"conntrack.{field}: {off}")


def _ipvs(settings: Ipvs) -> Iterator[Setting]:
    mode = "another mode than ipvs"
    # There is no IPVS underneath; where somebody else has loaded it, it finds what it finds beside kube-proxy.
    # conn_reuse_mode is left alone, as kube-proxy leaves it on kernels from 5.9 on.
    for name in ("conntrack", "expire_nodest_conn", "expire_quiescent_template"):
        yield Setting(_IPV4 + f"vs/{name}", 1, "mode", mode, optional=True)
    yield Setting(_IPV4 + "ip_forward", 1, "mode", mode)
    if settings.strict_arp:
        yield Setting(_IPV4 + "conf/all/arp_ignore", 1, "ipvs.strictARP", "ipvs.strictARP: false")
        yield Setting(_IPV4 + "conf/all/arp_announce", 2, "ipvs.strictARP", "ipvs.strictARP: false")
    for name, field, value in (
        ("tcp_timeout_established", "tcpTimeout", settings.tcp),
        ("tcp_timeout_fin_wait", "tcpFinTimeout", settings.tcp_fin),
        ("udp_timeout", "udpTimeout", settings.udp),
        ("udp_timeout_stream", "udpTimeout", settings.udp),
    ):
        if value is not None:
            # Kube-proxy only logs that IPVS did not take a timeout.
            yield Setting(_NETFILTER + name, value, f"ipvs.{field}", f"ipvs.{field}: 0s", fatal=False)
