# SPDX-License-Identifier: Apache-2.0
"""Probes what the helpers of this kernel can do: ``struct abilities`` of bpf/abilities.h.

The programs have an alternative for each; the verifier sees only the branch that is taken.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from pyebpf_proxy.datapath.loader import _libbpf
from pyebpf_proxy.datapath.loader._libbpf import captured, ffi

# include/uapi/linux/bpf.h
_SCHED_CLS, _CGROUP_SOCK_ADDR = 3, 18
_SK_STORAGE_GET, _KTIME_GET_COARSE_NS, _LOOP, _SET_RETVAL = 107, 160, 181, 187
_MAP_SK_STORAGE = 24
#: Maps that are not created if the kernel has no socket storage.
STORAGE_MAPS = frozenset({"connected_revnat", "socket_translations"})


class Abilities(NamedTuple):
    """``struct abilities``, by the same names."""

    #: Lists are scanned completely; without it, schedulers of mode ipvs check only some endpoints of a long list.
    loop: bool = True
    #: A refused connect returns the right error; without it, EPERM.
    set_retval: bool = True
    #: A clock with the resolution of a tick, which is cheaper.
    coarse_clock: bool = True
    #: The state of a socket is stored in the socket; without it, in maps that all sockets share.
    socket_storage: bool = True


@cache
def of_kernel() -> Abilities:
    """Probes the kernel once. Without the right to load programs every ability is assumed; loading then reports the
    error."""
    storage = all(_has_helper(program, _SK_STORAGE_GET) for program in (_SCHED_CLS, _CGROUP_SOCK_ADDR))
    with captured():
        storage = storage and _libbpf.lib().libbpf_probe_bpf_map_type(_MAP_SK_STORAGE, ffi.NULL) != 0
    return Abilities(
        loop=all(_has_helper(program, _LOOP) for program in (_SCHED_CLS, _CGROUP_SOCK_ADDR)),
        set_retval=_has_helper(_CGROUP_SOCK_ADDR, _SET_RETVAL),
        coarse_clock=_has_helper(_SCHED_CLS, _KTIME_GET_COARSE_NS),
        socket_storage=storage,
    )


def _has_helper(program_type: int, helper: int) -> bool:
    with captured():
        return bool(_libbpf.lib().libbpf_probe_bpf_helper(program_type, helper, ffi.NULL) != 0)
