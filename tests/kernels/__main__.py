# SPDX-License-Identifier: Apache-2.0
"""Boot kernels, run the suites in each, and print the results.

tests/kernels/README.md lists the environment variables: ``ARCH=arm64`` boots kernels of that architecture.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType

from tests.kernels import architecture, guest, image, report
from tests.kernels.architecture import AMD64, Architecture
from tests.kernels.cpio import join
from tests.kernels.debian import codename
from tests.kernels.problem import KernelsError
from tests.kernels.suites import REFUSED, SUITES, chosen, paths

DEFAULT = ("6.1", "6.12")
#: Passed on to the guests.
PASSED_ON = ("SUITES", "ARGS")
#: Seconds for one guest. Emulation on a busy machine is slow: ``LIMIT`` sets more.
_LIMIT = 2400


def qemu(kind: Architecture = AMD64) -> tuple[str, ...]:
    """The command; downloaded if neither the machine nor the cache has one."""
    unpacked = image.CACHE / f"qemu{image.suffix(kind)}"
    try:
        return guest.find_qemu(unpacked, kind)
    except KernelsError:
        if os.environ.get("QEMU") or unpacked.exists():
            raise
    print("fetching QEMU", flush=True)
    scratch = unpacked.with_name(f"qemu.{os.getpid()}")
    try:
        image.debian(True).unpack_with_dependencies(kind.package, f"{codename()}-backports", scratch)
        scratch.rename(unpacked)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return guest.find_qemu(unpacked, kind)


def main(arguments: list[str]) -> int:
    """0: every kernel behaved as expected; 1: something failed; 2: nothing could be tried."""
    signal.signal(signal.SIGTERM, _interrupted)
    signal.signal(signal.SIGHUP, _interrupted)
    parser = argparse.ArgumentParser(prog="python -m tests.kernels", description=__doc__)
    parser.add_argument(
        "series", nargs="*", metavar="SERIES", help=f"such as 6.12, or newest (default: {' '.join(DEFAULT)})"
    )
    parser.add_argument("--fetch", action="store_true", help="only download what is needed")
    options = parser.parse_args(arguments)
    series = options.series or list(DEFAULT)
    if os.geteuid() != 0:
        print("test-kernels: root is needed (debootstrap)", file=sys.stderr)
        return 2
    image.CACHE.mkdir(parents=True, exist_ok=True)
    try:
        kind = architecture.named(os.environ.get("ARCH", ""))
        if options.fetch:
            _fetch(series, kind)
            return 0
        with tempfile.TemporaryDirectory(prefix="run.", dir=image.CACHE) as scratch:
            return _run(series, Path(scratch), kind)
    except KernelsError as error:
        print(f"test-kernels: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("test-kernels: interrupted; no guest is left", file=sys.stderr)
        return 130


def _fetch(series: list[str], kind: Architecture) -> tuple[tuple[str, ...], list[image.Kernel], Path]:
    """QEMU, kernels, Debian and Python libraries: from the cache, or from the mirrors."""
    for name in series:
        if name != "newest" and not re.fullmatch(r"\d+\.\d+", name):
            raise KernelsError(f"KERNELS: {name} is no series: a number as 6.12, or newest")
    image.libraries(kind)
    return qemu(kind), [image.kernel(name, kind) for name in series], image.root(kind)


def _run(series: list[str], scratch: Path, kind: Architecture = AMD64) -> int:
    names = os.environ.get("SUITES", "")
    known = {"all", *(suite.name for suite in SUITES)}
    if unknown := sorted(set(names.split()) - known):
        raise KernelsError(f"SUITES: there is no {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    command, kernels, root = _fetch(series, kind)
    project = scratch / "project.cpio"
    image.project(project, {name: os.environ.get(name, "") for name in PASSED_ON}, paths(names), kind)
    machine = guest.choose_machine(command, kernels[0].image, scratch, kind)
    # Labs with conversations need a machine that is fast enough for their timeouts of two seconds.
    if names and any(suite.few_rights for suite in chosen(names)):
        machine = replace(machine, shift=1)
    print(f"{machine.accelerator}{f' ({machine.why})' if machine.why else ''}", flush=True)

    asked = {suite.name for suite in chosen(names)}

    def boot(kernel: image.Kernel) -> report.Row:
        began = time.monotonic()
        initrd, folder = scratch / f"initrd-{kernel.series}", scratch / kernel.series
        join((root, kernel.modules, project), initrd)
        # The kernel passes unknown words of its command line to init as environment.
        words = "REFUSED=1" if kernel.series in REFUSED else ""
        limit = float(os.environ.get("LIMIT") or _LIMIT)
        outcome = guest.run(machine, kernel.image, initrd, folder, limit, words)
        if not outcome.booted and not guest.stopped():
            # Emulators sometimes fail. A guest that has printed anything is never tried again.
            print(f"{kernel.release}: {outcome.problem}; once more", flush=True)
            outcome = guest.run(machine, kernel.image, initrd, folder, limit, words)
        initrd.unlink()
        if guest.stopped():
            raise KeyboardInterrupt
        print(f"{kernel.release}: {outcome.problem or 'done'}, {time.monotonic() - began:.0f} s", flush=True)
        row = report.read(kernel, outcome, folder, asked)
        _keep(folder, image.CACHE / "results" / f"{kernel.series}{image.suffix(kind)}")
        return row

    jobs = int(os.environ.get("JOBS") or min(len(kernels), (os.cpu_count() or 1) // machine.cpus) or 1)
    with ThreadPoolExecutor(jobs) as pool:
        booting = [pool.submit(boot, kernel) for kernel in kernels]
        try:
            rows = [future.result() for future in booting]
        except BaseException:
            for future in booting:
                future.cancel()
            guest.stop_all()
            raise
    print(report.table(rows))
    if not names:
        print(f"\n{report.left_out()}")
    return 1 if any(row.failed for row in rows) else 0


def _keep(folder: Path, place: Path) -> None:
    """Console and results for inspection; complete results of this run."""
    place.parent.mkdir(exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):  # another run has put its own there meanwhile
        folder.rename(place)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
