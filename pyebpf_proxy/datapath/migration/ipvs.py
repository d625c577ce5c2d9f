# SPDX-License-Identifier: Apache-2.0
"""Leftovers of kube-proxy's mode ipvs: virtual servers, the device kube-ipvs0, ipsets.

A netlink query of IPVS or ipset loads their modules, so each is queried only if it is loaded already:
``/proc/net/ip_vs``, ``/sys/module/ip_set``.

Addresses in ``ipvs.excludeCIDRs`` belong to other software (keepalived, for example): their virtual servers stay, and
so do the addresses on kube-ipvs0, and with them the device.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyebpf_proxy.config.addresses import Address, Network
from pyebpf_proxy.datapath.netlink import uapi
from pyebpf_proxy.datapath.netlink.messages import attribute, text, values
from pyebpf_proxy.datapath.netlink.rtnetlink import WITHOUT_STATISTICS, Rtnetlink
from pyebpf_proxy.datapath.report import Report

DEVICE = "kube-ipvs0"
KIND = "dummy"
MAX_SET_NAME = 31
#: kube-proxy names the IPv6 sets KUBE-6-… and truncates the names to the kernel's limit.
SETS_IPV4 = (
    "KUBE-LOOP-BACK",
    "KUBE-CLUSTER-IP",
    "KUBE-EXTERNAL-IP",
    "KUBE-EXTERNAL-IP-LOCAL",
    "KUBE-LOAD-BALANCER",
    "KUBE-LOAD-BALANCER-LOCAL",
    "KUBE-LOAD-BALANCER-FW",
    "KUBE-LOAD-BALANCER-SOURCE-IP",
    "KUBE-LOAD-BALANCER-SOURCE-CIDR",
    "KUBE-NODE-PORT-TCP",
    "KUBE-NODE-PORT-LOCAL-TCP",
    "KUBE-NODE-PORT-UDP",
    "KUBE-NODE-PORT-LOCAL-UDP",
    "KUBE-NODE-PORT-SCTP-HASH",
    "KUBE-NODE-PORT-LOCAL-SCTP-HASH",
    "KUBE-HEALTH-CHECK-NODE-PORT",
    "KUBE-IPVS-IPS",
)
SETS = (*SETS_IPV4, *(name.replace("KUBE-", "KUBE-6-", 1)[:MAX_SET_NAME] for name in SETS_IPV4))


class VirtualServer(NamedTuple):
    """An IPVS service: an address, a port and a protocol."""

    address: Address
    protocol: int
    port: int

    def __str__(self) -> str:
        return f"{self.address} port {self.port} protocol {self.protocol}"


def excluded(address: Address, cidrs: Iterable[Network]) -> bool:
    """Whether ``ipvs.excludeCIDRs`` contains an address."""
    return any(address in cidr for cidr in cidrs if cidr.version == address.version)


def to_remove(servers: Iterable[VirtualServer], cidrs: Sequence[Network]) -> list[VirtualServer]:
    """The virtual servers that a clean-up removes."""
    return [server for server in servers if not excluded(server.address, cidrs)]


def device_exists() -> bool:
    """Whether a device with mode ipvs's name exists."""
    try:
        socket.if_nametoindex(DEVICE)
    except OSError:
        return False
    return True


def ipvs_loaded() -> bool:
    return Path("/proc/net/ip_vs").exists()


def ipset_loaded() -> bool:
    return Path("/sys/module/ip_set").exists()


def remove_servers(cidrs: Sequence[Network], report: Report) -> None:
    """Remove the virtual servers of this network namespace, except those with an excluded address."""
    from pyroute2 import IPVS, IPVSService

    with IPVS() as ipvs:
        for server in to_remove(filter(None, map(_server, ipvs.service("dump"))), cidrs):
            try:
                ipvs.service("del", IPVSService(addr=str(server.address), protocol=server.protocol, port=server.port))
            except Exception as error:  # pyroute2's own errors are not OSErrors
                report.problems.append(f"IPVS service {server}: {error}")
            else:
                report.removed.append(f"IPVS service {server}")


def _server(message: Any) -> VirtualServer | None:
    """A service of a dump; None for a service by firewall mark, which kube-proxy never creates."""
    service = message.get_attr("IPVS_CMD_ATTR_SERVICE")
    address = service.get_attr("IPVS_SVC_ATTR_ADDR")
    if address is None or service.get_attr("IPVS_SVC_ATTR_FWMARK"):
        return None
    return VirtualServer(
        ipaddress.ip_address(address),
        service.get_attr("IPVS_SVC_ATTR_PROTOCOL") or 0,
        service.get_attr("IPVS_SVC_ATTR_PORT") or 0,
    )


def remove_addresses(cidrs: Sequence[Network], report: Report, name: str = DEVICE, kind: str = KIND) -> None:
    """Remove the addresses of the device that are not excluded. A device of another kind is left alone."""
    with Rtnetlink() as netlink:
        index, found, addresses = _device(netlink, name)
        if not index or found != kind:
            return
        stays = any(excluded(_address(each), cidrs) for each in addresses)
        for each in addresses:
            address = _address(each)
            if excluded(address, cidrs) or address.is_link_local:
                continue
            family, length, _, _, _ = uapi.IFADDRMSG.unpack_from(each)
            message = uapi.IFADDRMSG.pack(family, length, 0, 0, index)
            message += attribute(uapi.IFA_LOCAL, address.packed) + attribute(uapi.IFA_ADDRESS, address.packed)
            netlink.change(uapi.RTM_DELADDR, 0, message, f"delete {address} of {name}")
            if stays:
                report.removed.append(f"address {address} on {name}")


def remove_device(cidrs: Sequence[Network], report: Report, name: str = DEVICE, kind: str = KIND) -> None:
    """Remove the device, unless it has an excluded address. A device of another kind stays."""
    with Rtnetlink() as netlink:
        index, found, addresses = _device(netlink, name)
        if not index:
            return
        if found != kind:
            report.problems.append(f"device {name} is of kind {found or 'none'}, not {kind}: it stays")
            return
        if not any(excluded(_address(each), cidrs) for each in addresses):
            message = uapi.IFINFOMSG.pack(socket.AF_UNSPEC, 0, index, 0, 0)
            netlink.change(uapi.RTM_DELLINK, 0, message, f"delete device {name}")
            report.removed.append(f"device {name}")


def _device(netlink: Rtnetlink, name: str) -> tuple[int, str, list[bytes]]:
    """Index (0: there is no such device), kind and addresses of a device."""
    try:
        index = socket.if_nametoindex(name)
    except OSError:
        return 0, "", []
    every_link = bytes(uapi.IFINFOMSG.size) + WITHOUT_STATISTICS
    listed = netlink.list_all(uapi.RTM_GETLINK, every_link, "list devices")
    found = next(_kind(each) for each in listed if uapi.IFINFOMSG.unpack_from(each)[2] == index)
    every_address = netlink.list_all(uapi.RTM_GETADDR, bytes(uapi.IFADDRMSG.size), "list addresses")
    return index, found, [each for each in every_address if uapi.IFADDRMSG.unpack_from(each)[4] == index]


def _kind(link: bytes) -> str:
    info = values(values(link, uapi.IFINFOMSG.size).get(uapi.IFLA_LINKINFO, b""))
    return text(info.get(uapi.IFLA_INFO_KIND, b""))


def _address(message: bytes) -> Address:
    parts = values(message, uapi.IFADDRMSG.size)
    return ipaddress.ip_address(parts.get(uapi.IFA_LOCAL) or parts[uapi.IFA_ADDRESS])


def remove_sets(report: Report) -> None:
    """Remove kube-proxy's ipsets; after the rules that use them."""
    from pyroute2 import IPSet

    with IPSet() as ipset:
        for name in SETS:
            try:
                ipset.destroy(name)
            except Exception as error:  # pyroute2's own: NetlinkError, IPSetError
                if getattr(error, "code", None) != errno.ENOENT:
                    report.problems.append(f"ipset {name}: {_words(error)}")
            else:
                report.removed.append(f"ipset {name}")


def _words(error: Exception) -> str:
    return str(error.args[-1]) if error.args else type(error).__name__


def step(report: Report, what: str, action: Callable[[], None]) -> None:
    """Do one part; a failure is recorded as one problem and does not stop the other parts."""
    try:
        action()
    except Exception as error:  # pyroute2 has several kinds
        report.problems.append(f"{what}: {_words(error)}")
