# SPDX-License-Identifier: Apache-2.0
"""``doctor``: checks, before or after an installation, whether this machine can run pyebpf-proxy; findings have a fix.

Features are tested, not derived from versions: the programs are loaded as the agent loads them, but not attached.
"""

from __future__ import annotations

import argparse
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.common.kernel_files import kernel_number
from pyebpf_proxy.common.kernel_versions import OLDEST_KERNEL, TESTED_KERNEL, dotted
from pyebpf_proxy.datapath import preflight
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.see import facts, model
from pyebpf_proxy.see.answers import NOT_RIGHT, RIGHT
from pyebpf_proxy.see.doctor.fast_path import findings as _fast_path
from pyebpf_proxy.see.text import Cell, Colour, Terminal, table, terminal, wrapped

if TYPE_CHECKING:
    from pyebpf_proxy.see.programs import Programs

_PROC = Path("/proc/sys")
_FILES_LEAST, _WATCHES_LEAST = 1024, 16
_MARK = 0x4000
_CILIUM = ("Cilium implements Services on this node", "kubeProxyReplacement: false")
#: Pins of other eBPF implementations of Services. Cilium has maps of Services in any case, these for NodePorts only.
_OTHERS = {
    "tc/globals/cilium_snat_v4_external": _CILIUM,
    "tc/globals/cilium_snat_v6_external": _CILIUM,
    "tc/globals/cali_v4_nat_fe3": ("Calico implements Services on this node", "bpfEnabled: false"),
}
_ON_THE_NODE = "install pyebpf-proxy on the node and run doctor there as root: docs/deploy.md, on a single node"

Found = Iterator[model.Finding]


def _good(what: str, text: str) -> model.Finding:
    return model.Finding(what=what, state="good", text=text, remedy="")


def _warn(what: str, text: str, remedy: str) -> model.Finding:
    return model.Finding(what=what, state="warning", text=text, remedy=remedy)


def _bad(what: str, text: str, remedy: str) -> model.Finding:
    return model.Finding(what=what, state="bad", text=text, remedy=remedy)


def examine(directory: Path) -> Found:
    """Every finding. Checks on which others depend come first."""
    for check in (_needs, _rights):
        found = list(check())
        yield from found
        if any(each.state == "bad" for each in found):
            return  # the next checks would fail for the same reason
    yield from _programs()
    yield from _mounts(directory)
    yield from _fast_path(directory)
    yield from _conntrack()
    yield from _sysctls()
    yield from _bridges(directory)
    yield from _others(directory)
    yield from _limits()


def _needs() -> Found:
    """The agent's start-up checks, with their messages. A kernel that is too old fails here."""
    release, version = os.uname().release, preflight.kernel_version()
    oldest, tested = map(dotted, (OLDEST_KERNEL, TESTED_KERNEL))
    if version is not None and version < OLDEST_KERNEL:
        remedy = f"boot a kernel of {oldest} or newer; {tested} or newer is tested (Debian 12 has one)"
        yield _bad("kernel", f"this kernel, {release}, is older than {oldest}", remedy)
    elif version is not None and version < TESTED_KERNEL:
        yield _warn("kernel", f"this kernel, {release}, is not tested", f"use {tested} or newer: docs/kernels.md")
    else:
        yield _good("kernel", release)
    for check in preflight.needs():
        try:
            yield _good(check.what, check.look())
        except FatalError as error:
            text, _, remedy = str(error).partition("; ")
            yield _bad(check.what, text, remedy)


def _rights() -> Found:
    try:
        preflight.check_rights()
    except FatalError as error:
        text, _, remedy = str(error).partition("; ")
        yield _bad("rights", text, remedy)
        return
    held = preflight.effective_capabilities()
    every = "all" if not ~held & (1 << 38) - 1 else "CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"
    yield _good("rights", f"sufficient for the agent: {every}")


def _programs() -> Found:
    """Load the programs with each option."""
    from pyebpf_proxy.datapath.loader.libbpf import BpfError
    from pyebpf_proxy.datapath.loader.programs import OPTIONAL
    from pyebpf_proxy.see.doctor.loading import ATTEMPTS, attempt

    for name, text, settings, object_name, without in ATTEMPTS:
        try:
            attempt(object_name, settings)
        except (BpfError, FatalError) as error:
            why = f"the kernel rejects it: {error}"
            if name not in OPTIONAL:
                yield _warn(name, why, without)
            else:
                yield _good(name, f"not available, not required: {preflight.unreachable_conntrack() or why}")
        else:
            yield _good(name, text)


def _mounts(directory: Path) -> Found:
    place = next((path for path in mounts.bpffs_candidates(directory) if mounts.holds_pins(path)), None)
    if place is None:
        yield _warn("bpffs", "no bpffs is mounted; the agent mounts one", f"mount -t bpf bpf {mounts.SYSTEM_BPFFS}")
    else:
        yield _good("bpffs", str(place))
    try:
        cgroup = mounts.open_cgroup2()
    except OSError as error:
        yield _bad("cgroup2", str(error), "mount -t cgroup2 none /sys/fs/cgroup/unified; CONFIG_CGROUPS")
        return
    os.close(cgroup.descriptor)
    if cgroup.warning:
        yield _warn("cgroup2", cgroup.warning, "run it where the root cgroup is visible")
    else:
        yield _good("cgroup2", cgroup.found)


def _conntrack() -> Found:
    fill = facts.conntrack_fill()
    if fill is None:
        yield _warn("conntrack", "nf_conntrack is not loaded; the agent loads it", "modprobe nf_conntrack")
    elif fill.is_full(0.9):
        yield _bad(
            "conntrack",
            f"{fill.text} entries in use",
            "raise nf_conntrack_max (conntrack.maxPerCore)",
        )
    else:
        yield _good("conntrack", f"entries in use: {fill.text}")
    for name in ("nf_conntrack_acct", "nf_conntrack_timestamp"):
        if kernel_number(_PROC / "net/netfilter" / name) == 0:
            what = "bytes" if name.endswith("acct") else "age"
            yield _good(
                name, f"off: pyebpf-proxy flows does not show the {what} of flows (sysctl -w net.netfilter.{name}=1)"
            )


def _sysctls() -> Found:
    for family, path in (("IPv4", "net/ipv4/ip_forward"), ("IPv6", "net/ipv6/conf/all/forwarding")):
        if kernel_number(_PROC / path) == 0:
            name = path.replace("/", ".")
            yield _warn(name, f"{family} packets are not forwarded: remote pods are unreachable", f"sysctl -w {name}=1")
        else:
            yield _good(path.replace("/", "."), "on")
    strict = [
        path.parent.name
        for path in sorted((_PROC / "net/ipv4/conf").glob("*/rp_filter"))
        if kernel_number(path) == 1 and path.parent.name not in ("lo", "default")
    ]
    if strict:
        yield _warn(
            "rp_filter",
            f"strict on {', '.join(strict[:5])}: packets on asymmetric routes are dropped",
            "sysctl -w net.ipv4.conf.all.rp_filter=2 (and for each device), if routes are asymmetric here",
        )


def _bridges(directory: Path) -> Found:
    """Whether a reply between two ports of a bridge is translated: by netfilter, or by tc with the conntrack lookup."""
    name = "bridge-nf-call-iptables"
    if kernel_number(_PROC / "net/bridge" / name) != 0:
        return
    if _looks_up_conntrack(directory):
        yield _good(name, "0: the tc programs redirect replies between two ports to the bridge (docs/data-plane.md)")
    else:
        yield _warn(
            name,
            "0, and the programs cannot look flows up in conntrack: replies between two ports of a bridge are not"
            " translated",
            f"sysctl -w net.bridge.{name}=1",
        )


def _looks_up_conntrack(directory: Path) -> bool:
    """Whether the attached programs look up conntrack. If none are attached: whether new ones could."""
    from pyebpf_proxy.datapath.loader.libbpf import BpfError
    from pyebpf_proxy.see.doctor import loading

    settings = _settings(_attached(directory))
    if settings is not None:
        return bool(settings["conntrack_lookup"])
    try:
        loading.attempt("tc", loading.LOOKUP)
    except (BpfError, FatalError):
        return False
    return True


def _others(directory: Path) -> Found:
    from pyebpf_proxy.datapath.migration import leftovers

    try:
        modes = sorted(leftovers.running())
    except Exception as error:  # a tool is missing or fails
        yield _warn("kube-proxy", f"its rules cannot be listed: {error}", "install iptables and nftables")
    else:
        if modes:
            what = f"rules of kube-proxy exist, mode {', '.join(modes)}"
            yield _warn("kube-proxy", what, "stop kube-proxy; the agent's next start, or --cleanup, removes the rules")
        else:
            yield _good("kube-proxy", "no rules found")
    if facts.in_container() and not mounts.is_bpffs(mounts.SYSTEM_BPFFS):
        what = f"not checked: the node's {mounts.SYSTEM_BPFFS}, with the pins of other programs, is not visible here"
        yield _warn("other proxies", what, _ON_THE_NODE)
    yield from _other_pins()
    attached = _attached(directory)
    settings = _settings(attached)
    mark = _MARK if settings is None else int(settings["masquerade_mark"])
    yield from _mark_users(directory, mark)
    yield from _cni(mark, socket_programs=attached is None or bool(attached.links))


def _other_pins() -> Found:
    pinned = {other for path, other in _OTHERS.items() if (mounts.SYSTEM_BPFFS / path).exists()}
    for text, remedy in sorted(pinned):
        yield _bad("other proxies", text, remedy)


def _cni(mark: int, socket_programs: bool) -> Found:
    from pyebpf_proxy.see.doctor import cni

    found = cni.read(mark, socket_programs)
    if found.problem:
        yield _warn("CNI", found.problem, "repair or remove the file: the kubelet cannot start pods with it either")
    elif found.file is None and facts.in_container():
        yield _warn("CNI", f"not checked: the node's {cni.FOLDERS[0]} is not visible in this container", _ON_THE_NODE)
    elif found.file is None:
        # This is normal before an installation.
        yield _good("CNI", f"no configuration in {cni.FOLDERS[0]}")
    else:
        for clash in found.clashes:
            yield (_bad if clash.bad else _warn)("CNI", f"{found.file.name}: {clash.text}", clash.remedy)
        if not found.clashes:
            yield _good("CNI", f"{found.file.name}: {', '.join(found.plugins)}")


def _mark_users(directory: Path, mark: int) -> Found:
    own = mounts.table_name(directory)
    try:
        rules = [entry["rule"] for entry in facts.nft("list ruleset") or [] if "rule" in entry]
    except OSError as error:
        yield _warn("masquerade bit", str(error), facts.nft_remedy())
        return
    users = sorted(
        {
            f"{rule['family']} {rule['table']} {rule['chain']}"
            for rule in rules
            if rule["table"] != own and any(_sets_bit(expression, mark) for expression in rule.get("expr", ()))
        }
    )
    if users:
        what = f"{mark:#x} is also set by other rules: {', '.join(users[:5])}: packets that they mark are masqueraded"
        yield _warn("masquerade bit", what, "use another bit: masqueradeBit of iptables or nftables")
    else:
        yield _good("masquerade bit", f"no other nftables rule sets {mark:#x}")


def _settings(attached: Programs | None) -> Mapping[str, Any] | None:
    return attached.settings if attached is not None else None


def _attached(directory: Path) -> Programs | None:
    """The programs of the agent; None if it has none, or if they cannot be read."""
    from pyebpf_proxy.see import programs
    from pyebpf_proxy.see.answers import SeeError
    from pyebpf_proxy.see.maps import Pinned

    try:
        with Pinned(directory) as maps:
            return programs.read(maps)
    except SeeError:
        return None


def _sets_bit(expression: Any, mark: int) -> bool:
    """Whether a rule's expression sets this bit of the packet mark: ``meta mark set …``."""
    mangle = expression.get("mangle") if isinstance(expression, dict) else None
    if mangle is None or mangle.get("key") != {"meta": {"key": "mark"}}:
        return False
    return any(number & mark and number.bit_count() <= 16 for number in _numbers(mangle.get("value")))


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _numbers(each)


def _limits() -> Found:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FILES_LEAST:
        yield _warn("open files", f"limit {files}", f"ulimit -n {_FILES_LEAST}, or LimitNOFILE= of the service")
    else:
        yield _good("open files", f"limit {files}")
    watches = kernel_number(_PROC / "fs/inotify/max_user_instances")
    if watches is not None and watches < _WATCHES_LEAST:
        yield _warn("inotify", f"{watches} instances per user", "sysctl -w fs.inotify.max_user_instances=128")


# ---- text -------------------------------------------------------------------------------------------------------

_COLOURS: dict[str, Colour] = {"good": "green", "warning": "yellow", "bad": "red"}


def text(findings: list[model.Finding], terminal: Terminal) -> list[str]:
    """A table, then the remedy for each finding that is not good."""
    rows: list[list[Cell | str]] = [[each.what, Cell(each.state, _COLOURS[each.state]), each.text] for each in findings]
    lines = table(terminal, ["CHECK", "STATE", "FOUND"], rows)
    for each in findings:
        if each.state != "good":
            lines += wrapped(terminal, f"{each.what}: {each.text}", colour=_COLOURS[each.state])
            lines += wrapped(terminal, each.remedy, indent="  ")
    return lines


def run(arguments: argparse.Namespace) -> int:
    """``doctor``. Exit status 1: some finding is a warning or bad."""
    from pyebpf_proxy.see.output import show

    found = list(examine(arguments.directory))
    show(arguments, model.Findings(findings=found), text(found, terminal()), (each.what for each in found))
    return RIGHT if all(each.state == "good" for each in found) else NOT_RIGHT
