# SPDX-License-Identifier: Apache-2.0
"""The interface of the data plane: load, write, attach, follow the node; then leave everything or remove it."""

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

from pyebpf_proxy.common.errors import DatapathError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.config.addresses import Address
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.cleanup import cleanup
from pyebpf_proxy.datapath.connections.counts import Connections
from pyebpf_proxy.datapath.connections.ct_refusals import ConntrackRefusals
from pyebpf_proxy.datapath.connections.drain import drain, pin_programs
from pyebpf_proxy.datapath.connections.liberal import make_liberal
from pyebpf_proxy.datapath.connections.promotion import Promoter, promoter
from pyebpf_proxy.datapath.connections.udp_cleanup import Cleaned, UdpCleanup, peers_in
from pyebpf_proxy.datapath.loader import grace
from pyebpf_proxy.datapath.loader.libbpf import Map
from pyebpf_proxy.datapath.loader.programs import LAYOUT_VERSION, LEAST_CONNECTIONS, Loaded, fast_path_is_built, load
from pyebpf_proxy.datapath.loader.reasons import reasons
from pyebpf_proxy.datapath.maps import excluded_pods
from pyebpf_proxy.datapath.maps.other_layouts import OtherLayouts
from pyebpf_proxy.datapath.maps.writer import Writer
from pyebpf_proxy.datapath.migration.monitor import KubeProxyMonitor
from pyebpf_proxy.datapath.netfilter.cluster_addresses import ClusterAddresses
from pyebpf_proxy.datapath.netfilter.host_rules import HostRules
from pyebpf_proxy.datapath.netfilter.nft import NftError, Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour, Prefix
from pyebpf_proxy.datapath.netfilter.table_watch import TableWatch
from pyebpf_proxy.datapath.node import cgroups, mounts, sysctls
from pyebpf_proxy.datapath.node.fast_path import FastPath
from pyebpf_proxy.datapath.node.frames import Frames, attach_frames
from pyebpf_proxy.datapath.node.links import MAPS, Node
from pyebpf_proxy.datapath.node.node_settings import ANY_RESET, LIBERAL
from pyebpf_proxy.datapath.node.pins import KeptPins
from pyebpf_proxy.datapath.settings import (
    beside_fast_path,
    conntrack_is_liberal,
    host_traffic,
    map_sizes,
    node_config,
    settings,
    xdp_config,
)
from pyebpf_proxy.datapath.view import flow_table, view
from pyebpf_proxy.services.model import ServicePort, ServicePortName
from pyebpf_proxy.services.node_facts import NodeFacts

Delta = Mapping[ServicePortName, ServicePort | None]

_log = Logger("datapath")


@dataclass
class _Parts:
    """The parts of a running data plane."""

    loaded: Loaded
    table: Table
    node: Node
    writer: Writer
    clusters: ClusterAddresses
    #: The wanted rules; the table knows which of them it has.
    host_rules: HostRules
    udp: UdpCleanup
    #: Serving endpoints of UDP services have changed since the last clean-up.
    udp_touched: bool
    #: All pins, also if their bpffs is unmounted.
    pins: KeptPins
    #: None: the fast path is off.
    fast: FastPath | None = None
    #: None: the fast path is off.
    promoter: Promoter | None = None
    #: Why packets of the node are not served as configured; empty: they are.
    host_problem: str = ""
    #: None: XDP is off.
    frames: Frames | None = None


class Datapath:
    """One instance in the kernel. The constructor does nothing; ``close`` keeps what ``start`` has attached."""

    def __init__(self, effective: Effective, warn_node: sysctls.WarnNode | None = None) -> None:
        """``warn_node``: called with reason and text to record a Warning event for this Node."""
        self._effective = effective
        self._warn_node = warn_node
        self._stack = ExitStack()
        self._parts: _Parts | None = None
        self._counters: tuple[Mapping[str, bytes], Map] | None = None
        self._behaviour = Behaviour(effective.masquerade_mark, refuse_unknown=effective.nft_mode)
        self._beside = KubeProxyMonitor(effective.ipvs_exclude_cidrs)
        self._refused = ConntrackRefusals()
        #: Called after every clean-up of stale UDP flows, in the event loop's thread.
        self.on_cleaned: Callable[[Cleaned], None] = lambda cleaned: None

    # ---- start and end -----------------------------------------------------------------------------------------

    def start(self, facts: NodeFacts, wanted: Delta) -> Collection[str]:
        """Load, adopt the state of a former run, complete the maps, then attach. Returns problems as text.

        Raises DatapathError. The node then has no programs of this instance, or the old ones keep working.
        """
        with self._undone_if_it_fails():
            self._parts = parts = self._start(facts, wanted)
            self._stack.callback(parts.node.follow(asyncio.get_running_loop(), _log.error))
            watch = TableWatch(parts.table.name, self._table_touched)
            self._stack.callback(watch.close)
            watch.follow(asyncio.get_running_loop())
            self._count_connections(parts)
            self._open_fast_path(parts)
            parts.pins.follow(asyncio.get_running_loop())
            self._stack.callback(asyncio.create_task(self._refused.run(), name="conntrack's refusals").cancel)
            if parts.frames is not None:
                parts.frames.follow(asyncio.get_running_loop())
            # Not earlier: until everything is attached, kube-proxy's rules carry the traffic.
            self._beside.replaced()
            return _problems(parts)

    def prepare(self) -> None:
        """The preparing part of ``start``: mounts, the nft table (which loads conntrack) and node settings."""
        with self._undone_if_it_fails():
            self._prepare()

    def close(self) -> None:
        """Release everything. Attached programs stay and keep working."""
        self._beside.close()
        self._counters = None
        self._parts = None
        self._stack.close()

    def present(self) -> bool:
        """Whether this instance has programs in the kernel that work without the agent."""
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
        # Before the programs: the table loads conntrack and NAT, whose functions they call.
        table = Table(mounts.table_name(directory))
        kernel = self._effective.kernel
        # The value that the proxy itself set for the fast path does not count as the administrator's choice.
        others = conntrack_is_liberal() and not sysctls.held(LIBERAL, directory)
        liberal = kernel.conntrack.tcp_be_liberal or others
        self._behaviour = self._behaviour._replace(
            drop_invalid=not self._effective.nft_mode and not liberal,
            mark_datagrams=self._effective.socket_lb != "off" and table.knows_sockets(),
        )
        wanted = bool(self._effective.fast_path) and fast_path_is_built()
        self._behaviour = beside_fast_path(self._behaviour, wanted)
        table.ensure(self._behaviour)
        # After conntrack is loaded, and before its timeouts are read for the programs.
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
            # A former run may have had a fast path. The new programs will not use its flows.
            drain(pins)
        loaded = load(wanted_settings, pins / "maps", map_sizes(effective))
        if why := why or loaded.why_not_fast:
            loaded.why_not_fast = why
            say = _log.info if effective.fast_path == "auto" else _log.warning
            say("there is no fast path", why=why)
        self._stack.callback(loaded.close)
        for name, (old, new) in loaded.resized.items():
            _log.info("a map was resized", map=name, old=old, new=new)
        self._counters = _counters(loaded), loaded.maps["counters"]
        self._behaviour = beside_fast_path(self._behaviour, loaded.settings.fast_path)
        table.ensure(self._behaviour)
        self._say(loaded)
        if "excluded_pods" in loaded.maps:
            excluded_pods.write(loaded.maps["excluded_pods"], loaded.sock.btf, effective.socket_lb_exclude)
        # Until the new programs are attached, those of a former run may use other maps with different ids.
        writer = Writer(loaded, table.update, max(table.elements, default=0))
        # In one step: no entry of a former run may keep an address that belongs to another service by now.
        writer.apply(wanted, complete=True)
        # Ids that the writer has adopted. Other old elements of the nft table go when the new programs are attached.
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
        kept = KeptPins(bpffs, pins.parent, pins / "maps")
        self._stack.callback(kept.close)
        parts = _Parts(loaded, table, node, writer, clusters, host_rules, udp, udp_touched, kept)
        if effective.socket_lb == "off":
            # Before the socket programs of a former run are detached.
            self._serve_host(parts, host_rules)
        former = OtherLayouts(pins, loaded, writer)
        former.take_over()
        former.drain()
        # The maps are complete: programs attached from here on find everything.
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
        # After tc, which handles what XDP leaves.
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
        """Start counting connections, if the scheduler uses connection counts."""
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
        parts.fast = FastPath(word, btf.struct("fast_path"), btf.enum("slow_path_reason"), parts.table.name, heed)
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
        """Write the changed service ports; ``complete``: there are no others. Returns all problems as text."""
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
                # First: ports of defined services must not be refused.
                parts.table.change_ports(moved.ports_added, moved.ports_removed)
                parts.table.change_addresses("cluster_ips", map(_prefix, moved.added), map(_prefix, moved.removed))
        return _problems(parts)

    def node_changed(self, facts: NodeFacts) -> None:
        """Apply new Node facts: ServiceCIDRs, and which node addresses serve NodePorts. New flows use them."""
        parts = self._running()
        with _in_words():
            parts.table.set_addresses("service_cidrs", _prefixes(facts))
            self._serve_host(parts, parts.host_rules.with_traffic(host_traffic(self._effective, facts)))
            parts.node.configure(node_config(self._effective, facts))

    def refresh(self) -> bool:
        """Repair the nft table and the node's maps if others changed them, which costs little if they did not.

        Devices are followed. The result: others have changed the service maps, and :meth:`apply` must be called with
        everything.
        """
        parts = self._running()
        parts.pins.check()
        with _in_words():
            parts.table.ensure(self._behaviour)
            parts.writer.recount_clients()
            for name in parts.node.read_back():
                _log.error("others have written into a map, it is repaired", map=name)
            overwritten = parts.writer.was_overwritten()
        self._beside.look()
        if parts.frames is not None:
            parts.frames.look()
        return overwritten

    def _table_touched(self) -> None:
        """Somebody, perhaps the proxy itself, has committed a change to the nft table."""
        table = self._running().table
        try:
            if table.ensure(self._behaviour):
                _log.warning(
                    "another program deleted or flushed the nftables table, it is restored:"
                    " let that program flush only its own tables",
                    table=table.name,
                )
        except OSError as error:
            _log.error("the nftables table could not be restored, will retry", error=str(error))

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
        """How many packets and socket calls by reason, summed over all CPUs. Safe in any thread."""
        if self._counters is None:
            return {}
        keys, counters = self._counters
        return {
            name: sum(int.from_bytes(value, sys.byteorder) for value in counters.lookup_cpus(key) or ())
            for name, key in keys.items()
        }

    def refusals(self) -> Mapping[str, str]:
        """Configured features that are not available, and why. Safe in any thread."""
        return {} if self._parts is None else self._parts.loaded.refusals

    def xdp_devices(self) -> Mapping[str, str]:
        """Devices that carry the proxy's XDP program, and its mode. Safe in any thread."""
        frames = self._parts.frames if self._parts is not None else None
        return {} if frames is None else frames.attached()

    def addresses(self) -> list[Address]:
        """Every address of a device of this node, as reported by netlink so far."""
        return [] if self._parts is None else self._parts.node.addresses

    def fill(self) -> Mapping[str, tuple[int, int]]:
        """Used entries and capacity of every map that the control plane fills, as counted. Safe in any thread."""
        parts = self._parts
        if parts is None:
            return {}
        table = flow_table(parts.loaded)
        return {**parts.writer.fill(), **({} if table is None else {"flows": table[:2]})}

    def view(self) -> Mapping[str, Any]:
        """The result of ``view``; empty before the start. Safe in any thread."""
        parts = self._parts
        if parts is None:
            return {}
        beside = {"pinsGone": parts.pins.why_not, "conntrackRefusals": self._refused.view()}
        return {**view(parts.loaded, parts.node, parts.fast, parts.promoter), **beside}

    # ---- parts -------------------------------------------------------------------------------------------------

    def _running(self) -> _Parts:
        if self._parts is None:
            raise RuntimeError("the data plane was not started")
        return self._parts

    @staticmethod
    def _serve_host(parts: _Parts, changed: HostRules | None) -> None:
        """Apply rules for the node's own packets. A kernel that lacks an expression must not block other services."""
        if changed is None:
            return
        parts.host_rules = changed
        try:
            parts.table.set_host_rules(changed)
        except NftError as error:
            parts.host_problem = f"packets of the node itself are not served as configured: {error}"
        else:
            parts.host_problem = ""

    def _tell_cleaned(self, cleaned: Cleaned) -> None:
        self.on_cleaned(cleaned)
        if cleaned.flows or cleaned.sockets:
            family = cleaned.family.name
            _log.info("stale UDP flows and sockets ended", family=family, flows=cleaned.flows, sockets=cleaned.sockets)

    @staticmethod
    def _say(loaded: Loaded) -> None:
        if loaded.why_not_pods:
            _log.warning("pods' sockets are not translated, tc serves their packets", why=loaded.why_not_pods)
        if loaded.why_no_lookup:
            _log.info("conntrack is not looked up before a flow is opened", why=loaded.why_no_lookup)


def _problems(parts: _Parts) -> list[str]:
    problems = [str(problem) for problem in parts.writer.problems.values()]
    return [*problems, parts.host_problem] if parts.host_problem else problems


def _holds_settings(directory: Path) -> bool:
    return sysctls.held(LIBERAL, directory) or sysctls.held(ANY_RESET, directory)


def _fast_path_is_off(effective: Effective) -> None:
    """The fast path was on before: its connections must go on when conntrack is strict again."""
    if effective.kernel.conntrack.tcp_be_liberal:
        return
    try:
        _log.info("the fast path is off", connections=make_liberal())
        _, problems = sysctls.restore(effective.directory, holder=LIBERAL.field)
    except OSError as error:
        problems = [str(error)]
    for problem in problems:
        _log.error("a setting of the fast path could not be restored", error=problem)


def _prefix(address: bytes) -> Prefix:
    return address, 8 * len(address)


def _prefixes(facts: NodeFacts) -> set[Prefix]:
    return {(network.network_address.packed, network.prefixlen) for network in facts.service_cidrs}


def _counters(loaded: Loaded) -> dict[str, bytes]:
    """Keys of the counters by the names of the reasons."""
    return {name: struct.pack("=I", number) for name, number in reasons(loaded.tc.btf.enum).items()}


@contextmanager
def _in_words() -> Iterator[None]:
    """Turns errors of the kernel into the one error that the loop handles."""
    try:
        yield
    except OSError as error:
        raise DatapathError(str(error)) from error
