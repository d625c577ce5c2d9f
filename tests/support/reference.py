# SPDX-License-Identifier: Apache-2.0
"""The real kube-proxy: where it is, and its answer to a case."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import CACHE
from tests.parity.answer import Answer, of_kube_proxy
from tests.parity.case import Case

RELEASE = "v1.36.3"
TIMEOUT = 120.0


def kube_proxy() -> Path:
    """The real kube-proxy; tests/cluster/build.sh builds it."""
    return CACHE / "go" / "kube-proxy"


def version(program: Path) -> str:
    """Its version: ``Kubernetes v1.36.3``."""
    return subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout.strip()


def ask(program: Path, case: Case) -> Answer:
    """Run the real kube-proxy on the case, in a separate network namespace: its start would clean up the machine's
    rules.
    """
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        if case.file is not None:
            (Path(folder) / "config.yaml").write_bytes(case.file)
        arguments = [argument.replace("{dir}", folder) for argument in case.arguments]
        alone = ["unshare", "--net"] if os.geteuid() == 0 and shutil.which("unshare") else []
        if not alone and not any("write-config-to" in argument for argument in arguments):
            alone = ["unshare", "--user", "--map-root-user", "--net"]
        ran = subprocess.run(
            [*alone, program, *arguments],
            capture_output=True,
            timeout=TIMEOUT,
            stdin=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
            check=False,
        )
        written = Path(folder) / "written.yaml"
        return of_kube_proxy(
            ran.returncode,
            ran.stdout.decode(errors="replace"),
            ran.stderr.decode(errors="replace"),
            written.read_text() if written.is_file() else None,
            folder,
        )


def ask_all(program: Path, cases: Iterable[Case]) -> Iterator[tuple[Case, Answer]]:
    """Every case with its answer, several at a time, in the order of ``cases``."""
    cases = list(cases)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 2) as pool:
        yield from zip(cases, pool.map(lambda case: ask(program, case), cases), strict=True)
