# SPDX-License-Identifier: Apache-2.0
"""Images as archives that containerd imports, under the names that the kubelet and the specs use.

No image is pulled: each consists of programs that are built or unpacked here. An archive is built again when its
contents have changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e import programs
from tests.e2e.layout import KUBE_PROXY_IMAGE, NEXT_IMAGE, PROXY_IMAGE, REPOSITORY, STORE
from tests.e2e.problem import E2EError

FOLDER = STORE / "images"
COREDNS_IMAGE = "registry.k8s.io/coredns/coredns:v1.14.7"
PAUSE_IMAGE = "registry.k8s.io/pause:3.10.2"
#: tests/e2e/load.yaml names it.
LOAD_IMAGE = "docker.io/library/pep-load:1"
_E2E = "registry.k8s.io/e2e-test-images"
AGNHOST_IMAGE = f"{_E2E}/agnhost:2.63.0"
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HERE = Path(__file__).parent
_USERS = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
#: Parts of a root that the container runtime creates, or that a container does not need.
_LEFT_OUT = ("./dev/", "./proc/", "./sys/", "./run/", "./var/cache/apt/", "./var/lib/apt/lists/", "./usr/share/doc/",
             "./usr/share/man/", "./usr/share/locale/")  # fmt: skip

#: root.py, RECIPE, FOLDER: the instructions of a recipe, and image.json as root.py writes it.
_CARRY_OUT = """
import json, pathlib, runpy, sys
root, recipe, folder = map(pathlib.Path, sys.argv[1:])
stage = runpy.run_path(str(root))["build"](recipe, folder)
how = {"entry_point": stage.entry_point, "environment": stage.environment}
(folder / "image.json").write_text(json.dumps(how))
"""

Fill = Callable[[tarfile.TarFile], None]


@dataclass(frozen=True)
class Image:
    """One archive: its names, what fills its only layer, how it is run, and the files that it depends on."""

    archive: str
    names: Sequence[str]
    fill: Fill
    run: Mapping[str, object]
    sources: Sequence[Path] = field(default_factory=list)


def prepare() -> list[Path]:
    """Build the archives that are missing or out of date; returns all of them, for import."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    return [_make(image) for image in _images()]


def _images() -> list[Image]:
    pause, load = compiled("pause"), compiled("load")
    tools = _root("tools", _HERE / "tools.Dockerfile", [_HERE / "tools.Dockerfile"])
    proxy = _root("pyebpf-proxy", REPOSITORY / "deploy/Dockerfile", _proxy_sources())
    agnhost, coredns, kube_proxy = (programs.built(name) for name in ("agnhost", "coredns", "kube-proxy"))
    regression = programs.built("regression-issue-74839")
    busybox = programs.UNPACKED / "bin/busybox"
    certificates = programs.source("k8s.io/kubernetes") / "test/images/agnhost/porter"

    def fill_agnhost(tar: tarfile.TarFile) -> None:
        _tree(tar, tools)
        _file(tar, agnhost, "./agnhost")
        _link(tar, "./agnhost-2", "agnhost")
        _file(tar, coredns, "./coredns")
        _file(tar, _HERE / "wget.sh", "./usr/bin/wget")
        _folder(tar, "./uploads", 0o777)
        for name in ("localhost.crt", "localhost.key"):
            _file(tar, certificates / name, f"./{name}", 0o644)

    def fill_kube_proxy(tar: tarfile.TarFile) -> None:
        _tree(tar, tools)
        _file(tar, kube_proxy, "./usr/local/bin/kube-proxy")

    def fill_coredns(tar: tarfile.TarFile) -> None:
        _file(tar, coredns, "coredns")
        _folder(tar, "etc")
        _text(tar, "etc/passwd", _USERS)
        _folder(tar, "tmp", 0o1777)

    def fill_busybox(tar: tarfile.TarFile) -> None:
        for name in ("bin", "etc", "root", "var"):
            _folder(tar, name)
        _folder(tar, "tmp", 0o1777)
        _file(tar, busybox, "bin/busybox")
        _text(tar, "etc/passwd", _USERS)
        _text(tar, "etc/group", "root:x:0:\n")
        applets = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split()
        for applet in applets:
            if applet != "busybox":
                _link(tar, f"bin/{applet}", "/bin/busybox")

    how = json.loads((STORE / "pyebpf-proxy/image.json").read_text())
    environment = [f"{name}={value}" for name, value in how["environment"].items()]
    return [
        Image("pause", [PAUSE_IMAGE, "registry.k8s.io/pause:3.10.1", "registry.k8s.io/pause:3.10"],
              lambda tar: _file(tar, pause, "pause"), {"Entrypoint": ["/pause"], "Env": [_PATH]}, [pause]),
        Image("load", [LOAD_IMAGE], lambda tar: _file(tar, load, "load"), {"Entrypoint": ["/load"], "Env": [_PATH]},
              [load]),
        Image("agnhost", [AGNHOST_IMAGE, f"{_E2E}/agnhost:2.55", f"{_E2E}/glibc-dns-testing:2.0.0",
                          "registry.k8s.io/build-image/distroless-iptables:v0.9.6"],
              fill_agnhost, {"Entrypoint": ["/agnhost"], "Cmd": ["pause"], "Env": [_PATH]},
              [tools, agnhost, coredns, _HERE / "wget.sh"]),
        Image("kube-proxy", [KUBE_PROXY_IMAGE], fill_kube_proxy,
              {"Entrypoint": ["/usr/local/bin/kube-proxy"], "Env": [_PATH]}, [tools, kube_proxy]),
        Image("coredns", [COREDNS_IMAGE], fill_coredns,
              {"Entrypoint": ["/coredns"], "Env": [_PATH], "WorkingDir": "/"}, [coredns]),
        Image("busybox", [f"{_E2E}/busybox:1.37.0-1"], fill_busybox, {"Cmd": ["sh"], "Env": [_PATH]}, [busybox]),
        Image("regression-issue-74839", [f"{_E2E}/regression-issue-74839:1.4"],
              lambda tar: _file(tar, regression, "regression-issue-74839"),
              {"Entrypoint": ["/regression-issue-74839"], "Env": [_PATH]}, [regression]),
        Image("pyebpf-proxy", [PROXY_IMAGE, NEXT_IMAGE], lambda tar: _tree(tar, proxy),
              {"Entrypoint": how["entry_point"], "Env": environment, "WorkingDir": "/"}, [proxy]),
    ]  # fmt: skip


def compiled(name: str, folder: Path = STORE) -> Path:
    """The program of NAME.c, statically linked."""
    program, source = folder / name, _HERE / f"{name}.c"
    newest = max(each.stat().st_mtime for each in (source, REPOSITORY / "bench/load.h"))
    if not program.exists() or program.stat().st_mtime < newest:
        options = ["-Os", "-static", "-s", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["gcc", *options, "-o", program, source], check=True)
    return program


# ---- roots ---------------------------------------------------------------------------------------------------------


def _proxy_sources() -> list[Path]:
    """The files that the image of deploy/Dockerfile is built from."""
    listed = ["pyebpf_proxy", "bpf", "deploy/image", "deploy/Dockerfile", "requirements.lock", "pyproject.toml",
              "tools/debian-packages.txt", "Makefile"]  # fmt: skip
    found: list[Path] = []
    for path in map(REPOSITORY.joinpath, listed):
        found += [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return [path for path in found if "__pycache__" not in path.parts and path.suffix != ".o"]


def _root(name: str, recipe: Path, sources: Sequence[Path]) -> Path:
    """The file system of a Dockerfile, built by deploy/image/root.py; built again if a source has changed."""
    folder = STORE / name
    wanted = _digest({str(path.relative_to(REPOSITORY)): path.read_bytes() for path in sources})
    stamp = folder / "stamp"
    if not stamp.exists() or stamp.read_text() != wanted:
        log = folder / "build.log"
        print(f"making the root of {name}; output in {log}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        root = REPOSITORY / "deploy/image/root.py"
        with log.open("wb") as output:
            command: list[str | Path] = [sys.executable, "-c", _CARRY_OUT, root, recipe, folder]
            done = subprocess.run(command, check=False, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        if done.returncode:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise E2EError(f"{recipe.name}: {lines[-1] if lines else 'no output'} ({log})")
        for stage in folder.iterdir():
            if stage.is_dir() and stage.name != "root":
                shutil.rmtree(stage)
        stamp.write_text(wanted)
    return folder / "root"


def _digest(parts: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name, content in sorted(parts.items()):
        total.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()


# ---- archives ------------------------------------------------------------------------------------------------------


def _state(path: Path) -> str:
    """Changes when a source does: a root has a stamp, a program its time and size."""
    stamp = path.parent / "stamp"
    if path.is_dir():
        return stamp.read_text()
    found = path.stat()
    return f"{found.st_mtime_ns} {found.st_size}"


def _make(image: Image) -> Path:
    """The archive in ``docker load``'s format, with one layer."""
    target, stamp = FOLDER / f"{image.archive}.tar", FOLDER / f"{image.archive}.stamp"
    states = {str(path): _state(path).encode() for path in image.sources}
    wanted = _digest(states | {"names": repr(list(image.names)).encode(), "run": json.dumps(image.run).encode()})
    if target.exists() and stamp.exists() and stamp.read_text() == wanted:
        return target
    print(f"making the image {image.names[0]}", flush=True)
    stamp.unlink(missing_ok=True)
    layer, fresh = target.with_suffix(".layer"), target.with_suffix(".fresh")
    try:
        with tarfile.open(layer, "w", format=tarfile.GNU_FORMAT) as tar:
            image.fill(tar)
        with layer.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        created = "2026-01-01T00:00:00Z"
        configuration = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "created": created,
                "config": image.run,
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{content}"]},
                "history": [{"created": created, "created_by": "tests/e2e/images.py"}],
            }
        )
        name = f"{hashlib.sha256(configuration.encode()).hexdigest()}.json"
        manifest = [{"Config": name, "RepoTags": list(image.names), "Layers": [f"{content}/layer.tar"]}]
        with tarfile.open(fresh, "w", format=tarfile.GNU_FORMAT) as tar:
            _text(tar, name, configuration)
            tar.add(layer, f"{content}/layer.tar")
            _text(tar, "manifest.json", json.dumps(manifest))
        fresh.rename(target)
        stamp.write_text(wanted)
    finally:
        layer.unlink(missing_ok=True)
        fresh.unlink(missing_ok=True)
    return target


def _tree(tar: tarfile.TarFile, root: Path) -> None:
    tar.add(root, ".", filter=lambda info: None if info.name.startswith(_LEFT_OUT) else info)


def _file(tar: tarfile.TarFile, source: Path, name: str, mode: int = 0o755) -> None:
    info = tar.gettarinfo(str(source), name)
    info.mode, info.uid, info.gid, info.uname, info.gname = mode, 0, 0, "root", "root"
    with source.open("rb") as file:
        tar.addfile(info, file)


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)


def _folder(tar: tarfile.TarFile, name: str, mode: int = 0o755) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    tar.addfile(info)


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data))
