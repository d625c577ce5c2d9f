# SPDX-License-Identifier: Apache-2.0
"""What runs inside a guest: which lane the kernel lets us take, then suite after suite; all into /results."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from pyebpf_proxy.datapath import preflight
from pyebpf_proxy.datapath.loader.programs import Settings, load
from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour
from pyebpf_proxy.errors import FatalError
from tests.kernels.suites import MODULES, Suite, chosen

RESULTS = Path("/results")


def probe() -> dict[str, str]:
    """What the agent finds out about this kernel before it serves: by its own functions, nothing by version."""
    try:
        preflight.check()
        # As the agent does: the table first, it brings the modules with it.
        table = Table("probe_table")
        table.ensure(Behaviour(masquerade_mark=0x4000))
        try:
            loaded = load(Settings(netns_cookie=1, pod_sockets=True, fast_path=True, xdp=True))
        finally:
            table.remove()
    except (FatalError, OSError) as error:
        return {"refused": str(error)}
    found = {"lane": loaded.lane, "why": loaded.why}
    found |= {"why_not_pods": loaded.why_not_pods, "why_not_fast": loaded.why_not_fast}
    found |= {"why_not_xdp": loaded.why_not_xdp}
    loaded.close()
    return found


def run(suite: Suite) -> None:
    """One call of pytest; its results and its exit status (-1: out of time) are left, its words are the console's."""
    command = ["timeout", "-k", "5", str(suite.limit), sys.executable, "-m", "pytest", *suite.arguments]
    command += ["-v", "--color=no", "-p", "no:cacheprovider", f"--junitxml={RESULTS / suite.name}.xml"]
    command += shlex.split(os.environ.get("ARGS", ""))
    began = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    print(f"{suite.name}: exit status {status}, {time.monotonic() - began:.1f} s", flush=True)
    (RESULTS / f"{suite.name}.status").write_text(str(-1 if status in (124, 137) else status))


def main() -> int:
    """0 if everything that was to be tried was tried; what failed is in the results."""
    RESULTS.mkdir(exist_ok=True)
    wanted = chosen(os.environ.get("SUITES", ""))
    to_refuse = bool(os.environ.get("REFUSED"))
    for suite in wanted:
        if suite.refused if to_refuse else suite.first:
            run(suite)
    found = {"release": os.uname().release} | probe()
    (RESULTS / "probe.json").write_text(json.dumps(found))
    print(found, flush=True)
    if to_refuse or "refused" in found:
        return 0
    for module in MODULES:
        subprocess.run(["modprobe", "-q", module], check=False)
    for suite in wanted:
        if not suite.first and not suite.refused:
            run(suite)
    return 0


if __name__ == "__main__":
    sys.exit(main())
