# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.e2e up|down|test|switch|churn|page``: see docs/kubernetes-e2e.md."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from types import FrameType

from tests.e2e import churn, cluster, page, specs, switch
from tests.e2e.cni import CNIS, DEFAULT_CNI
from tests.e2e.problem import E2EError


def main(arguments: list[str]) -> int:
    """0: done; 1: specs failed; 2: nothing could be done, with one line; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e")
    parser.add_argument("command", choices=("up", "down", "test", "switch", "churn", "page"))
    parser.add_argument("--proxy", choices=cluster.PROXIES, default="pyebpf-proxy")
    parser.add_argument("--dual", action="store_true", help="both families")
    parser.add_argument(
        "--cni", choices=CNIS, default=DEFAULT_CNI, help=f"what connects the pods (default: {DEFAULT_CNI})"
    )
    parser.add_argument("--processes", type=int, default=4, help="specs that run at once")
    parser.add_argument("--focus", default="", help="specs to run, as a regular expression")
    parser.add_argument("--load-balancer", action="store_true", help="a load-balancer controller, and the specs for it")
    parser.add_argument(
        "--replace", action="store_true", help="replace kube-proxy by pyebpf-proxy and back while the specs run"
    )
    parser.add_argument("--seconds", type=int, default=600, help="of churn (default: 600)")
    parser.add_argument("--here", action="store_true", help="in the cluster that is up, which stays")
    parser.add_argument(
        "--record", action="store_true", help="write the results below tests/e2e/recorded, and the page"
    )
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    try:
        if options.command == "up":
            return up(options)
        if options.command == "page":
            page.write()
            return 0
        if options.command == "switch":
            status = switch.run(options.record)
            if options.record:
                page.write()
            return status
        if options.command == "churn":
            status = churn.run(options.seconds, options.record)
            if options.record:
                page.write()
            return status
        if options.command == "down":
            with cluster.exclusive():
                cluster.down()
            return 0
        balanced = options.load_balancer
        focus = options.focus or (specs.BALANCED_FOCUS if balanced else specs.FOCUS)
        choice = specs.Choice(focus, options.processes, balanced, options.replace)
        status = specs.run(options.proxy, options.dual, options.cni, choice, options.here, options.record)
        if options.record:
            page.write()
        return status
    except E2EError as problem:
        print(f"e2e: {problem}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        output = (error.stderr or b"").decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr
        lines = (output or "").strip().splitlines()
        print(f"e2e: {' '.join(map(str, error.cmd))[:200]}: {lines[-1] if lines else error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("e2e: interrupted", file=sys.stderr)
        return 130


def up(options: argparse.Namespace) -> int:
    """Create a cluster that stays. If that fails, only the last lines of its logs are left."""
    cluster.prepare(cni=options.cni)
    with cluster.exclusive():
        cluster.refuse_if_used()
        made = cluster.Cluster()
        made.up(options.proxy, options.dual, options.cni)
    print(cluster.describe(made))
    return 0


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
