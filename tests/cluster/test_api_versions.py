# SPDX-License-Identifier: Apache-2.0
"""API servers of every supported Kubernetes release: the agent lists, watches, and serves what they say.

The agent is the pod of deploy/ with the role's rights, in mode nftables, which follows most resources. etcd is of the
version that clusters have, not Debian's: API servers send the list as the beginning of a watch only with a newer one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import CACHE, ROOT
from tests.cluster.changes_in_force import check_changes
from tests.cluster.world import ACCOUNT, PRIVILEGED, OutageWorld
from tests.support.apiserver import ApiServer

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

PINS = ROOT / "tests" / "cluster" / "kubernetes"
#: Whether a list is the beginning of a watch: the release's default of the feature gate WatchList.
STREAMS = {"1.33": False, "1.34": True, "1.35": True, "1.36": True}
USER = f"system:serviceaccount:kube-system:{ACCOUNT}"
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": [USER]}],
}


def built(name: str) -> Path:
    """A program that tests/cluster/build.sh makes; skips if it is missing, since it takes minutes to build."""
    program = CACHE / "go" / name
    if not program.exists():
        pytest.skip(f"{name} is not built: make test-api-versions builds it (Go)")
    return program


def pinned(minor: str) -> str:
    """The release that a go.mod pins; the newest one is that of all other programs."""
    folder = PINS / minor
    text = ((folder if folder.is_dir() else PINS) / "go.mod").read_text()
    (release,) = re.findall(r"^(?:require)?\s+k8s\.io/kubernetes (\S+)$", text, re.MULTILINE)
    return str(release)


@pytest.fixture(scope="module", params=STREAMS)
def minor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def world(minor: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutageWorld]:
    program = built(f"kube-apiserver-{minor}" if (PINS / minor).is_dir() else "kube-apiserver")
    etcd = built("etcd")
    folder = tmp_path_factory.mktemp("world")
    policy = folder / "policy.yaml"
    policy.write_text(yaml.safe_dump(POLICY))
    audit = (f"--audit-policy-file={policy}", f"--audit-log-path={folder / 'audit.log'}")
    server = ApiServer((*PRIVILEGED, *audit), program, etcd)
    with OutageWorld(folder, server, "nftables") as world:
        yield world


def requests(world: OutageWorld) -> list[dict[str, Any]]:
    """The agent's requests, as the API server has recorded them."""
    return [json.loads(line) for line in (world.folder / "audit.log").read_text().splitlines()]


def test_the_pinned_release_runs(world: OutageWorld, minor: str) -> None:
    release = world.server.request("GET", "/version")["gitVersion"]
    assert release == pinned(minor), "remove the old program from the cache and build it again"
    assert release.startswith(f"v{minor}.")


def test_it_lists_as_the_release_allows(world: OutageWorld, minor: str) -> None:
    """A server that refuses to begin a watch with the list gets a list request instead."""
    world.wait(world.follows, "everything is followed")
    asked = requests(world)
    streamed = [each for each in asked if "sendInitialEvents=true" in each["requestURI"]]
    assert {each["objectRef"]["resource"] for each in streamed} == world.resources
    accepted = {each["objectRef"]["resource"] for each in streamed if each["responseStatus"]["code"] == 200}
    listed = {each["objectRef"]["resource"] for each in asked if each["verb"] == "list"}
    assert (accepted, listed) == ((world.resources, set()) if STREAMS[minor] else (set(), world.resources))


def test_changes_are_in_force(world: OutageWorld) -> None:
    check_changes(world)


def test_its_rights_suffice(world: OutageWorld) -> None:
    """Nothing is refused, and the Event of the start arrives."""

    def events() -> list[str]:
        found = world.server.request("GET", "/apis/events.k8s.io/v1/events")["items"]
        return [each["reason"] for each in found if each["regarding"].get("name") == world.node.name]

    world.wait(lambda: "Starting" in events(), "the Event of the start")
    assert [each["requestURI"] for each in requests(world) if each["responseStatus"]["code"] in (401, 403)] == []
