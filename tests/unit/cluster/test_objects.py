# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy cluster``: its objects are those of deploy/, what it changes can be undone, the agent needs none."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest

from pyebpf_proxy.cluster import objects, scheduling
from pyebpf_proxy.cluster.model import kube_proxy_health, pod_of
from tests import ROOT
from tests.support.merge_patch import merged

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
OURS = {"key": objects.PARKED, "operator": "DoesNotExist"}
THEIRS = {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}


@pytest.mark.needs_kubectl
def test_the_objects_in_the_package_are_those_of_deploy() -> None:
    ran = subprocess.run([sys.executable, ROOT / "tools" / "cluster_objects.py", "--check"], check=False)
    assert ran.returncode == 0


def test_the_agent_runs_on_selected_nodes_and_only_commands_replace_pods() -> None:
    daemon_set = objects.agent("registry.example/x:1")[-1]
    specification = daemon_set["spec"]["template"]["spec"]
    assert specification["nodeSelector"] == {"kubernetes.io/os": "linux", objects.AGENT: "true"}
    assert daemon_set["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert specification["containers"][0]["image"] == "registry.example/x:1"


@pytest.mark.parametrize("what", ["fit", "verify", "await"])
def test_a_task_pod_may_use_iptables_and_has_no_token(what: str) -> None:
    specification = objects.task_pod(what, "e", "n1", "x:1", ["true"])["spec"]
    (container,) = specification["containers"]
    # iptables-legacy needs NET_RAW and its lock.
    assert container["securityContext"]["capabilities"] == {"add": ["NET_ADMIN", "NET_RAW"], "drop": ["ALL"]}
    paths = {each["hostPath"]["path"] for each in specification["volumes"] if "hostPath" in each}
    assert "/run/xtables.lock" in paths
    assert ("priorityClassName" in specification) == (what != "fit"), "no pod is evicted for a trial"
    assert specification["automountServiceAccountToken"] is False
    assert (specification["nodeName"], specification["restartPolicy"]) == ("n1", "Never")
    assert "readinessProbe" not in container


def test_the_clean_up_may_call_bpf_too() -> None:
    """The runtimes' seccomp profile allows it only with this capability."""
    (container,) = objects.task_pod("clean", "e", "n1", "x:1", objects.CLEAN_UP)["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"add": ["NET_ADMIN", "BPF"], "drop": ["ALL"]}


def test_a_variable_of_a_task_pod_replaces_the_one_of_its_name() -> None:
    pod = objects.task_pod("clean", "e", "n1", "x:1", objects.CLEAN_UP, {"KUBE_PROXY_HEALTH": "[::1]:10356"})
    variables = [(each["name"], each.get("value")) for each in pod["spec"]["containers"][0]["env"]]
    health, metrics = ("KUBE_PROXY_HEALTH", "[::1]:10356"), ("KUBE_PROXY_METRICS", "127.0.0.1:10249")
    assert sorted(variables, key=str) == [health, metrics, ("NODE_NAME", None)]


def test_a_pod_on_the_pod_network_has_no_right() -> None:
    specification = objects.task_pod("connect", "e", "n1", "x:1", ["true"])["spec"]
    assert not specification.keys() & {"hostNetwork", "volumes"}
    (container,) = specification["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("", "127.0.0.1:10256"),
        ("0.0.0.0:10256", "127.0.0.1:10256"),
        ("0.0.0.0:10356", "127.0.0.1:10356"),
        ("0.0.0.0", "127.0.0.1:10256"),
        ("[::]:10356", "[::1]:10356"),
        ("192.0.2.11:10256", "192.0.2.11:10256"),
        ("2001:db8::1", "[2001:db8::1]:10256"),
    ],
)
def test_where_kube_proxy_serves_its_health(address: str, expected: str) -> None:
    assert kube_proxy_health({"healthzBindAddress": address}) == expected


AFFINITIES: list[Any] = [
    None,
    {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "x"}]}},
    {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}]}},
    {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [THEIRS]}, {"matchFields": [{"key": "metadata.name"}]}]
            }
        }
    },
]


@pytest.mark.parametrize("affinity", AFFINITIES, ids=["none", "of pods", "preferred", "required"])
@pytest.mark.parametrize("strategy", ["RollingUpdate", "OnDelete"])
def test_kube_proxys_daemonset_is_changed_and_restored(affinity: Any, strategy: str) -> None:
    update: Any = {"type": strategy}
    if strategy == "RollingUpdate":
        update["rollingUpdate"] = {"maxSurge": 0, "maxUnavailable": 1}
    template: Any = {"spec": {"nodeSelector": {"kubernetes.io/os": "linux"}}}
    if affinity:
        template["spec"]["affinity"] = affinity
    original: Any = {
        "metadata": {"annotations": {"deprecated.daemonset.template.generation": "1"}},
        "spec": {"updateStrategy": update, "template": template},
    }
    kept = copy.deepcopy(original)
    prepared = merged(original, objects.prepare(original))
    assert objects.is_prepared(prepared)
    assert prepared["spec"]["updateStrategy"] == {"type": "OnDelete"}
    terms = prepared["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert all(OURS in term["matchExpressions"] for term in terms)
    assert merged(prepared, objects.prepare(prepared)) == prepared, "again changes nothing"
    back = merged(prepared, objects.unprepare(prepared))
    assert not objects.is_prepared(back)
    back = merged(back, objects.restore_strategy(back))
    assert back == kept == original
    assert objects.unprepare(original) is None


@pytest.mark.parametrize("affinity", AFFINITIES, ids=["none", "of pods", "preferred", "required"])
def test_what_others_change_meanwhile_stays(affinity: Any) -> None:
    """An administrator adds to kube-proxy's affinity, and sets another update strategy."""
    update: Any = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    template: Any = {"spec": {"affinity": affinity} if affinity else {}}
    original: Any = {"metadata": {}, "spec": {"updateStrategy": update, "template": template}}
    prepared = merged(original, objects.prepare(original))
    added = {"key": "example.org/proxy", "operator": "Exists"}
    edited = copy.deepcopy(prepared)
    terms = edited["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    for term in terms:
        term["matchExpressions"].insert(0, added)
    edited["spec"]["template"]["spec"]["affinity"]["podAffinity"] = {"preferred": []}
    edited["spec"]["updateStrategy"] = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "20%"}}
    assert not objects.is_prepared(edited)
    assert objects.spares_parked(edited), "no node has to be unparked for it"
    again = merged(edited, objects.prepare(edited))
    assert again["spec"]["updateStrategy"] == {"type": "OnDelete"}
    for before, strategy in ((edited, edited), (again, edited)):
        back = merged(before, objects.unprepare(before))
        back = merged(back, objects.restore_strategy(back))
        assert back["spec"]["updateStrategy"] == strategy["spec"]["updateStrategy"]
        present = back["spec"]["template"]["spec"]["affinity"]
        assert present["podAffinity"] == {"preferred": []}
        kept = present["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
        assert all(added in term["matchExpressions"] and OURS not in term["matchExpressions"] for term in kept)
        assert len(kept) == len(terms)


@pytest.mark.parametrize("terms", [[{}], [{}, {"matchExpressions": [THEIRS]}]], ids=["alone", "beside another"])
def test_an_empty_term_still_matches_no_node(terms: list[Any]) -> None:
    """With a condition in it, kube-proxy would start on nodes from which its DaemonSet keeps it."""
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}
    original: Any = {"metadata": {"annotations": {"a": "b"}}, "spec": {"updateStrategy": {"type": "OnDelete"}}}
    original["spec"]["template"] = {"spec": {"affinity": affinity}}
    node: Any = {"metadata": {"name": "n1", "labels": {"kubernetes.io/arch": "arm64"}}}
    prepared = merged(original, objects.prepare(original))
    assert objects.is_prepared(prepared)
    assert not scheduling.selects(prepared, node)
    back = merged(prepared, objects.unprepare(prepared) or {})
    assert merged(back, objects.restore_strategy(back)) == original


def test_a_term_of_others_beside_the_commands_own_restricts_nothing() -> None:
    """Terms are alternatives, and the commands' own matches every node that is not parked: kube-proxy must stay."""
    original: Any = {"metadata": {}, "spec": {"updateStrategy": {"type": "OnDelete"}, "template": {"spec": {}}}}
    edited = merged(original, objects.prepare(original))
    edited["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"].append(
        {"matchExpressions": [THEIRS]}
    )
    node: Any = {"metadata": {"name": "n1", "labels": {"kubernetes.io/arch": "arm64"}}}
    assert scheduling.selects(edited, node)
    assert scheduling.selects(merged(edited, objects.unprepare(edited)), node)


@pytest.mark.parametrize("note", ["{", "null", "7", "{}", "[" * 100_000])
def test_notes_that_another_program_has_changed(note: str) -> None:
    """The end of a rollback, and an upgrade, must not fail for them."""
    original: Any = {"metadata": {}, "spec": {"updateStrategy": {"type": "OnDelete"}, "template": {"spec": {}}}}
    prepared = merged(original, objects.prepare(original))
    prepared["metadata"]["annotations"][objects.BEFORE] = note
    assert objects.was_changed(prepared)
    back = merged(prepared, objects.restore_strategy(prepared))
    assert back["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    assert back["metadata"]["annotations"] == {}
    agent = objects.upgraded(objects.agent("x:1")[-1], "x:2")
    agent["metadata"]["annotations"][objects.FORMER] = note
    assert objects.template_image(objects.downgraded(agent, "x:1")) == "x:1"
    assert objects.FORMER not in objects.upgraded(agent, "x:2")["metadata"].get("annotations", {})


def test_the_agents_former_template_comes_back() -> None:
    old = objects.agent("x:1")[-1]
    old["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "OLD", "value": "1"})
    new = objects.upgraded(old, "x:2")
    assert objects.template_image(new) == "x:2"
    again = objects.upgraded(new, "x:2")
    assert objects.downgraded(again, "x:1")["spec"]["template"] == old["spec"]["template"]
    assert objects.downgraded(old, "x:1")["spec"]["template"] == old["spec"]["template"]
    assert objects.template_image(objects.downgraded(old, "x:0")) == "x:0", "one that is not known"


def test_the_meaning_of_a_pods_status() -> None:
    def pod(state: dict[str, Any], phase: str = "Pending", **more: Any) -> Any:
        status = {"phase": phase, "containerStatuses": [{"name": "c", "state": state, "restartCount": 0, **more}]}
        container = {"name": "c", "image": "x:1"}
        return pod_of(
            {
                "metadata": {"name": "p", "uid": "u"},
                "spec": {"nodeName": "n", "containers": [container]},
                "status": status,
            }
        )

    assert pod({"waiting": {"reason": "ContainerCreating"}}).hopeless == ""
    # The kubelet reports this first, and tries again at once.
    assert pod({"waiting": {"reason": "ErrImagePull"}}).hopeless == ""
    backing_off = pod({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}})
    assert (backing_off.hopeless, backing_off.ran) == ("the image cannot be pulled: not found", False)
    crashed = pod({"waiting": {"reason": "CrashLoopBackOff"}}, lastState={"terminated": {"message": "CAP_BPF missing"}})
    assert crashed.hopeless == "the container exits repeatedly: CAP_BPF missing"
    assert crashed.ran
    # A kubelet's own message for it says only how long it waits; the log's last lines say why.
    waits = "back-off 20s restarting failed container=pyebpf-proxy pod=pyebpf-proxy-q8zkv_kube-system(0e9f4c6a-5d0f)"
    log = "2026-11-23T09:00:01.120Z info starting version=0.1.0\nError: the kernel has no BTF\n\n"
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": waits}}
    crashed = pod(waiting, lastState={"terminated": {"message": log, "exitCode": 1}})
    assert crashed.hopeless == "the container exits repeatedly: Error: the kernel has no BTF"
    silent = pod(waiting, lastState={"terminated": {"exitCode": 1}})
    assert silent.hopeless == f"the container exits repeatedly: {waits}"
    assert not pod({"running": {}}, "Running", started=False).started
    assert pod({"running": {}}, "Running", started=True).usable


@pytest.mark.parametrize("first", [True, False], ids=["sidecar first", "sidecar last"])
def test_a_sidecars_status_is_not_the_agents(first: bool) -> None:
    """The kubelet sorts the statuses by name; a webhook may add its container before the agent's."""
    running, waiting = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, {"waiting": {"reason": "CrashLoopBackOff"}}
    containers = [{"name": objects.NAME, "image": "x:1"}, {"name": "mesh", "image": "mesh:7"}]
    statuses = [
        {"name": "mesh", "state": running, "restartCount": 0},
        {"name": objects.NAME, "state": waiting, "restartCount": 3},
    ]
    found = pod_of(
        {
            "metadata": {"name": "p", "uid": "u", "labels": {"k8s-app": objects.NAME}},
            "spec": {"nodeName": "n", "containers": containers[::-1] if first else containers},
            "status": {"phase": "Running", "containerStatuses": statuses},
        }
    )
    assert (found.image, found.started, found.restarts) == ("x:1", False, 3)
    assert found.hopeless == "the container exits repeatedly: CrashLoopBackOff"


def test_the_agent_imports_neither_the_commands_nor_their_library() -> None:
    program = (
        "import sys, pyebpf_proxy.cli, pyebpf_proxy.agent.run, pyebpf_proxy.commands, pyebpf_proxy.lab.cli\n"
        "print([name for name in sys.modules if name.startswith(('kubernetes', 'pyebpf_proxy.cluster'))])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_without_the_library_one_line_has_the_remedy() -> None:
    program = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "from pyebpf_proxy.cli import main; sys.exit(main(['cluster', 'status']))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 3
    assert ran.stderr.startswith("Error: the Python package kubernetes is not installed: install the wheel of ")
    assert ran.stderr.count("\n") == 1


def test_a_closed_pipe_does_not_stop_the_command_halfway() -> None:
    """A node that is being taken over would have no proxy."""
    code = (
        "from pyebpf_proxy.cluster.output import Output; import sys\n"
        "output = Output(False)\n"
        "while not output.status: output.say('line')\n"
        "output.say('into the void'); output.end()\n"
        "print('continued', output.status, file=sys.stderr)"
    )
    ran = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" | head -1', sys.executable, code], capture_output=True, text=True, check=True
    )
    assert (ran.stdout, ran.stderr) == ("line\n", "continued 141\n")


def test_a_closed_pipe_ends_the_help_quietly() -> None:
    command = [sys.executable, "-m", "pyebpf_proxy", "cluster", "install", "--help"]
    # Without a buffer, argparse of Python 3.12 and later ignores the error, and the status is 0.
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
