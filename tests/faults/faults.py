# SPDX-License-Identifier: Apache-2.0
"""Every fault. The modules of_*.py make and end them."""

from __future__ import annotations

from tests.faults import of_api, of_node, of_process, of_tables, of_traffic
from tests.faults.measure import Fault

_NO_FILES = "keeps nothing in a run folder"
_NO_BPF = "has no BPF programs"
FAULTS = {
    each.name: each
    for each in (
        Fault("syn-flood", "SYN flood from forged addresses to a Service, 10 000 a second", of_traffic.syn_flood),
        Fault("udp-flood", "UDP flood to closed NodePorts, 10 000 a second", of_traffic.udp_flood),
        Fault("scan", "scan of all VIPs from outside and of ClusterIPs from a pod, 20 000 SYNs a second",
              of_traffic.scan),
        Fault("conntrack-full", "conntrack's table is full of answered flows", of_tables.conntrack_full,
              affects_all=True, refuses=True),
        Fault("conntrack-flooded", "conntrack's table is full of unanswered flows; 10 000 SYNs and 10 000 datagrams"
              " a second to an endpoint that does not answer", of_tables.conntrack_flooded, seconds=10.0,
              affects_all=True, named=True),
        Fault("source-ports", "all ports for masquerading to one endpoint are in use, TCP over IPv4",
              of_tables.source_ports_used(4, "tcp"), refuses=True),
        Fault("source-ports-ipv6", "all these ports, TCP over IPv6", of_tables.source_ports_used(6, "tcp"),
              refuses=True),
        Fault("source-ports-udp", "all these ports, UDP over IPv4", of_tables.source_ports_used(4, "udp"),
              refuses=True),
        Fault("source-ports-udp-ipv6", "all these ports, UDP over IPv6", of_tables.source_ports_used(6, "udp"),
              refuses=True),
        Fault("maps-full", "400 Services of a tenant, room for 256 frontends", of_tables.maps_full, refuses=True,
              not_beside="has no maps of a fixed size", own={"maps": of_tables.SMALL}),
        Fault("manifest-churn", "a manifest changes 100 times a second", of_api.manifest_churn,
              not_beside="reads no manifests"),
        Fault("api-churn", "changes of EndpointSlices at the API server, 1 000 a second, for ten minutes",
              of_api.api_churn, seconds=600.0, api=True, healed=of_api.churn_is_applied),
        Fault("at-once", "100 000 objects at once at the API server: 20 000 Services, 80 000 EndpointSlices",
              of_api.at_once, seconds=30.0, api=True, healed=of_api.crowd_is_served),
        Fault("garbage", "the API server answers with garbage, watches too", of_api.garbage, api=True, named=True),
        Fault("certificate", "the proxy's client certificate expires, and is replaced", of_api.expired_certificate,
              seconds=10.0, api=True, named=True),
        Fault("authority", "the API server's certificate is of a new CA, which the proxy gets later",
              of_api.unknown_authority, seconds=10.0, api=True, named=True),
        Fault("disk-full", "the file system of the run folder is full", of_process.disk_full, named=True,
              not_beside=_NO_FILES),
        Fault("read-only", "the run folder is read-only", of_process.read_only, named=True, not_beside=_NO_FILES),
        Fault("descriptors", "the proxy gets no file descriptor", of_process.no_descriptors, named=True),
        Fault("stopped", "the proxy is stopped (SIGSTOP) for 20 s", of_process.stopped, seconds=20.0, named=True),
        Fault("killed", "the proxy is killed (SIGKILL), and started again", of_process.killed, named=True),
        Fault("memory", "the proxy reaches `memory.max`, is killed by the kernel, and started again",
              of_process.out_of_memory, named=True),
        Fault("quota", "the proxy has 5 % of a processor", of_process.small_quota, seconds=10.0),
        Fault("clock", "the proxy's wall clock steps a day forth and two days back, again and again",
              of_process.clock_steps, seconds=6.0, not_beside="its clock cannot be set alone",
              environment=of_process.clock_environment),
        Fault("netlink", "20 000 routes and 20 000 conntrack entries come and go, again and again; netlink sockets"
              " overrun", of_node.netlink_overrun, seconds=10.0),
        Fault("rules-flushed", "`nft flush ruleset`", of_node.rules_flushed, seconds=10.0, once=True,
              healed=of_node.has_rules),
        Fault("detached", "the BPF programs of all devices are detached", of_node.programs_detached, seconds=10.0,
              once=True, healed=of_node.has_programs, not_beside=_NO_BPF),
        Fault("sockets-detached", "the socket programs are detached, as if their cgroup was removed",
              of_node.sockets_detached, seconds=10.0, once=True, healed=of_node.has_socket_programs,
              not_beside=_NO_BPF),
        Fault("unmounted", "the bpffs with the pins is unmounted", of_node.pins_unmounted, healed=of_node.has_pins,
              not_beside=_NO_BPF),
        Fault("renamed", "the device of an endpoint's pod has another name", of_node.device_renamed),
        Fault("uplink-renamed", "the device to the outside has another name", of_node.uplink_renamed),
        Fault("moved", "the device of another endpoint's pod is in another network namespace, then back",
              of_node.device_moved, healed=of_node.victim_is_served),
        # So long because a connection fails once in a minute.
        Fault("neighbours", "all neighbour entries are deleted, five times a second", of_node.neighbours_deleted,
              seconds=180.0, kernels_own=True),
    )
}  # fmt: skip
