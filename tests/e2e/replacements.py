# SPDX-License-Identifier: Apache-2.0
"""The proxy is replaced again and again while upstream's specs run: takeover, rolling upgrade, return."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.commands import run_command, title
from tests.e2e.layout import NEXT_IMAGE, PROXY_IMAGE
from tests.e2e.problem import E2EError

#: A round: from kube-proxy to pyebpf-proxy, through an upgrade, and back.
ROUND = (("install", "--image", PROXY_IMAGE), ("upgrade", "--image", NEXT_IMAGE), ("rollback",))
#: How long each state stays, in seconds: specs begin and end in all of them.
STAY = 15.0


@dataclass(frozen=True)
class Replacement:
    """A command that replaced the proxy of all nodes, or failed."""

    what: str
    status: int
    seconds: float


class Replacements:
    """``with Replacements(cluster, log) as done``: rounds until the block ends; the last one is completed."""

    def __init__(self, cluster: Cluster, log: Path) -> None:
        if not cluster.proxy.startswith("kube-proxy"):
            raise E2EError("this needs a cluster with kube-proxy: PROXY=kube-proxy")
        self._cluster = cluster
        self._log = log
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._rounds, name="replacements")
        self.made: list[Replacement] = []

    def __enter__(self) -> Replacements:
        print(f"the proxy is replaced meanwhile; output in {self._log}", flush=True)
        self._log.write_text("")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def require_success(self) -> None:
        """E2EError if a command failed, or if there was no complete round."""
        if failed := [each for each in self.made if each.status]:
            raise E2EError(f"{failed[0].what}: exit status {failed[0].status} ({self._log})")
        if len(self.made) < len(ROUND):
            raise E2EError("the specs ended before the proxy was replaced")

    def _rounds(self) -> None:
        while not self._over.is_set():
            for words in ROUND:
                if not self._command(words):
                    return
                self._over.wait(STAY)

    def _command(self, words: tuple[str, ...]) -> bool:
        began = time.monotonic()
        with self._log.open("a") as log:
            log.write(f"\n$ {title(words)}\n")
            status, _ = run_command(self._cluster.kubeconfig, words, log.write)
        self.made.append(Replacement(title(words), status, round(time.monotonic() - began, 1)))
        print(f"{title(words)}: exit status {status}, {self.made[-1].seconds:.0f} s", flush=True)
        return status == 0
