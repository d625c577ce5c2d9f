# SPDX-License-Identifier: Apache-2.0
"""Finds the bpffs for pins and the cgroup2 for socket programs, or mounts them if they are missing.

A process started by ``ip netns exec`` has its own mount namespace, whose /sys has neither of the two and which ends
with the process. Pins must outlive the agent, so the host's mounts are used there, through the /proc/PID/root of a
process that sees them, and a missing bpffs is mounted in that process's mount namespace. That is process 1 or, if it
is protected even against root, the kernel's first thread or the outermost ancestor.

The instance that mounts a bpffs leaves a folder ``pyebpf-proxy/mounted_by_pyebpf_proxy`` in it (in the file system
itself, because several instances share it). Clean-up unmounts a bpffs only if it has that mark and is otherwise empty.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy.datapath.refused import RefusedError

DEFAULT_DIRECTORY = Path("/run/pyebpf-proxy")
FOLDER = "pyebpf-proxy"
MARK = "mounted_by_pyebpf_proxy"
SYSTEM_BPFFS = Path("/sys/fs/bpf")
PROC = Path("/proc")
BPF_FS_MAGIC = 0xCAFE4A11
CGROUP2_SUPER_MAGIC = 0x63677270
CLONE_NEWNS = 0x00020000
SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT = 430, 431, 432  # the same on every architecture
FSCONFIG_CMD_CREATE = 6
FSOPEN_CLOEXEC = FSMOUNT_CLOEXEC = 1
# The kernel's own files in the root of a bpffs (bpf_preload).
KERNELS_OWN = frozenset({"maps.debug", "progs.debug"})

#: How the kernel writes spaces and backslashes in a path.
_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")

_libc = ctypes.CDLL(None, use_errno=True)


class MountError(RefusedError):
    """A file system is missing and cannot be mounted."""


class Bpffs(NamedTuple):
    """``warning``: a message about this place, empty if all is well."""

    path: Path
    warning: str = ""


def instance_name(directory: Path) -> str:
    """A short name, unique per directory, valid for bpffs and nftables: "default" for the default.

    Two paths of one directory, such as /run/x and /var/run/x, are one instance: it has one lock and one record.
    """
    absolute = Path(os.path.realpath(directory))
    if absolute == Path(os.path.realpath(DEFAULT_DIRECTORY)):
        return "default"
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", absolute.name)[:40].lstrip("-")
    return f"{readable or 'root'}-{hashlib.sha256(os.fsencode(absolute)).hexdigest()[:8]}"


def table_name(directory: Path) -> str:
    """Name of the instance's nftables table."""
    name = instance_name(directory)
    return FOLDER if name == "default" else f"{FOLDER}-{name}"


def pin_directory(bpffs: Path, directory: Path, version: int) -> Path:
    """Folder of the instance's pins for a layout version; maps and links are in sub-folders of these names."""
    return bpffs / FOLDER / instance_name(directory) / f"v{version}"


def tcx_directory(bpffs: Path, directory: Path) -> Path:
    """Folder of the pins of programs on devices. Independent of the layout version: the next one replaces in place."""
    return bpffs / FOLDER / instance_name(directory) / "tcx"


def file_system_type(path: Path) -> int:
    """Magic number of the file system at ``path``, 0 if there is none (statfs(2))."""
    buffer = (ctypes.c_long * 64)()
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return 0
    return int(buffer[0]) & 0xFFFFFFFF


def is_bpffs(path: Path) -> bool:
    return file_system_type(path) == BPF_FS_MAGIC


def holds_pins(place: Path) -> bool:
    """Whether pins can be below ``place``: it, or at least the folder in it, is a bpffs. A pod sees only the folder."""
    return is_bpffs(place) or is_bpffs(place / FOLDER)


def bpffs_candidates(directory: Path) -> list[Path]:
    """Where the instance's bpffs may be, in order of preference."""
    return [directory / "bpf", SYSTEM_BPFFS, root_of_host() / SYSTEM_BPFFS.relative_to("/")]


def ensure_bpffs(directory: Path) -> Bpffs:
    """The bpffs for pins; mounted if there is none. MountError reports what was tried and what to do."""
    candidates = bpffs_candidates(directory)
    for candidate in candidates:
        if holds_pins(candidate):
            return Bpffs(candidate)
    reasons = []
    try:
        in_mount_namespace_of_init(lambda: mount_bpffs(SYSTEM_BPFFS))
        place = SYSTEM_BPFFS if is_bpffs(SYSTEM_BPFFS) else candidates[-1]
        if is_bpffs(place):
            _mark(place)
            return Bpffs(place)
        reasons.append(f"{candidates[-1]}: mounted, but not visible from here")
    except OSError as error:
        reasons.append(f"{candidates[-1]}: {error.strerror}")
    place = candidates[0]
    try:
        place.mkdir(parents=True, exist_ok=True)
        mount_bpffs(place)
        _mark(place)
    except OSError as error:
        reasons.append(f"{place}: {error.strerror}")
        raise MountError(
            error.errno,
            f"no bpffs, and mounting one failed ({'; '.join(reasons)}); mount it with: mount -t bpf bpf {SYSTEM_BPFFS}",
        ) from error
    private = not in_namespace_of_init("mnt")
    return Bpffs(
        place,
        f"{SYSTEM_BPFFS} of the host is out of reach ({reasons[0]}); pins are in {place} and end with this "
        "process's mount namespace: services stop when the agent does"
        if private
        else "",
    )


def release_bpffs(directory: Path) -> list[str]:
    """Removes the instance's pins, and the bpffs if the proxy mounted it and it is empty. Returns what was removed."""
    gone: list[str] = []
    seen: set[tuple[int, int]] = set()
    for bpffs in bpffs_candidates(directory):
        if not holds_pins(bpffs):
            continue
        root = os.stat(bpffs if is_bpffs(bpffs) else bpffs / FOLDER)
        identity = (root.st_dev, root.st_ino)
        if identity in seen:
            continue
        seen.add(identity)
        instance = bpffs / FOLDER / instance_name(directory)
        if instance.is_symlink():
            instance.unlink()  # a container of the agent may put it there, to the pins of other programs
        elif instance.is_dir():
            _remove_tree(instance)
            gone.append(f"pins in {instance}")
        gone += _release_mount(bpffs)
    return gone


class Cgroup2(NamedTuple):
    """An open cgroup, where it was found (for messages), and a warning, "" if all is well."""

    descriptor: int
    found: str
    warning: str = ""


def open_cgroup2() -> Cgroup2:
    """The root of the cgroup2 hierarchy; if it is not visible, the highest visible cgroup.

    If it is not mounted anywhere, a detached mount is created, which is invisible and ends with the descriptor.
    """
    candidates = [place for place in _cgroup2_candidates() if file_system_type(place) == CGROUP2_SUPER_MAGIC]
    for candidate in [*filter(_is_root_cgroup, candidates), *candidates[:1]]:
        warning = (
            ""
            if _is_root_cgroup(candidate)
            else f"{candidate} is not the root cgroup: processes of the node outside it are not served;"
            " in a pod: mount the node's /sys/fs/cgroup there"
        )
        descriptor = os.open(candidate, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return Cgroup2(descriptor, str(candidate), warning)
    try:
        mount = _detached_cgroup2()
    except OSError as error:
        raise MountError(
            error.errno,
            f"no cgroup2 file system, and mounting one failed: {error.strerror}; it is needed for the node's own "
            "connections to services (CONFIG_CGROUPS, mount -t cgroup2 none /sys/fs/cgroup/unified)",
        ) from error
    try:
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
        return Cgroup2(descriptor, "a detached mount")
    finally:
        os.close(mount)


def _is_root_cgroup(cgroup: Path) -> bool:
    """Only the root has no such file (Documentation/admin-guide/cgroup-v2); the root of a cgroup namespace has it."""
    return not (cgroup / "cgroup.type").exists()


def _cgroup2_candidates() -> Iterator[Path]:
    usual = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
    mounted = list(_mounted_cgroup2(Path("/proc/self/mountinfo")))
    host = root_of_host()
    of_init = [host / p.relative_to("/") for p in _mounted_cgroup2(host.parent / "mountinfo")]
    # In its own cgroup namespace a process sees its subtree as the root; init sees the whole hierarchy.
    own = [*usual, *mounted]
    yield from [*own, *of_init] if in_namespace_of_init("cgroup") else [*of_init, *own]


def _mounted_cgroup2(table: Path) -> Iterator[Path]:
    try:
        # Bytes: any user who may mount, and any pod with a subPath, can choose a path that is not UTF-8.
        lines = table.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(b" - ")
        fields = before.split(b" ")
        if after.startswith(b"cgroup2 ") and fields[3] == b"/":
            yield Path(os.fsdecode(_OCTAL.sub(lambda found: bytes([int(found[1], 8)]), fields[4])))


def _detached_cgroup2() -> int:
    context = checked(_libc.syscall(SYS_FSOPEN, b"cgroup2", FSOPEN_CLOEXEC))
    try:
        checked(_libc.syscall(SYS_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0))
        return checked(_libc.syscall(SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, 0))
    finally:
        os.close(context)


def mount_bpffs(path: Path) -> None:
    """Mount a new bpffs in this mount namespace. OSError."""
    checked(_libc.mount(b"bpf", os.fsencode(path), b"bpf", 0, b"mode=0700"))


def _mark(bpffs: Path) -> None:
    (bpffs / FOLDER / MARK).mkdir(parents=True, exist_ok=True, mode=0o700)


def _release_mount(bpffs: Path) -> list[str]:
    """Removes the proxy's folder if it has no instance left, and the mount if the proxy made it and it is empty."""
    folder = bpffs / FOLDER
    # In a pod the folder itself is mounted and cannot be removed from there: an empty folder is left on the node.
    if not folder.is_dir() or os.stat(folder).st_dev != os.stat(bpffs).st_dev:
        return []
    if {entry.name for entry in folder.iterdir()} - {MARK}:
        return []
    marked = (folder / MARK).is_dir()
    others = {entry.name for entry in bpffs.iterdir()} - KERNELS_OWN - {FOLDER}
    _remove_tree(folder)
    if not marked or others:
        return []
    try:
        if bpffs.is_relative_to(root_of_host()):
            target = Path("/") / bpffs.relative_to(root_of_host())
            in_mount_namespace_of_init(lambda: checked(_libc.umount2(os.fsencode(target), 0)))
        else:
            checked(_libc.umount2(os.fsencode(bpffs), 0))
    except OSError as error:
        if error.errno == errno.EBUSY:
            return []  # it is in use
        raise MountError(error.errno, f"cannot unmount {bpffs}: {error.strerror}") from error
    return [f"bpffs at {bpffs}"]


def _remove_tree(folder: Path) -> None:
    """Removes a folder of a bpffs. Never leaves that file system, and follows no link, even one that is put there
    meanwhile: a container of the agent can write to it. Links are removed before maps."""
    with opened_folder(folder) as descriptor:
        _empty(descriptor, folder)
    folder.rmdir()


@contextmanager
def opened_folder(name: Path | str, inside: int | None = None) -> Iterator[int]:
    """The descriptor of a folder. OSError, also if it is a link. ``inside``: another folder's, for a name there."""
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _empty(folder: int, path: Path) -> None:
    """Removes everything in an open folder. ``path``: for the error."""
    if not is_bpffs(Path(f"/proc/self/fd/{folder}")):
        raise MountError(errno.EINVAL, f"{path} is not in a bpffs, it is left alone")
    for name in sorted(os.listdir(folder), key=lambda name: (name != "links", name)):
        try:
            with opened_folder(name, folder) as inner:
                _empty(inner, path / name)
        except NotADirectoryError:
            os.unlink(name, dir_fd=folder)
        else:
            os.rmdir(name, dir_fd=folder)


@functools.cache
def root_of_host() -> Path:
    """The root directory as the host's processes see it: /proc/PID/root of a process whose mounts are readable.

    Some machines protect process 1 even against root. /proc/1/root if no process is readable.
    """
    for process in ("1", *_first_thread(), *reversed(_ancestors())):
        try:
            os.stat(PROC / process / "ns" / "mnt")
            os.stat(PROC / process / "root")
        except OSError:
            continue
        return PROC / process / "root"
    return PROC / "1" / "root"


def _first_thread() -> Iterator[str]:
    """kthreadd, which has the mounts of the boot. Not visible in a container."""
    if _parent("2") == "0":
        yield "2"


def _ancestors() -> list[str]:
    found: list[str] = []
    process = _parent("self")
    while process not in ("", "0", "1"):
        found.append(process)
        process = _parent(process)
    return found


def _parent(process: str) -> str:
    try:
        # The name, in brackets, may contain any bytes, including brackets.
        return (PROC / process / "stat").read_bytes().rpartition(b")")[2].split()[1].decode()
    except (OSError, IndexError):
        return ""


def in_namespace_of_init(kind: str) -> bool:
    """Whether this process shares the host's namespace of that kind ("mnt", "cgroup")."""
    try:
        inits = os.stat(root_of_host().parent / "ns" / kind)
    except OSError:
        return True
    own = os.stat(f"/proc/self/ns/{kind}")
    return (own.st_dev, own.st_ino) == (inits.st_dev, inits.st_ino)


def in_mount_namespace_of_init(work: Callable[[], object]) -> None:
    """Runs ``work`` in the host's mount namespace: in a child, because returning may be impossible. OSError of work."""
    if in_namespace_of_init("mnt"):
        work()
        return
    namespace = os.open(root_of_host().parent / "ns" / "mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        child = os.fork()
        if child == 0:
            code = errno.EIO
            try:
                checked(_libc.setns(namespace, CLONE_NEWNS))
                work()
                code = 0
            except OSError as error:
                code = error.errno or errno.EIO
            finally:
                os._exit(min(code, 255))
    finally:
        os.close(namespace)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        number = code if code > 0 else errno.EIO
        raise OSError(number, os.strerror(number))


def checked(result: int) -> int:
    """The result of a system call; OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
