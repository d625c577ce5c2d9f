# SPDX-License-Identifier: Apache-2.0
"""``cluster install --datapath-config``: what is refused, where it is kept, and which agents are replaced for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyebpf_proxy.cluster import agents, cli, datapath, objects, status, task_pod
from pyebpf_proxy.cluster.api import CONFIG_MAPS, DAEMON_SETS, NODES, Object
from pyebpf_proxy.cluster.canary import Canary, canary
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.install import Install
from pyebpf_proxy.cluster.model import view
from pyebpf_proxy.cluster.objects import KUBE_PROXY, NAME, NAMESPACE
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.cluster.rollback import Rollback
from pyebpf_proxy.cluster.upgrade import Upgrade
from tests import ROOT
from tests.unit.cluster.fake_api import FakeApi, running

REPOSITORY = "registry.example/pyebpf-proxy"
IMAGE, NEWER = f"{REPOSITORY}:1", f"{REPOSITORY}:2"
HEAD = "apiVersion: datapath.pyebpf-proxy.io/v1alpha1\nkind: DatapathConfiguration\n"
TEXT, OTHER = f"{HEAD}fastPath: false\n", f"{HEAD}socketLB: off\n"
ARGUMENT = "--datapath-config=/etc/datapath/datapath.yaml"
PLACE = CONFIG_MAPS.path(NAMESPACE, objects.DATAPATH)


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Task pods succeed at once."""
    monkeypatch.setattr(task_pod, "run", lambda *_: "all is well\n")


def cluster(*nodes: str) -> FakeApi:
    api = FakeApi(*nodes)
    for node in nodes:
        api.stored[NODES.path(name=node)]["metadata"]["labels"]["kubernetes.io/os"] = "linux"
    return api


def install(api: FakeApi, text: str | None = None, some: Canary | None = None, image: str = "") -> None:
    Install(api, Output(as_json=False), "", 0.5).run(image or IMAGE, some, dry_run=False, datapath_text=text)


def reads(api: FakeApi) -> dict[str, str]:
    """By node, the digest for which its agent was made; "" if it has no option for a datapath configuration."""
    found = {}
    for node, pod in api.pods_of(NAME).items():
        (container,) = pod["spec"]["containers"]
        mounts = [each for each in container["volumeMounts"] if each["mountPath"] == "/etc/datapath"]
        volumes = [each for each in pod["spec"]["volumes"] if each.get("configMap", {}).get("name") == objects.DATAPATH]
        assert len(mounts) == len(volumes) == container["args"].count(ARGUMENT)
        found[node] = pod["metadata"]["annotations"].get(objects.DATAPATH_DIGEST, "")
        assert len(mounts) == bool(found[node])
    return found


def uids(api: FakeApi) -> dict[str, str]:
    return {node: pod["metadata"]["uid"] for node, pod in api.pods_of(NAME).items()}


# ---- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "maps: {backends4: 3}\nfastPath: maybe\n", "maps.backends4: must be from 256 to 4194304, not 3"),
        (HEAD + "maps: {backends4: 3}\nfastPath: maybe\n", "fastPath: must be auto, true or false"),
        (HEAD + "socketLb: off\n", "socketLb: unknown field, did you mean socketLB?"),
        (HEAD + "directory: /tmp/x\n", "directory: must be /run/pyebpf-proxy, which the agent's pod mounts"),
        (HEAD + "manifests: /tmp/x\n", "manifests: must be absent"),
        ("kind: KubeProxyConfiguration\n", "apiVersion: is missing"),
        ((HEAD + "fastPath: false\n").encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_file_with_which_no_agent_starts_is_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, said: str
) -> None:
    """The kubeconfig does not even exist."""
    file = tmp_path / "datapath.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    words = ["install", "--image", IMAGE, "--datapath-config", str(file), "--kubeconfig", str(tmp_path / "none")]
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"Error: {file}: ")
    assert said in line


def test_a_file_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none.yaml"
    assert cli.main(["install", "--datapath-config", str(file)]) == 2
    assert capsys.readouterr().err == f"Error: --datapath-config: open {file}: no such file or directory\n"


def test_the_example_is_accepted() -> None:
    file = ROOT / "examples" / "datapath-config.yaml"
    assert datapath.read(str(file)) == file.read_text()


# ---- install -------------------------------------------------------------------------------------------------------


def test_it_is_kept_in_a_config_map_which_each_later_command_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    api = cluster("n1", "n2")
    digest = datapath.digest(TEXT)
    install(api, TEXT, canary("1"))
    assert api.stored[PLACE]["data"] == {"datapath.yaml": TEXT}
    assert reads(api) == {"n1": digest}
    install(api)
    assert reads(api) == {"n1": digest, "n2": digest}
    before = uids(api)
    install(api)
    install(api, TEXT)
    assert uids(api) == before, "nothing has changed"
    Upgrade(api, Output(as_json=False), "", 0.5).run(NEWER)
    assert reads(api) == {"n1": digest, "n2": digest}
    assert set(api.images().values()) == {NEWER}
    Upgrade(api, Output(as_json=False), "", 0.5).run(IMAGE)
    assert reads(api) == {"n1": digest, "n2": digest}
    assert api.stored[PLACE]["data"] == {"datapath.yaml": TEXT}
    capsys.readouterr()
    assert status.show(view(api), agents.NOT_ASKED, Output(as_json=False)) == []
    Rollback(api, Output(as_json=False), "", 0.5).run("")
    assert PLACE not in api.stored
    assert not api.pods_of(NAME)


def test_agents_that_run_are_replaced_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    api = cluster("n1", "n2")
    install(api)
    first = uids(api)
    assert reads(api) == {"n1": "", "n2": ""}
    install(api, TEXT, canary("1"))
    assert reads(api) == {"n1": datapath.digest(TEXT), "n2": ""}
    said = capsys.readouterr().out
    assert "n1: replacing the agent, which runs with another datapath configuration" in said
    assert "1 node with another datapath configuration; to continue, run pyebpf-proxy cluster install" in said
    assert "left to kube-proxy" not in said
    (finding,) = status.show(view(api), agents.NOT_ASKED, Output(as_json=False))
    assert "another datapath configuration than that of the DaemonSet on n2" in finding.text
    install(api)
    assert reads(api) == dict.fromkeys(("n1", "n2"), datapath.digest(TEXT))
    second = uids(api)
    assert not set(first.values()) & set(second.values())
    install(api, OTHER)
    assert reads(api) == dict.fromkeys(("n1", "n2"), datapath.digest(OTHER))
    assert not set(second.values()) & set(uids(api).values())
    assert all(map(view(api).is_done, ("n1", "n2")))
    assert not api.pods_of(KUBE_PROXY)


def test_an_agent_that_does_not_start_with_it_gives_its_node_back() -> None:
    """As on any other failure of install; the other nodes keep their agents."""
    api = cluster("n1", "n2")
    install(api)
    digest = datapath.digest(TEXT)
    crashed: Object = {"waiting": {"reason": "CrashLoopBackOff", "message": "map services is too small"}}

    def of(pod: Object) -> Object:
        if pod["metadata"]["annotations"].get(objects.DATAPATH_DIGEST) != digest:
            return running(ready=True)
        return {"phase": "Running", "containerStatuses": [{"state": crashed, "restartCount": 3}]}

    api.status_of = of
    with pytest.raises(ClusterError, match=r"^n1: .*map services is too small; the node was given back to kube-proxy"):
        install(api, TEXT)
    assert list(api.pods_of(KUBE_PROXY)) == ["n1"]
    assert reads(api) == {"n2": ""}
    install(api, OTHER)
    assert reads(api) == dict.fromkeys(("n1", "n2"), datapath.digest(OTHER))


def test_without_the_config_map_the_defaults_apply_again() -> None:
    api = cluster("n1")
    install(api, TEXT)
    del api.stored[PLACE]
    install(api)
    assert reads(api) == {"n1": ""}


@pytest.mark.parametrize("data", [None, {}, {"datapath.yaml": HEAD + "x: 1\n"}])
@pytest.mark.parametrize("command", ["install", "upgrade"])
def test_a_config_map_with_which_no_agent_starts_is_refused(data: Any, command: str) -> None:
    """The ConfigMap was edited. The agents run with what it was when they started."""
    api = cluster("n1")
    install(api, TEXT)
    before = uids(api)
    api.stored[PLACE]["data"] = data
    where = f"ConfigMap {NAMESPACE}/{objects.DATAPATH}: datapath.yaml: "
    with pytest.raises(ClusterError, match=where):
        install(api) if command == "install" else Upgrade(api, Output(as_json=False), "", 0.5).run(NEWER)
    assert uids(api) == before
    install(api, TEXT)
    assert api.stored[PLACE]["data"] == {"datapath.yaml": TEXT}


def test_the_api_servers_defaults_in_a_kept_template() -> None:
    """After a failed upgrade, the API server would refuse a volume that is there twice."""
    present = objects.installed(None, IMAGE, "a")[-1]
    volumes = present["spec"]["template"]["spec"]["volumes"]
    next(each for each in volumes if each["name"] == "datapath")["configMap"]["defaultMode"] = 420
    for digest in ("b", ""):
        specification = objects.downgraded(present, IMAGE, digest)["spec"]["template"]["spec"]
        assert len([each for each in specification["volumes"] if each["name"] == "datapath"]) == bool(digest)
        assert specification["containers"][0]["args"].count(ARGUMENT) == bool(digest)


def test_a_dry_run_prints_it_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    api = cluster("n1")
    Install(api, Output(as_json=False), "", 0.5).run(IMAGE, None, dry_run=True, datapath_text=TEXT)
    said = capsys.readouterr().out
    assert f"name: {objects.DATAPATH}\n" in said
    assert "fastPath: false" in said
    assert said.index("kind: ConfigMap") < said.index("kind: DaemonSet")
    assert ARGUMENT in said
    assert PLACE not in api.stored
    assert DAEMON_SETS.path(NAMESPACE, NAME) not in api.stored


def test_an_older_image_may_not_know_the_fields() -> None:
    api = cluster("n1")
    old = f"{REPOSITORY}:0.0.9"
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), objects.agent(old)[-1])
    with pytest.raises(ClusterError, match=r"0\.0\.9 is older than this command, which cannot check"):
        install(api, TEXT, image=old)
    assert PLACE not in api.stored
    api.put(PLACE, objects.datapath_config_map(TEXT))
    install(api, image=old)
    assert reads(api) == {"n1": datapath.digest(TEXT)}, "one that the cluster has stays in effect"
