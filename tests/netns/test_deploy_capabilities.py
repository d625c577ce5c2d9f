# SPDX-License-Identifier: Apache-2.0
"""The agent as the DaemonSet runs it: only its capabilities, a read-only root file system, and only its mounts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from signal import SIGKILL
from subprocess import DEVNULL, Popen

import pytest
import yaml

from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.client import ANSWERED, ask
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.see.doctor import checks
from tests.deployment import apparmor, manifests
from tests.deployment.node import contained, pod_of, wait_ready, with_manifests
from tests.deployment.seccomp_filter import runtime_default
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import node_client, outside_client, pod_client, reasons, served_by
from tests.support.logs import Log, Message

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf, pytest.mark.needs_netns]

WEB = Kind("web", 1)
DAEMON_SET = manifests.base_daemon_set()
NEEDED = manifests.capabilities(DAEMON_SET)
#: Metrics that a healthy agent without an API server does not expose; tests/unit/docs/test_runbook.py lists them.
ONLY_IN_TROUBLE = {
    "pyebpf_proxy_api_connected",
    "pyebpf_proxy_fast_path_closed",
    "pyebpf_proxy_promotion_failures_total",
}


def pod(lab: Lab, capabilities: list[str] = NEEDED, without: str = "") -> manifests.Object:
    """The DaemonSet's pod with a folder of manifests instead of the API server. ``without``: a volume that is
    left out.
    """
    return with_manifests(pod_of(DAEMON_SET, capabilities, without), lab.manifests)


@pytest.fixture(scope="module")
def small() -> Iterator[Lab]:
    """One node with a pod that serves and one that asks; no agent."""
    with Lab(nodes=1) as lab:
        WEB.endpoints = (lab.add_pod("web-1", lab.nodes[0]),)
        lab.add_pod("asking", lab.nodes[0], serve=False)
        write_nodes(lab)
        write_services(lab, WEB)
        yield lab


def test_the_pod_of_the_manifest_serves(small: Lab, family: int, protocol: str) -> None:
    node = small.nodes[0]
    with contained(small.nodes[0], pod(small)) as container:
        container.start()
        wait_ready(small.nodes[0], container)
        warnings = Log(container).lines(level="warning")
        expected = (Message.NODE_PORT_ADDRESSES_UNSET, Message.OOM_SCORE_FAILS, Message.ONE_VALUE_FOR_ALL)
        assert all(any(part in line.text for part in expected) for line in warnings), warnings
        before = reasons(node)
        for origin in (pod_client(small.pods["asking"]), node_client(node), outside_client(small)):
            target = WEB.target("NodePort" if origin.kind == "external" else "ClusterIP", node)
            outcome = origin.namespace.call(ask, target.address.of(family), target.ports[protocol], protocol)
            assert outcome.kind == ANSWERED, (origin.name, outcome)
        # The socket of the node's own process is translated, none of its packets.
        assert served_by(before, reasons(node)) == {"tc": 2, "socket": 1}


def test_the_metrics_of_alerts_and_dashboard_exist(small: Lab) -> None:
    """An alert on a missing metric never fires. All metrics but one exist from the start."""
    groups = yaml.safe_load((manifests.DEPLOY / "prometheus" / "pyebpf-proxy.rules.yaml").read_text())["groups"]
    panels = json.loads((manifests.DEPLOY / "grafana" / "pyebpf-proxy.json").read_text())["panels"]
    expressions = [rule["expr"] for group in groups for rule in group["rules"]]
    expressions += [target["expr"] for panel in panels for target in panel["targets"]]
    named = re.findall(r"\b(?:kubeproxy|pyebpf_proxy|process)_[a-z0-9_]+", " ".join(expressions))
    wanted = {name.removesuffix("_bucket") for name in named} - ONLY_IN_TROUBLE
    assert len(wanted) > 10
    node = small.nodes[0]

    def missing() -> set[str]:
        # A counter with labels has no other line before its first count.
        return wanted - set(re.findall(r"^# TYPE ([a-z0-9_]+) ", node.agent.metrics(), re.MULTILINE))

    with contained(node, pod(small)) as container:
        container.start()
        wait_ready(node, container)
        # As with kube-proxy: it appears with the first change whose time is known.
        assert missing() == {"kubeproxy_network_programming_duration_seconds"}
        first, *slices = WEB.objects()
        now = datetime.now(UTC).isoformat()
        for each in slices:
            each["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": now}
        small.write("web.yaml", [first, *slices])
        container.wait_for(lambda: not missing(), "the latency of a change is measured")


def test_sigterm_ends_the_pod_and_another_takes_over(small: Lab) -> None:
    """The agent is process 1 of its pod. Pins and lock are on the node, so traffic continues between the pods and after
    them.
    """
    node = small.nodes[0]
    target = WEB.target("LoadBalancer", node)
    for _ in range(2):
        with contained(small.nodes[0], pod(small)) as container:
            container.start()
            wait_ready(small.nodes[0], container)
            assert container.terminate() == 0
            assert small.client.call(ask, target.address.v4, 80).kind == ANSWERED


def test_the_nodes_settings_are_written(small: Lab) -> None:
    """The container's /proc/sys is read-only; the agent uses the mount of the node's."""
    name = "net/netfilter/nf_conntrack_udp_timeout_stream"
    node = small.nodes[0]
    with contained(small.nodes[0], pod(small)) as container:
        configuration = node.agent.configuration({"conntrack": {"udpStreamTimeout": "77s"}})
        (node.agent.folder / "config" / "config.conf").write_text(yaml.safe_dump(configuration))
        container.start()
        wait_ready(small.nodes[0], container)
        assert node.namespace.run("cat", f"/proc/sys/{name}") == "77\n"
        Log(container).some(f"setting={name} value=77")
    with contained(small.nodes[0], pod(small, without="netfilter")) as container:
        configuration = node.agent.configuration({"conntrack": {"udpStreamTimeout": "78s"}})
        (node.agent.folder / "config" / "config.conf").write_text(yaml.safe_dump(configuration))
        container.start()
        assert container.wait_ended() == 1
        assert "Read-only file system; set it beforehand" in Log(container).last().text


@pytest.mark.parametrize("name", NEEDED)
def test_each_capability_is_needed(small: Lab, name: str) -> None:
    with contained(small.nodes[0], pod(small, [other for other in NEEDED if other != name])) as container:
        container.start()
        assert container.wait_ended() == 1
        assert f"not allowed: CAP_{name} missing" in Log(container).last().text


# The agent's command without its own check of capabilities.
UNCHECKED = """
import sys
from pyebpf_proxy.datapath import preflight
preflight.check_rights = lambda *needed: None
from pyebpf_proxy.cli import main
sys.exit(main())
"""
REFUSALS = {
    "NET_ADMIN": r"nftables table inet pyebpf-proxy: .*not permitted",
    "BPF": r"load tc\w*\.bpf\.o: Operation not permitted \(EPERM\)",
    "PERFMON": r"load tc\w*\.bpf\.o: Permission denied \(EACCES\): .*pointer (comparison|arithmetic) ",
}


@pytest.mark.parametrize("name", NEEDED)
def test_without_a_capability_the_kernel_refuses(small: Lab, name: str) -> None:
    """So the agent demands no more than it needs."""
    specification = pod(small, [other for other in NEEDED if other != name])
    specification["containers"][0]["command"] = [sys.executable, "-c", UNCHECKED]
    # The runtime's profile would refuse bpf() before the kernel does.
    specification["securityContext"]["seccompProfile"] = {"type": "Unconfined"}
    with contained(small.nodes[0], specification) as container:
        container.start()
        assert container.wait_ended() == 1
        assert re.search(REFUSALS[name], container.log()), container.log()


# Calls that the kernel allows every process, and how the container's filter treats them. bpf() and perf_event_open()
# have no arguments, so the kernel reports another error.
CALLS = """
import ctypes, errno, os, platform
libc = ctypes.CDLL(None, use_errno=True)
numbers = dict(zip("bpf perf_event_open keyctl add_key io_uring_setup".split(), NUMBERS[platform.machine()]))
for name, number in numbers.items():
    libc.syscall(number, *(ctypes.c_long(0) for _ in range(5)))
    print(name, errno.errorcode.get(ctypes.get_errno(), "granted"))
    ctypes.set_errno(0)
for name, call in (("unshare", lambda: libc.unshare(0x10000000)), ("vsock", lambda: libc.socket(40, 1, 0)),
                   ("inet", lambda: libc.socket(2, 1, 0))):
    ctypes.set_errno(0)
    print(name, "granted" if call() >= 0 else errno.errorcode[ctypes.get_errno()])
print(*(line for line in open("/proc/self/status").read().splitlines() if line.startswith("Seccomp:")))
"""
NUMBERS = {"x86_64": (321, 298, 250, 248, 425), "aarch64": (280, 241, 219, 217, 425)}


def answers(lab: Lab, specification: manifests.Object) -> dict[str, str]:
    """The kernel's answer to each of those calls in such a container."""
    (container,) = specification["containers"]
    container["command"], container["args"] = [sys.executable, "-c", CALLS.replace("NUMBERS", repr(NUMBERS))], []
    with contained(lab.nodes[0], specification) as made:
        made.start()
        assert made.wait_ended() == 0, made.log()
        return dict(line.split(maxsplit=1) for line in made.log().splitlines())


def test_t13_these_containers_have_the_runtimes_default_seccomp_profile(small: Lab) -> None:
    """The tests above rely on this: calls that the agent does not need are refused, and bpf() without its
    capability.
    """
    specification = pod(small)
    assert specification["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    found = answers(small, specification)
    assert found.pop("Seccomp:") == "2"
    # With its capabilities bpf() and perf_event_open() reach the kernel, which finds no arguments.
    assert found.pop("bpf") not in ("EPERM", "granted")
    assert found.pop("perf_event_open") not in ("EPERM", "granted")
    refused = ("keyctl", "add_key", "io_uring_setup", "unshare", "vsock")
    assert found == {**dict.fromkeys(refused, "EPERM"), "inet": "granted"}
    found = answers(small, pod(small, ["NET_ADMIN"]))
    assert (found["bpf"], found["perf_event_open"]) == ("EPERM", "EPERM")
    specification["securityContext"]["seccompProfile"] = {"type": "Unconfined"}
    found = answers(small, specification)
    assert found["Seccomp:"] == "0"
    assert [found[name] for name in refused].count("EPERM") == 0, found


def test_t13_the_seccomp_filter_applies_to_the_agent_and_its_threads(small: Lab) -> None:
    """Every thread's status in /proc shows it (finding T13)."""
    with contained(small.nodes[0], pod(small)) as container:
        container.start()
        wait_ready(small.nodes[0], container)
        for status in container.statuses():
            assert "\nSeccomp:\t2\n" in status
            assert "\nNoNewPrivs:\t1\n" in status


def test_t13_with_an_older_runtimes_profile_the_agent_names_what_is_refused(small: Lab, tmp_path: Path) -> None:
    """A profile that allows bpf() only with CAP_SYS_ADMIN."""
    (tmp_path / "filter").write_bytes(runtime_default(["NET_ADMIN", "PERFMON"]))
    specification = pod(small)
    profile = {"type": "Localhost", "localhostProfile": str(tmp_path / "filter")}
    specification["securityContext"]["seccompProfile"] = profile
    with contained(small.nodes[0], specification) as container:
        container.start()
        assert container.wait_ended() == 1
        assert "Operation not permitted" in Log(container).last().text, container.log()


def test_with_the_component_for_crio_it_serves_without_a_profile(small: Lab) -> None:
    """What remains is what the manifest gives: the capabilities, and no new privileges."""
    component = yaml.safe_load((manifests.DEPLOY / "components" / "crio" / "kustomization.yaml").read_text())
    (operation,) = yaml.safe_load(component["patches"][0]["patch"])
    specification = pod(small)
    specification["securityContext"]["seccompProfile"] = operation["value"]
    with contained(small.nodes[0], specification) as container:
        container.start()
        wait_ready(small.nodes[0], container)
        for status in container.statuses():
            assert "\nSeccomp:\t0\n" in status
            assert "\nNoNewPrivs:\t1\n" in status


def test_t13_the_agent_serves_under_the_apparmor_profile(small: Lab) -> None:
    """Writing below /sys/fs is denied by path, also on a mount that is writable; the agent has its pins elsewhere.

    Finding T13.
    """
    if not apparmor.enabled():
        pytest.skip("this kernel has no AppArmor; suite container of make test-kernels has it")
    specification = pod(small)
    (container,) = specification["containers"]
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "pins")
    container["volumeMounts"].append({**mount, "mountPath": "/sys/fs/bpf"})
    pins = mount["mountPath"]
    script = f"cat /proc/self/attr/apparmor/current; mkdir /sys/fs/bpf/mine; mkdir {pins}/mine && echo made"
    container["command"], container["args"] = ["/bin/sh", "-c", script], []
    with contained(small.nodes[0], specification) as made:
        made.start()
        made.wait_ended()
        output = made.log().splitlines()
    assert output[0] == f"{apparmor.NAME} (enforce)"
    assert re.search("mkdir: .*/sys/fs/bpf/mine.*: Permission denied", output[1]), output
    assert output[2] == "made"
    with contained(small.nodes[0], pod(small)) as agent:
        agent.start()
        wait_ready(small.nodes[0], agent)
        label = Path(f"/proc/{agent.first()}/attr/apparmor/current").read_text().strip()
        assert label == f"{apparmor.NAME} (enforce)"
        target = WEB.target("ClusterIP", small.nodes[0])
        asking = pod_client(small.pods["asking"]).namespace
        assert asking.call(ask, target.address.v4, target.ports["tcp"]).kind == ANSWERED


def test_a_missing_bpffs_of_the_node_is_reported(small: Lab) -> None:
    with contained(small.nodes[0], pod(small, without="pins")) as container:
        container.start()
        assert container.wait_ended() == 1
        Log(container).some(Message.NO_BPFFS, "mount -t bpf bpf /sys/fs/bpf")


def test_missing_cgroups_of_the_node_are_reported(small: Lab) -> None:
    """The agent then sees only its own cgroup as the root of a hierarchy."""
    with contained(small.nodes[0], pod(small, without="cgroup")) as container:
        container.start()
        wait_ready(small.nodes[0], container)
        Log(container).some(Message.CGROUP_IS_NO_ROOT)


def test_s11_the_agent_accesses_only_its_part_of_the_nodes_file_systems(small: Lab) -> None:
    """A compromised agent must not find the pins of the CNI plugin's programs, nor change other settings.

    Finding S11.
    """
    (small.nodes[0].agent.directory / "bpf" / "others").mkdir(exist_ok=True)
    specification = pod(small)
    (container,) = specification["containers"]
    script = (
        "ls /run/pyebpf-proxy/bpf; find /host/proc/sys/net -maxdepth 4 -not -path '*/netfilter/*';"
        " cat /host/proc/sys/net/ipv4/conf/all/route_localnet >/host/proc/sys/net/ipv4/conf/all/route_localnet"
        " && echo written; echo 1 >/host/proc/sys/net/ipv4/ip_forward; mkdir /sys/fs/bpf/mine"
    )
    container["command"], container["args"] = ["/bin/sh", "-c", script], []
    with contained(small.nodes[0], specification) as made:
        made.start()
        made.wait_ended()
        output = made.log().splitlines()
    assert output[0] == "pyebpf-proxy"
    below = {line.removeprefix("/host/proc/sys/net") for line in output if line.startswith("/host/proc/sys/net")}
    folders = {"", "/netfilter", "/ipv4", "/ipv4/conf", "/ipv4/conf/all"}
    assert below == {*folders, "/ipv4/conf/all/route_localnet"}
    assert "written" in output
    assert sum("ip_forward" in line or "/sys/fs/bpf/mine" in line for line in output) == 2, output


def test_the_container_has_only_its_capabilities(small: Lab) -> None:
    """The tests above rely on this property of the container."""
    specification = pod(small)
    (container,) = specification["containers"]
    script = "grep Cap /proc/self/status; touch /x; touch /run/y; echo 1 >/proc/sys/net/ipv4/ip_forward; ls /proc"
    container["command"], container["args"] = ["/bin/sh", "-c", script], []
    with contained(small.nodes[0], specification) as made:
        made.start()
        made.wait_ended()
        output = made.log()
    bits = sum(1 << {"NET_ADMIN": 12, "PERFMON": 38, "BPF": 39}[name] for name in NEEDED)
    for name in ("CapPrm", "CapEff", "CapBnd"):
        assert f"{name}:\t{bits:016x}" in output
    assert output.count("Read-only file system") == 3, output
    assert "\n1\n" in output
    assert "\n2\n" not in output, "the container sees processes of the machine"


# Loads a program that reads what a process passes to write() if it has the length of the secret, and prints it. If it
# begins as the secret does, the process is killed.
TRACING = """
import ctypes, os, platform, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
machine = platform.machine()
BPF = {"x86_64": 321, "aarch64": 280}[machine]
# The number of write(), and where pt_regs has its two last arguments: length and buffer, or the other way round.
WRITE, REGISTERS, AT_LENGTH, AT_BUFFER = {"x86_64": (1, 96, -16, -8), "aarch64": (64, 8, -8, -16)}[machine]
LENGTH, BEGIN = int(sys.argv[1]), int.from_bytes(sys.argv[2].encode(), "little")

def bpf(command, attributes):
    buffer = ctypes.create_string_buffer(attributes, 128)
    result = libc.syscall(BPF, command, buffer, 128)
    assert result >= 0, (command, os.strerror(ctypes.get_errno()))
    return result

def op(code, to=0, source=0, offset=0, number=0):
    return struct.pack("<BBhi", code, source << 4 | to, offset, number)

fd = bpf(0, struct.pack("IIII", 2, 4, LENGTH, 1))  # an array of one value
code = [
    op(0xBF, 6, 1),                            # r6 = context of sys_enter: registers, number of the call
    op(0x79, 7, 6, 8), op(0x55, 7, 0, 24, WRITE),
    op(0x79, 3, 6, 0), op(0x07, 3, 0, 0, REGISTERS),
    op(0xBF, 1, 10), op(0x07, 1, 0, 0, -16), op(0xB7, 2, 0, 0, 16),
    op(0x85, number=113),                      # probe_read_kernel
    op(0x79, 7, 10, AT_LENGTH), op(0x55, 7, 0, 16, LENGTH),
    op(0x62, 10, 0, -24, 0),
    op(0x18, 1, 1, 0, fd), op(0), op(0xBF, 2, 10), op(0x07, 2, 0, 0, -24),
    op(0x85, number=1),                        # map_lookup_elem
    op(0x15, 0, 0, 9, 0), op(0xBF, 8, 0),
    op(0xBF, 1, 0), op(0xB7, 2, 0, 0, LENGTH), op(0x79, 3, 10, AT_BUFFER),
    op(0x85, number=112),                      # probe_read_user
    op(0x61, 7, 8), op(0x55, 7, 0, 2, BEGIN), op(0xB7, 1, 0, 0, 9),
    op(0x85, number=109),                      # send_signal
    op(0xB7, 0), op(0x95),
]
program, license = ctypes.create_string_buffer(b"".join(code)), ctypes.create_string_buffer(b"GPL")
addresses = (ctypes.addressof(program), ctypes.addressof(license))
loaded = bpf(5, struct.pack("IIQQ", 17, len(code), *addresses))  # RAW_TRACEPOINT
name = ctypes.create_string_buffer(b"sys_enter")
bpf(17, struct.pack("QI", ctypes.addressof(name), loaded))
key, value = ctypes.create_string_buffer(4), ctypes.create_string_buffer(LENGTH)
end = time.monotonic() + 20
while not any(value.raw) and time.monotonic() < end:
    time.sleep(0.05)
    bpf(1, struct.pack("IIQQ", fd, 0, ctypes.addressof(key), ctypes.addressof(value)))
print(value.raw.decode())
"""


# Writes its argument again and again.
WRITING = "import os, sys, time\nwhile True:\n    os.write(1, sys.argv[1].encode())\n    time.sleep(0.01)"


def test_the_capabilities_allow_reading_and_ending_other_processes(small: Lab) -> None:
    """docs/security.md says so: the manifest does not limit what an attacker in the pod can read."""
    secret = token_hex(350)  # no other process writes so many bytes at once, and begins like this
    specification = pod(small)
    (container,) = specification["containers"]
    container["command"] = [sys.executable, "-c", TRACING]
    container["args"] = [str(len(secret)), secret[:4]]
    writing = [sys.executable, "-c", WRITING, secret]
    with contained(small.nodes[0], specification) as made, Popen(writing, stdout=DEVNULL) as process:
        try:
            made.start()
            assert process.wait(60) == -SIGKILL
            assert made.wait_ended() == 0, made.log()
        finally:
            process.kill()
        assert made.log() == f"{secret}\n"


def test_doctor_reports_what_it_cannot_see(small: Lab) -> None:
    """The container's own /etc/cni and /sys/fs/bpf are not the node's."""
    specification = pod(small)
    (container,) = specification["containers"]
    container["command"], container["args"] = [*command(), "doctor", "-o", "json"], []
    with contained(small.nodes[0], specification) as made:
        made.start()
        assert made.wait_ended() == 1
        findings = json.loads(made.log())["findings"]
    unseen = {each["what"]: each for each in findings if each["text"].startswith("not checked: ")}
    assert {name: each["state"] for name, each in unseen.items()} == {"CNI": "warning", "other proxies": "warning"}
    assert "the node's /etc/cni/net.d is not visible in this container" in unseen["CNI"]["text"]
    assert {each["remedy"] for each in unseen.values()} == {checks._ON_THE_NODE}
