# SPDX-License-Identifier: Apache-2.0
"""A dry run of the real program on a test packet: with the maps in use, and without side effects.

A second copy of the program is loaded with the constants of the attached one and ``dry_run`` set (bpf/settings.h). It
has its own maps for everything that programs write: counters, affinity, round-robin cursors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from pyebpf_proxy.common.bpf_constants import PRIORITY_REJECT
from pyebpf_proxy.datapath.loader.btf import StaleObjectError
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Object, SkBuff, load_object
from pyebpf_proxy.datapath.loader.programs import object_file, unused_maps
from pyebpf_proxy.datapath.loader.reasons import reasons
from pyebpf_proxy.see.answers import SeeError
from pyebpf_proxy.see.decide import Packet, Verdict
from pyebpf_proxy.see.maps import U32, Pinned
from pyebpf_proxy.services.model import Protocol

_SHOT = 2
_XDP_DROP = 1
#: A dry run counts this reason for every selected backend, because it has no paths.
_CHOSEN = "new_flow_netfilter"
_SMALL = 64
#: Maps that programs write, and their sizes in a dry run, which has its own.
_PRIVATE = {
    "affinities": _SMALL,
    "affinity_counts": _SMALL,
    "bridged_flows": _SMALL,
    "bridged_fragments": _SMALL,
    "choices": _SMALL,
    "localities": _SMALL,
    "locality_sets": _SMALL,
    "socket_revnat4": _SMALL,
    "socket_revnat6": _SMALL,
    "socket_flows": _SMALL,
    "xdp_choices": _SMALL,
}
_OWN = frozenset(
    (
        *_PRIVATE,
        "counters",
        "last_refused",
        "recent_refusals",
        "refusals",
        "rr_cursor",
        "dry_results",
        "tracing",
        "decisions",
    )
)


class Outcome(NamedTuple):
    """The result of the program. ``reasons``: the counters that it incremented."""

    verdict: Verdict
    reasons: list[str]
    backend: int = 0
    masquerade: bool = False


def run(
    maps: Pinned, program: str, settings: Mapping[str, Any], packet: Packet, mac: bytes, affinity: bytes | None
) -> Outcome:
    """Run ``program`` on the packet. ``mac``: the device's address; the program ignores frames to other hosts.

    ``affinity``: key and value of the client's affinity entry. Raises SeeError.
    """
    with _in_words(), _loaded(maps, "tc", program, settings, affinity) as loaded:
        result = loaded.programs[program].test_run(frame(packet, mac), SkBuff(ifindex=packet.device))
        assert result.skb is not None
        return _outcome(loaded, result.retval, result.skb)


def run_xdp(
    maps: Pinned, settings: Mapping[str, Any], packet: Packet, mac: bytes, affinity: bytes | None = None
) -> Outcome:
    """Run the XDP program, which must be attached to the packet's device. The arguments are those of ``run``.

    "left": the frame is passed to tc. "served": XDP has selected the backend, and tc translates the packet.
    """
    with _in_words(), _loaded(maps, "xdp", "xdp_ethernet", settings, affinity) as loaded:
        result = loaded.programs["xdp_ethernet"].run_frame(frame(packet, mac), packet.device)
        return _xdp_outcome(loaded, result.retval)


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except StaleObjectError as error:
        raise SeeError(
            f"the dry run of the program failed: {error.what} is missing in the BPF objects of this command"
        ) from None
    except BpfError as error:
        raise SeeError(f"the dry run of the program failed: {error}") from None


@contextmanager
def _loaded(
    maps: Pinned, object_name: str, program: str, settings: Mapping[str, Any], affinity: bytes | None
) -> Iterator[Object]:
    with _load(maps, object_name, program, settings) as loaded:
        if affinity is not None:
            size = loaded.maps["affinities"].key_size
            loaded.maps["affinities"].update(affinity[:size], affinity[size:])
        yield loaded


def _load(maps: Pinned, object_name: str, program: str, settings: Mapping[str, Any]) -> Object:
    xdp = object_name == "xdp"
    path = object_file(object_name, xdp or bool(settings["conntrack_lookup"]))
    with Object.open(path) as unset:
        layout = unset.btf.struct("settings")
        known = {name: value for name, value in settings.items() if name in layout.fields}
        # A test frame has its link header, also in generic mode.
        others = {"dry_run": 1, "pod_sockets": 0, "fast_path": 0, "xdp": int(xdp), "xdp_generic": 0}
        packed = layout.pack(**{**known, **others})
        wanted = frozenset(unset.sizes)
    without = unused_maps(settings["scheduler"], False, xdp=xdp) - {"dry_results"}
    shared = {name: maps.map(name) for name in wanted - without - _OWN if name in maps.names}
    sizes = {name: size for name, size in _PRIVATE.items() if name in wanted}
    if "slots" in shared:
        sizes["rr_cursor"] = shared["slots"].max_entries
    return load_object(
        lambda: Object.open(
            path, rodata={"settings": packed}, max_entries=sizes, reuse=shared, programs={program}, without=without
        )
    )


def _counted(loaded: Object) -> list[str]:
    counter = loaded.maps["counters"]
    return [
        name
        for name, number in reasons(loaded.btf.enum).items()
        if number < counter.max_entries and any(any(value) for value in counter.lookup_cpus(U32.pack(number)) or ())
    ]


def _chosen(loaded: Object, counted: list[str]) -> Outcome | None:
    """The program's selection (struct dry_result); None if it has selected no backend."""
    if _CHOSEN not in counted:
        return None
    value = loaded.maps["dry_results"].lookup(U32.pack(0))
    layout = loaded.btf.struct("dry_result")
    result = layout.unpack(value or bytes(layout.size))
    return Outcome("served", counted, int(result["backend"]), bool(result["masqueraded"]))


def _xdp_outcome(loaded: Object, retval: int) -> Outcome:
    counted = _counted(loaded)
    if retval == _XDP_DROP:
        return Outcome("dropped", counted)
    return _chosen(loaded, counted) or Outcome("left", counted)


def _outcome(loaded: Object, retval: int, skb: SkBuff) -> Outcome:
    counted = _counted(loaded)
    if retval == _SHOT:
        return Outcome("dropped", counted)
    if skb.priority == PRIORITY_REJECT:
        return Outcome("refused", counted)
    return _chosen(loaded, counted) or Outcome("left", counted)


def frame(packet: Packet, mac: bytes = bytes.fromhex("020000000002")) -> bytes:
    """An Ethernet frame to ``mac`` that opens the flow: a SYN, a datagram, an INIT."""
    ports = struct.pack(">HH", packet.source_port, packet.destination_port)
    if packet.protocol is Protocol.TCP:
        body = ports + struct.pack(">IIBBHHH", 1, 0, 5 << 4, 0x02, 65535, 0, 0)
    elif packet.protocol is Protocol.UDP:
        body = ports + struct.pack(">HH", 12, 0) + b"test"
    else:
        body = ports + struct.pack(">II", 0, 0) + struct.pack(">BBHIIHHI", 1, 0, 20, 1, 65535, 1, 1, 1)
    ethernet = mac + bytes.fromhex("020000000001")
    if len(packet.source) == 4:
        header = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, 64, packet.protocol, 0)
        header += packet.source + packet.destination
        return ethernet + struct.pack(">H", 0x0800) + _checked(header) + body
    header = struct.pack(">IHBB", 6 << 28, len(body), packet.protocol, 64) + packet.source + packet.destination
    return ethernet + struct.pack(">H", 0x86DD) + header + body


def _checked(header: bytes) -> bytes:
    total = sum(struct.unpack(f">{len(header) // 2}H", header))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return header[:10] + struct.pack(">H", ~total & 0xFFFF) + header[12:]
