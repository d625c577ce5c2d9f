# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.support.without_lookup pyebpf-proxy …``: the agent on a kernel that refuses lookups in conntrack.

That is what a kernel with conntrack as a module does to an agent with the DaemonSet's capabilities; where conntrack is
built in, no set of capabilities has this effect. Stock kernels run the same in guests (tests/kernels).
"""

from __future__ import annotations

import errno
import sys
from typing import Any

from pyebpf_proxy import cli
from pyebpf_proxy.datapath.loader import programs
from pyebpf_proxy.datapath.loader.libbpf import BpfError, Object
from pyebpf_proxy.lab import agent
from tests import ROOT

_load = programs._load


def command(namespace: str) -> tuple[str, ...]:
    """For ``enter`` of :meth:`Agent.start`."""
    return ("ip", "netns", "exec", namespace, "env", f"PYTHONPATH={ROOT}", sys.executable, "-m", __name__)


def _refuse_lookup(*arguments: Any, **named: Any) -> Object:
    path, settings = arguments[:2]
    if settings.conntrack_lookup:
        error = BpfError(f"load {path.name}", errno.EINVAL, "the kernel has no bpf_skb_ct_lookup for this agent")
        error.refused = True
        raise error
    return _load(*arguments, **named)


if __name__ == "__main__":
    programs._load = _refuse_lookup
    del sys.argv[1 : 1 + len(agent.command())]
    sys.exit(cli.main())
