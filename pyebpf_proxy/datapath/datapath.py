# SPDX-License-Identifier: Apache-2.0
"""The door of the data plane: loads, writes, attaches, follows the node, and leaves or removes it all."""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyebpf_proxy.config.addresses import Address
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.cleanup import cleanup
from pyebpf_proxy.datapath.connections.counts import Connections
from pyebpf_proxy.datapath.connections.drain import drain, pin_programs
from pyebpf_proxy.datapath.connections.liberal import make_liberal
from pyebpf_proxy.datapath.connections.promotion import Promoter, promoter
from pyebpf_proxy.datapath.connections.udp_cleanup import Cleaned, UdpCleanup, peers_in
from pyebpf_proxy.datapath.kube_proxy.monitor import KubeProxyMonitor
from pyebpf_proxy.datapath.loader import grace
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.loader.programs import LAYOUT_VERSION, LEAST_CONNECTIONS, Loaded, fast_path_is_built, load
from pyebpf_proxy.datapath.netfilter.cluster_addresses import ClusterAddresses
from pyebpf_proxy.datapath.netfilter.host_rules import HostRules
from pyebpf_proxy.datapath.netfilter.nft import NftError, Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour, Prefix
from pyebpf_proxy.datapath.node import cgroups, mounts, sysctls
from pyebpf_proxy.datapath.node.fast_path import FastPath
from pyebpf_proxy.datapath.node.frames import Frames, attach_frames
from pyebpf_proxy.datapath.node.links import MAPS, Node
from pyebpf_proxy.datapath.node.node_settings import ANY_RESET, LIBERAL
from pyebpf_proxy.datapath.settings import (
    beside_fast_path,
    conntrack_is_liberal,
    host_traffic,
    map_sizes,
    node_config,
    settings,
    xdp_config,
)
from pyebpf_proxy.datapath.tables import excluded_pods
from pyebpf_proxy.datapath.tables.other_layouts import OtherLayouts
from pyebpf_proxy.datapath.tables.writer import Writer
from pyebpf_proxy.datapath.view import flow_table, view
from pyebpf_proxy.errors import DatapathError
from pyebpf_proxy.log import Logger
from pyebpf_proxy.node_facts import NodeFacts
from pyebpf_proxy.services.model import ServicePort, ServicePortName

Delta = Mapping[ServicePortName, ServicePort | None]

_log = Logger("datapath")


@dataclass
class _Parts:
    """What there is while the data plane runs."""

    loaded: Loaded
    table: Table
    node: Node
    writer: Writer
    clusters: ClusterAddresses
    #: As it shall be; what of it the table has, the table knows.
    host_rules: HostRules
    udp: UdpCleanup
    #: Serving endpoints of UDP services have changed since the last clean-up.
    udp_touched: bool
    #: None: it is off.
    fast: FastPath | None = None
    #: The same.
    promoter: Promoter | None = None
    #: Why packets of the node are not served as they shall be; empty: they are.
    host_problem: str = ""
    #: None: there is no XDP.
    frames: Frames | None = None


class Datapath:
    """One instance in the kernel. Making it does nothing; ``start`` does everything, ``close`` leaves everything."""

    def __init__(self, effective: Effective, warn_node: sysctls.WarnNode | None = None) -> None:
        """``warn_node``: where a Warning event on this Node goes, by reason and text."""
        self._effective = effective
        self._warn_node = warn_node
        self._stack = ExitStack()
        self._parts: _Parts | None = None
        self._counters: tuple[Mapping[str, bytes], Map] | None = None
        self._behaviour = Behaviour(effective.masquerade_mark, refuse_unknown=effective.nft_mode)
        self._beside = KubeProxyMonitor(effective.ipvs_exclude_cidrs)
        #: Told of every clean-up of stale UDP flows, in the loop's thread.
        self.on_cleaned: Callable[[Cleaned], None] = lambda cleaned: None

    # ---- start and end -----------------------------------------------------------------------------------------

    def start(self, facts: NodeFacts, wanted: Delta) -> Collection[str]:
        """Load, adopt what a former run left, make the maps complete, then attach. Returns problems in words.

        Raises DatapathError. Then a node that carried nothing of ours carries nothing; one that did goes on as it was.
        """
        with self._undone_if_it_fails():
            self._parts = parts = self._start(facts, wanted)
            self._stack.callback(parts.node.follow(asyncio.get_running_loop(), _log.error))
            self._count_connections(parts)
            self._open_fast_path(parts)
            if parts.frames is not None:
                parts.frames.follow(asyncio.get_running_loop())
            # Not before: until everything is attached, kube-proxy's rules carry the traffic.
            self._beside.replaced()
            return _problems(parts)

    def prepare(self) -> None:
        """The part of ``start`` that makes places: mounts, the nft table, which brings conntrack, and node settings."""
        with self._undone_if_it_fails():
            self._prepare()

    def close(self) -> None:
        """Let go of everything. What is attached stays and works."""
        self._beside.close()
        self._counters = None
        self._parts = None
        self._stack.close()

    def present(self) -> bool:
        """Whether this instance has anything in the kernel that works without the agent."""
        directory = self._effective.directory
        instance = mounts.instance_name(directory)
        places = (path for path in mounts.bpffs_candidates(directory) if mounts.holds_pins(path))
        return any((place / mounts.FOLDER / instance).is_dir() for place in places)

    @contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        fresh = not self.present()
        try:
            with _in_words():
                yield
        except BaseException:
            self.close()
            if fresh:
                for problem in cleanup(self._effective.directory).problems:
                    _log.error("a failed start could not be undone", error=problem)
            raise

    def _prepare(self) -> tuple[Path, Table]:
        directory = self._effective.directory
        bpffs = mounts.ensure_bpffs(directory)
        if bpffs.warning:
            _log.warning(bpffs.warning)
        # Before the programs: it brings conntrack and NAT, whose functions they call.
        table = Table(mounts.table_name(directory))
        kernel = self._effective.kernel
        # What we make so ourselves, for the fast path, is no word of somebody's.
        others = conntrack_is_liberal() and not sysctls.held(LIBERAL, directory)
        liberal = kernel.conntrack.tcp_be_liberal or others
        self._behaviour = self._behaviour._replace(
            drop_invalid=not self._effective.nft_mode and not liberal,
            mark_datagrams=self._effective.socket_lb != "off" and table.knows_sockets(),
        )
        wanted = bool(self._effective.fast_path) and fast_path_is_built()
        self._behaviour = beside_fast_path(self._behaviour, wanted)
        table.ensure(self._behaviour)
        # After conntrack is there, before its timeouts are read for the programs.
        sysctls.apply(kernel, directory, self._warn_node)
        return bpffs.path, table

    def _start(self, facts: NodeFacts, wanted: Delta) -> _Parts:
        effective = self._effective
        directory = effective.directory
        bpffs, table = self._prepare()
        pins = mounts.pin_directory(bpffs, directory, LAYOUT_VERSION)
        why = ""
        if effective.fast_path and fast_path_is_built():
            why = sysctls.hold(LIBERAL, directory) or sysctls.hold(ANY_RESET, directory)
        wanted_settings = replace(
            settings(effective, facts),
            fast_path=bool(effective.fast_path) and not why,
            mark_datagrams=self._behaviour.mark_datagrams,
        )
        if not wanted_settings.fast_path:
            # A former run may have had one. Its flows are nothing that the next programs would look at.
            drain(pins)
        loaded = load(wanted_settings, pins / "maps", map_sizes(effective))
        if why := why or loaded.why_not_fast:
            loaded.why_not_fast = why
            say = _log.info if effective.fast_path == "auto" else _log.warning
            say("there is no fast path", why=why)
        self._stack.callback(loaded.close)
        for name, (old, new) in loaded.resized.items():
            _log.info("a map has another size", map=name, old=old, new=new)
        self._counters = _counters(loaded), loaded.maps["counters"]
        self._behaviour = beside_fast_path(self._behaviour, loaded.settings.fast_path)
        table.ensure(self._behaviour)
        self._say(loaded)
        if "excluded_pods" in loaded.maps:
            excluded_pods.write(loaded.maps["excluded_pods"], loaded.sock.btf, effective.socket_lb_exclude)
        # Until ours are attached, the programs of a former run may go by other maps, where the same ids mean others.
        writer = Writer(loaded, table.update, max(table.elements, default=0))
        # In one step: what a former run left keeps no address that is another's by now.
        writer.apply(wanted, complete=True)
        # What the writer has adopted; what else the nft table has from before goes when our programs are in place.
        backends = writer.netfilter_backends
        table.update(backends)
        clusters = ClusterAddresses()
        clusters.apply(wanted)
        table.set_ports(clusters.ports)
        table.set_addresses("cluster_ips", map(_prefix, clusters.all))
        table.set_addresses("service_cidrs", _prefixes(facts))
        host_rules = HostRules(host_traffic(effective, facts))
        host_rules = host_rules.after(wanted) or host_rules
        udp = UdpCleanup(peers_in(loaded.maps, loaded.sock.btf))
        udp_touched = udp.apply(wanted)
        nodes_maps = {name: loaded.maps[name] for name in MAPS}
        tcx = mounts.tcx_directory(bpffs, directory)
        node = Node(directory, node_config(effective, facts), nodes_maps, loaded.tc.btf, _log.error, tcx)
        self._stack.callback(node.close)
        parts = _Parts(loaded, table, node, writer, clusters, host_rules, udp, udp_touched)
        if effective.socket_lb == "off":
            # Before the socket programs of a former run are detached.
            self._serve_host(parts, host_rules)
        former = OtherLayouts(pins, loaded, writer)
        former.take_over()
        former.drain()
        # The maps are complete: what is attached from here on finds everything.
        parts.frames = self._attach(loaded, node, pins)
        former.retire()
        grace.wait()
        table.replace(backends)
        self._serve_host(parts, host_rules)
        return parts

    def _attach(self, loaded: Loaded, node: Node, pins: Path) -> Frames | None:
        found = self._attach_sockets(loaded, pins / "links") if self._effective.socket_lb != "off" else "none"
        if loaded.settings.fast_path:
            pin_programs(loaded.tc.programs, pins)
        node.attach({name: program.fd for name, program in loaded.tc.programs.items()})
        # After tc, which takes what XDP leaves.
        frames = attach_frames(loaded, node, xdp_config(self._effective), pins / "xdp")
        if frames is not None:
            self._stack.callback(frames.close)
        if self._effective.socket_lb == "off" and cgroups.detach(pins / "links"):
            _log.info("the socket programs of a former run are detached")
        loaded.attached()
        if not loaded.settings.fast_path and _holds_settings(self._effective.directory):
            _fast_path_is_off(self._effective)
        _log.info("attached", devices=len(node.attached), cgroup=found, pins=pins)
        return frames

    def _attach_sockets(self, loaded: Loaded, links: Path) -> str:
        cgroup = mounts.open_cgroup2()
        if cgroup.warning:
            _log.warning(cgroup.warning)
        try:
            cgroups.attach(loaded.sock.programs, cgroup.descriptor, links)
        finally:
            os.close(cgroup.descriptor)
        return cgroup.found

    def _count_connections(self, parts: _Parts) -> None:
        """Where the scheduler goes by connections, somebody has to count them."""
        if parts.loaded.settings.scheduler < LEAST_CONNECTIONS:
            return
        loaded, writer = parts.loaded, parts.writer
        connections = Connections(loaded.maps, loaded.tc.btf, writer.backends_of, writer.has_backend)
        task = asyncio.create_task(connections.run(), name="connections")
        self._stack.callback(task.cancel)

    def _open_fast_path(self, parts: _Parts) -> None:
        loaded = parts.loaded
        if not loaded.settings.fast_path:
            return
        btf, word = loaded.tc.btf, loaded.maps["fast_path"]
        heed = self._effective.fast_path == "auto"
        parts.fast = FastPath(word, btf.struct("fast_path"), btf.enum("reason"), parts.table.name, heed)
        if parts.frames is not None:
            parts.frames.on_written = parts.fast.devices_moved
        parts.node.on_devices = parts.fast.devices_moved
        self._stack.callback(parts.fast.close)
        parts.fast.follow(asyncio.get_running_loop())
        parts.promoter = promoter(loaded.maps, loaded.tc.programs, btf)
        self._stack.callback(asyncio.create_task(parts.promoter.run(), name="promoter").cancel)
        _log.info("flows take the fast path", entries=loaded.maps["flows"].max_entries)

    # ---- while it runs -----------------------------------------------------------------------------------------

    def apply(self, delta: Delta, complete: bool = False) -> Collection[str]:
        """Write the service ports that differ; ``complete``: there are no others. Returns all problems, in words."""
        parts = self._running()
        with _in_words():
            parts.writer.apply(delta, complete)
            if complete:
                parts.table.replace(parts.writer.netfilter_backends)
            self._serve_host(parts, parts.host_rules.after(delta, complete))
            if parts.udp.apply(delta):
                parts.udp_touched = True
                if parts.fast is not None:
                    parts.fast.moved()
            if self._effective.nft_mode:
                moved = parts.clusters.apply(delta)
                # First: what is defined must not be refused.
                parts.table.change_ports(moved.ports_added, moved.ports_removed)
                parts.table.change_addresses("cluster_ips", map(_prefix, moved.added), map(_prefix, moved.removed))
        return _problems(parts)

    def node_changed(self, facts: NodeFacts) -> None:
        """Other Nodes: their ServiceCIDRs, and which addresses of ours serve NodePorts. New flows go by it."""
        parts = self._running()
        with _in_words():
            parts.table.set_addresses("service_cidrs", _prefixes(facts))
            self._serve_host(parts, parts.host_rules.with_traffic(host_traffic(self._effective, facts)))
            parts.node.configure(node_config(self._effective, facts))

    def refresh(self) -> None:
        """Mend what others may have changed: the nft table. Costs little when nobody has. Devices are followed."""
        parts = self._running()
        with _in_words():
            parts.table.ensure(self._behaviour)
            parts.writer.recount_clients()
        self._beside.look()
        if parts.frames is not None:
            parts.frames.look()

    async def collect(self) -> None:
        """Remove old versions once no program can be reading them; then end stale UDP flows and sockets."""
        parts = self._running()
        with _in_words():
            await parts.writer.collect_async()
            while parts.udp_touched:
                parts.udp_touched = False
                for cleaned in await parts.udp.clean():
                    self._tell_cleaned(cleaned)

    def reasons(self) -> Mapping[str, int]:
        """How many packets and socket calls by reason, all CPUs together. Safe in any thread."""
        if self._counters is None:
            return {}
        keys, counters = self._counters
        return {
            name: sum(int.from_bytes(value, sys.byteorder) for value in counters.lookup_cpus(key) or ())
            for name, key in keys.items()
        }

    def refusals(self) -> Mapping[str, str]:
        """What was asked for and is not there, and why. Safe in any thread."""
        return {} if self._parts is None else self._parts.loaded.refusals

    def xdp_devices(self) -> Mapping[str, str]:
        """Devices that carry our XDP program, and its mode. Safe in any thread."""
        frames = self._parts.frames if self._parts is not None else None
        return {} if frames is None else frames.attached()

    def addresses(self) -> list[Address]:
        """Every address of a device of this node, as far as netlink has told."""
        return [] if self._parts is None else self._parts.node.addresses

    def fill(self) -> Mapping[str, tuple[int, int]]:
        """Entries used and room of every map that the control plane fills. Counted, not read. Safe in any thread."""
        parts = self._parts
        if parts is None:
            return {}
        table = flow_table(parts.loaded)
        return {**parts.writer.fill(), **({} if table is None else {"flows": table[:2]})}

    def view(self) -> Mapping[str, Any]:
        """What ``view`` says; empty before the start. Safe in any thread."""
        parts = self._parts
        return {} if parts is None else view(parts.loaded, parts.node, parts.fast, parts.promoter)

    # ---- parts -------------------------------------------------------------------------------------------------

    def _running(self) -> _Parts:
        if self._parts is None:
            raise RuntimeError("the data plane was not started")
        return self._parts

    @staticmethod
    def _serve_host(parts: _Parts, changed: HostRules | None) -> None:
        """What nftables refuses here (an expression that this kernel lacks) must not keep others from being served."""
        if changed is None:
            return
        parts.host_rules = changed
        try:
            parts.table.set_host_rules(changed)
        except NftError as error:
            parts.host_problem = f"what the node itself sends is not served as it should be: {error}"
        else:
            parts.host_problem = ""

    def _tell_cleaned(self, cleaned: Cleaned) -> None:
        self.on_cleaned(cleaned)
        if cleaned.flows or cleaned.sockets:
            family = cleaned.family.name
            _log.info("stale UDP ended", family=family, flows=cleaned.flows, sockets=cleaned.sockets)

    @staticmethod
    def _say(loaded: Loaded) -> None:
        if loaded.why_not_pods:
            _log.warning("sockets of pods are not translated, tc serves them", why=loaded.why_not_pods)
        if loaded.why_no_lookup:
            _log.info("conntrack is not asked before a flow is opened", why=loaded.why_no_lookup)


def _problems(parts: _Parts) -> list[str]:
    problems = [str(problem) for problem in parts.writer.problems.values()]
    return [*problems, parts.host_problem] if parts.host_problem else problems


def _holds_settings(directory: Path) -> bool:
    return sysctls.held(LIBERAL, directory) or sysctls.held(ANY_RESET, directory)


def _fast_path_is_off(effective: Effective) -> None:
    """It was on before: connections that it carried must go on when conntrack is strict again."""
    if effective.kernel.conntrack.tcp_be_liberal:
        return
    try:
        _log.info("the fast path is off", connections=make_liberal())
        _, problems = sysctls.restore(effective.directory, holder=LIBERAL.field)
    except OSError as error:
        problems = [str(error)]
    for problem in problems:
        _log.error("a setting of the fast path stays as it is", error=problem)


def _prefix(address: bytes) -> Prefix:
    return address, 8 * len(address)


def _prefixes(facts: NodeFacts) -> set[Prefix]:
    return {(network.network_address.packed, network.prefixlen) for network in facts.service_cidrs}


def _counters(loaded: Loaded) -> dict[str, bytes]:
    """Keys of the reasons' counters, by the reasons' names."""
    hidden = ("REASON_UNSPECIFIED", "REASON_COUNT")
    numbers = loaded.tc.btf.enum("reason")
    return {name.lower(): struct.pack("=I", number) for name, number in numbers.items() if name not in hidden}


@contextmanager
def _in_words() -> Iterator[None]:
    """What the kernel refuses, as the one error that the loop knows."""
    try:
        yield
    except OSError as error:
        raise DatapathError(str(error)) from error
