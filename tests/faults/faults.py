# SPDX-License-Identifier: Apache-2.0
"""Every fault: how it is made, and how it ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.api_load import Connection
from pyebpf_proxy.lab.addresses import CLIENT, cluster_ip, vip
from pyebpf_proxy.lab.manifests import endpoint_slice
from pyebpf_proxy.lab.namespace import LabError
from tests.faults.contenders import ByApi
from tests.faults.floods import datagrams, flooding, syns
from tests.faults.ground import NODE_PORT, NOWHERE, TARGET_PORT, VICTIM, VICTIM_NODE_PORT, Ground, answers, wait_until
from tests.faults.measure import Fault
from tests.support.damage import CannotBeMadeError, enter, full_conntrack, has_program, take_program_off
from tests.support.spoiling_proxy import Proxy as Spoiler

_FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
#: Changes a second of churn.
_CHURN = 100


# ---- floods -----------------------------------------------------------------------


@contextmanager
def syn_flood(ground: Ground) -> Iterator[None]:
    """From forged addresses."""
    with flooding(ground.lab.client, syns(NOWHERE, [vip(VICTIM).v4], [80])):
        yield


@contextmanager
def udp_flood(ground: Ground) -> Iterator[None]:
    closed = [port for port in range(30000, 32768) if port not in (NODE_PORT, VICTIM_NODE_PORT)]
    with flooding(ground.lab.client, datagrams(NOWHERE, [ground.node.address.v4], closed)):
        yield


@contextmanager
def scan(ground: Ground) -> Iterator[None]:
    """Addresses of VIPs from outside, addresses of ClusterIPs from a pod, many ports of each."""
    ports = range(1, 20000)
    virtual = syns(f"{CLIENT.v4}/32", [f"203.0.113.{number}" for number in range(100, 255)], ports)
    pod = f"{ground.toolbox.address.v4}/32"
    inside = syns(pod, [f"10.96.{number >> 8}.{number & 255}" for number in range(256, 4096)], ports)
    with flooding(ground.lab.client, virtual), flooding(ground.toolbox.namespace, inside):
        yield


# ---- tables -----------------------------------------------------------------------


@contextmanager
def conntrack_full(ground: Ground) -> Iterator[None]:
    stop = threading.Event()
    with full_conntrack(ground.node.namespace) as top_up:
        # Entries of connections that were reset leave room.
        top_up()
        yield
    stop.set()


@contextmanager
def source_ports_used(ground: Ground) -> Iterator[None]:
    """Every port that the node may masquerade with towards the victim's endpoint, IPv4."""
    target, ours = ground.lab.pods["victim"].address.v4, ground.node.gateway.v4
    state = "-t 600 -u SEEN_REPLY,ASSURED --state ESTABLISHED"
    lines = (
        f"-I -p tcp -s 198.18.{port >> 12}.7 -d {vip(VICTIM).v4} --sport {port} --dport 80 -r {target} -q {ours}"
        f" --reply-port-src {TARGET_PORT} --reply-port-dst {port} {state}"
        for port in range(1, 65536)
    )
    enter(ground.node.namespace, lines)
    try:
        # The victim's clients are refused, and not for lack of an endpoint.
        for _ in range(20):
            ground.lab.client.call(answers, type(CLIENT)(vip(VICTIM).v4, vip(VICTIM).v4), 80, 0.1)
        yield
    finally:
        ground.node.namespace.run("conntrack", "-D", "-p", "tcp", "-r", target, "-q", ours, check=False)


_SMALL = dict.fromkeys(("frontends4", "frontends6", "services", "serviceNames", "slots"), 256)


@contextmanager
def maps_full(ground: Ground) -> Iterator[None]:
    """More Services than there is room for, of another namespace."""
    objects = []
    for number in range(400):
        for each in ground.service(f"tenant-{number}", 0, "web-1"):
            each["metadata"]["namespace"] = "tenant"
            if each["kind"] == "Service":
                address = cluster_ip(0)._replace(v4=f"10.96.{4 + number // 200}.{number % 200 + 1}")
                address = address._replace(v6=f"fd00:10:96::4:{number + 1:x}"[:39])
                each["spec"] |= {"clusterIP": address.v4, "clusterIPs": [address.v4]}
                each["spec"] |= {"ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack"}
            objects.append(each)
    ground.proxy.apply("tenant", objects)
    try:
        yield
    finally:
        (ground.lab.manifests / "tenant.yaml").unlink()


# ---- changes ----------------------------------------------------------------------


@contextmanager
def _repeated(step: Callable[[int], None]) -> Iterator[None]:
    """``step`` with a number, _CHURN times a second, in a thread; what it raises is raised at the end."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        number, begun = 0, time.monotonic()
        try:
            while not stop.wait(max(0.0, begun + number / _CHURN - time.monotonic())):
                step(number)
                number += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if errors:
            raise errors[0]


@contextmanager
def manifest_churn(ground: Ground) -> Iterator[None]:
    """The endpoints of a Service, 100 times a second."""

    def step(number: int) -> None:
        pods = (("web-1",), ("web-2",), ("web-1", "web-2"))[number % 3]
        ground.proxy.apply("churn", ground.service("churn", 60, *pods))

    with _repeated(step):
        yield


@contextmanager
def api_churn(ground: Ground) -> Iterator[None]:
    """The same, of 20 Services at a real API server."""
    assert ground.api is not None
    names = [f"churn-{number}" for number in range(20)]
    for number, name in enumerate(names):
        ground.proxy.apply(name, ground.service(name, 60 + number, "web-1"))
    connection = Connection(ground.api)
    pods = [ground.lab.pods[name].address.v4 for name in ("web-1", "web-2")]

    def step(number: int) -> None:
        name = names[number % len(names)]
        made = endpoint_slice(name, 4, [], [])
        path = f"/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/{made['metadata']['name']}"
        address = pods[number // len(names) % 2]
        change = {"endpoints": [{"addresses": [address], "conditions": {"ready": True}, "nodeName": "node1"}]}
        connection.write("PATCH", path, change, "application/merge-patch+json")

    with _repeated(step):
        yield


@contextmanager
def garbage(ground: Ground) -> Iterator[None]:
    """Every answer of the API server, watches included, is no JSON."""
    assert ground.api is not None
    assert isinstance(ground.proxy, ByApi)
    with Spoiler(ground.api.port, ground.api.folder) as spoiler:
        spoiler.set("garbage")
        ground.proxy.relay.target = spoiler.port
        ground.proxy.relay.cut()
        try:
            yield
        finally:
            ground.proxy.relay.target = ground.api.port


# ---- the process ------------------------------------------------------------------


@contextmanager
def disk_full(ground: Ground) -> Iterator[None]:
    big = ground.node.agent.directory / "big"
    with contextlib.suppress(OSError), big.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        big.unlink()


@contextmanager
def read_only(ground: Ground) -> Iterator[None]:
    """By a mount over it, since the agent holds its lock open for writing; below it the bpffs is as before."""
    folder = str(ground.node.agent.directory)
    subprocess.run(["mount", "--rbind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", folder], check=True)
        # The first mount is below; and so is its bpffs.


@contextmanager
def no_descriptors(ground: Ground) -> Iterator[None]:
    pid = ground.proxy.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # Less than it has: not even the place of one that it closes.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def stopped(ground: Ground) -> Iterator[None]:
    os.kill(ground.proxy.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(ground.proxy.pid, signal.SIGCONT)


@contextmanager
def killed(ground: Ground) -> Iterator[None]:
    ground.proxy.kill()
    try:
        yield
    finally:
        ground.proxy.start()


@contextmanager
def small_quota(ground: Ground) -> Iterator[None]:
    """5 ms in 100 ms."""
    group = Path(f"/sys/fs/cgroup/cpu/pep-faults-{os.getpid()}")
    settings = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "5000"}
    if not group.parent.is_dir():
        group = Path(f"/sys/fs/cgroup/pep-faults-{os.getpid()}")
        settings = {"cpu.max": "5000 100000"}
        if "cpu" not in (group.parent / "cgroup.subtree_control").read_text().split():
            raise CannotBeMadeError("the root cgroup gives no cpu controller to others")
    where = next(
        line.split(":", 2)[2]
        for line in Path(f"/proc/{ground.proxy.pid}/cgroup").read_text().splitlines()
        if ",cpu," in f",{line.split(':')[1]}," or (line.startswith("0::") and "cpu.max" in settings)
    )
    group.mkdir()
    try:
        for name, value in settings.items():
            (group / name).write_text(value)
        (group / "cgroup.procs").write_text(str(ground.proxy.pid))
        yield
    finally:
        (Path(f"{group.parent}{where}") / "cgroup.procs").write_text(str(ground.proxy.pid))
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


@contextmanager
def clock_steps(ground: Ground) -> Iterator[None]:
    """A day forth, then a day back; for the agent alone."""
    file = _clock()
    file.write_text("+86400\n")
    time.sleep(1.0)
    file.write_text("-86400\n")
    try:
        yield
    finally:
        # Without it, the clock is right.
        file.unlink()


def _clock() -> Path:
    """What libfaketime reads. The lab's folder is not there yet when the agent's environment is made."""
    return Path(tempfile.gettempdir()) / f"clock-of-faults-{os.getpid()}"


def _clock_environment() -> tuple[str, ...]:
    if not _FAKETIME.exists():
        raise CannotBeMadeError("libfaketime is not installed")
    file = _clock()
    file.write_text("+0\n")
    return (
        f"LD_PRELOAD={_FAKETIME}",
        f"FAKETIME_TIMESTAMP_FILE={file}",
        "FAKETIME_NO_CACHE=1",
        "FAKETIME_DONT_FAKE_MONOTONIC=1",
    )


# ---- the node ---------------------------------------------------------------------


@contextmanager
def netlink_overrun(ground: Ground) -> Iterator[None]:
    """20 000 routes and 20 000 entries of conntrack, there and gone, so fast that sockets run over."""
    space = ground.node.namespace
    routes = [f"route add blackhole 198.19.{n >> 8}.{n & 255}/32 table 77" for n in range(20_000)]
    stop_at = time.monotonic() + 4
    while time.monotonic() < stop_at:
        os.kill(ground.proxy.pid, signal.SIGSTOP)  # so that it is certain
        try:
            space.ip(*routes)
            space.ip("route flush table 77")
            flow = "-d 198.19.0.2 --dport 9 -t 600 -u SEEN_REPLY,ASSURED --state ESTABLISHED"
            enter(space, (f"-I -p tcp -s 198.18.0.2 --sport {n} {flow}" for n in range(1, 20_000)))
            space.run("conntrack", "-D", "-d", "198.19.0.2")
        finally:
            os.kill(ground.proxy.pid, signal.SIGCONT)
    yield


@contextmanager
def rules_flushed(ground: Ground) -> Iterator[None]:
    ground.node.namespace.run("nft", "flush", "ruleset")
    yield


def has_rules(ground: Ground) -> bool:
    tables = ground.node.namespace.run("nft", "list", "tables")
    return ("pyebpf-proxy" if ground.name == "ours" else "kube-proxy") in tables


def _devices(ground: Ground) -> list[str]:
    return ["eth0", *(pod.device for pod in ground.node.pods)]


@contextmanager
def programs_detached(ground: Ground) -> Iterator[None]:
    for device in _devices(ground):
        if not ground.node.namespace.call(take_program_off, ground.node.agent.directory, device):
            raise CannotBeMadeError(f"no program on {device}")
    yield


def _has_programs(ground: Ground) -> bool:
    return all(ground.node.namespace.call(has_program, device) for device in _devices(ground))


@contextmanager
def pins_unmounted(ground: Ground) -> Iterator[None]:
    place = str(ground.node.agent.directory / "bpf")
    subprocess.run(["umount", "-l", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-t", "bpf", "bpffs", place], check=True)


def _has_pins(ground: Ground) -> bool:
    return any((ground.node.agent.directory / "bpf").rglob("frontends4"))


@contextmanager
def device_renamed(ground: Ground) -> Iterator[None]:
    """A pod's, while it is up."""
    name = ground.lab.pods["web-1"].device
    try:
        ground.node.namespace.ip(f"link set dev {name} name other0")
    except LabError as error:
        raise CannotBeMadeError(f"this kernel renames no device that is up: {error}") from None
    try:
        yield
    finally:
        ground.node.namespace.ip(f"link set dev other0 name {name}")


@contextmanager
def neighbours_deleted(ground: Ground) -> Iterator[None]:
    """All of them, five times a second."""
    task = ground.node.namespace.start(_delete_neighbours)
    try:
        yield
    finally:
        task.stop()


def _delete_neighbours() -> None:
    while True:
        subprocess.run(["ip", "neigh", "flush", "all"], stdout=subprocess.DEVNULL, check=True)
        time.sleep(0.2)


_NO_FILES = "keeps nothing in a run folder"
_NO_BPF = "has no BPF programs"
FAULTS = {
    each.name: each
    for each in (
        Fault("syn-flood", "SYN flood from forged addresses to a Service, 10 000 a second", syn_flood),
        Fault("udp-flood", "UDP flood to closed NodePorts, 10 000 a second", udp_flood),
        Fault("scan", "scan of all VIPs from outside and of ClusterIPs from a pod, 20 000 SYNs a second", scan),
        Fault("conntrack-full", "conntrack's table is full", conntrack_full, spares_nobody=True, refuses=True),
        Fault("source-ports", "all ports for masquerading to one endpoint are in use", source_ports_used,
              refuses=True),
        Fault("maps-full", "400 Services of a tenant, room for 256 frontends", maps_full, refuses=True,
              not_beside="has no maps of a fixed size", own={"maps": _SMALL}),
        Fault("manifest-churn", "a manifest changes 100 times a second", manifest_churn,
              not_beside="reads no manifests"),
        Fault("api-churn", "100 changes a second at the API server", api_churn, api=True),
        Fault("garbage", "the API server answers with garbage, watches too", garbage, api=True),
        Fault("disk-full", "the file system of the run folder is full", disk_full, not_beside=_NO_FILES),
        Fault("read-only", "the run folder is read-only", read_only, not_beside=_NO_FILES),
        Fault("descriptors", "the proxy gets no file descriptor", no_descriptors),
        Fault("stopped", "the proxy is stopped (SIGSTOP) for 20 s", stopped, seconds=20.0),
        Fault("killed", "the proxy is killed (SIGKILL), and started again", killed),
        Fault("quota", "the proxy has 5 % of a processor", small_quota, seconds=10.0),
        Fault("netlink", "20 000 routes and 20 000 conntrack entries come and go; its netlink sockets overrun",
              netlink_overrun),
        Fault("rules-flushed", "`nft flush ruleset`", rules_flushed, seconds=10.0, once=True, healed=has_rules),
        Fault("detached", "the BPF programs of all devices are detached", programs_detached, seconds=10.0, once=True,
              healed=_has_programs, not_beside=_NO_BPF),
        Fault("unmounted", "the bpffs with the pins is unmounted", pins_unmounted, healed=_has_pins,
              not_beside=_NO_BPF),
        Fault("renamed", "the device of an endpoint's pod has another name", device_renamed),
        Fault("neighbours", "all neighbour entries are deleted, five times a second", neighbours_deleted),
        Fault("clock", "the proxy's wall clock steps a day forth, then back", clock_steps, seconds=6.0,
              not_beside="its clock cannot be set alone", environment=_clock_environment),
    )
}  # fmt: skip
