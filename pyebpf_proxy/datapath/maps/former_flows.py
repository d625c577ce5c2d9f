# SPDX-License-Identifier: Apache-2.0
"""Takes over the kernel's flows from a flow table that the new programs do not use, to be confirmed anew.

Only speed would be lost without them, but no young flow may take the source port of one that is masqueraded.
"""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.datapath.connections.drain import types_of
from pyebpf_proxy.datapath.loader.btf import Btf, StaleObjectError
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Map

#: Structs that a flow consists of. Only its own fields may differ.
_PARTS_OF_FLOW = ("flow_key", "flow_rewrite", "link")
#: Fields that are about the former run only. Ids of a service and a backend are others' in the maps of another layout;
#: 0 is not known, and the endpoint of a datagram is then not looked up among those of the wrong service.
_OF_FORMER_RUN = ("generation", "confirmed_until", "service", "backend")
_BPF_NOEXIST = 1
_log = Logger("datapath")


def take_over_flows(table: Path, state: Path, flows: Map, btf: Btf) -> None:
    """Copy the kernel's flows of the pinned ``table``. Call after the drain: then there are no others. BpfError.

    ``state``: the pin of the map ``fast_path`` beside it. ``flows``: the new table, by the types of ``btf``; entries
    that it has stay as they are. A quarter of it stays free: for masqueraded flows that conntrack knows, and new ones.
    """
    if not (table.exists() and state.exists()):
        return
    with closing(Map.open_pinned(table)) as old, closing(Map.open_pinned(state)) as word:
        try:
            former = types_of(old, word)
            if any(former.struct(name).fields != btf.struct(name).fields for name in _PARTS_OF_FLOW):
                return
            old_layout, new_layout = former.struct("flow"), btf.struct("flow")
        except (StaleObjectError, ValueError):
            return  # the drain has logged it
        names = [name for name in new_layout.fields if name in old_layout.fields and name not in _OF_FORMER_RUN]
        if not {"rewrite", "young"} <= set(names):
            return
        rows = []
        for key, value in old.items():
            fields = old_layout.unpack(value)
            if not fields["young"]:
                rows.append((key, new_layout.pack(**{name: fields[name] for name in names})))
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
    if missing:
        left = max(0, len(missing) - room)
        _log.info("flows of the former flow table are taken over", entries=len(missing) - left, no_room=left)
