# SPDX-License-Identifier: Apache-2.0
"""A Debian with systemd as process 1, in its own namespaces: shows what a package does to a machine."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from pyebpf_proxy.lab.namespace import die_with_parent
from tests import ROOT
from tests.support.tool_module import tool

#: Services that would change this machine, or that the tests do not need.
_MASKED = (
    "systemd-sysctl",
    "systemd-modules-load",
    "systemd-udevd",
    "systemd-logind",
    "getty@tty1",
    "systemd-resolved",
)

# $1: the root. The network namespace exists already.
_BOOT = """
root=$1
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t bpf bpf "$root/sys/fs/bpf"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
exec chroot "$root" env -i container=chroot PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --show-status=no
"""


def make_root(folder: Path, packages: tuple[Path, Path]) -> Path:
    """A Debian in which apt has installed systemd, the package and its dependencies."""
    recipe = tool("root", ROOT / "deploy" / "image")
    folder.mkdir(parents=True, exist_ok=True)
    stage = recipe.Stage(folder / "root", recipe.own_architecture())
    shutil.rmtree(stage.root, ignore_errors=True)
    subprocess.run(
        ["cp", "-a", "--reflink=auto", recipe.base("debian:bookworm-slim", stage.architecture), stage.root], check=True
    )
    for package, name in zip(packages, ("package", "later"), strict=True):
        shutil.copy(package, stage.root / "root" / f"{name}.deb")
    apt = "DEBIAN_FRONTEND=noninteractive apt-get -q -y"
    recipe.run(
        stage,
        f"{apt} update && {apt} install --no-install-recommends systemd-sysv iproute2 /root/package.deb"
        " && rm -rf /var/lib/apt/lists/*",
    )
    # Only the journal of one boot: tests wait for messages.
    shutil.rmtree(stage.root / "var/log/journal", ignore_errors=True)
    for name in _MASKED:
        (stage.root / "etc/systemd/system" / f"{name}.service").symlink_to("/dev/null")
    return Path(stage.root)


class Machine:
    """``root`` booted in the network namespace of that name. A context manager that ends it with all its processes."""

    def __init__(self, root: Path, namespace: str) -> None:
        self.root = root
        self._namespace = namespace
        self._cgroup = _cgroup2() / f"{namespace}-machine"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._cgroup.mkdir(exist_ok=True)
        namespaces = ["--mount", "--pid", "--fork", "--kill-child", "--cgroup", "--ipc", "--uts"]
        self._process = subprocess.Popen(
            [
                *("sh", "-c", 'echo $$ >"$0"/cgroup.procs && exec "$@"', str(self._cgroup)),
                *("ip", "netns", "exec", self._namespace, "unshare", *namespaces),
                *("sh", "-euc", _BOOT, "sh", str(self.root)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        end = time.monotonic() + 60
        while not (self._init() and self.run("systemctl", "is-system-running", status=None) == "running"):
            assert time.monotonic() < end, f"it does not boot: {self._init()}"
            time.sleep(0.2)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        (self._cgroup / "cgroup.kill").write_text("1")
        if self._process is not None:
            self._process.wait(30)
        end = time.monotonic() + 30
        while (self._cgroup / "cgroup.events").read_text().startswith("populated 1") and time.monotonic() < end:
            time.sleep(0.05)
        for folder in sorted(self._cgroup.rglob("*/"), key=lambda path: -len(path.parts)):
            if folder.is_dir():
                folder.rmdir()
        self._cgroup.rmdir()

    def _init(self) -> str:
        """Process 1, by its number outside."""
        try:
            return (self._cgroup / "init.scope" / "cgroup.procs").read_text().split()[0]
        except (OSError, IndexError):
            return ""

    def run(self, *command: str, status: int | None = 0) -> str:
        """The output of a command in the machine. AssertionError unless it ends with this status; None: any status."""
        init = self._init()
        enter = [
            "nsenter",
            f"--target={init}",
            *(f"--{name}" for name in ("mount", "pid", "net", "ipc", "uts", "cgroup")),
        ]
        environment = [
            "env",
            "--chdir=/",
            "-i",
            "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
            "DEBIAN_FRONTEND=noninteractive",
            "LC_ALL=C",
        ]
        done = subprocess.run(
            [*enter, "--root", *environment, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=120,
        )
        assert status is None or done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout.strip()

    def journal(self) -> str:
        """The log of the service."""
        return self.run("journalctl", "--no-pager", "-q", "-o", "cat", "-u", "pyebpf-proxy")

    def wait_for(self, text: str, count: int = 1, deadline: float = 60.0) -> None:
        """Wait until the service has logged this so often."""
        end = time.monotonic() + deadline
        while self.journal().count(text) < count:
            assert time.monotonic() < end, f"not logged: {text}\n{self.journal()}"
            time.sleep(0.2)


def _cgroup2() -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line:
            return Path(line.split()[4])
    raise OSError("cgroup2 is not mounted here")
