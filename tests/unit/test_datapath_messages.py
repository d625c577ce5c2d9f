# SPDX-License-Identifier: Apache-2.0
"""A start takes of pyroute2 what it needs, and leaves the library whole for whoever wants it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import pyebpf_proxy.agent.run
assert not [name for name in sys.modules if name.startswith("pyroute2")], "the whole of pyroute2 was imported"
from pyebpf_proxy.datapath.node.messages import ifinfmsg
import pyroute2
from pyroute2 import IPVS, IPVSService, IPSet, IPRoute
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg as theirs
assert pyroute2.netlink.rtnl.ifinfmsg.ifinfmsg is theirs
assert theirs is not ifinfmsg
with IPRoute() as route:
    assert [link.get_attr("IFLA_IFNAME") for link in route.get_links()]
from pyebpf_proxy.datapath.node.follower import Follower
follower = Follower()
assert follower.state.links
"""


def test_the_rest_of_pyroute2_is_imported_by_who_needs_it_and_not_by_a_start() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
