# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy`` with shorter waits for the API server: seconds instead of minutes."""

from __future__ import annotations

import sys
from dataclasses import replace

from pyebpf_proxy.cli import main
from pyebpf_proxy.kube.api import client, credentials
from pyebpf_proxy.kube.api.timing import Timing

QUICK = replace(
    Timing(),
    connect=4.0,
    answer=5.0,
    window=3.0,
    watch=(25.0, 30.0),
    grace=3.0,
    backoff=(0.3, 1.5),
    forbidden=1.0,
    settle=12.0,
    starting=3.0,
    node=5.0,
    look=0.3,
)

if __name__ == "__main__":
    client.Timing = lambda: QUICK  # type: ignore[assignment,misc]
    credentials.TOKEN_SECONDS = 0.5
    sys.exit(main())
