# SPDX-License-Identifier: Apache-2.0
"""Only the message classes of rtnetlink from pyroute2.

``import pyroute2`` loads the whole package, 140 modules with databases and servers: a tenth of the CPU time of a start,
and 7 MB of memory. So its parts are imported with an empty package instead of the real one, and then removed from
sys.modules: a later import of pyroute2 loads the complete package.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def _parts_alone(name: str = "pyroute2") -> Iterator[None]:
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is None or spec.submodule_search_locations is None:
        yield
        return
    empty = ModuleType(name)
    empty.__spec__, empty.__path__ = spec, list(spec.submodule_search_locations)
    sys.modules[name] = empty
    try:
        yield
    finally:
        for part in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            del sys.modules[part]


with _parts_alone():
    from pyroute2.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST
    from pyroute2.netlink.rtnl import (
        RTM_DELADDR,
        RTM_DELLINK,
        RTM_DELQDISC,
        RTM_DELTFILTER,
        RTM_GETADDR,
        RTM_GETLINK,
        RTM_GETQDISC,
        RTM_GETTFILTER,
        RTM_NEWADDR,
        RTM_NEWLINK,
        RTM_NEWQDISC,
        RTM_NEWTFILTER,
    )
    from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
    from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
    from pyroute2.netlink.rtnl.marshal import MarshalRtnl
    from pyroute2.netlink.rtnl.tcmsg import tcmsg

__all__ = [
    "NLM_F_ACK",
    "NLM_F_CREATE",
    "NLM_F_DUMP",
    "NLM_F_EXCL",
    "NLM_F_REPLACE",
    "NLM_F_REQUEST",
    "RTM_DELADDR",
    "RTM_DELLINK",
    "RTM_DELQDISC",
    "RTM_DELTFILTER",
    "RTM_GETADDR",
    "RTM_GETLINK",
    "RTM_GETQDISC",
    "RTM_GETTFILTER",
    "RTM_NEWADDR",
    "RTM_NEWLINK",
    "RTM_NEWQDISC",
    "RTM_NEWTFILTER",
    "MarshalRtnl",
    "ifaddrmsg",
    "ifinfmsg",
    "tcmsg",
]
