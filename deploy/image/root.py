# SPDX-License-Identifier: Apache-2.0
"""Executes deploy/Dockerfile in folders, like a container builder, on a machine that cannot pull images.

    root.py FOLDER      creates FOLDER/root, the file system of the last stage, and FOLDER/image.json, how to run it

debootstrap creates a base image ``debian:SUITE-slim`` from the mirror that this machine's apt uses, and it is kept in
the cache folder. ``RUN`` uses chroot in separate namespaces. Meanwhile, this machine's settings of apt and pip are
mounted read-only; they are not in the result. Needs root and debootstrap.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("PYEBPF_PROXY_CACHE", "/var/cache/pyebpf-proxy"))
#: Files of this machine that are visible, read-only, during a RUN.
BORROWED = ("/etc/resolv.conf", "/etc/hosts", "/etc/apt", "/etc/pip.conf")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
#: The packages are those of this machine's mirror.
ARGUMENTS = {"ARCHIVE": "mirror"}
PASSED_ON = re.compile(r"(?i)^(pip_(?!find_links|cert).*|.*_proxy)$")

# Arguments: the root, the BORROWED files, --, the working folder, the command.
RUN = """
root=$1; shift
mkdir -p "$root/proc" "$root/sys" "$root/dev" "$root/run"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
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


class RecipeError(Exception):
    """An instruction that cannot be executed. The text is one line."""


@dataclass
class Stage:
    """One stage of the image while it is built."""

    root: Path
    directory: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    #: Variables that RUN sees, but that are not in the image.
    arguments: dict[str, str] = field(default_factory=dict)
    entry_point: list[str] = field(default_factory=list)


def instructions(text: str) -> list[tuple[str, str]]:
    """Instructions in order, as (instruction, rest), without comments, and with continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(line.split(None, 1)[0].upper(), line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def build(recipe: Path, folder: Path) -> Stage:
    """Execute all instructions. The result: the last stage. RecipeError or CalledProcessError if one fails."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    for instruction, rest in instructions(recipe.read_text()):
        print(f"{instruction} {rest}", flush=True)
        if instruction == "FROM":
            words = rest.split()
            name = words[2] if len(words) == 3 and words[1].upper() == "AS" else "root"
            stage = stages[name] = Stage(folder / name)
            shutil.rmtree(stage.root, ignore_errors=True)
            subprocess.run(["cp", "-a", "--reflink=auto", base(words[0]), stage.root], check=True)
        elif stage is None:
            raise RecipeError(f"{instruction} before the first FROM")
        elif instruction == "ARG":
            name, _, value = rest.partition("=")
            stage.arguments[name] = ARGUMENTS.get(name) or os.environ.get(name) or value
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
    return stage


def base(image: str) -> Path:
    """The root of ``debian:SUITE-slim``, whatever its digest. It is created if it is not in the cache."""
    found = re.fullmatch(r"debian:([a-z]+)-slim(@sha256:[0-9a-f]{64})?", image)
    if not found:
        raise RecipeError(f"FROM {image}: only debian:SUITE-slim can be made here")
    suite = found.group(1)
    root = CACHE / f"debian-{suite}"
    if not root.exists():
        targets = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Identifier: Packages", f"Codename: {suite}"]
        mirrors = subprocess.run(targets, check=True, capture_output=True, text=True).stdout.split()
        if not mirrors:
            raise RecipeError(f"apt is not configured for {suite} here")
        fresh = root.with_name(f"{root.name}.{os.getpid()}")
        try:
            subprocess.run(["debootstrap", "--variant=minbase", suite, fresh, mirrors[0]], check=True)
            shutil.rmtree(fresh / "var/cache/apt/archives")
            fresh.rename(root)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return root


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
    standard = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = {name: value for name, value in os.environ.items() if PASSED_ON.match(name)}
    environment |= {"PATH": standard, "HOME": "/root"} | stage.environment | stage.arguments
    if os.path.exists(CERTIFICATES):
        environment |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), "/run/certificates")
    namespaces = ["--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]
    script = ["/bin/sh", "-euc", RUN, "sh", str(stage.root), *borrowed, "--", stage.directory, command]
    subprocess.run(["unshare", *namespaces, *script], env=environment, check=True)
    for place in made:
        place.unlink()


def main(arguments: list[str]) -> int:
    """The command line."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(f"usage: {sys.argv[0]} FOLDER", file=sys.stderr)
        return 1
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        print("this needs root and debootstrap (apt-get install debootstrap)", file=sys.stderr)
        return 1
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        stage = build(REPOSITORY / "deploy" / "Dockerfile", folder)
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
