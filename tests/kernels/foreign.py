# SPDX-License-Identifier: Apache-2.0
"""The file system of a guest whose programs this machine cannot run: Debian without the scripts of its packages, and
the compiled parts of Python libraries.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

from tests import ROOT
from tests.kernels.problem import KernelsError

#: What the scripts of packages would have made, and the suites need: users, and the names of alternatives.
COPIES = {
    "etc/passwd": "usr/share/base-passwd/passwd.master",
    "etc/group": "usr/share/base-passwd/group.master",
    "etc/nsswitch.conf": "usr/share/libc-bin/nsswitch.conf",
}
_TABLES = ("iptables", "ip6tables", "arptables", "ebtables")
LINKS = {
    "usr/bin/awk": "mawk",
    "usr/bin/which": "which.debianutils",
    **{f"usr/sbin/{name}{what}": f"{name}-nft{what}" for name in _TABLES for what in ("", "-restore", "-save")},
}


def finish(root: Path) -> None:
    """Unpack what ``debootstrap --foreign`` has only downloaded into this root, and complete it without its scripts."""
    for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):
        # Not dpkg-deb -x: it replaces the links of a merged /usr by folders.
        files = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
        unpack = ["tar", "-C", root, "-x", "--keep-directory-symlink", "-f", "-"]
        done = subprocess.run(unpack, stdin=files.stdout, stderr=subprocess.PIPE, text=True, check=False)
        if files.wait() or done.returncode:
            raise KernelsError(f"{package.name} cannot be unpacked: {(done.stderr.strip() or 'tar').splitlines()[-1]}")
    proc = root / "proc"
    if proc.is_symlink():  # to that of this machine
        proc.unlink()
        proc.mkdir()
    sources = [*COPIES.values(), *(f"{os.path.dirname(name)}/{target}" for name, target in LINKS.items())]
    # A link may have an absolute target, which is not on this machine.
    if missing := [source for source in sources if not os.path.lexists(root / source)]:
        raise KernelsError(f"Debian's packages have no {missing[0]}")
    for name, source in COPIES.items():
        (root / name).write_bytes((root / source).read_bytes())
    for name, target in LINKS.items():
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(target)


def compiled(site: Path, left_out: Callable[[str], bool]) -> list[str]:
    """The distributions in this folder with compiled parts, but for those whose compiled parts are all left out."""
    found = []
    for each in distributions(path=[str(site)]):
        parts = [str(file) for file in each.files or () if file.suffix == ".so"]
        if any(not left_out(part) for part in parts):
            found.append(each.metadata["Name"])
    return sorted(found)


def locked(names: list[str]) -> str:
    """The entries of the lock file with these names, with hashes, which are those of all architectures."""
    select = [sys.executable, ROOT / "deploy/image/locked.py", ROOT / "requirements.lock", *names]
    done = subprocess.run(select, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelsError(done.stderr.strip())
    return done.stdout


def install(lock: str, machine: str, folder: Path) -> None:
    """Download the wheels of a lock file for another machine, and unpack them into a folder."""
    # Wheels name the oldest glibc they run with; the guest has the one of this machine.
    newest = int(platform.libc_ver()[1].split(".")[1])
    tags = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, newest + 1))]
    with tempfile.NamedTemporaryFile("w", suffix=".lock") as file:
        file.write(lock)
        file.flush()
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"),
            *("--target", folder, "--no-deps", "--only-binary=:all:", "--no-compile", "--require-hashes"),
            *("--implementation", "cp", "--python-version", f"{sys.version_info[0]}.{sys.version_info[1]}"),
            *(word for tag in tags for word in ("--platform", f"{tag}_{machine}")),
            *("-r", file.name),
        ]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelsError(f"pip: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
