# SPDX-License-Identifier: Apache-2.0
"""One container of a pod, created as a container runtime does: the agent has exactly the manifest's rights and mounts.

A :class:`Container` takes the pod specification of a DaemonSet and runs in an existing network namespace
(``hostNetwork: true``), with a root file system, a process namespace, a cgroup namespace, a mount namespace and a
separate capability set::

    /                    the image, bound; read-only with ``readOnlyRootFilesystem``
    /proc, /sys          new ones; /sys and /proc/sys are read-only, as in every runtime
    /sys/fs/cgroup       its own cgroup as the root
    /dev                 a tmpfs with the usual few devices
    volumeMounts         bound from the host; ``substitutes`` maps a path of the host in a test
    system calls         by seccompProfile: those of containerd's default profile (``RuntimeDefault``), or all
    AppArmor             containerd's default profile, if the kernel has AppArmor

The agent is process 1 and sees no process of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

if __name__ != "__main__":  # this package does not exist in the container
    from tests.deployment import apparmor
    from tests.deployment.seccomp_filter import runtime_default

#: include/uapi/linux/capability.h, the capabilities that manifests here name.
CAPABILITIES = {
    "NET_ADMIN": 12,
    "NET_RAW": 13,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_RESOURCE": 24,
    "PERFMON": 38,
    "BPF": 39,
}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SECCOMP_MODE_FILTER = 2


class Container:
    """The only container of ``pod`` (a PodSpec), to be run in a network namespace. A context manager that ends it.

    ``folder``: for the root mount (in its own mount namespace) and the log. ``image``: the root file system;
    ``entry_point``, ``environment``: those of the image. ``substitutes``: replacements of volumes, by name.
    """

    def __init__(
        self,
        pod: Mapping[str, Any],
        namespace: str,
        folder: Path,
        entry_point: Sequence[str],
        node_name: str,
        *,
        image: Path = Path("/"),
        substitutes: Mapping[str, Path] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.pod = pod
        self.namespace = namespace
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._specification = _specification(pod, folder, entry_point, node_name, image, substitutes or {})
        self._specification["environment"] |= dict(environment or {})
        self._cgroup: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def start(self) -> None:
        """Returns at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "root").mkdir(exist_ok=True)
        # Without a separate cgroup the cgroup namespace would show the whole hierarchy.
        self._cgroup = _cgroup2() / f"{self.namespace}-container"
        self._cgroup.mkdir(exist_ok=True)
        namespaces = ["--mount", "--pid", "--fork", "--kill-child", "--cgroup", "--ipc", "--uts"]
        with open(self.folder / "container.log", "wb") as log:
            self.process = subprocess.Popen(
                [
                    *("sh", "-c", 'echo $$ >"$0"/cgroup.procs && exec "$@"', str(self._cgroup)),
                    *("nsenter", f"--net=/run/netns/{self.namespace}", "unshare", *namespaces),
                    *(sys.executable, "-I", __file__),
                ],
                stdin=_text(json.dumps(self._specification)),
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
                start_new_session=True,
            )

    def log(self) -> str:
        """Its log since its last start."""
        return (self.folder / "container.log").read_text(errors="replace")

    def wait_for(self, condition: Callable[[], object], what: str, deadline: float = 60.0) -> None:
        """Wait while it runs; AssertionError with its log if it ends, or after ``deadline`` seconds."""
        end = time.monotonic() + deadline
        while not condition():
            if self.process is None or self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"still not: {what}; its log:\n{self.log()}")
            time.sleep(0.05)

    def wait_ended(self, deadline: float = 60.0) -> int:
        """Wait until it ends by itself; returns the exit status. TimeoutExpired after ``deadline`` seconds."""
        assert self.process is not None
        status = self.process.wait(deadline)
        self.kill()
        return status

    def kill(self) -> None:
        """End it at once, as a runtime does after the grace period, and remove its cgroup."""
        if self._cgroup is not None:
            # With AppArmor the container would not end with the process that created it.
            (self._cgroup / "cgroup.kill").write_text("1")
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        if self._cgroup is not None:
            _remove_cgroup(self._cgroup)
            self._cgroup = None

    def statuses(self) -> list[str]:
        """``/proc/PID/status`` of every thread in the container."""
        return [text for pid in self._processes() for text in _texts(Path(f"/proc/{pid}/task").glob("*/status"))]

    def first(self) -> int:
        """Process 1 of the container, by its number on the machine."""
        (pid,) = (pid for pid, number in self._processes().items() if number == 1)
        return pid

    def terminate(self) -> int:
        """Send SIGTERM to process 1 of the container; returns its exit status."""
        os.kill(self.first(), signal.SIGTERM)
        return self.wait_ended()

    def _processes(self) -> dict[int, int]:
        """The container's processes without their starter: number on the machine, and in the container."""
        assert self._cgroup is not None
        found = {}
        for pid in (self._cgroup / "cgroup.procs").read_text().split():
            for text in _texts([Path(f"/proc/{pid}/status")]):
                (line,) = (line for line in text.splitlines() if line.startswith("NSpid"))
                if len(line.split()) > 2:
                    found[int(pid)] = int(line.split()[-1])
        return found


def _texts(paths: Iterable[Path]) -> Iterator[str]:
    """The texts of processes that still exist: the agent sometimes runs programs."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield path.read_text()


def _specification(
    pod: Mapping[str, Any],
    folder: Path,
    entry_point: Sequence[str],
    node_name: str,
    image: Path,
    substitutes: Mapping[str, Path],
) -> dict[str, Any]:
    (container,) = pod["containers"]
    security = container["securityContext"]
    if security["privileged"] or security["capabilities"]["drop"] != ["ALL"] or not pod["hostNetwork"]:
        raise ValueError("only a container of the host's network that is not privileged and drops ALL can be made here")
    sources = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    sources |= {name: str(path) for name, path in substitutes.items()}
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    for variable in container.get("env", ()):
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        environment[variable["name"]] = node_name if field == "spec.nodeName" else variable["value"]
    arguments = [*container.get("command", entry_point), *container.get("args", ())]
    for name, value in environment.items():
        arguments = [argument.replace(f"$({name})", value) for argument in arguments]
    # As runtimes do: a mount inside another is made after it.
    mounts = sorted(container["volumeMounts"], key=lambda mount: mount["mountPath"].count("/"))
    return {
        "root": str(folder / "root"),
        "image": str(image),
        "read_only": security["readOnlyRootFilesystem"],
        "mounts": [(sources[mount["name"]], mount["mountPath"], bool(mount.get("readOnly"))) for mount in mounts],
        "capabilities": security["capabilities"]["add"],
        "no_new_privileges": security["allowPrivilegeEscalation"] is False,
        "seccomp": _seccomp(pod, security["capabilities"]["add"]).hex(),
        # Without appArmorProfile a node with AppArmor applies the runtime's default.
        "apparmor": apparmor.load() if apparmor.enabled() else "",
        "arguments": arguments,
        "environment": environment,
    }


def _seccomp(pod: Mapping[str, Any], capabilities: Sequence[str]) -> bytes:
    """The program that filters system calls; none: all are allowed."""
    profile = pod.get("securityContext", {}).get("seccompProfile", {"type": "Unconfined"})
    match profile["type"]:
        case "RuntimeDefault":
            return runtime_default(capabilities)
        case "Localhost":
            return Path(profile["localhostProfile"]).read_bytes()
        case "Unconfined":
            return b""
    raise ValueError(f"seccomp profile {profile}")


def _cgroup2() -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line:
            return Path(line.split()[4])
    raise OSError(errno.ENOENT, "cgroup2 is not mounted here")


def _remove_cgroup(cgroup: Path, deadline: float = 30.0) -> None:
    end = time.monotonic() + deadline
    while True:
        try:
            cgroup.rmdir()
        except OSError as error:
            # The kernel is killing its processes, one after the other.
            if error.errno != errno.EBUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return


def _text(text: str) -> int:
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    return reader


_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _mount(source: str, target: Path | str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = (None if text is None else text.encode() for text in (source, str(target), kind))
    _checked(_libc.mount(*texts, flags, None if data is None else data.encode()), f"mount {source} at {target}")


def _bind(source: str, target: Path, read_only: bool) -> None:
    _mount(source, target, None, MS_BIND | MS_REC)
    if read_only:
        _mount(source, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY)


def _filter_calls(instructions: bytes) -> None:
    """The last step, as in a runtime: earlier steps need calls that the profile refuses."""
    if not instructions:
        return
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0), "seccomp filter")


def _enter(wanted: dict[str, Any]) -> None:
    """Become the container's process in the new namespaces; never returns."""
    root = Path(wanted["root"])
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    # As runtimes do: mount points are created in a separate layer, and the image does not change.
    layers = root / "layers"
    _mount("tmpfs", root, "tmpfs", 0)
    for folder in (layers / "upper", layers / "work", root / "root"):
        folder.mkdir(parents=True)
    root /= "root"
    _mount("overlay", root, "overlay", 0, f"lowerdir={wanted['image']},upperdir={layers}/upper,workdir={layers}/work")
    _mount("tmpfs", root / "dev", "tmpfs", MS_NOSUID, "mode=755")
    for name in ("null", "zero", "random", "urandom"):
        (root / "dev" / name).touch()
        _mount(f"/dev/{name}", root / "dev" / name, None, MS_BIND)
    _mount("proc", root / "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _bind(str(root / "proc/sys"), root / "proc/sys", read_only=True)
    _mount("sysfs", root / "sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
    _mount("cgroup", root / "sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
    for source, target, read_only in wanted["mounts"]:
        # /var/run is a link to /run, which must not lead to this machine's.
        place = root / target.removeprefix("/var").lstrip("/") if target.startswith("/var/run/") else root / target[1:]
        if Path(source).is_file():
            # As runtimes do: a file hides what is at that path, and links are not followed.
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            place.touch()
        else:
            place.mkdir(parents=True, exist_ok=True)
        _bind(source, place, read_only)
    if wanted["read_only"]:
        _mount("overlay", root, None, MS_REMOUNT | MS_RDONLY)
    os.chdir(root)
    _mount(".", "/", None, MS_MOVE)
    os.chroot(".")
    os.chdir("/")
    kept = {CAPABILITIES[name] for name in wanted["capabilities"]}
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for bit in range(last + 1):
        if bit not in kept:
            _checked(_libc.prctl(PR_CAPBSET_DROP, bit, 0, 0, 0), f"drop capability {bit}")
    if wanted["no_new_privileges"]:
        _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if wanted["apparmor"]:
        Path("/proc/self/attr/apparmor/exec").write_text(f"exec {wanted['apparmor']}")
    _filter_calls(bytes.fromhex(wanted["seccomp"]))
    os.execve(wanted["arguments"][0], wanted["arguments"], wanted["environment"])


if __name__ == "__main__":
    _enter(json.load(sys.stdin))
