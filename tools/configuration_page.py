# SPDX-License-Identifier: Apache-2.0
"""Prints pages of docs/, made from the models and the table of flags: every field and flag, and its effect.

.venv/bin/python tools/configuration_page.py >docs/configuration.md
.venv/bin/python tools/configuration_page.py datapath >docs/datapath-configuration.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pyebpf_proxy.config import durations
from pyebpf_proxy.config.complete import complete
from pyebpf_proxy.config.datapath_model import DatapathConfiguration, Maps, Size
from pyebpf_proxy.config.decode import bare, fields_of
from pyebpf_proxy.config.defaults import with_defaults
from pyebpf_proxy.config.flag_table import DEPRECATED, GROUPS, IGNORED
from pyebpf_proxy.config.flags import parse
from pyebpf_proxy.config.model import FlushFrequency, KubeProxyConfiguration, Reader, Section

HEAD = """# Configuration

<!-- Made by tools/configuration_page.py; a test compares. -->

`pyebpf-proxy` takes kube-proxy's configuration file (`kubeproxy.config.k8s.io/v1alpha1`, kind
`KubeProxyConfiguration`, YAML or JSON) and its command line as they are. They mean the same, and errors have
kube-proxy's words; what differs on purpose is in [differences.md](differences.md).

* With `--config`, flags that set fields are ignored, except those of logging and `--hostname-override`.
* Unknown and duplicate fields are a warning; a wrong type, a bad value or an unknown feature gate ends the program.
* Zero means the default where kube-proxy cannot tell it from absent: the text says where zero is a value of its own.
* `pyebpf-proxy --write-config-to FILE` writes what is in force.
* The section of `mode` gives syncPeriod, minSyncPeriod and masqueradeAll (mode ipvs: masqueradeAll from `iptables`).
* What is ours and not kube-proxy's has a file of its own: [datapath-configuration.md](datapath-configuration.md).

"""


DATAPATH_HEAD = """# The options of our own

<!-- Made by tools/configuration_page.py; a test compares. -->

What is pyebpf-proxy's and not kube-proxy's stands in a document of its own, given by `--datapath-config FILE`: YAML
or JSON, `apiVersion: datapath.pyebpf-proxy.io/v1alpha1`, `kind: DatapathConfiguration`. Nothing of it is ever in a
KubeProxyConfiguration, and `--write-config-to` does not write it.
[examples/datapath-config.yaml](../examples/datapath-config.yaml) shows every field.

* The file is read strictly: an unknown or duplicate field, a wrong type or a value out of range ends the program,
  before anything is done, also with `--write-config-to` and `--cleanup` (which takes the folder from `directory`).
  All errors are told at once, each by its path: `maps.backends4: must be from 256 to 4194304, not 3`.
* Every field but `apiVersion` and `kind` may be left out; `null` is as if it were.
* The flags `--directory` and `--manifests` win over the file.
* A change needs a new start of the agent. No connection is lost by it. Written or renamed, the file ends the agent
  with status 1, as kube-proxy's file does, so that what started it starts it again.

"""

MAPS_TEXT = """
## Sizes of the maps

The names are those of [bpf/maps.h](../bpf/maps.h), which [maps.md](maps.md) explains. "Empty" is the kernel memory
that a map of the default size takes before anything is in it, "each" what one entry takes beside: estimates for a
64-bit kernel (`bpftool map show` has the true figure). A map that is full is named in the log, with the service that
found no place.

"""

DATAPATH_FOOT = """
All maps of the default sizes take some 54 MB empty, and some {total} MB with `fastPath: false`, without those of single
schedulers. The largest are preallocated: `flows`, `backends4`, `endpoints4` (for a quick first sync), and those that
the programs write to (the kernel's LRU maps are always so).

### When a size changes

The maps of the run before are pinned. The next start makes maps of the new sizes beside them, copies what is in them,
and puts the new pins in place of the old ones; the old programs go on with the old maps until the new ones replace
them, and what they wrote meanwhile (clients' affinity, sockets) is brought over then. Connections, endpoints and
affinity stay. While it goes on, old and new maps both take memory. If the entries of one map do not fit, the start
ends with its name, how many there are and the size, and nothing has changed; of `affinities`, clients whose time is
over need no place. Service ids and places in `slots` are not moved: an array must be large enough for the last one in
use. `--cleanup` always helps, at the price of what was remembered.

Killed at any point, the next start takes up what is there
([resize.py](../pyebpf_proxy/datapath/tables/resize.py) says how).

## socketLB: off

The programs on the root cgroup are what translates connections of the node's own processes, and of pods in the host's
network. The tc programs see what *enters* the node. So without the socket programs:

* What comes from pods and from outside is served as before: ClusterIPs, NodePorts, external and load balancer
  addresses.
* What the node's own processes send is translated by our nft table in the output hook, as kube-proxy does it, NodePorts
  on 127.0.0.1 and on the node's own addresses included. Each endpoint is a rule there: with 1 000 Services of ten
  endpoints that adds half a second of CPU time to a start, with 10 000 some 14 s, and memory of libnftables.
* When the programs of a former run are detached, TCP connections made through them go on: their sockets are connected
  to the endpoint itself. UDP sockets that were translated show the endpoint's address from then on, in `getpeername`
  and as the source of answers; unconnected ones talk to the Service's address untranslated.

It is for nodes where another program owns the sockets.

## socketLB: all

Sockets of pods are translated when they connect, too: their packets go to the endpoint from the beginning, and nothing
is left for conntrack to translate. [data-plane.md](data-plane.md#sockets-of-pods) has the way of it. What an
application or an endpoint can see is the same as without it, since whatever a socket cannot know or do is left to the
tc programs:

* what has to be masqueraded: addresses from outside with policy Cluster, `masqueradeAll`, a pod that gets itself;
* what is refused or dropped;
* SCTP;
* everything where the local traffic detector does not call the source a pod. A family without a detector
  (`detectLocalMode: ClusterCIDR` without a `clusterCIDR` of it, say) has no pods, and `all` changes nothing for it;
* pods with netfilter rules of their own on what they send: a service mesh that redirects connections by the address
  that the application asked for goes on to see it. It is looked for with each connect, so it does not matter when the
  rules come;
* pods with more than one network (devices that are up, beside the loopback);
* pods whose addresses are in `socketLBExclude`. A proxy knows no Kubernetes namespaces; a network plugin that gives a
  namespace a range of its own makes one. It is for meshes that redirect by other means than netfilter;
* of each pod and family one connection a minute, by which tc learns what the pod's packets look like.

What can be seen, and cannot be helped:

* rules of the node, or of a network policy, that go by a *Service's* address or by conntrack's translation see packets
  to the endpoint itself; so does `conntrack -L`;
* a pod that has the address of a Service on a device of its own, beside its only network, is not asked;
* unconnected UDP sockets that were talking to a Service when `all` was switched on may get another endpoint once.

Where the kernel does not let socket programs look at a network namespace, that is said at the start, and `all` is
`node`.

## What a reviewer must check

* `Maps` has every map of bpf/maps.h but counters and hints, whose sizes follow from what is in them, and `rr_cursor`,
  which is as large as `slots`; defaults are those of the header (a test compares).
* No room reads the document: it ends in `Effective` (config/effective.py).
* A map that the programs write to is in `WRITTEN_BY_PROGRAMS` of resize.py, or its newest entries are lost when its
  size changes.
* In resize.py there is no moment in which a pin is missing, and none in which an old map that a program writes to has
  no pin.
"""


def main() -> None:
    """Print the page."""
    sys.stdout.write(datapath_page() if sys.argv[1:] == ["datapath"] else page())


def datapath_page() -> str:
    """The page of the options of our own."""
    parts = [DATAPATH_HEAD, "## Fields\n\n| field | type | default | effect |\n|---|---|---|---|\n"]
    values = DatapathConfiguration()
    for name, info in DatapathConfiguration.model_fields.items():
        if name != "maps":
            row = (f"`{info.alias}`", _kind(info), _shown(getattr(values, name), None), _cell(info.description or ""))
            parts.append(f"| {' | '.join(row)} |\n")
    parts.append("| `maps` | mapping |  | Sizes of the BPF maps: below. |\n")
    parts += [MAPS_TEXT, "| field | holds | default | range | empty | each |\n|---|---|---|---|---|---|\n"]
    total = 0
    for name, info in Maps.model_fields.items():
        extra: Any = info.json_schema_extra
        size = Size(*extra["size"])
        default = getattr(values.maps, name)
        total += 0 if "Made only" in (info.description or "") else default * size.empty_bytes
        cells = (
            f"`maps.{info.alias}`",
            _cell(info.description or ""),
            f"`{default}`",
            f"{size.least}-{size.most}",
            f"{default * size.empty_bytes / 1e6:.1f} MB" if size.empty_bytes else "",
            f"{size.used_bytes} bytes" if size.used_bytes else "",
        )
        parts.append(f"| {' | '.join(cells)} |\n")
    parts.append(DATAPATH_FOOT.replace("{total}", f"{total / 1e6:.0f}"))
    return "".join(parts)


def _kind(info: Any) -> str:
    import typing

    kind = bare(info.annotation)
    if typing.get_origin(kind) is typing.Literal:
        return _cell("|".join(typing.get_args(kind)))
    if typing.get_origin(kind) is list:
        return "list of CIDRs" if info.alias == "podNetwork" else "list of texts"
    return {"str": "text"}.get(kind.__name__, kind.__name__)


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Fields\n\n| field | type | default | effect here |\n|---|---|---|---|\n"]
    parts += [f"| {' | '.join(row)} |\n" for row in _fields(KubeProxyConfiguration, _defaults(), "")]
    parts.append("\n## Flags\n")
    for title, flags in GROUPS.items():
        parts.append(f"\n### {title}\n\n| flag | type | default | effect here |\n|---|---|---|---|\n")
        for flag in flags:
            name = f"`-{flag.short}`, `--{flag.name}`" if flag.short else f"`--{flag.name}`"
            default = f"`{flag.default}`" if flag.default else ""
            parts.append(f"| {name} | {_cell(flag.type or 'bool')} | {default} | {_cell(flag.help)} |\n")
    parts.append("\n### Deprecated, not in the help\n\n")
    parts += [f"* `--{name}`: {flag.help}\n" for name, (flag, _) in DEPRECATED.items()]
    parts.append("\n### Accepted without effect\n\nOf older releases and of libraries; most say so in a warning.\n\n")
    parts.append(", ".join(f"`--{flag.name}`" for flag in IGNORED) + "\n")
    return "".join(parts)


def _defaults() -> KubeProxyConfiguration:
    config = complete(parse([]), lambda text, file: None)
    # Zeroes of the sections not in force are shown with the defaults that they have when they are.
    filled = with_defaults(KubeProxyConfiguration())
    return config.model_copy(update={name: getattr(filled, name) for name in ("ipvs", "nftables")})


def _fields(model: type[Section], values: Any, path: str) -> list[tuple[str, str, str, str]]:
    rows = []
    for key, field in fields_of(model).items():
        info = model.model_fields[field.name]
        value = getattr(values, field.name)
        kind = bare(info.annotation)
        if isinstance(kind, type) and issubclass(kind, Section):
            rows += _fields(kind, value, f"{path}{key}.")
            continue
        reader = field.kind if isinstance(field.kind, Reader) else None
        type_name = reader.value.removeprefix("*") if reader else field.go_type.rpartition(".")[2]
        rows.append((f"`{path}{key}`", _cell(type_name), _shown(value, reader), _cell(info.description or "")))
        if key == "vmodule":
            item = model.model_fields["vmodule"]
            rows += _entries(f"{path}{key}[].", item)
    return rows


def _entries(path: str, info: Any) -> list[tuple[str, str, str, str]]:
    import typing

    (entry,) = typing.get_args(bare(info.annotation))
    return _fields(entry, entry(), path)


def _shown(value: Any, reader: Reader | None) -> str:
    if isinstance(value, FlushFrequency):
        value = durations.format(value.nanoseconds)
    elif reader in (Reader.DURATION, Reader.POINTER_DURATION):
        value = durations.format(value)
    elif isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, float):
        value = f"{value:g}"
    return "" if value in ("", None) or value in ({}, []) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
