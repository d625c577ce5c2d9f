# SPDX-License-Identifier: Apache-2.0
"""``LAB_KERNEL``: another Debian kernel under the box's own system, which QEMU boots without a bootloader.

The box's initramfs is used unchanged. A second one follows it, with the kernel's modules and a script that also
provides them in the booted system.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kernels import image
from tests.kernels.cpio import Archive, join
from tests.kernels.problem import KernelsError

# Modules for networks as in tests/kernels, and for the machine's disk.
_MODULES = (
    *("kernel/net", "kernel/drivers/net", "kernel/lib", "kernel/crypto", "kernel/arch", "kernel/drivers/char"),
    *("kernel/fs/ext4", "kernel/fs/jbd2", "kernel/fs/fuse", "kernel/drivers/virtio", "kernel/drivers/block"),
)
_FILES = ("kernel/fs/mbcache.*",)
_LEFT_OUT = ("ethernet", "wireless", "wwan", "infiniband", "bluetooth", "mac80211", "drbd", "xen*", "nbd*")
# After Debian's own script, which ends udev.
_ORDER = """/scripts/init-bottom/modules "$@"
[ -e /conf/param.conf ] && . /conf/param.conf
/scripts/init-bottom/udev "$@"
[ -e /conf/param.conf ] && . /conf/param.conf
"""
_SCRIPT = """#!/bin/sh
[ "$1" = prereqs ] && exit 0
# The system's own modules are another kernel's; nothing is written to its disk.
mount -t tmpfs -o mode=755 modules "$rootmnt/usr/lib/modules"
cp -a "/usr/lib/modules/$(uname -r)" "$rootmnt/usr/lib/modules/"
"""


def make(series: str, box_initrd: Path, target: Path) -> None:
    """vmlinuz, initrd and release in the folder ``target``, complete or absent. KernelsError if it fails."""
    if (target / "release").exists():
        return
    if not re.fullmatch(r"\d+\.\d+|newest", series):
        raise KernelsError(f"LAB_KERNEL={series}: a series as 6.12, or newest")
    image.CACHE.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kernel.", dir=target.parent) as folder:
        scratch = Path(folder)
        package, version = _find(series)
        print(f"fetching {package} {version}", flush=True)
        image.debian(False).kernel(package, version, scratch / "files")
        (vmlinuz,) = (scratch / "files").glob("**/boot/vmlinuz-*")
        release = vmlinuz.name.removeprefix("vmlinuz-")
        (modules,) = (scratch / "files").glob(f"**/lib/modules/{release}")
        subprocess.run(["depmod", "-b", modules.parents[2], release], check=True)
        behind = scratch / "behind"
        with behind.open("wb") as file:
            _write(Archive(file), modules, release)
        done = scratch / "done"
        done.mkdir(mode=0o755)
        shutil.copy(vmlinuz, done / "vmlinuz")
        padded = scratch / "padded"
        content = box_initrd.read_bytes()
        padded.write_bytes(content + bytes(-len(content) % 512))
        join((padded, behind), done / "initrd")
        (done / "release").write_text(release + "\n")
        done.rename(target)


def _find(series: str) -> tuple[str, str]:
    found = image.debian(False).newest(series)
    if found is None:
        raise KernelsError(f"LAB_KERNEL={series}: no Debian suite of the mirror has such a kernel")
    return found


def _write(archive: Archive, modules: Path, release: str) -> None:
    there = f"usr/lib/modules/{release}"
    for path in sorted([*modules.glob("modules.*"), *(found for name in _FILES for found in modules.glob(name))]):
        archive.add(path, f"{there}/{path.relative_to(modules)}")
    for part in _MODULES:
        if (modules / part).is_dir():
            archive.tree(modules / part, f"{there}/{part}", _left_out)
    archive.data("scripts/init-bottom/ORDER", _ORDER.encode())
    archive.data("scripts/init-bottom/modules", _SCRIPT.encode(), mode=0o755)
    archive.close()


def _left_out(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name.rpartition("/")[2], pattern) for pattern in _LEFT_OUT)


def main(arguments: list[str]) -> int:
    """SERIES, the box's initramfs, the folder; status 2 and one line if it fails."""
    series, initrd, target = arguments
    try:
        make(series, Path(initrd), Path(target))
    except KernelsError as error:
        print(f"kernel: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
