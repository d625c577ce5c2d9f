# SPDX-License-Identifier: Apache-2.0
"""The interface of the data plane: a list of managers, started in order. ``close`` leaves what serves packets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from pyebpf_proxy.common.errors import DatapathError, FatalError
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
from pyebpf_proxy.datapath.repairs import repairs
from pyebpf_proxy.datapath.view import flow_table, view
from pyebpf_proxy.services.model import ServicePortName
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
        udp_flows = UdpFlows(effective, programs, service_maps, lambda cleaned: self.on_cleaned(cleaned))
        take_over = TakeOver(bpffs, programs, service_maps)
        sockets = SocketPrograms(effective, bpffs, programs)
        self._xdp = xdp = XdpPrograms(effective, bpffs, programs, node_maps, lambda: take_over.others.release_xdp())
        self._fast_path = FastPathManager(effective, nft, programs, node_maps, xdp, udp_flows)
        self._pins = Pins(bpffs)
        self._conntrack = ConntrackStatistics()
        sockets_off = effective.socket_lb == "off"
        #: These managers need more rights than the rest. ``--init-only`` starts only these.
        self._preparation: list[Manager] = [
            bpffs,
            # Before the programs: the table makes the kernel load conntrack and NAT, whose functions the programs call.
            nft,
            # After conntrack is loaded, and before the timeouts of conntrack are read for the programs.
            KernelSettings(effective, warn_node),
        ]
        self._managers: list[Manager] = [
            *self._preparation,
            # Before the programs: without these settings the programs are loaded without a fast path.
            settings,
            programs,
            # All maps and sets come before the programs are attached, so that the programs find everything.
            service_maps,
            udp_flows,
            ClusterSets(effective, nft),
            node_maps,
            # Without socket programs: these rules must exist before the socket programs of a former run are detached.
            *([host_packets] if sockets_off else []),
            # Just before the programs of a former run are replaced: until then they change affinity and flows.
            take_over,
            sockets,
            TcPrograms(bpffs, programs, node_maps, nft),
            # After tc, which handles what XDP leaves to it.
            xdp,
            # After the last program has been replaced.
            Retirement(bpffs, nft, programs, service_maps, node_maps, sockets, settings, take_over),
            # With socket programs: a former run without them has rules that are needed until here.
            *([] if sockets_off else [host_packets]),
            # After the table is filled: each of those commits would trigger a check.
            NftWatch(nft),
            ConnectionCounts(programs, service_maps),
            # After the devices: the fast path needs the programs on both devices of a flow.
            self._fast_path,
            # After the last object has been pinned.
            self._pins,
            self._conntrack,
            # Last: until everything works, the rules of kube-proxy carry the traffic.
            KubeProxy(effective),
        ]
        self._stack = ExitStack()
        self._running = False
        #: The first task of a manager that has ended unexpectedly.
        self._ended: asyncio.Task[None] | None = None
        self._has_ended = asyncio.Event()
        for manager in self._managers:
            manager.on_task_ended = self._task_ended

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
        with _Failures() as failures:
            for manager in self._started():
                with failures.noted():
                    manager.apply(delta, complete)
        return self._problems()

    def node_changed(self, facts: NodeFacts) -> None:
        """Apply new Node facts: ServiceCIDRs, and which node addresses serve NodePorts. New flows use them."""
        with _Failures() as failures:
            for manager in self._started():
                with failures.noted():
                    manager.node_changed(facts)

    def refresh(self) -> bool:
        """Repair what others changed, which costs little if they did not. Changes of devices are followed by netlink.

        True: others have written into the service maps, and :meth:`apply` must be called with everything.
        """
        overwritten = False
        with _Failures() as failures:
            for manager in self._started():
                with failures.noted():
                    manager.refresh()
            with failures.noted():
                # If this call fails, the next one returns the same.
                overwritten = self._service_maps.writer.was_overwritten()
        return overwritten

    async def collect(self) -> None:
        """Remove old versions once no program can be reading them; then end stale UDP flows and sockets."""
        with _Failures() as failures:
            for manager in self._started():
                with failures.noted():
                    await manager.collect()

    async def guard(self) -> None:
        """Wait until a task of a manager ends unexpectedly: its error, DatapathError or FatalError."""
        await self._has_ended.wait()
        assert self._ended is not None
        with _in_words():
            self._ended.result()
        raise FatalError(f"internal error: the task {self._ended.get_name()} ended unexpectedly")

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._ended = self._ended or task
        self._has_ended.set()

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

    def unwritten(self) -> Mapping[ServicePortName, str]:
        """Service ports that are not in the maps as wanted, and why; a copy."""
        if not self._running:
            return {}
        return {name: problem.text for name, problem in self._service_maps.writer.problems.copy().items()}

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
            "repairs": repairs.view(),
            "runFolder": obstacle(self._effective.directory),
        }


class _Failures:
    """A failure of one manager must not keep the next ones from their part: they are raised together at the end."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None and self._texts:
            raise DatapathError("; ".join(self._texts))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error of the kernel, and continue after the block."""
        try:
            with _in_words():
                yield
        except DatapathError as error:
            self._texts[str(error)] = None


@contextmanager
def _in_words() -> Iterator[None]:
    """Turns errors of the kernel into the one error that the loop handles."""
    try:
        yield
    except OSError as error:
        raise DatapathError(str(error)) from error
