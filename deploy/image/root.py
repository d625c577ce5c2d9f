# SPDX-License-Identifier: Apache-2.0
"""Executes deploy/Dockerfile in folders, like a container builder, on a machine that cannot pull images.

    root.py FOLDER [ARCHITECTURE]   creates FOLDER/root, the file system of the last stage, and FOLDER/image.json, how
                                    to run it; for amd64 or arm64, by default that of this machine

debootstrap creates a base image ``debian:SUITE-slim`` from the mirror that this machine's apt uses, and it is kept in
the cache folder. ``RUN`` uses chroot in separate namespaces. Meanwhile, this machine's settings of apt and pip are
mounted read-only; they are not in the result. Needs root and debootstrap.

Programs of another architecture run through QEMU's user mode emulation, which only the namespaces of a ``RUN`` know:
the kernel keeps such registrations (binfmt_misc) by user namespace since Linux 6.7.
"""

from __future__ import annotations

import fnmatch
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("PYEBPF_PROXY_CACHE", "/var/cache/pyebpf-proxy"))
#: Files of this machine that are visible, read-only, during a RUN.
BORROWED = ("/etc/resolv.conf", "/etc/hosts", "/etc/apt", "/etc/pip.conf")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: The packages are those of this machine's mirror.
ARGUMENTS = {"ARCHIVE": "mirror"}
#: Debian's names of architectures, and the kernel's.
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
#: The machine in the header of their programs, and of BPF objects.
ELF = {"amd64": 62, "arm64": 183}
ELF_BPF = 247
PASSED_ON = re.compile(r"(?i)^(pip_(?!find_links|cert).*|.*_proxy)$")

# Arguments: the root, the BORROWED files, --, the working folder, the command.
RUN = """
root=$1; shift
mkdir -p "$root/proc" "$root/sys" "$root/dev" "$root/run"
mount -t proc proc "$root/proc"
if [ -z "${REGISTER:-}" ]; then
    mount -t sysfs -o ro sysfs "$root/sys"
fi
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero random urandom; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
while [ "$1" != -- ]; do
    mount -o bind,ro "$1" "$root$1"
    shift
done
cat @CERTIFICATES@ >"$root/run/certificates" 2>/dev/null || true
shift
exec chroot "$root" /bin/sh -c 'cd "$1" && eval "$2"' sh "$@"
""".replace("@CERTIFICATES@", CERTIFICATES)


# The argument: what to register. A user namespace has no sysfs of its own.
FOREIGN = """
read -r _
exec /bin/sh -euc 'mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc || {
    echo "this kernel cannot run programs of another architecture in a user namespace (binfmt_misc, Linux 6.7)" >&2
    exit 1
}
printf %s "$REGISTER" >/proc/sys/fs/binfmt_misc/register
exec "$@"' sh "$@"
"""


class RecipeError(Exception):
    """An instruction that cannot be executed. The text is one line."""


@dataclass
class Stage:
    """One stage of the image while it is built."""

    root: Path
    architecture: str = ""
    directory: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    #: Variables that RUN sees, but that are not in the image.
    arguments: dict[str, str] = field(default_factory=dict)
    entry_point: list[str] = field(default_factory=list)


def instructions(text: str) -> list[tuple[str, str]]:
    """Instructions in order, as (instruction, rest), without comments, and with continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(line.split(None, 1)[0].upper(), line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def own_architecture() -> str:
    """Debian's name of this machine's architecture."""
    machine = platform.machine()
    return next((name for name, kernels in MACHINES.items() if kernels == machine), machine)


def build(recipe: Path, folder: Path, architecture: str = "") -> Stage:
    """Execute all instructions. The result: the last stage. RecipeError or CalledProcessError if one fails."""
    own = own_architecture()
    architecture = architecture or own
    if architecture != own:
        emulator(architecture)
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    for instruction, rest in instructions(recipe.read_text()):
        print(f"{instruction} {rest}", flush=True)
        if instruction == "FROM":
            words = rest.split()
            here = words[0] == "--platform=$BUILDPLATFORM"
            del words[:here]
            name = words[2] if len(words) == 3 and words[1].upper() == "AS" else "root"
            stage = stages[name] = Stage(folder / name, own if here else architecture)
            shutil.rmtree(stage.root, ignore_errors=True)
            subprocess.run(["cp", "-a", "--reflink=auto", base(words[0], stage.architecture), stage.root], check=True)
        elif stage is None:
            raise RecipeError(f"{instruction} before the first FROM")
        elif instruction == "ARG":
            name, _, value = rest.partition("=")
            predefined = ARGUMENTS | {"TARGETARCH": architecture}
            stage.arguments[name] = predefined.get(name) or os.environ.get(name) or value
            print(f"  {stage.arguments[name]}", flush=True)
        elif instruction == "WORKDIR":
            stage.directory = rest
            inside(stage, rest).mkdir(parents=True, exist_ok=True)
        elif instruction == "ENV":
            name, _, value = rest.partition("=")
            if value.startswith("$"):
                if value[1:] not in stage.arguments:
                    raise RecipeError(f"ENV {rest}: only a whole value can be an argument here")
                value = stage.arguments[value[1:]]
            stage.environment[name] = value
        elif instruction == "ENTRYPOINT":
            stage.entry_point = json.loads(rest)
        elif instruction == "COPY":
            copy(stage, rest.split(), stages, ignored)
        elif instruction == "RUN":
            run(stage, rest)
        else:
            raise RecipeError(f"{instruction} is not known here")
    if stage is None or not stage.entry_point:
        raise RecipeError(f"{recipe} makes nothing that can be run")
    if others := files_of_others(stage.root, architecture):
        raise RecipeError(f"files for another architecture than {architecture}: {', '.join(others)}")
    return stage


def files_of_others(root: Path, architecture: str) -> list[str]:
    """Programs and libraries for another architecture, such as a wheel that pip has selected wrongly."""
    found = []
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in names):
            if path.is_symlink() or not path.is_file():
                continue
            with path.open("rb") as file:
                head = file.read(20)
            if head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") not in (ELF[architecture], ELF_BPF):
                found.append(str(path.relative_to(root)))
    return sorted(found)


def base(image: str, architecture: str) -> Path:
    """The root of ``debian:SUITE-slim``, whatever its digest. It is created if it is not in the cache."""
    found = re.fullmatch(r"debian:([a-z]+)-slim(@sha256:[0-9a-f]{64})?", image)
    if not found:
        raise RecipeError(f"FROM {image}: only debian:SUITE-slim can be made here")
    suite = found.group(1)
    foreign = architecture != own_architecture()
    root = CACHE / (f"debian-{suite}-{architecture}" if foreign else f"debian-{suite}")
    if not root.exists():
        targets = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Identifier: Packages", f"Codename: {suite}"]
        mirrors = subprocess.run(targets, check=True, capture_output=True, text=True).stdout.split()
        if not mirrors:
            raise RecipeError(f"apt is not configured for {suite} here")
        fresh = root.with_name(f"{root.name}.{os.getpid()}")
        try:
            options = ["--variant=minbase", *((f"--arch={architecture}", "--foreign") if foreign else ())]
            subprocess.run(["debootstrap", *options, suite, fresh, mirrors[0]], check=True)
            if foreign:
                second_stage(fresh, architecture)
            shutil.rmtree(fresh / "var/cache/apt/archives")
            fresh.rename(root)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return root


def second_stage(root: Path, architecture: str) -> None:
    """What debootstrap does with the programs of the root itself."""
    # Without device nodes, which a user namespace cannot make; debootstrap knows that of containers.
    script = [
        "/bin/sh",
        "-euc",
        'mount --rbind /dev "$1/dev"; exec chroot "$1" /debootstrap/debootstrap --second-stage',
    ]
    enter([*script, "sh", str(root)], {"PATH": STANDARD_PATH, "container": "lxc"}, architecture)


def emulator(architecture: str) -> str:
    """QEMU's program that runs programs of this architecture; RecipeError if there is none."""
    for name in (f"qemu-{MACHINES[architecture]}-static", f"qemu-{MACHINES[architecture]}"):
        if found := shutil.which(name):
            return found
    raise RecipeError(f"programs of {architecture} cannot run here: apt-get install qemu-user-static")


def enter(command: list[str], environment: dict[str, str], architecture: str) -> None:
    """Run a command in separate namespaces in which this machine runs programs of this architecture."""
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]
    if architecture == own_architecture():
        subprocess.run([*namespaces, *command], env=environment, check=True)
        return
    # ELF, 64 bits, little-endian; the type (2 or 3) and the machine.
    magic = rf"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x{ELF[architecture]:02x}\x00"
    mask = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
    # F: opened here, since the new root does not have it. P: programs get the name that they were called by.
    register = f":{architecture}:M::{magic}:{mask}:{emulator(architecture)}:FP"
    whole = [*namespaces, "--user", "/bin/sh", "-euc", FOREIGN, "sh", *command]
    with subprocess.Popen(whole, env=environment | {"REGISTER": register}, stdin=subprocess.PIPE, text=True) as process:
        own = os.readlink("/proc/self/ns/user")
        while process.poll() is None and os.readlink(f"/proc/{process.pid}/ns/user") == own:
            time.sleep(0.01)
        for kind in ("uid", "gid"):
            # All ids as they are: files belong to the same users as outside.
            Path(f"/proc/{process.pid}/{kind}_map").write_text("0 0 4294967295\n")
        process.communicate("\n")
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def inside(stage: Stage, path: str) -> Path:
    """The path on this machine of a path in the image."""
    return stage.root / os.path.join(stage.directory, path).lstrip("/")


def copy(stage: Stage, words: list[str], stages: dict[str, Stage], ignored: list[str]) -> None:
    """``COPY [--from=STAGE] SOURCE… TARGET``; of a folder, the contents are copied."""
    origin, patterns = REPOSITORY, ignored
    if words[0].startswith("--from="):
        origin, patterns = stages[words.pop(0).removeprefix("--from=")].root, []
    *sources, target = words
    for source in sources:
        path = origin / source.lstrip("/")
        place = inside(stage, target)
        if path.is_dir():
            shutil.copytree(path, place, symlinks=True, dirs_exist_ok=True, ignore=_ignore(origin, patterns))
        else:
            place = place / path.name if target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)


def _ignore(origin: Path, patterns: list[str]):  # type: ignore[no-untyped-def]
    def ignore(folder: str, names: list[str]) -> list[str]:
        def left_out(name: str) -> bool:
            path = str((Path(folder) / name).relative_to(origin))
            return any(fnmatch.fnmatch(path, pattern.replace("**/", "*")) for pattern in patterns)

        return [name for name in names if left_out(name)]

    return ignore


def run(stage: Stage, command: str) -> None:
    """``RUN``, with chroot in separate namespaces."""
    borrowed, made = [], []
    for path in filter(os.path.exists, BORROWED):
        place = stage.root / path.lstrip("/")
        if not place.exists():
            place.touch()
            made.append(place)
        borrowed.append(path)
    environment = {name: value for name, value in os.environ.items() if PASSED_ON.match(name)}
    environment |= {"PATH": STANDARD_PATH, "HOME": "/root"} | stage.environment | stage.arguments
    if os.path.exists(CERTIFICATES):
        environment |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), "/run/certificates")
    script = ["/bin/sh", "-euc", RUN, "sh", str(stage.root), *borrowed, "--", stage.directory, command]
    enter(script, environment, stage.architecture)
    for place in made:
        place.unlink()


def main(arguments: list[str]) -> int:
    """The command line."""
    if len(arguments) not in (1, 2) or arguments[0].startswith("-") or not {*arguments[1:]} <= {*MACHINES}:
        print(f"usage: {sys.argv[0]} FOLDER [{'|'.join(MACHINES)}]", file=sys.stderr)
        return 1
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        print("this needs root and debootstrap (apt-get install debootstrap)", file=sys.stderr)
        return 1
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        stage = build(REPOSITORY / "deploy" / "Dockerfile", folder, *arguments[1:])
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"exit status {error.returncode}: {shlex.join(map(str, error.cmd[-1:]))}", file=sys.stderr)
        return 1
    how = {"entry_point": stage.entry_point, "environment": stage.environment}
    (folder / "image.json").write_text(json.dumps(how, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
