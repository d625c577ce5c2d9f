# SPDX-License-Identifier: Apache-2.0
"""Faults of tables: conntrack is full, source ports are used up, maps are full."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from pyebpf_proxy.datapath.connections import ct_refusals
from pyebpf_proxy.lab.addresses import Dual, cluster_ip, vip
from pyebpf_proxy.lab.manifests import Object, Port, endpoint, endpoint_slice, service
from tests.faults.floods import datagrams, flooding, syns
from tests.faults.ground import NOWHERE, TARGET_PORT, VICTIM, VICTIM_UDP_PORT, Ground, answers, wait_until
from tests.support.damage import enter, full_conntrack

#: The number of the Service whose endpoint does not answer, and its port.
_SILENT, _SILENT_PORT = 13, 7000


@contextmanager
def conntrack_full(ground: Ground) -> Iterator[None]:
    """Full of answered flows, which the kernel does not evict."""
    with full_conntrack(ground.node.namespace) as top_up:
        # Entries of reset connections leave room.
        top_up()
        yield


@contextmanager
def conntrack_flooded(ground: Ground) -> Iterator[None]:
    """Full of unanswered flows, which the kernel evicts for new ones. More of them arrive all the time."""
    ground.proxy.apply("silent", _silent())
    try:
        wait_until(lambda: ground.node.namespace.call(_is_served), "the silent Service is served")
        target, ports = [vip(_SILENT).v4], [_SILENT_PORT]
        client = ground.lab.client
        with (
            full_conntrack(ground.node.namespace, answered=False),
            flooding(client, syns(NOWHERE, target, ports)),
            flooding(client, datagrams(NOWHERE, target, ports)),
        ):
            yield
            used = int(ground.node.namespace.run("sysctl", "-n", "net.netfilter.nf_conntrack_count"))
        ground.notes.append(f"{used} entries at the end")
    finally:
        ground.delete("silent", _silent())


def _silent() -> list[Object]:
    """A Service with one endpoint, on a node that does not exist, for TCP and UDP."""
    ports = [Port(name, _SILENT_PORT, TARGET_PORT, name.upper()) for name in ("tcp", "udp")]
    gone = [endpoint("198.19.255.254", "node2")]
    family = {"ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack", "clusterIPs": [cluster_ip(_SILENT).v4]}
    made = service("silent", ports, cluster_ip(_SILENT), vip=vip(_SILENT), **family)
    made["status"]["loadBalancer"]["ingress"] = [{"ip": vip(_SILENT).v4}]
    return [made, endpoint_slice("silent", 4, ports, gone)]


def _is_served() -> bool:
    """A ClusterIP without endpoints refuses; the silent one never answers."""
    try:
        socket.create_connection((cluster_ip(_SILENT).v4, _SILENT_PORT), timeout=0.2).close()
    except TimeoutError:
        return True
    except OSError:
        pass
    return False


def source_ports_used(family: int, protocol: str) -> Callable[[Ground], AbstractContextManager[None]]:
    """Every port that the node may use for masquerading to the victim's endpoint is in use."""

    @contextmanager
    def made(ground: Ground) -> Iterator[None]:
        target, ours = ground.lab.pods["victim"].address.of(family), ground.node.gateway.of(family)
        virtual = vip(VICTIM).of(family)
        port = 80 if protocol == "tcp" else VICTIM_UDP_PORT
        state = "-t 600 -u SEEN_REPLY,ASSURED" + (" --state ESTABLISHED" if protocol == "tcp" else "")
        client = (lambda n: f"2001:db8:99::{n >> 12:x}") if family == 6 else (lambda n: f"198.18.{n >> 12}.7")
        enter(
            ground.node.namespace,
            (
                f"-I -p {protocol} -s {client(n)} -d {virtual} --sport {n} --dport {port}"
                f" -r {target} -q {ours} --reply-port-src {TARGET_PORT} --reply-port-dst {n} {state}"
                for n in range(1, 65536)
            ),
        )
        try:
            before = ground.node.namespace.call(ct_refusals.read)["insert_failed"]
            # The victim's clients are refused, and not because an endpoint is missing.
            for _ in range(20):
                ground.lab.client.call(_ask, virtual, port, protocol)
            refused = ground.node.namespace.call(ct_refusals.read)["insert_failed"] - before
            if not refused:
                raise RuntimeError("no flow was refused")
            ground.notes.append(f"{refused} of 20 flows refused")
            yield
        finally:
            delete = ("conntrack", "-D", "-f", f"ipv{family}", "-p", protocol, "-r", target, "-q", ours)
            ground.node.namespace.run(*delete, check=False)

    return made


def _ask(address: str, port: int, protocol: str) -> None:
    if protocol == "tcp":
        answers(Dual(address, address), port, 0.1)
        return
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"?", (address, port))


#: Sizes of maps for ``maps_full``.
SMALL = dict.fromkeys(("frontends4", "frontends6", "services", "serviceNames", "slots"), 256)


@contextmanager
def maps_full(ground: Ground) -> Iterator[None]:
    """More Services of another namespace than the maps have room for."""
    objects = []
    for number in range(400):
        for each in ground.service(f"tenant-{number}", 0, "web-1"):
            each["metadata"]["namespace"] = "tenant"
            if each["kind"] == "Service":
                address = f"10.96.{4 + number // 200}.{number % 200 + 1}"
                each["spec"] |= {"clusterIP": address, "clusterIPs": [address]}
                each["spec"] |= {"ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack"}
            objects.append(each)
    ground.proxy.apply("tenant", objects)
    try:
        yield
    finally:
        ground.delete("tenant", objects)
