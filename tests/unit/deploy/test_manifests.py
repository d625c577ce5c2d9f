# SPDX-License-Identifier: Apache-2.0
"""deploy/: every kustomization builds, and the result matches docs/deploy.md."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pyebpf_proxy import __version__
from pyebpf_proxy.cluster.objects import AGENT, PARKED
from pyebpf_proxy.common.kube_proxy_health import DEFAULT, VARIABLE
from pyebpf_proxy.config.complete import complete
from pyebpf_proxy.config.flags import parse
from tests import ROOT
from tests.deployment import apparmor, manifests
from tests.deployment.manifests import DEPLOY, Object, build, container, one

pytestmark = pytest.mark.needs_kubectl

KUSTOMIZATIONS = manifests.kustomizations()
NAMES = [str(path.relative_to(DEPLOY)) for path in KUSTOMIZATIONS]
KUBEADM = DEPLOY / "overlays" / "kubeadm"
BACK = DEPLOY / "overlays" / "kubeadm-back"
OURS = KUSTOMIZATIONS
#: Folders of the node that the pod may see; docs/deploy.md gives the reason for each.
HOST_PATHS = {
    "/run/pyebpf-proxy",
    "/sys/fs/bpf/pyebpf-proxy",
    "/sys/fs/cgroup",
    "/proc/sys/net/netfilter",
    "/proc/sys/net/ipv4/conf/all/route_localnet",
}


def pod(objects: tuple[Object, ...]) -> Object:
    template: Object = one(objects, "DaemonSet")["spec"]["template"]
    return template


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=NAMES)
def test_kustomizations_build_and_objects_are_unique(folder: Path) -> None:
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in build(folder)]
    assert names
    assert len(names) == len(set(names))
    cluster_wide = {"ClusterRole", "ClusterRoleBinding"}
    assert all((namespace is None) == (kind in cluster_wide) for kind, namespace, _ in names)
    assert {namespace for _, namespace, _ in names} <= {None, "kube-system"}


def test_every_file_is_used() -> None:
    """A manifest that no kustomization names is never applied."""
    loose = []
    for path in DEPLOY.rglob("*.yaml"):
        siblings = path.with_name("kustomization.yaml")
        if path.name != "kustomization.yaml" and siblings.exists():
            listed = re.findall(r"^\s+- (?:path: )?(\S+)$", siblings.read_text(), re.MULTILINE)
            if path.name not in listed:
                loose.append(path)
    assert loose == []


@pytest.mark.parametrize("folder", OURS, ids=lambda folder: folder.name)
def test_names_labels_and_image_are_consistent(folder: Path) -> None:
    objects = build(folder)
    daemon_set = one(objects, "DaemonSet")
    labels = pod(objects)["metadata"]["labels"]
    assert daemon_set["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert "app.kubernetes.io/version" not in labels, "a version in a selector or template would restart every pod"
    assert container(daemon_set)["image"].rpartition(":")[2] == __version__
    for each in objects:
        if each["metadata"]["name"] == "pyebpf-proxy":
            assert each["metadata"]["labels"]["app.kubernetes.io/version"] == __version__
    account = one(objects, "ServiceAccount")["metadata"]
    assert pod(objects)["spec"]["serviceAccountName"] == account["name"]
    binding = one(objects, "ClusterRoleBinding")
    (subject,) = binding["subjects"]
    assert (subject["kind"], subject["namespace"], subject["name"]) == (
        "ServiceAccount",
        account["namespace"],
        account["name"],
    )
    assert binding["roleRef"]["name"] == one(objects, "ClusterRole")["metadata"]["name"]


def test_the_role_grants_only_the_used_rights() -> None:
    granted = {
        (group, resource, verb)
        for rule in one(manifests.base(), "ClusterRole")["rules"]
        for group, resource, verb in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
        if rule.keys() <= {"apiGroups", "resources", "verbs"}
    }
    read = [
        ("", "services"),
        ("", "nodes"),
        ("discovery.k8s.io", "endpointslices"),
        ("networking.k8s.io", "servicecidrs"),
    ]
    assert granted == {
        *((*what, verb) for what in read for verb in ("list", "watch")),
        ("events.k8s.io", "events", "create"),
        ("events.k8s.io", "events", "patch"),
    }


@pytest.mark.parametrize("folder", OURS, ids=lambda folder: folder.name)
def test_the_container_has_minimal_rights(folder: Path) -> None:
    objects = build(folder)
    specification = pod(objects)["spec"]
    security = container(one(objects, "DaemonSet"))["securityContext"]
    assert security["privileged"] is False
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"]["drop"] == ["ALL"]
    assert set(security["capabilities"]["add"]) <= {"NET_ADMIN", "BPF", "PERFMON"}
    assert specification["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostPID", "hostIPC", "shareProcessNamespace"} & specification.keys()
    assert "initContainers" not in specification
    paths = {volume["hostPath"]["path"] for volume in specification["volumes"] if "hostPath" in volume}
    assert paths <= HOST_PATHS


@pytest.mark.parametrize("component", [None, "ipvs"])
def test_t13_no_path_that_the_apparmor_profile_denies_is_mounted_writable(
    component: str | None, tmp_path: Path
) -> None:
    """It denies by path: the agent writes /sys/fs/bpf and /proc/sys through other mounts."""
    assert apparmor.denies_write("/sys/fs/bpf/pyebpf-proxy/tc")
    assert apparmor.denies_write("/proc/sys/net/netfilter/nf_conntrack_max")
    assert not apparmor.denies_write("/sys/fs/cgroup/kubepods/cgroup.procs")
    objects = with_component(tmp_path, component) if component else manifests.base()
    mounts = container(one(objects, "DaemonSet"))["volumeMounts"]
    written = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
    assert {"/run/pyebpf-proxy/bpf/pyebpf-proxy", "/host/proc/sys/net/netfilter"} <= {*written}
    assert [path for path in written if apparmor.denies_write(path) or apparmor.denies_write(f"{path}/x")] == []


@pytest.mark.parametrize("folder", OURS, ids=lambda folder: folder.name)
def test_volumes_and_mounts_are_consistent(folder: Path) -> None:
    objects = build(folder)
    volumes = [volume["name"] for volume in pod(objects)["spec"]["volumes"]]
    mounts = container(one(objects, "DaemonSet"))["volumeMounts"]
    assert sorted(volumes) == sorted(mount["name"] for mount in mounts)
    kinds = {volume["name"]: volume for volume in pod(objects)["spec"]["volumes"]}
    for mount in mounts:
        if "configMap" in kinds[mount["name"]] or mount["name"] == "cgroup":
            assert mount["readOnly"] is True


def test_the_page_has_what_the_kubelet_says_without_bpffs() -> None:
    """No folder can be made in sysfs: the container is not started, and the agent's own message is never printed."""
    volumes = manifests.base_daemon_set()["spec"]["template"]["spec"]["volumes"]
    (pins,) = (volume for volume in volumes if volume.get("hostPath", {}).get("path", "").startswith("/sys/fs/bpf"))
    assert pins["hostPath"]["type"] == "DirectoryOrCreate"
    failed = f'MountVolume.SetUp failed for volume "{pins["name"]}" : mkdir {pins["hostPath"]["path"]}: '
    assert f"{failed}operation not permitted" in (ROOT / "docs" / "troubleshooting.md").read_text()


@pytest.mark.parametrize("folder", OURS, ids=lambda folder: folder.name)
def test_the_agent_runs_on_every_node_and_is_not_evicted(folder: Path) -> None:
    specification = pod(build(folder))["spec"]
    assert specification["hostNetwork"] is True
    assert specification["priorityClassName"] == "system-node-critical"
    assert specification["tolerations"] == [{"operator": "Exists"}]
    assert specification["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert specification["dnsPolicy"] == "Default", "cluster DNS is a Service"
    resources = container(one(build(folder), "DaemonSet"))["resources"]
    assert "limits" not in resources, "an agent that is throttled or killed programs late"


@pytest.mark.parametrize("folder", [DEPLOY / "base", KUBEADM], ids=lambda folder: folder.name)
def test_probes_ask_the_agent_itself_and_no_port(folder: Path) -> None:
    """A flood of the health port restarts no agent (finding S3)."""
    agent = container(one(build(folder), "DaemonSet"))
    probes = {name: agent[name]["exec"]["command"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert not any("httpGet" in agent[name] for name in probes), "a port can be flooded, or belong to another process"
    assert agent["terminationMessagePolicy"] == "FallbackToLogsOnError", "cluster install says why an agent ended"
    start = agent["startupProbe"]
    assert start["periodSeconds"] == 1, "a pod is ready within two seconds of its start"
    assert start["periodSeconds"] * start["failureThreshold"] == 300, "a slow start is not ended"
    # A process for each probe: more often, the probes of a node would take some percent of a CPU.
    rates = [1 / agent[name]["periodSeconds"] for name in ("livenessProbe", "readinessProbe")]
    assert sum(rates) <= 0.1
    assert [agent[name]["periodSeconds"] * agent[name]["failureThreshold"] for name in probes] == [300, 90, 30]
    # A busy node divides its CPU time by these requests. With less, changes wait for longer than servers take to end.
    assert agent["resources"] == {"requests": {"cpu": "100m", "memory": "100Mi"}}
    # `ready` fails while a node is being deleted, which is no reason to kill its agent.
    assert probes == {
        "startupProbe": ["pyebpf-proxy", "probe", "live"],
        "livenessProbe": ["pyebpf-proxy", "probe", "live"],
        "readinessProbe": ["pyebpf-proxy", "probe", "ready"],
    }


@pytest.mark.parametrize("folder", [DEPLOY / "base", KUBEADM], ids=lambda folder: folder.name)
def test_the_command_line_names_mounted_files_and_the_node(folder: Path) -> None:
    agent = container(one(build(folder), "DaemonSet"))
    assert "command" not in agent, "the image determines what is run"
    assert agent["args"] == ["--config=/var/lib/kube-proxy/config.conf", "--hostname-override=$(NODE_NAME)"]
    assert "/var/lib/kube-proxy" in [mount["mountPath"] for mount in agent["volumeMounts"]]
    (variable,) = agent["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


def test_the_configuration_is_valid_once_it_is_filled_in(tmp_path: Path) -> None:
    data: dict[str, Any] = one(manifests.base(), "ConfigMap")["data"]
    assert data.keys() == {"config.conf", "kubeconfig.conf"}
    assert re.findall(r"<[^>]*>", "".join(data.values())) == ["<10.244.0.0/16>", "<control-plane-endpoint>"]
    assert all(name in (ROOT / "docs" / "deploy.md").read_text() for name in ("clusterCIDR", "control-plane-endpoint"))
    file = tmp_path / "config.conf"
    file.write_text(re.sub(r"[<>]", "", data["config.conf"]))
    warnings: list[str] = []
    configuration = complete(parse(["--config", str(file)]), lambda text, file: warnings.append(text))
    assert warnings == []
    assert configuration.client_connection.kubeconfig == "/var/lib/kube-proxy/kubeconfig.conf"


def test_kubeadm_uses_its_own_configuration() -> None:
    objects = build(KUBEADM)
    assert "ConfigMap" not in [each["kind"] for each in objects]
    (volume,) = (volume for volume in pod(objects)["spec"]["volumes"] if volume["name"] == "config")
    assert volume["configMap"] == {"name": "kube-proxy"}


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=NAMES)
def test_no_kustomization_has_kube_proxys_daemonset(folder: Path) -> None:
    """`apply` would remove its containers if it was created by apply, and `delete` would delete it."""
    assert "kube-proxy" not in [each["metadata"]["name"] for each in build(folder)]


def test_parking_and_unparking_undo_each_other() -> None:
    files = [yaml.safe_load((DEPLOY / "kube-proxy" / f"{name}.yaml").read_text()) for name in ("park", "unpark")]
    selectors = [each["spec"]["template"]["spec"].pop("nodeSelector") for each in files]
    assert selectors == [{"pyebpf-proxy/no-node": "true"}, {"pyebpf-proxy/no-node": None}]
    assert files == [{"spec": {"template": {"spec": {}}}}] * 2, "all else of it is kubeadm's"
    # `cluster install` gives nodes these labels: as a selector one would select just the nodes that are taken over.
    assert not {AGENT, PARKED} & {key for each in selectors for key in each}


@pytest.mark.parametrize("folder", OURS, ids=lambda folder: folder.name)
def test_a_users_overlay_names_the_image(tmp_path: Path, folder: Path) -> None:
    """As docs/deploy.md shows it, for every folder that runs the image, including the rollback."""
    relative = Path("/".join([".."] * (len(tmp_path.parts) - 1))) / str(folder).lstrip("/")
    name = "registry.example:5000/team/pyebpf-proxy"
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{relative}]\nimages:\n  - {{name: REGISTRY/pyebpf-proxy, newName: {name}, newTag: 1.2.3}}\n"
    )
    assert container(one(build(tmp_path), "DaemonSet"))["image"] == f"{name}:1.2.3"


def test_a_users_overlay_adds_a_datapath_configuration(tmp_path: Path) -> None:
    """As docs/deploy.md shows it. A change of the file gives the ConfigMap another name, which replaces the pods."""
    section = (ROOT / "docs" / "deploy.md").read_text().partition("\n## Datapath configuration\n")[2]
    text, values = re.findall(r"^```yaml\n(.*?)^```$", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    assert list(yaml.safe_load(values)) == ["datapathConfig"], "for Helm"
    relative = "/".join([".."] * (len(tmp_path.parts) - 1)) + str(ROOT)
    (tmp_path / "kustomization.yaml").write_text(text.replace("PATH/", f"{relative}/"))
    (tmp_path / "datapath.yaml").write_text((ROOT / "examples" / "datapath-config.yaml").read_text())
    objects = build(tmp_path)
    (made,) = (each for each in objects if each["kind"] == "ConfigMap")
    agent = container(one(objects, "DaemonSet"))
    (volume,) = (each for each in pod(objects)["spec"]["volumes"] if each["name"] == "datapath")
    (mount,) = (each for each in agent["volumeMounts"] if each["name"] == "datapath")
    assert volume["configMap"] == {"name": made["metadata"]["name"]}
    assert made["metadata"]["name"].startswith("pyebpf-proxy-datapath-")
    (file,) = made["data"]
    assert agent["args"][-1] == f"--datapath-config={mount['mountPath']}/{file}"
    assert len(agent["args"]) == len(container(one(build(KUBEADM), "DaemonSet"))["args"]) + 1


@pytest.mark.parametrize("folder", OURS, ids=lambda folder: folder.name)
def test_there_is_no_default_image(folder: Path) -> None:
    """An image that was not chosen must not be pulled from a public registry: runtimes reject names with capitals."""
    name = container(one(build(folder), "DaemonSet"))["image"].rpartition(":")[0]
    assert name == "REGISTRY/pyebpf-proxy"
    assert name.lower() != name


def test_cleaning_up_needs_one_capability_and_no_api() -> None:
    objects = build(BACK / "cleanup")
    agent = container(one(objects, "DaemonSet"))
    steps = agent["command"][2].split(" && ")
    # kube-proxy's pod is ready before it has programmed anything.
    assert steps[:2] == ["pyebpf-proxy probe kube-proxy", "pyebpf-proxy --cleanup --keep-kube-proxy-rules"]
    assert {"name": VARIABLE, "value": DEFAULT} in agent["env"]
    assert pod(objects)["spec"]["automountServiceAccountToken"] is False
    assert agent["securityContext"]["capabilities"]["add"] == ["NET_ADMIN", "BPF"]
    assert not {"livenessProbe", "startupProbe"} & agent.keys()


def test_the_file_of_the_base_equals_its_kustomize_output() -> None:
    """Tests without kubectl use the file itself."""
    built, file = pod(manifests.base())["spec"], manifests.base_daemon_set()["spec"]["template"]["spec"]
    (container_built,), (container_file,) = built.pop("containers"), file.pop("containers")
    assert container_built | {"image": ""} == container_file | {"image": ""}
    assert built == file


def with_component(folder: Path, name: str) -> tuple[Object, ...]:
    """The base with a component."""
    overlay = folder / "overlay"
    overlay.mkdir()
    relative = Path("/".join([".."] * (len(overlay.parts) - 1))) / str(DEPLOY).lstrip("/")
    (overlay / "kustomization.yaml").write_text(
        f"resources: [{relative}/base]\ncomponents: [{relative}/components/{name}]\n"
    )
    return build(overlay)


def test_the_component_adds_one_capability(tmp_path: Path) -> None:
    added = manifests.capabilities(one(with_component(tmp_path, "conntrack-lookup"), "DaemonSet"))
    assert added == [*manifests.capabilities(one(manifests.base(), "DaemonSet")), "SYS_ADMIN"]


def test_the_component_for_selinux_sets_only_the_type(tmp_path: Path) -> None:
    """container-selinux has this type for containers that administer the node."""
    plain, typed = (pod(each)["spec"] for each in (manifests.base(), with_component(tmp_path, "selinux")))
    assert typed["securityContext"].pop("seLinuxOptions") == {"type": "spc_t"}
    assert typed == plain


def test_the_component_for_crio_takes_the_profile_away_and_nothing_else(tmp_path: Path) -> None:
    """CRI-O's default profile refuses bpf() to holders of CAP_BPF."""
    plain, free = (pod(each)["spec"] for each in (manifests.base(), with_component(tmp_path, "crio")))
    assert free["securityContext"].pop("seccompProfile") == {"type": "Unconfined"}
    assert plain["securityContext"].pop("seccompProfile") == {"type": "RuntimeDefault"}
    assert free == plain


def test_s12_the_contents_of_the_image_are_pinned() -> None:
    """The base image by its digest, Debian's packages by a day (finding S12)."""
    text = (DEPLOY / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (?:--platform=\S+ )?(\S+)", text, re.MULTILINE)
    assert len(bases) == text.count("\nARG SNAPSHOT=") == 2
    assert len(set(bases)) == len(set(re.findall(r"^ARG SNAPSHOT=(\d{8}T\d{6}Z)$", text, re.MULTILINE))) == 1
    assert re.fullmatch(r"debian:bookworm-slim@sha256:[0-9a-f]{64}", bases[0])


def test_s12_the_packages_of_the_image_are_those_of_one_day(tmp_path: Path) -> None:
    """The sources of Debian's image; the command that changes them is the script's own."""
    lines = (DEPLOY / "image" / "stage.sh").read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines) if line.strip().startswith("sed -i"))
    sources = tmp_path / "debian.sources"
    sources.write_text(
        "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n\n"
        "Types: deb\nURIs: http://mirror.example/debian-security\nSuites: bookworm-security\n"
    )
    command = f"{lines[number].strip().removesuffix(chr(92))} {sources}"
    subprocess.run(
        ["bash", "-euc", command],
        env={"ARCHIVE": "http://archive.example", "SNAPSHOT": "20251201T000000Z", "PATH": os.environ["PATH"]},
        check=True,
    )
    found = [line.partition(": ")[2] for line in sources.read_text().splitlines() if line.startswith("URIs")]
    archive = "http://archive.example"
    assert found == [f"{archive}/debian/20251201T000000Z", f"{archive}/debian-security/20251201T000000Z"]


def test_s12_a_build_without_a_snapshot_date_fails(tmp_path: Path) -> None:
    """The script ends before it downloads packages; with ARCHIVE=mirror it does not."""
    (tmp_path / "bin").mkdir()
    for name in ("apt-get", "rm"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/called\n')
        (tmp_path / "bin" / name).chmod(0o755)
    script = [DEPLOY / "image" / "stage.sh", "packages", "run"]
    found = {}
    for archive in ("", "mirror"):
        environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ARCHIVE": archive}
        found[archive] = subprocess.run(
            script, cwd=DEPLOY.parent, env=environment, capture_output=True, text=True, check=False
        )
        assert (tmp_path / "called").exists() == bool(archive)
    assert found[""].returncode == 1
    assert found[""].stderr.startswith("the versions of Debian's packages are not pinned: --build-arg ARCHIVE=URL")
    assert found["mirror"].returncode == 0, found["mirror"].stderr
    calls = (tmp_path / "called").read_text().splitlines()
    assert calls[0] == "apt-get -q update"
    assert calls[1].startswith("apt-get -q -y install --no-install-recommends libbpf1 ")


def test_s11_only_mode_ipvs_needs_more_of_the_nodes_settings(tmp_path: Path) -> None:
    objects = with_component(tmp_path, "ipvs")
    paths = {volume["hostPath"]["path"] for volume in pod(objects)["spec"]["volumes"] if "hostPath" in volume}
    assert paths - HOST_PATHS == {"/proc/sys/net/ipv4"}
    mounts = container(one(objects, "DaemonSet"))["volumeMounts"]
    assert {"name": "ipv4", "mountPath": "/host/proc/sys/net/ipv4"} in mounts
