# SPDX-License-Identifier: Apache-2.0
"""Takes over the kernel's flows from a flow table that the new programs do not use, to be confirmed anew.

It is that of another layout (maps/other_layouts.py), or has another size (maps/resize.py). Only speed would be lost
without them, but no young flow may take the source port of one that is masqueraded.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.datapath.connections import young_counts
from pyebpf_proxy.datapath.connections.drain import drain, types_of
from pyebpf_proxy.datapath.loader.btf import Btf, StaleObjectError
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Map
from pyebpf_proxy.datapath.maps.resize import former_pins

#: Structs that a flow consists of. Only its own fields may differ.
_PARTS_OF_FLOW = ("flow_key", "flow_rewrite", "link")
#: Two copies of one number. They differ while a program changes the entry (bpf/observer.h).
_TAGS = ("tag", "tag_again")
#: Fields that are about the former run only.
_CONFIRMATION = ("generation", "confirmed_until")
#: In the maps of another layout these ids belong to other services and backends. They are set to 0, which means not
#: known: then the endpoint of a datagram is not looked up among those of the wrong service.
_IDS = ("service", "backend")
_BPF_NOEXIST = 1
_log = Logger("datapath")


def drain_resized(pins: Path, maps: Mapping[str, Map], btf: Btf) -> None:
    """If the flow table got another size: drain and take over the one that the attached programs use.

    ``pins``: the folder of this layout version. ``maps``, ``btf``: of the new programs, which are not attached yet. No
    flow becomes young until the agent ends the draining, which is after they are attached. Can be repeated.
    BpfError, OSError.
    """
    former = former_pins(pins / "maps", "flows")
    if not former or "flows" not in maps:
        return
    drain(pins)  # logs errors
    for table in former:
        take_over_flows(table, pins / "maps" / "fast_path", maps["flows"], btf, same_ids=True)
    # The new table has no young flow, so the counts start at zero. Flows that the old programs still end do not lower
    # counts that do not exist.
    young_counts.keep_only(maps["young_counts"], ())


def take_over_flows(table: Path, state: Path, flows: Map, btf: Btf, same_ids: bool = False) -> None:
    """Copy the kernel's flows of the pinned ``table``. Call after the drain: then there are no others.

    Errors are logged: only speed and some source ports are at stake.
    ``state``: the pin of the map ``fast_path`` beside it. ``flows``: the new table, by the types of ``btf``; entries
    that it has stay as they are. ``same_ids``: services and backends have the ids that they had. A quarter of the new
    table stays free: for masqueraded flows that conntrack knows, and new ones.
    """
    try:
        rows = _kernels_flows(table, state, btf, same_ids)
        present = {key for key, _ in flows.items()}
        missing = [row for row in rows if row[0] not in present]
        room = max(0, flows.max_entries - flows.max_entries // 4 - len(present))
        for key, value in missing[:room]:
            try:
                flows.update(key, value, _BPF_NOEXIST)
            except BpfError as error:
                # A program was faster, or the table is full.
                if error.errno not in (errno.EEXIST, errno.E2BIG):
                    raise
    except (OSError, FatalError) as error:
        _log.error("flows of the former flow table could not be taken over", table=table, error=str(error))
        return
    if missing:
        left = max(0, len(missing) - room)
        _log.info("took over flows of the former flow table", entries=len(missing) - left, no_room=left)


def _kernels_flows(table: Path, state: Path, btf: Btf, same_ids: bool) -> list[tuple[bytes, bytes]]:
    """The rows for the new table, as for :func:`take_over_flows`. BpfError, OSError, FatalError."""
    if not (table.exists() and state.exists()):
        return []
    with closing(Map.open_pinned(table)) as old, closing(Map.open_pinned(state)) as word:
        try:
            former = types_of(old, word)
            if any(former.struct(name).fields != btf.struct(name).fields for name in _PARTS_OF_FLOW):
                return []
            old_layout, new_layout = former.struct("flow"), btf.struct("flow")
        except (StaleObjectError, ValueError):
            return []  # the drain has logged it
        dropped = _CONFIRMATION if same_ids else _CONFIRMATION + _IDS
        names = [name for name in new_layout.fields if name in old_layout.fields and name not in dropped]
        if not {"rewrite", "young"} <= set(names):
            return []
        tags = former.struct("flow_rewrite").packer(*_TAGS)
        rows = []
        for key, value in old.items():
            fields = old_layout.unpack(value)
            tag, again = tags.unpack(fields["rewrite"])
            # A copy of an entry in the middle of a change would be found by no program, and swept by none.
            if not fields["young"] and tag and tag == again:
                rows.append((key, new_layout.pack(**{name: fields[name] for name in names})))
        return rows
