# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.vagrant``: starts two machines with vagrant, runs course.py on them, prints its table.

If no libvirtd answers, a private one runs meanwhile (vagrant/libvirt.sh), with this program inside it: so nothing is
left, however it ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import tests
from tests.kernels import guest
from tests.kernels.problem import KernelsError
from tests.vagrant.course import HEAD, Course, summary
from tests.vagrant.nodes import BUILT, FOLDER, LOGS, Node, Vagrant
from tests.vagrant.problem import VagrantError

CACHE = tests.CACHE / "vagrant"
INSIDE = "--inside"
_NEEDED = {"vagrant": "vagrant", "qemu-system-x86_64": "qemu-system-x86", "rsync": "rsync", "ssh": "openssh-client"}
#: Seconds until both have booted; seconds for provisioning.
_BOOT, _PROVISION = 1200.0, 2400.0


def need() -> None:
    """VagrantError for the first missing program."""
    for program, package in _NEEDED.items():
        if shutil.which(program) is None:
            raise VagrantError(f"{program} is missing: apt-get install {package}")
    listed = subprocess.run(["vagrant", "plugin", "list"], capture_output=True, text=True, check=False).stdout
    installed = subprocess.run(["dpkg-query", "-W", "vagrant-libvirt"], capture_output=True, check=False)
    if "vagrant-libvirt" not in listed and installed.returncode:
        raise VagrantError("vagrant's provider libvirt is missing: apt-get install vagrant-libvirt")


def choose_driver(kernel: Path | None, scratch: Path) -> tuple[str, str]:
    """``LAB_DRIVER``, or kvm if a kernel prints its first line under it; and why not kvm, or nothing.

    VagrantError for a driver that cannot be used.
    """
    wanted = os.environ.get("LAB_DRIVER", "")
    if wanted not in ("", "kvm", "qemu"):
        raise VagrantError(f"LAB_DRIVER={wanted}: kvm or qemu")
    if wanted == "qemu":
        return "qemu", "LAB_DRIVER=qemu"
    if kernel is None:  # the user's own box: its kernel is inside it
        why = "" if os.access("/dev/kvm", os.R_OK | os.W_OK) else "there is no /dev/kvm that may be used"
    else:
        try:
            why = guest.choose_machine(("qemu-system-x86_64",), kernel, scratch).why
        except KernelsError as error:
            raise VagrantError(str(error)) from None
    if why and wanted == "kvm":
        raise VagrantError(f"LAB_DRIVER=kvm: {why}")
    return ("qemu", why) if why else ("kvm", "")


def _answers() -> bool:
    """Whether a libvirtd of this machine answers."""
    if shutil.which("virsh") is None:
        return False
    return (
        subprocess.run(["virsh", "-q", "-c", "qemu:///system", "uri"], capture_output=True, check=False).returncode == 0
    )


def outside() -> int:
    """Prepare; then run inside, with a libvirtd."""
    need()
    CACHE.mkdir(parents=True, exist_ok=True)
    if subprocess.run([FOLDER / "prepare.sh"], check=False).returncode:
        raise VagrantError("the nodes could not be prepared: see above")
    kernel = None
    if not os.environ.get("LAB_BOX"):
        path = subprocess.run([FOLDER / "build-box", "--path"], check=True, capture_output=True, text=True).stdout
        kernel = Path(path.strip()).with_suffix(".vmlinuz")
    with tempfile.TemporaryDirectory(prefix="run.", dir=CACHE) as scratch:
        driver, why = choose_driver(kernel, Path(scratch))
        print(f"driver {driver}{f' ({why})' if why else ''}", flush=True)
        environment = os.environ | {"LAB_DRIVER": driver, "LAB_STATE": f"{scratch}/libvirt"}
        if _answers():
            os.environ.update(environment)
            return inside(Path(scratch))
        command = [
            str(FOLDER / "libvirt.sh"),
            "with",
            "env",
            "-C",
            str(BUILT.parents[1]),
            sys.executable,
            "-m",
            "tests.vagrant",
        ]
        process = subprocess.Popen([*command, INSIDE, scratch], env=environment)
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def inside(scratch: Path) -> int:
    """Start the machines, try everything, remove the machines; 0 if every row is right."""
    began = time.monotonic()
    vagrant = Vagrant(os.environ["LAB_DRIVER"], CACHE / "home", scratch)
    course = None
    try:
        vagrant.up(float(os.environ.get("LAB_BOOT_TIMEOUT") or _BOOT))
        print(f"two nodes have booted after {time.monotonic() - began:.0f} s", flush=True)
        nodes = vagrant.nodes()
        provision(nodes)
        kernel = nodes[0].run("uname -r").strip()
        print(f"agents run on {kernel} after {time.monotonic() - began:.0f} s", flush=True)
        course = Course(nodes, os.environ["LAB_DRIVER"])
        course.run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        vagrant.run("destroy", "-f", limit=600)
    table = [HEAD, *(row.text() for row in course.rows)]
    table += ["", f"kernel {kernel}, driver {os.environ['LAB_DRIVER']}", summary(course.rows, time.monotonic() - began)]
    (LOGS / "table.txt").write_text("\n".join(table) + "\n")
    print("\n" + "\n".join(table))
    return 1 if any(row.problem for row in course.rows) else 0


def provision(nodes: Sequence[Node]) -> None:
    """Run ``vagrant provision`` on all at once. VagrantError with the script's last lines."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        for done in [
            pool.submit(node.run, "sudo /srv/pyebpf-proxy/provision.sh --lab", b"", _PROVISION) for node in nodes
        ]:
            done.result()


def main(arguments: list[str]) -> int:
    """0: everything is right; 1: something is not; 2: nothing could be tried; 130: interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    try:
        return inside(Path(arguments[1])) if arguments[:1] == [INSIDE] else outside()
    except VagrantError as error:
        print(f"lab-test: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if arguments[:1] != [INSIDE]:
            print("lab-test: interrupted; no machine is left", file=sys.stderr)
        return 130


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
