# SPDX-License-Identifier: Apache-2.0
"""``make record``: run the real kube-proxy on every case again, and record its answers."""

from __future__ import annotations

import sys

from tests.parity import recordings
from tests.support import reference


def main() -> int:
    program = reference.kube_proxy()
    if not program.exists():
        print(f"{program} is missing: run tests/cluster/build.sh", file=sys.stderr)
        return 1
    release = reference.version(program)
    count = recordings.write(release, reference.ask_all(program, recordings.all_cases()))
    print(f"{count} answers of {release} written to {recordings.PATH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
