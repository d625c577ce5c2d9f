# SPDX-License-Identifier: Apache-2.0
"""The interface of the data plane: a list of managers, started in order. Closed, they leave what serves packets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from pyebpf_proxy.common.errors import DatapathError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.run_directory import obstacle
from pyebpf_proxy.config.addresses import Address
from pyebpf_proxy.config.effective import Effective
from pyebpf_proxy.datapath.cleanup import cleanup
from pyebpf_proxy.datapath.connections.udp_cleanup import Cleaned
from pyebpf_proxy.datapath.managers.bpffs import Bpffs
from pyebpf_proxy.datapath.managers.cluster_sets import ClusterSets
from pyebpf_proxy.datapath.managers.connection_counts import ConnectionCounts
from pyebpf_proxy.datapath.managers.conntrack_statistics import ConntrackStatistics
from pyebpf_proxy.datapath.managers.devices import NodeMaps, TcPrograms, XdpPrograms
from pyebpf_proxy.datapath.managers.fast_path import FastPathManager
from pyebpf_proxy.datapath.managers.former_run import Retirement, TakeOver
from pyebpf_proxy.datapath.managers.host_packets import HostPackets
from pyebpf_proxy.datapath.managers.kernel_settings import FastPathSettings, KernelSettings
from pyebpf_proxy.datapath.managers.kube_proxy import KubeProxy
from pyebpf_proxy.datapath.managers.manager import Delta, Manager
from pyebpf_proxy.datapath.managers.nft_table import NftTable, NftWatch
from pyebpf_proxy.datapath.managers.pins import Pins
from pyebpf_proxy.datapath.managers.programs import Programs
from pyebpf_proxy.datapath.managers.service_maps import ServiceMaps
from pyebpf_proxy.datapath.managers.sockets import SocketPrograms
from pyebpf_proxy.datapath.managers.udp_flows import UdpFlows
from pyebpf_proxy.datapath.netlink.subscription import overruns
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.datapath.node.sysctls import WarnNode
from pyebpf_proxy.datapath.view import flow_table, view
from pyebpf_proxy.services.node_facts import NodeFacts

_log = Logger("datapath")


class Datapath:
    """One instance in the kernel. The constructor does nothing; ``close`` keeps what ``start`` has attached."""

    def __init__(self, effective: Effective, warn_node: WarnNode | None = None) -> None:
        """``warn_node``: called with reason and text to record a Warning event for this Node."""
        self._effective = effective
        #: Called after every clean-up of stale UDP flows, in the event loop's thread.
        self.on_cleaned: Callable[[Cleaned], None] = lambda cleaned: None
        bpffs = Bpffs(effective.directory)
        nft = NftTable(effective)
        settings = FastPathSettings(effective)
        self._programs = programs = Programs(effective, bpffs, nft, settings)
        self._service_maps = service_maps = ServiceMaps(programs, nft)
        self._node_maps = node_maps = NodeMaps(effective, bpffs, programs)
        host_packets = HostPackets(effective, nft)
        udp_flows = UdpFlows(effective, programs, lambda cleaned: self.on_cleaned(cleaned))
        take_over = TakeOver(bpffs, programs, service_maps)
        sockets = SocketPrograms(effective, bpffs, programs)
        self._xdp = xdp = XdpPrograms(effective, bpffs, programs, node_maps)
        self._fast_path = FastPathManager(effective, nft, programs, node_maps, xdp, udp_flows)
        self._pins = Pins(bpffs)
        self._conntrack = ConntrackStatistics()
        sockets_off = effective.socket_lb == "off"
        #: Needs more rights than the rest, which ``--init-only`` leaves to a later start.
        self._preparation: list[Manager] = [
            bpffs,
            # Before the programs: the table loads conntrack and NAT, whose functions they call.
            nft,
            # After conntrack is loaded, and before its timeouts are read for the programs.
            KernelSettings(effective, warn_node),
        ]
        self._managers: list[Manager] = [
            *self._preparation,
            # Before the programs: without these settings they are loaded without a fast path.
            settings,
            programs,
            # First all maps and sets, so that programs find everything once they are attached.
            service_maps,
            udp_flows,
            ClusterSets(effective, nft),
            node_maps,
            # If nothing is translated at sockets: before the socket programs of a former run are detached.
            *([host_packets] if sockets_off else []),
            # The last step before the programs of a former run are replaced: they change affinity and flows until then.
            take_over,
            sockets,
            TcPrograms(bpffs, programs, node_maps),
            # After tc, which handles what XDP leaves.
            xdp,
            # After the last program was replaced.
            Retirement(bpffs, programs, service_maps, node_maps, sockets, settings, take_over),
            # If sockets are translated: the rules of a former run that did not do so are needed until here.
            *([] if sockets_off else [host_packets]),
            # After the table was filled, which would wake it.
            NftWatch(nft),
            ConnectionCounts(programs, service_maps),
            # After the devices: flows of the fast path go from one attached program to the other.
            self._fast_path,
            # After the last object was pinned.
            self._pins,
            self._conntrack,
            # Last: until everything works, kube-proxy's rules carry the traffic.
            KubeProxy(effective),
        ]
        self._stack = ExitStack()
        self._running = False

    # ---- start and end -----------------------------------------------------------------------------------------

    def start(self, facts: NodeFacts, wanted: Delta) -> Collection[str]:
        """Load, adopt the state of a former run, complete the maps, then attach. Returns problems as text.

        Raises DatapathError. The node then has no programs of this instance, or the old ones keep working.
        """
        self._start(self._managers, facts, wanted)
        self._running = True
        return self._problems()

    def prepare(self, facts: NodeFacts) -> None:
        """The preparing part of ``start``: mounts, the nft table (which loads conntrack) and kernel settings."""
        self._start(self._preparation, facts, {})

    def _start(self, managers: Iterable[Manager], facts: NodeFacts, wanted: Delta) -> None:
        fresh = not self.present()
        try:
            with _in_words():
                for manager in managers:
                    self._stack.callback(manager.close)
                    manager.start(facts, wanted)
        except BaseException:
            self.close()
            if fresh:
                for problem in cleanup(self._effective.directory).problems:
                    _log.error("a failed start could not be undone", error=problem)
            raise

    def close(self) -> None:
        """Release everything, in reverse order. Attached programs stay and keep working."""
        self._running = False
        self._stack.close()

    def present(self) -> bool:
        """Whether this instance has programs in the kernel that work without the agent."""
        directory = self._effective.directory
        instance = mounts.instance_name(directory)
        places = (path for path in mounts.bpffs_candidates(directory) if mounts.holds_pins(path))
        return any((place / mounts.FOLDER / instance).is_dir() for place in places)

    # ---- while it runs -----------------------------------------------------------------------------------------

    def apply(self, delta: Delta, complete: bool = False) -> Collection[str]:
        """Write the changed service ports; ``complete``: there are no others. Returns all problems as text."""
        with _in_words():
            for manager in self._started():
                manager.apply(delta, complete)
        return self._problems()

    def node_changed(self, facts: NodeFacts) -> None:
        """Apply new Node facts: ServiceCIDRs, and which node addresses serve NodePorts. New flows use them."""
        with _in_words():
            for manager in self._started():
                manager.node_changed(facts)

    def refresh(self) -> bool:
        """Repair what others changed, which costs little if they did not. Devices are followed.

        True: others have written into the service maps, and :meth:`apply` must be called with everything.
        """
        with _in_words():
            for manager in self._started():
                manager.refresh()
            return self._service_maps.writer.was_overwritten()

    async def collect(self) -> None:
        """Remove old versions once no program can be reading them; then end stale UDP flows and sockets."""
        with _in_words():
            for manager in self._started():
                await manager.collect()

    def _started(self) -> Iterable[Manager]:
        if not self._running:
            raise RuntimeError("the data plane was not started")
        return self._managers

    def _problems(self) -> list[str]:
        return [problem for manager in self._managers for problem in manager.problems]

    # ---- its state, safe in any thread; empty before the start ------------------------------------------------

    def reasons(self) -> Mapping[str, int]:
        """How many packets and socket calls by reason, summed over all CPUs."""
        return self._programs.reasons()

    def refusals(self) -> Mapping[str, str]:
        """Features that are not available, and why."""
        return self._programs.loaded.refusals if self._running else {}

    def xdp_devices(self) -> Mapping[str, str]:
        """Devices that carry the proxy's XDP program, and its mode."""
        return self._xdp.attached() if self._running else {}

    def addresses(self) -> list[Address]:
        """Every address of a device of this node, as reported by netlink so far."""
        return self._node_maps.node.addresses if self._running else []

    def fill(self) -> Mapping[str, tuple[int, int]]:
        """Used entries and capacity of every map that the control plane fills, as counted."""
        if not self._running:
            return {}
        table = flow_table(self._programs.loaded)
        return {**self._service_maps.writer.fill(), **({} if table is None else {"flows": table[:2]})}

    def view(self) -> Mapping[str, Any]:
        """The result of ``view``."""
        if not self._running:
            return {}
        fast_path = self._fast_path
        found = view(self._programs.loaded, self._node_maps.node, fast_path.fast_path, fast_path.promoter)
        return {
            **found,
            "pinsGone": self._pins.why_gone,
            "conntrackRefusals": self._conntrack.refusals(),
            "netlinkOverruns": overruns(),
            "runFolder": obstacle(self._effective.directory),
        }


@contextmanager
def _in_words() -> Iterator[None]:
    """Turns errors of the kernel into the one error that the loop handles."""
    try:
        yield
    except OSError as error:
        raise DatapathError(str(error)) from error
