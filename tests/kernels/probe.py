# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.kernels.probe``, in a guest: what this kernel supports with this process' rights, as JSON."""

from __future__ import annotations

import json

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.datapath import preflight
from pyebpf_proxy.datapath.loader.programs import Settings, load
from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour


def probe() -> dict[str, str]:
    """``path`` (fast or slow), and what was refused, with the reason; only ``refused`` if the data plane cannot run."""
    try:
        preflight.check()
        # As the agent does: the table first, which loads the modules.
        table = Table("probe_table")
        table.ensure(Behaviour(masquerade_mark=0x4000))
        try:
            loaded = load(Settings(netns_cookie=1, pod_sockets=True, fast_path=True, xdp=True))
        finally:
            table.remove()
    except (FatalError, OSError) as error:
        return {"refused": str(error)}
    found = {"path": "fast" if loaded.settings.fast_path else "slow", **loaded.refusals}
    loaded.close()
    return found


if __name__ == "__main__":
    print(json.dumps(probe()))
