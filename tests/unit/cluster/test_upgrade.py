# SPDX-License-Identifier: Apache-2.0
"""``cluster upgrade`` where nodes come, go, or are half taken over."""

from __future__ import annotations

import copy

import pytest

from pyebpf_proxy import __version__
from pyebpf_proxy.cluster import agents, objects, status, takeover, task_pod
from pyebpf_proxy.cluster.api import DAEMON_SETS, LEASES, NODES, PODS, Object
from pyebpf_proxy.cluster.canary import Canary
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.install import Install
from pyebpf_proxy.cluster.lease import NAME as LEASE
from pyebpf_proxy.cluster.model import view
from pyebpf_proxy.cluster.objects import KUBE_PROXY, NAME, NAMESPACE, ON, PARKED
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.cluster.upgrade import Upgrade
from pyebpf_proxy.services.nodes import TO_BE_DELETED_TAINT
from tests.unit.cluster.fake_api import NOW, FakeApi, node_object, running

OLDER, NEWER = "registry.example/pyebpf-proxy:1", "registry.example/pyebpf-proxy:2"


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Task pods succeed at once."""
    monkeypatch.setattr(task_pod, "run", lambda *_: "all is well\n")
    monkeypatch.setattr(task_pod, "_LOOK_SECONDS", 0.05)


@pytest.fixture
def api() -> FakeApi:
    """The agent is installed on no node yet. It is ready where kube-proxy does not hold the health port."""
    api = FakeApi("n1", "n2")

    def status_of(pod: Object) -> Object:
        return running(ready=pod["spec"]["nodeName"] not in api.pods_of(KUBE_PROXY))

    api.status_of = status_of
    daemon_set = objects.agent(OLDER)[-1]
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), daemon_set)
    kube_proxy = DAEMON_SETS.path(NAMESPACE, KUBE_PROXY)
    api.patch(DAEMON_SETS, KUBE_PROXY, objects.prepare(api.stored[kube_proxy]), NAMESPACE)
    return api


def upgrade(api: FakeApi, image: str = NEWER) -> None:
    Upgrade(api, Output(as_json=False), "", 0.5).run(image)


def test_a_node_that_is_deleted_meanwhile_is_named(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    """As an autoscaler does: the others go on."""
    api.label("n1", parked=ON, agent=ON)
    api.label("n2", parked=ON, agent=ON)
    agent = api.name_of_agent("n1")

    def remove_node(method: str, path: str) -> None:
        if method == "DELETE" and path == PODS.path(NAMESPACE, agent) and NODES.path(name="n1") in api.stored:
            del api.stored[NODES.path(name="n1")]

    api.before = remove_node
    upgrade(api)
    said = capsys.readouterr().out
    assert "[1/2] n1: the node no longer exists" in said
    assert "[2/2] n2: upgraded, and verified" in said
    assert api.images() == {"n2": NEWER}


def test_where_kube_proxy_also_runs_install_can_continue_after_an_upgrade(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an installation that was interrupted: kube-proxy holds the health port there, so no agent becomes ready."""
    api.label("n1", parked=ON, agent=ON)
    api.label("n2", agent=ON)
    upgrade(api)
    said = capsys.readouterr().out
    assert "[1/2] n1: upgraded, and verified" in said
    assert (
        "[2/2] n2: upgraded; kube-proxy also runs on the node: to complete the installation, run pyebpf-proxy cluster"
        " install" in said
    )
    assert api.images() == {"n1": NEWER, "n2": NEWER}
    Install(api, Output(as_json=False), "", 0.5).run("", None, dry_run=False)
    assert "[1/1] n2: taken over, and verified" in capsys.readouterr().out
    assert api.pods_of(KUBE_PROXY) == {}


def make_leave(api: FakeApi, node: str, how: str) -> None:
    """An autoscaler or a user removes the node: its agent is not ready from now on."""
    item = api.stored[NODES.path(name=node)]
    if how == "taint":
        item["spec"] = {"taints": [{"key": TO_BE_DELETED_TAINT, "effect": "NoSchedule"}]}
    else:
        item["metadata"]["deletionTimestamp"] = NOW
    api.status_of = lambda pod: running(ready=pod["spec"]["nodeName"] != node)


@pytest.mark.parametrize("how", ["taint", "deletion"])
def test_a_node_that_is_being_removed_is_named(api: FakeApi, capsys: pytest.CaptureFixture[str], how: str) -> None:
    """Its agent never becomes ready. That must not end the command, nor give a node back."""
    for node in ("n1", "n2"):
        api.label(node, parked=ON, agent=ON)
    make_leave(api, "n1", how)
    upgrade(api)
    said = capsys.readouterr().out
    assert "skipped, because they are being removed: n1\n" in said
    assert "[1/1] n2: upgraded, and verified" in said
    Install(api, Output(as_json=False), "", 0.5).run("", None, dry_run=False)
    said = capsys.readouterr().out
    assert "skipped, because they are being removed: n1\n" in said
    assert view(api).label("n1", PARKED) == ON


def test_a_node_that_is_removed_during_its_upgrade_is_no_failure(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.label("n1", parked=ON, agent=ON)
    api.label("n2", parked=ON, agent=ON)
    agent = api.name_of_agent("n1")

    def begin(method: str, path: str) -> None:
        if method == "DELETE" and path == PODS.path(NAMESPACE, agent):
            make_leave(api, "n1", "taint")

    api.before = begin
    upgrade(api)
    said = capsys.readouterr().out
    assert "[1/2] n1: upgraded, and verified" in said
    assert "[2/2] n2: upgraded, and verified" in said


@pytest.mark.parametrize("when", ["before its turn", "during its upgrade"])
def test_a_node_that_has_registered_again_is_named(api: FakeApi, capsys: pytest.CaptureFixture[str], when: str) -> None:
    """It has no label, and kube-proxy serves it."""
    api.label("n1", parked=ON, agent=ON)
    api.label("n2", parked=ON, agent=ON)
    first, second = (api.name_of_agent(node) for node in ("n1", "n2"))
    last_moment = PODS.path(NAMESPACE, first if when == "before its turn" else second)

    def register_again(method: str, path: str) -> None:
        if method == "DELETE" and path == last_moment:
            api.stored[NODES.path(name="n2")] = node_object("n2")
            api.stored[NODES.path(name="n2")]["metadata"] |= {"resourceVersion": "900", "uid": "another"}

    api.before = register_again
    upgrade(api)
    said = capsys.readouterr().out
    assert "[1/2] n1: upgraded, and verified" in said
    assert "[2/2] n2: no agent runs there any more; to take the node over, run pyebpf-proxy cluster install" in said
    assert api.images() == {"n1": NEWER}
    assert objects.template_image(api.stored[DAEMON_SETS.path(NAMESPACE, NAME)]) == NEWER


def test_a_pod_of_the_former_template_that_was_just_created_is_replaced(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod that was listed has ended while the image was tried."""
    api.label("n1", parked=ON, agent=ON)
    listed = api.name_of_agent("n1")

    def tried(site: takeover.Site, node: str) -> takeover.Reached:
        if PODS.path(NAMESPACE, listed) in api.stored:
            api.delete(PODS, listed, NAMESPACE)
            assert api.name_of_agent(node) != listed
        return takeover.Reached([], [])

    monkeypatch.setattr(takeover, "try_image", tried)
    upgrade(api)
    assert "[1/1] n1: upgraded, and verified" in capsys.readouterr().out
    assert api.images() == {"n1": NEWER}


def test_a_downgrade_that_failed_once_can_be_repeated(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template of the older image is not this command's: the DaemonSet keeps it."""
    older, present = "registry.example/pyebpf-proxy:0.0.9", f"registry.example/pyebpf-proxy:{__version__}"
    daemon_set = objects.agent(older)[-1]
    daemon_set["spec"]["template"]["metadata"]["annotations"]["of"] = "the older version"
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), daemon_set)
    for node in ("n1", "n2"):
        api.label(node, parked=ON, agent=ON)
    upgrade(api, present)
    failures = ["n2"]

    def verify(site: takeover.Site, node: str, *_: object) -> None:
        if node in failures:
            failures.remove(node)
            raise ClusterError("a Service does not answer")

    monkeypatch.setattr(takeover, "verify", verify)
    with pytest.raises(ClusterError, match="n2: a Service does not answer"):
        upgrade(api, older)
    assert api.images() == {"n1": older, "n2": present}
    upgrade(api, older)
    assert api.images() == {"n1": older, "n2": older}
    template = api.stored[DAEMON_SETS.path(NAMESPACE, NAME)]["spec"]["template"]
    assert template["metadata"]["annotations"]["of"] == "the older version"


def test_a_node_without_an_agent_is_named(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    """Another program has removed its label."""
    api.label("n1", parked=ON)
    api.label("n2", parked=ON, agent=ON)
    upgrade(api)
    said = capsys.readouterr().out
    assert "skipped, because no agent runs there (pyebpf-proxy cluster status says why): n1\n" in said
    assert api.images() == {"n2": NEWER}


def mirrored(pod: Object) -> Object:
    """As a webhook that takes images from a mirror of the registry."""
    pod = copy.deepcopy(pod)
    container = pod["spec"]["containers"][0]
    container["image"] = "mirror.example/" + container["image"].rpartition("/")[2]
    return pod


def test_a_webhook_takes_images_from_a_mirror(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    """The agents' pods do not have the image of their DaemonSet, and yet run it."""
    api.admitted = mirrored
    for pod in api.pods_of(KUBE_PROXY).values():
        api.delete(PODS, pod["metadata"]["name"], NAMESPACE)
    Install(api, Output(as_json=False), "", 0.5).run(OLDER, Canary(1), dry_run=False)
    assert api.images() == {"n1": OLDER.replace("registry", "mirror")}
    capsys.readouterr()
    status.show(view(api), agents.NOT_ASKED, Output(as_json=False))
    assert "mirror" not in capsys.readouterr().out, "kube-proxy's pod is not an old one"
    Install(api, Output(as_json=False), "", 0.5).run("", None, dry_run=False)
    assert "[1/1] n2: taken over, and verified" in capsys.readouterr().out
    upgrade(api)
    assert "2 nodes to upgrade" in capsys.readouterr().out
    assert set(api.images().values()) == {NEWER.replace("registry", "mirror")}
    assert objects.template_image(api.stored[DAEMON_SETS.path(NAMESPACE, NAME)]) == NEWER
    upgrade(api)
    assert "nothing to do" in capsys.readouterr().out
    status.show(view(api), agents.NOT_ASKED, Output(as_json=False))
    said = capsys.readouterr().out
    assert f"2 of 2 nodes served by pyebpf-proxy, image {NEWER}" in said
    assert "mirror" not in said


@pytest.mark.parametrize("fails", [False, True])
def test_a_command_that_has_lost_the_lease_leaves_the_template(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The image is pulled for minutes; meanwhile the machine sleeps, and another command begins."""
    api.label("n1", parked=ON, agent=ON)
    agents_set, lease = DAEMON_SETS.path(NAMESPACE, NAME), LEASES.path(NAMESPACE, LEASE)
    version = ""

    def task(_: object, what: str, *__: object) -> str:
        nonlocal version
        if what == ("verify" if fails else "fit"):
            api.put(lease, api.stored[lease] | {"spec": {"holderIdentity": "upgrade by operator@laptop"}})
            version = api.stored[agents_set]["metadata"]["resourceVersion"]
            if fails:
                raise ClusterError("verify: no connection")
        return "all is well\n"

    monkeypatch.setattr(task_pod, "run", task)
    with pytest.raises(ClusterError, match=r"another command has taken over: upgrade by operator@laptop"):
        upgrade(api)
    assert version
    assert api.stored[agents_set]["metadata"]["resourceVersion"] == version


def test_a_return_to_the_former_agent_that_is_interrupted(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says what carries the traffic, and which command brings the former agent back."""
    api.label("n1", parked=ON, agent=ON)
    interrupted = False

    def task(_: object, what: str, *__: object) -> str:
        if what == "verify" and not interrupted:
            raise ClusterError("verify: no connection")
        return "all is well\n"

    def interrupt(method: str, path: str) -> None:
        nonlocal interrupted
        if method == "DELETE" and not interrupted and api.images() == {"n1": NEWER}:
            interrupted = True
            raise KeyboardInterrupt

    monkeypatch.setattr(task_pod, "run", task)
    api.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        upgrade(api)
    assert capsys.readouterr().out.endswith(
        f"n1: failed: verify: no connection; restoring the agent with {OLDER}\n"
        "[1/1] n1: interrupted; the programs of the last agent carry the traffic; to restore the agent with"
        f" {OLDER}, run pyebpf-proxy cluster upgrade --image {OLDER} --nodes SELECTOR\n"
    )
    upgrade(api, OLDER)
    assert api.images() == {"n1": OLDER}


def test_where_kube_proxy_also_runs_the_former_agent_comes_back(api: FakeApi) -> None:
    api.label("n1", agent=ON)

    def status_of(pod: Object) -> Object:
        if pod["spec"]["containers"][0]["image"] == NEWER:
            waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "CAP_BPF is missing"}}
            return {"phase": "Running", "containerStatuses": [{"state": waiting}]}
        return running(ready=False)

    api.status_of = status_of
    with pytest.raises(ClusterError, match=rf"CAP_BPF is missing; the agent with {OLDER} runs there again"):
        upgrade(api)
    assert api.images() == {"n1": OLDER}


def test_an_older_image_needs_the_command_of_its_version(api: FakeApi) -> None:
    api.label("n1", parked=ON, agent=ON)
    before = copy.deepcopy(api.stored[DAEMON_SETS.path(NAMESPACE, NAME)])
    with pytest.raises(
        ClusterError, match=r"^registry.example/pyebpf-proxy:v0.0.9 is older than this command"
    ) as error:
        upgrade(api, "registry.example/pyebpf-proxy:v0.0.9")
    assert error.value.status == 2
    assert "use the pyebpf-proxy command of that version" in str(error.value)
    assert api.stored[DAEMON_SETS.path(NAMESPACE, NAME)] == before
    assert api.images() == {"n1": OLDER}


def test_the_former_image_comes_back_with_its_own_template(api: FakeApi) -> None:
    """Although it is older than the command: its template is known."""
    old = "registry.example/pyebpf-proxy:0.0.9"
    path = DAEMON_SETS.path(NAMESPACE, NAME)
    daemon_set = objects.agent(old)[-1]
    daemon_set["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "OLD", "value": "1"})
    template = copy.deepcopy(daemon_set["spec"]["template"])
    api.put(path, daemon_set)
    for node in ("n1", "n2"):
        api.label(node, parked=ON, agent=ON)
    upgrade(api)
    assert api.stored[path]["spec"]["template"] != template
    upgrade(api, old)
    assert api.images() == {"n1": old, "n2": old}
    assert api.stored[path]["spec"]["template"] == template


@pytest.mark.parametrize(
    ("image", "older"),
    [
        ("localhost:5000/pyebpf-proxy:0.0.9", True),
        ("localhost:5000/pyebpf-proxy", False),
        ("x/pyebpf-proxy:v0.0.10-arm64@sha256:00", True),
        ("x/pyebpf-proxy:0.1.0", False),
        ("x/pyebpf-proxy:0.10.0", False),
        ("x/pyebpf-proxy:next", False),
        ("x/pyebpf-proxy@sha256:00", False),
    ],
)
def test_which_images_are_older(image: str, older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "__version__", "0.1.0")
    assert objects.is_older(image) is older


def test_ctrl_c_while_the_image_is_tried(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(_: object, *__: object) -> str:
        raise KeyboardInterrupt

    api.label("n1", parked=ON, agent=ON)
    monkeypatch.setattr(task_pod, "run", task)
    with pytest.raises(KeyboardInterrupt):
        upgrade(api)
    assert capsys.readouterr().out.endswith(
        f"[1/1] n1: interrupted; the agent with {OLDER} stays; to continue, run pyebpf-proxy cluster upgrade"
        f" --image {NEWER}\n"
    )


def test_a_controller_that_has_not_seen_the_new_template(api: FakeApi) -> None:
    """It hears of pods and of DaemonSets in two watches, and would make the pod again from the former template."""
    api.label("n1", parked=ON, agent=ON)
    path, looks = DAEMON_SETS.path(NAMESPACE, NAME), 0

    def controller(method: str, asked: str) -> None:
        nonlocal looks
        if asked != path:
            return
        if method == "PATCH":
            api.seen[NAME], looks = copy.deepcopy(api.stored[path]), 0
        looks += method == "GET"
        if looks == 2:
            api.seen.clear()

    api.before = controller
    upgrade(api)
    assert api.images() == {"n1": NEWER}


def test_a_node_that_is_deleted_before_the_former_agent_is_back(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in ("n1", "n2"):
        api.label(node, parked=ON, agent=ON)

    def task(_: object, what: str, node: str, *__: object) -> str:
        if (what, node) == ("verify", "n1"):
            del api.stored[NODES.path(name="n1")]
            raise ClusterError("verify: no connection")
        return "all is well\n"

    monkeypatch.setattr(task_pod, "run", task)
    upgrade(api)
    said = capsys.readouterr().out
    assert "[1/2] n1: the node no longer exists" in said
    assert api.images()["n2"] == NEWER
