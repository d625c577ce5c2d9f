# SPDX-License-Identifier: Apache-2.0
"""Conflicts of the node's CNI configuration with pyebpf-proxy. Only files are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: Container runtimes look here, and use the first file in alphabetical order.
FOLDERS = (Path("/etc/cni/net.d"), Path("/var/lib/rancher/k3s/agent/etc/cni/net.d"))
#: The settings of Cilium's agent.
CILIUM = Path("/var/run/cilium/state/agent-runtime-config.json")
_ENDINGS = frozenset({".conf", ".conflist", ".json"})
_PORTMAP_BIT = 13

Plugin = Mapping[str, Any]


class Clash(NamedTuple):
    """A conflict. ``bad``: Services are not handled, or are handled twice."""

    bad: bool
    text: str
    remedy: str


class Read(NamedTuple):
    """``file``: the file in use, or None. ``plugins``: their types. ``problem``: why it cannot be read, or ""."""

    file: Path | None
    plugins: list[str]
    clashes: list[Clash]
    problem: str = ""


def read(mark: int, socket_programs: bool, folders: tuple[Path, ...] = FOLDERS, cilium: Path = CILIUM) -> Read:
    """The configuration in use, and its conflicts.

    ``mark``: the masquerade bit in use. ``socket_programs``: whether the agent attaches programs to the root cgroup.
    """
    path = next((path for folder in folders for path in _files(folder)), None)
    if path is None:
        return Read(None, [], [])
    try:
        plugins = list(_plugins(json.loads(path.read_bytes())))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        return Read(path, [], [], f"{path} cannot be read: {error}")
    clashes = [clash for plugin in plugins for clash in _clashes(plugin, mark, socket_programs, cilium)]
    return Read(path, [str(plugin.get("type", "?")) for plugin in plugins], clashes)


def _files(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(path for path in folder.iterdir() if path.suffix in _ENDINGS)
    except OSError:
        return


def _plugins(document: Any) -> Iterator[Plugin]:
    for each in document.get("plugins", [document]):
        each.get("type")
        yield each


def _clashes(plugin: Plugin, mark: int, socket_programs: bool, cilium: Path) -> Iterator[Clash]:
    kind = str(plugin.get("type", ""))
    if kind == "cilium-cni":
        yield from _cilium(cilium, socket_programs)
    elif kind == "portmap":
        yield from _portmap(plugin, mark)
    elif kind in _SERVE_THEMSELVES:
        yield _SERVE_THEMSELVES[kind]
    elif kind in _BY_KIND:
        yield from _BY_KIND[kind](plugin)


def _cilium(state: Path, socket_programs: bool) -> Iterator[Clash]:
    try:
        mode = json.loads(state.read_bytes()).get("KubeProxyReplacement")
    except (OSError, ValueError, AttributeError):
        mode = None  # another check finds Cilium's maps
    if str(mode).lower() not in ("none", "", "false", "disabled"):
        yield Clash(
            True,
            f"Cilium runs with kubeProxyReplacement {mode}: it implements Services itself, before pyebpf-proxy",
            "set kubeProxyReplacement: false (Helm), or do not run pyebpf-proxy",
        )
    elif socket_programs:
        yield Clash(
            False,
            "Cilium's agent does not start again while pyebpf-proxy has socket programs on its root cgroup",
            "set socketLB: off in the DatapathConfiguration, or give Cilium a cgroup of its own: docs/cnis.md",
        )


def _portmap(plugin: Plugin, mark: int) -> Iterator[Clash]:
    chain = plugin.get("externalSetMarkChain")
    bit = plugin.get("markMasqBit", _PORTMAP_BIT)
    if chain:
        yield Clash(
            False,
            f"portmap uses the chain {chain}, which kube-proxy creates and pyebpf-proxy does not: without the chain,"
            " pods with hostPorts do not start",
            "remove externalSetMarkChain: portmap then masquerades by itself",
        )
    elif isinstance(bit, int) and 0 <= bit < 32 and 1 << bit == mark:
        yield Clash(
            False,
            f"portmap's markMasqBit {bit} is pyebpf-proxy's masquerade bit: packets that portmap marks are masqueraded",
            "use another markMasqBit, or another masqueradeBit of iptables or nftables",
        )
    conditions = [name for name in ("conditionsV4", "conditionsV6") if plugin.get(name)]
    if conditions:
        yield Clash(
            False,
            f"portmap's {' and '.join(conditions)} apply to hostPorts only: NodePorts and VIPs are translated before"
            " iptables sees a packet",
            "for Services use loadBalancerSourceRanges, nodePortAddresses or a NetworkPolicy",
        )


def _bandwidth(plugin: Plugin) -> Iterator[Clash]:
    yield Clash(
        False,
        "bandwidth: packets of pods with the annotation kubernetes.io/egress-bandwidth go to an ifb device before the"
        " tc program sees them, and may not reach Services",
        "use socketLB: all, which translates connections at the sockets of these pods; or limit their bandwidth by"
        " other means",
    )


def _calico(plugin: Plugin) -> Iterator[Clash]:
    if str(plugin.get("linuxDataplane", plugin.get("dataplane", ""))).lower() in ("bpf", "ebpf"):
        yield Clash(True, "Calico's eBPF data plane implements Services itself", "linuxDataplane: Iptables or Nftables")


_SERVE_THEMSELVES = {
    "ovn-k8s-cni-overlay": Clash(True, "OVN-Kubernetes implements Services itself", "do not run pyebpf-proxy"),
    "antrea": Clash(
        False,
        "AntreaProxy implements ClusterIPs for pods itself, in Open vSwitch",
        "set antreaProxy.enable: false, or do not run pyebpf-proxy",
    ),
}
_BY_KIND: Mapping[str, Callable[[Plugin], Iterator[Clash]]] = {"bandwidth": _bandwidth, "calico": _calico}
