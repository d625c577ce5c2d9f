# SPDX-License-Identifier: Apache-2.0
"""Load the programs, and probe what this kernel supports.

Kfuncs are not stable, and some kernels refuse them, so nothing is derived from a version. Loading is tried with
everything, then without conntrack lookups, then without the fast path. Features that are switched off are dead code to
the verifier, so it never checks what the kernel lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyebpf_proxy.common.bpf_constants import (
    DESTINATION_HASH,
    LEAST_CONNECTIONS,
    LOCALITY,
    LOCALITY_WITH_REPLICATION,
    MAGLEV_HASH,
    ROUND_ROBIN,
    SHORTEST_DELAY,
    SOURCE_HASH,
)
from pyebpf_proxy.datapath.loader.abilities import STORAGE_MAPS
from pyebpf_proxy.datapath.loader.btf import StaleObjectError
from pyebpf_proxy.datapath.loader.layout import LAYOUT_VERSION as LAYOUT_VERSION
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Map, Object, load_object
from pyebpf_proxy.datapath.maps.resize import Resize
from pyebpf_proxy.datapath.preflight import old_kernel, unreachable_conntrack

if TYPE_CHECKING:
    from pyebpf_proxy.config.effective import Scheduler

OBJECTS = Path(__file__).resolve().parents[2] / "bpf"


@dataclass(frozen=True)
class Settings:
    """``struct settings`` of bpf/settings.h, by the same names; addresses and masks packed."""

    netns_cookie: int
    #: Random and odd. These values leave the hash of a permit as it is.
    permit_seed: int = 1
    permit_seed6: int = 0
    masquerade_mark: int = 0x4000
    #: Source ports of masqueraded flows of the fast path; 0 and 0: none.
    snat_port_min: int = 0
    snat_port_max: int = 0
    #: How many young flows packets of one device may have open at a time.
    flow_quota: int = 8192
    #: conntrack's timeouts of UDP flows, without replies and with.
    udp_seconds: int = 30
    udp_stream_seconds: int = 120
    #: Differs each time programs are loaded. 0: they look each new flow up in conntrack (bpf/client_filters.h).
    load: int = 0
    pod_cidr4: bytes = bytes(4)
    pod_mask4: bytes = bytes(4)
    pod_cidr6: bytes = bytes(16)
    pod_mask6: bytes = bytes(16)
    node_address4: bytes = bytes(4)
    node_address6: bytes = bytes(16)
    detector4: int = 0
    detector6: int = 0
    masquerade_all: bool = False
    conntrack_lookup: bool = True
    nft_mode: bool = False
    localhost_node_ports: int = 0
    scheduler: int = 0
    pod_sockets: bool = False
    fast_path: bool = False
    mark_datagrams: bool = False
    #: The processor may reorder loads and stores, as all do except x86 and s390.
    weak_memory: bool = False
    xdp: bool = False
    xdp_generic: bool = False
    dry_run: bool = False

    @property
    def conntrack_is_asked(self) -> bool:
        """Whether every program that opens flows looks them up in conntrack first (bpf/common.h). XDP cannot."""
        return self.conntrack_lookup and not self.xdp


#: The schedulers by IPVS's names. Every endpoint has weight 1, so some are the same.
SCHEDULERS: Mapping[Scheduler, int] = {
    "rr": ROUND_ROBIN,
    "wrr": ROUND_ROBIN,
    "sh": SOURCE_HASH,
    "dh": DESTINATION_HASH,
    "mh": MAGLEV_HASH,
    "lc": LEAST_CONNECTIONS,
    "wlc": LEAST_CONNECTIONS,
    "sed": SHORTEST_DELAY,
    "nq": SHORTEST_DELAY,
    "lblc": LOCALITY,
    "lblcr": LOCALITY_WITH_REPLICATION,
}
# This scheduler and all after it use the number of connections of each endpoint.
_COUNTING = {number for number in SCHEDULERS.values() if number >= LEAST_CONNECTIONS}
# Maps that only some schedulers use. Programs for the others do not refer to them, and they are not created.
_SCHEDULER_MAPS = {
    "rr_cursor": {ROUND_ROBIN},
    "connections": _COUNTING,
    "choices": _COUNTING,
    "localities": {LOCALITY},
    "locality_sets": {LOCALITY_WITH_REPLICATION},
    "xdp_choices": set(SCHEDULERS.values()),
}
# Maps that are created only if pods' sockets are translated.
_POD_MAPS = {"pod_sources", "deferred_sockets", "excluded_pods", *STORAGE_MAPS}
# Maps for XDP only.
_XDP_MAPS = {"xdp_devices", "xdp_choices"}
# Only for dry runs of programs.
_DRY_MAPS = {"dry_results"}
# Maps and programs for the fast path only.
_FLOW_MAPS = {
    *("flows", "fast_path", "flow_drafts", "flow_packet_counts", "promotions", "young_counts", "permits", "handovers"),
    *("sweep_results", "flow_fragments", "recent_flows", "recent_next", "recent_ends", "ticks", "tracked_clients"),
    *("straight_flows", "route_marks"),
    *("exchanges", "exchange_heads", "exchange_rates", "exchange_sweeps", "udp_filter"),
}
#: Features that are used wherever they load. Without them everything works.
OPTIONAL = frozenset(("conntrack lookup",))
_FLOW_PROGRAMS = {"tc_egress", "sweep_flows", "promote_flow", "end_flow", "enter_flow", "note_tracked_flow"}


class Loaded:
    """The programs in the kernel, and the maps that they share."""

    def __init__(
        self,
        tc: Object,
        sock: Object,
        settings: Settings,
        why_no_lookup: str = "",
        resize: Resize | None = None,
        why_not_pods: str = "",
        why_not_fast: str = "",
        xdp: Object | None = None,
        why_not_xdp: str = "",
    ) -> None:
        self.tc = tc
        self.sock = sock
        #: None: not configured, or not accepted.
        self.xdp = xdp
        #: Why XDP is not available although it is configured, or "".
        self.why_not_xdp = why_not_xdp
        self.settings = settings
        #: Why conntrack is not looked up before a flow is opened, or "".
        self.why_no_lookup = why_no_lookup
        #: Why pods' sockets are not translated although that is configured, or "".
        self.why_not_pods = why_not_pods
        #: Why the fast path is not available although it is configured, or "".
        self.why_not_fast = why_not_fast
        self.maps: dict[str, Map] = {**sock.maps, **tc.maps}
        self._resize = resize
        #: Maps that were pinned with another size: the old one and the new one.
        self.resized = resize.take_over(self.maps, tc.btf) if resize is not None else {}

    @property
    def refusals(self) -> dict[str, str]:
        """Features that are not available, and why: configured ones, and those of ``OPTIONAL``."""
        named = {
            "fast path": self.why_not_fast,
            "conntrack lookup": self.why_no_lookup,
            "sockets of pods": self.why_not_pods,
            "XDP": self.why_not_xdp,
        }
        return {what: why for what, why in named.items() if why}

    def attached(self) -> None:
        """Called when no program of a former run is attached any more: copies its last entries into the new maps.

        Maps that only the former run used, as its flow table, lose their pins: until now they could be drained.
        """
        if self._resize is not None:
            self._resize.finish(self.maps, self.tc.btf)
            for name in _unused(self.settings):
                (self._resize.pins / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the descriptors; pinned and attached objects stay."""
        self.maps = {}
        if self.xdp is not None:
            self.xdp.close()
        self.sock.close()
        self.tc.close()


def load(
    settings: Settings,
    pin_dir: Path | None = None,
    sizes: Mapping[str, int] | None = None,
    objects: Path = OBJECTS,
) -> Loaded:
    """Load the objects with as much of ``settings`` as the kernel accepts.

    ``pin_dir``: where the maps are pinned, and reused from if they exist. ``sizes``: max_entries by map; a pinned map
    of another size is replaced by one with its entries (``resize``), FatalError if they do not fit.
    Raises BpfError if even the programs without conntrack are refused; then no new pin is left behind.
    StaleObjectError if the objects were built from other sources.
    """
    resize: Resize | None = None
    if pin_dir is not None:
        pin_dir.mkdir(parents=True, exist_ok=True)
        resize = Resize(pin_dir)
        resize.begin()
    before = _pins(pin_dir)
    sizes = _with_schedulers(sizes or {})
    try:
        with ExitStack() as opened:
            tc, settings, why_no_lookup, why_not_fast = _load_tc(settings, pin_dir, sizes, objects)
            opened.callback(tc.close)
            sock, why_not_pods = _load_sock(settings, pin_dir, sizes, tc, objects)
            opened.callback(sock.close)
            xdp, why_not_xdp = _load_xdp(settings, pin_dir, sizes, tc, objects, why_not_fast)
            if xdp is not None:
                opened.callback(xdp.close)
            loaded = Loaded(tc, sock, settings, why_no_lookup, resize, why_not_pods, why_not_fast, xdp, why_not_xdp)
            opened.pop_all()
            return loaded
    except BaseException as error:
        if resize is not None:
            resize.abandon()
        for pin in _pins(pin_dir) - before:
            pin.unlink(missing_ok=True)
        if isinstance(error, BpfError) and (old := old_kernel()):
            error.text += old
        raise


def _load_tc(
    settings: Settings, pin_dir: Path | None, sizes: Mapping[str, int] | None, objects: Path
) -> tuple[Object, Settings, str, str]:
    """Returns also the accepted settings; why conntrack is not looked up; and why there is no fast path."""
    why_no_lookup = why_not_fast = ""
    wanted = settings
    if settings.fast_path and not fast_path_is_built(objects / "tc.bpf.o"):
        why_not_fast = "tc.bpf.o has no program tc_egress"
        wanted = replace(settings, fast_path=False)
    attempts = [wanted, replace(wanted, conntrack_lookup=False)]
    attempts += [replace(attempt, fast_path=False) for attempt in attempts]
    attempts = list(dict.fromkeys(attempts))
    for attempt in attempts:
        try:
            tc = _load(object_file("tc", attempt.conntrack_lookup, objects), attempt, pin_dir, sizes)
        except BpfError as error:
            if not error.refused:
                raise
            refused = f"the kernel does not accept it: {error}"
            if attempt.conntrack_lookup:
                why_no_lookup = why_no_lookup or unreachable_conntrack() or refused
            elif attempt.fast_path:
                why_not_fast = why_not_fast or refused
            if attempt is attempts[-1]:
                raise
        else:
            if not attempt.fast_path:
                for name in _FLOW_PROGRAMS:
                    tc.programs.pop(name, None)
            return tc, attempt, "" if attempt.conntrack_lookup else why_no_lookup, why_not_fast
    raise AssertionError("unreachable: the last attempt returns or raises")


def object_file(name: str, conntrack_lookup: bool, folder: Path = OBJECTS) -> Path:
    """The object with this name, or the one that does not declare conntrack's kfuncs.

    libbpf before 1.4 fails if it may not look for them, even if nothing calls them (bpf/tc_without_lookup.bpf.c).
    """
    return folder / (f"{name}.bpf.o" if conntrack_lookup else f"{name}_without_lookup.bpf.o")


def fast_path_is_built(path: Path = OBJECTS / "tc.bpf.o") -> bool:
    """Whether the object has the egress program; without it there is no fast path."""
    with Object.open(path) as unset:
        return "tc_egress" in unset.programs


def _load_sock(
    settings: Settings, pin_dir: Path | None, sizes: Mapping[str, int] | None, tc: Object, objects: Path
) -> tuple[Object, str]:
    """Load the socket programs; without pods, and why, if the kernel does not let them read a pod's namespace."""
    why = ""
    for attempt in [settings, replace(settings, pod_sockets=False)]:
        try:
            shared = tc.maps if pin_dir is None else None
            return _load(objects / "sock.bpf.o", attempt, pin_dir, sizes, shared), why
        except BpfError as error:
            if not (error.refused and attempt.pod_sockets):
                raise
            why = f"the kernel does not accept it: {error}"
    raise AssertionError("unreachable: the last attempt returns or raises")


def _load_xdp(
    settings: Settings,
    pin_dir: Path | None,
    sizes: Mapping[str, int] | None,
    tc: Object,
    objects: Path,
    why_not_fast: str,
) -> tuple[Object | None, str]:
    """The XDP program, if it is configured; None, and why, if there is no fast path or the kernel refuses it."""
    if not settings.xdp:
        return None, ""
    if not settings.fast_path:
        why = "is not available" if why_not_fast else "is off (fastPath: false)"
        return None, f"XDP needs the fast path, which {why}"
    try:
        return _load(objects / "xdp.bpf.o", settings, pin_dir, sizes, tc.maps if pin_dir is None else None), ""
    except BpfError as error:
        if not error.refused:
            raise
        return None, f"the kernel does not accept it: {error}"


def _load(
    path: Path,
    settings: Settings,
    pin_dir: Path | None,
    sizes: Mapping[str, int] | None,
    reuse: Mapping[str, Map] | None = None,
) -> Object:
    # The constants depend on the layout in the object, so it is opened first.
    with Object.open(path) as unset:
        layout = unset.btf.struct("settings")
        values = asdict(settings)
        # An unset field would be zero, which a newer or older program would take as a value.
        if unknown := sorted(layout.fields.keys() ^ values.keys()):
            raise StaleObjectError(str(path), f"struct settings differs in {', '.join(unknown)}")
        packed = layout.pack(**values)
        names, declared = set(unset.programs), unset.sizes
    resize = Resize(pin_dir) if pin_dir is not None else None
    return load_object(
        lambda: Object.open(
            path,
            pin_dir=pin_dir,
            rodata={"settings": packed},
            max_entries=sizes,
            reuse=reuse,
            resized=resize.made if resize is not None else None,
            renewed=resize.renewed({**declared, **(sizes or {})}) if resize is not None else (),
            without=_unused(settings),
            programs=None if settings.fast_path else names - _FLOW_PROGRAMS,
        )
    )


def _with_schedulers(sizes: Mapping[str, int]) -> dict[str, int]:
    """Derives the sizes of maps that are not configured from those of the maps they belong to."""
    wanted = dict(sizes)
    if "services" in sizes:
        wanted["affinity_counts"] = sizes["services"]
    if "slots" in sizes:
        wanted["rr_cursor"] = sizes["slots"]
    if "backends4" in sizes and "backends6" in sizes:
        wanted["connections"] = wanted["choices"] = sizes["backends4"] + sizes["backends6"]
    return wanted


def _unused(settings: Settings) -> set[str]:
    return unused_maps(settings.scheduler, settings.pod_sockets, settings.fast_path, settings.xdp)


def unused_maps(scheduler: int, pod_sockets: bool, fast_path: bool = False, xdp: bool = False) -> set[str]:
    """The maps that programs with these settings (bpf/settings.h) do not use."""
    unused = {name for name, users in _SCHEDULER_MAPS.items() if scheduler not in users} | _DRY_MAPS
    unused |= set() if pod_sockets else _POD_MAPS
    unused |= set() if xdp else _XDP_MAPS
    return unused if fast_path else unused | _FLOW_MAPS


def _pins(pin_dir: Path | None) -> set[Path]:
    return set(pin_dir.iterdir()) if pin_dir is not None and pin_dir.exists() else set()
