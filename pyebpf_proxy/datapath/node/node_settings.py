# SPDX-License-Identifier: Apache-2.0
"""Derives the settings of the kernel from the configuration (spec/service-semantics §12). Pure.

IPVS's timeouts are mapped to those of conntrack, which keeps the flows here: ``tcpTimeout`` to that of established
connections, ``tcpFinTimeout`` to that of FIN_WAIT (the only state that IPVS uses it for), ``udpTimeout`` to both of
UDP. If section conntrack sets the same one, ipvs has precedence: unlike conntrack's, its fields have no default, so a
value is deliberate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyebpf_proxy.config.kernel import Conntrack, Ipvs, KernelSettings

HASHSIZE = "sys/module/nf_conntrack/parameters/hashsize"
#: The same value under another name.
BUCKETS = "proc/sys/net/netfilter/nf_conntrack_buckets"
CONNTRACK_MAX = "proc/sys/net/netfilter/nf_conntrack_max"
#: kube-proxy's limit of maxPerCore times the number of CPUs.
MAX_SCALED = 1 << 20

_NETFILTER = "proc/sys/net/netfilter/nf_conntrack_"
_IPV4 = "proc/sys/net/ipv4/"


@dataclass(frozen=True, slots=True)
class Setting:
    """One file below / and its wanted value."""

    path: str
    value: int
    #: The field of the configuration that requires it, and the value of that field that leaves it alone.
    field: str
    leave: str
    #: A larger value is left as it is; otherwise the value must be exactly this one.
    at_least: bool = False
    #: A failure ends the start; otherwise it is logged.
    fatal: bool = True
    #: The file may be missing.
    optional: bool = False
    #: One value for the whole machine: if this network namespace may not change it, it is left alone.
    machine_wide: bool = False

    @property
    def name(self) -> str:
        """Its usual name: ``net/netfilter/nf_conntrack_max``; with the full path if it is not in /proc/sys."""
        return self.path.removeprefix("proc/sys/") if self.path.startswith("proc/sys/") else f"/{self.path}"


#: While the fast path is on, because conntrack then does not see every sequence number.
LIBERAL = Setting(_NETFILTER + "tcp_be_liberal", 1, "fastPath", "fastPath: false")
#: The same for resets: even a liberal conntrack checks them, and does not translate a refused one.
ANY_RESET = Setting(_NETFILTER + "tcp_ignore_invalid_rst", 1, "fastPath", "fastPath: false")
#: The same for its timeout of connections with data that is not acknowledged, five minutes: conntrack does not see the
#: acknowledgements that the fast path sends. A connection that is idle for longer would lose its entry. The value is
#: longer than the timeout of established connections, and every kernel accepts it (INT_MAX / HZ).
UNACKNOWLEDGED = Setting(
    _NETFILTER + "tcp_timeout_unacknowledged", 2_000_000, "fastPath", "fastPath: false", at_least=True
)
FAST_PATH = (LIBERAL, ANY_RESET, UNACKNOWLEDGED)
ROUTE_LOCALNET = Setting(
    _IPV4 + "conf/all/route_localnet", 1, "iptables.localhostNodePorts", "iptables.localhostNodePorts: false"
)

#: Every file that the proxy changes.
PATHS = frozenset(
    (
        HASHSIZE,
        BUCKETS,
        CONNTRACK_MAX,
        *(setting.path for setting in FAST_PATH),
        *(f"{_NETFILTER}tcp_timeout_{state}" for state in ("established", "close_wait", "fin_wait")),
        *(f"{_NETFILTER}udp_timeout{stream}" for stream in ("", "_stream")),
        *(f"{_IPV4}vs/{name}" for name in ("conntrack", "expire_nodest_conn", "expire_quiescent_template")),
        ROUTE_LOCALNET.path,
        *(f"{_IPV4}conf/all/{name}" for name in ("arp_ignore", "arp_announce")),
        f"{_IPV4}ip_forward",
    )
)


def wanted(settings: KernelSettings, cpus: int) -> list[Setting]:
    """All settings in the order in which they are written; no file occurs twice."""
    by_path: dict[str, Setting] = {}
    for setting in _all(settings, cpus):
        by_path[setting.path] = setting  # the position of the first, the value of the last
    return list(by_path.values())


def conntrack_max(settings: Conntrack, cpus: int) -> int:
    """Entries of the connection table, 0: left alone (spec/service-semantics §12).

    As in kube-proxy, the value from the CPUs is limited to 1048576, and that limit overrides ``min``.
    """
    if settings.max_per_core <= 0:
        return 0
    scaled = settings.max_per_core * cpus
    return MAX_SCALED if scaled > MAX_SCALED else max(scaled, settings.min)


def count_cpus(root: Path, fallback: int) -> int:
    """CPUs in use, from /sys/devices/system/cpu; ``fallback`` if it is not readable."""
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
        yield ROUTE_LOCALNET
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
    # IPVS is not used here. If other software has loaded it, these are as with kube-proxy.
    # conn_reuse_mode is left alone, as kube-proxy does from Linux 5.9 on.
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
            # kube-proxy only logs that IPVS did not accept a timeout.
            yield Setting(_NETFILTER + name, value, f"ipvs.{field}", f"ipvs.{field}: 0s", fatal=False)
