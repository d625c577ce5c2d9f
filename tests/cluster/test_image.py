# SPDX-License-Identifier: Apache-2.0
"""The image: deploy/Dockerfile carried out in folders, and the result started as the DaemonSet starts it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote

import pytest

from pyebpf_proxy import __version__
from pyebpf_proxy.common.kube_proxy_health import VARIABLE
from pyebpf_proxy.lab.addresses import cluster_ip, vip
from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.manifests import Port, node, service, slices
from tests import ROOT
from tests.deployment import manifests
from tests.deployment.node import contained, image_of, pod_of, use_folder, wait_ready, with_manifests
from tests.support.logs import Log, Message

pytestmark = pytest.mark.slow

FOLDER = ROOT / "build" / "image"
LARGEST = 150_000_000


@pytest.fixture(scope="module")
def image() -> Path:
    """The root file system, newly built; this takes some minutes."""
    subprocess.run(["make", "-C", ROOT, "image-root"], check=True, stdin=subprocess.DEVNULL)
    return image_of(FOLDER)[0]


@pytest.fixture(scope="module")
def small(image: Path) -> Iterator[Lab]:
    with Lab(nodes=1) as lab:
        (only,) = lab.nodes
        pod = lab.add_pod("web-1", only)
        ports = [Port("http", 80, 8080)]
        objects = [service("web", ports, cluster_ip(1), vip=vip(1)), *slices("web", ports, [(pod.address, only.name)])]
        lab.write("all.yaml", [node(only.name, only.address, only.pod_cidr), *objects])
        yield lab


def test_the_image_is_small(image: Path) -> None:
    """The compressed size that a node pulls. The base built here contains more than Debian's slim image."""
    folders = ("dev", "proc", "sys", "run", "var/cache/apt", "var/lib/apt/lists")
    left_out = [f"--exclude='./{name}/*'" for name in folders]
    command = f"set -o pipefail; tar -C {shlex.quote(str(image))} {' '.join(left_out)} -c . | gzip -c | wc -c"
    size = int(subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True).stdout)
    assert 20_000_000 < size <= LARGEST, f"{size / 1e6:.0f} MB"


def test_the_image_serves_with_the_daemon_sets_rights(small: Lab) -> None:
    (only,) = small.nodes
    root, entry_point, environment = image_of(FOLDER)
    specification = with_manifests(pod_of(manifests.one(manifests.base(), "DaemonSet")), small.manifests)
    with contained(only, specification, None, root, entry_point, environment) as container:
        container.start()
        wait_ready(only, container)
        Log(container).some(f"version={__version__}")
        Log(container).some(Message.FAST_PATH_ON)
        for family in (4, 6):
            outcome = small.client.call(ask, vip(1).of(family), 80)
            assert outcome.kind == ANSWERED, outcome
        assert only.namespace.call(ask, cluster_ip(1).v4, 80).kind == ANSWERED
        assert container.terminate() == 0


def test_s12_the_sbom_names_every_package_with_its_version(image: Path) -> None:
    subprocess.run([ROOT / "tools" / "setup.sh", "sbom"], check=True, stdin=subprocess.DEVNULL)
    subprocess.run([ROOT / "deploy" / "image" / "sbom.sh", FOLDER], check=True)

    def named(file: str) -> set[str]:
        components = json.loads((FOLDER / file).read_text())["components"]
        return {unquote(component["purl"].partition("?")[0]) for component in components}

    query = ["dpkg-query", f"--admindir={image}/var/lib/dpkg", "--show", "--showformat=${Package}@${Version}\n"]
    installed = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()
    assert len(installed) > 80
    assert {f"pkg:deb/debian/{each}" for each in installed} <= named("debian.cdx.json")
    (site,) = image.glob("opt/pyebpf-proxy/lib/python3*/site-packages")
    modules = {f"{found.name.lower()}@{found.version}" for found in distributions(path=[str(site)])}
    assert len(modules) > 10
    assert {f"pkg:pypi/{each.replace('_', '-')}" for each in modules} == named("python.cdx.json")


#: The sources are in a folder whose name differs by build. What the build writes is visible only to it.
BUILD = """
mount --bind "$1" /mnt
mount -t tmpfs none /tmp
mount -t tmpfs none /opt
cd "/mnt/$2"
deploy/image/stage.sh build
cp -a /opt/pyebpf-proxy "/mnt/built-$2"
"""


def test_s12_two_builds_have_the_same_contents(tmp_path: Path) -> None:
    """Every file of /opt/pyebpf-proxy: the BPF objects, the agent and its libraries from the lock, their bytecode."""
    found = []
    for number, name in enumerate(("first", "the-second")):
        tree = tmp_path / name
        tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True, text=True)
        for each in filter(None, tracked.stdout.split("\0")):
            if each.startswith(("bpf/", "deploy/image/", "pyebpf_proxy/", "tools/")) or "/" not in each:
                (tree / each).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / each, tree / each)
                shutil.copymode(ROOT / each, tree / each)
                os.utime(tree / each, (1_700_000_000 + 100_000 * number,) * 2)
        script = ["unshare", "--mount", "bash", "-euc", BUILD, "bash", tmp_path, name]
        subprocess.run(script, check=True, stdin=subprocess.DEVNULL)
        built = tmp_path / f"built-{name}"
        files = {path.relative_to(built): path for path in built.rglob("*") if not path.is_dir() or path.is_symlink()}
        found.append({each: _content(path) for each, path in files.items()})
    first, second = found
    assert sorted(str(each) for each in first.keys() | second.keys() if first.get(each) != second.get(each)) == []
    names = {each.name for each in first}
    assert {"tc.bpf.o", "sock.bpf.o", "RECORD", "direct_url.json"} <= names
    assert any(name.endswith(".pyc") for name in names)


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    return f"{path.stat().st_mode:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_the_pod_of_the_rollback_cleans_up(small: Lab) -> None:
    """It runs after the agent: it removes what is still attached, and the pod becomes ready."""
    (only,) = small.nodes
    root, entry_point, environment = image_of(FOLDER)
    cleaning = manifests.build(manifests.DEPLOY / "overlays" / "kubeadm-back" / "cleanup")
    specification = pod_of(manifests.one(cleaning, "DaemonSet"))
    clean = only.agent.folder / "clean"
    clean.mkdir()
    use_folder(specification, clean)
    # test_deploy_agent.py covers the wait for kube-proxy.
    (agent,) = specification["containers"]
    agent["env"] = [each | ({"value": ""} if each["name"] == VARIABLE else {}) for each in agent["env"]]
    assert "pyebpf-proxy" in only.namespace.run("nft", "list", "tables")
    with contained(only, specification, None, root, entry_point, environment) as container:
        container.start()
        container.wait_for(lambda: (clean / "done").exists(), "the file that its readiness probe asks for")
        Log(container).some("clean directory=")
    assert "pyebpf-proxy" not in only.namespace.run("nft", "list", "tables")
    # The folder itself is mounted into the pod, so the pod cannot remove it.
    assert not list((only.agent.directory / "bpf").glob("pyebpf-proxy/*"))


def test_the_image_has_no_build_or_test_tools(image: Path) -> None:
    programs = {path.name for folder in ("bin", "sbin") for path in (image / "usr" / folder).iterdir()}
    assert programs.isdisjoint({"clang", "gcc", "cc", "make", "ld", "pip", "pip3", "git", "bpftool"})
    packages = {path.name for path in (image / "opt/pyebpf-proxy/lib/python3.11/site-packages").iterdir()}
    assert packages.isdisjoint({"pip", "pytest", "hypothesis", "matplotlib", "mypy", "scapy", "numpy", "setuptools"})
    assert {"pyebpf_proxy", "msgspec", "pydantic"} <= packages


def test_the_image_has_the_tools_for_the_rules_of_each_kube_proxy(image: Path) -> None:
    programs = {path.name for path in (image / "usr/sbin").iterdir()}
    assert {"iptables-nft-save", "iptables-legacy-save", "ip6tables-nft-restore"} <= programs


def test_the_versions_are_those_of_the_lock(image: Path) -> None:
    lock = (ROOT / "requirements.lock").read_text()
    site = image / "opt/pyebpf-proxy/lib/python3.11/site-packages"
    found = [path.name.removesuffix(".dist-info").partition("-") for path in site.glob("*.dist-info")]
    assert len(found) > 5
    for name, _, version in found:
        normal = name.replace("_", "-").lower()
        assert (normal == "pyebpf-proxy" and version == __version__) or f"\n{normal}=={version} \\\n" in lock, name


def test_the_image_has_no_files_of_the_build_machine(image: Path) -> None:
    """The configuration of apt and pip was visible only during the build."""
    assert not (image / "etc" / "pip.conf").exists()
    assert not (image / "src").exists()
    assert not (image / "tmp" / "build").exists()
    assert list((image / "var/lib/apt/lists").glob("*Packages*")) == []
