# SPDX-License-Identifier: Apache-2.0
"""``status``: the state of one node on one page, with a remedy for each warning."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pyebpf_proxy import __version__
from pyebpf_proxy.common.bpf_constants import ON_ALL_LOOPBACK, ON_LOCALHOST
from pyebpf_proxy.common.kernel_files import kernel_number
from pyebpf_proxy.common.run_directory import obstacle
from pyebpf_proxy.datapath.loader.programs import OPTIONAL
from pyebpf_proxy.datapath.node.plan import REDIRECTS
from pyebpf_proxy.datapath.repairs import Repair
from pyebpf_proxy.see import drops, facts, fast_path, local, model, programs
from pyebpf_proxy.see.agent import running_agent
from pyebpf_proxy.see.answers import NOT_RIGHT, RIGHT, OtherLayoutError, SeeError, listed
from pyebpf_proxy.see.maps import U32, Pinned
from pyebpf_proxy.see.programs import Programs
from pyebpf_proxy.see.text import Cell, Terminal, ago, fields, table, terminal, wrapped

_FULL = 0.9
#: With more flows than this, the source ports in use are not counted, because this would take too long.
_MOST_FLOWS = 5000
_SOCKET_PROGRAMS = 8
#: Maps that services can fill. Maps that the programs write are left out: they evict entries when they are full.
_FILLED = (
    *(
        "frontends4",
        "frontends6",
        "service_configs",
        "service_names",
        "backends4",
        "backends6",
        "endpoints4",
        "endpoints6",
    ),
    *("source_ranges4", "source_ranges6", "node_addresses4", "node_addresses6"),
)
#: Settings of the programs, and what a value other than the default means.
_FEATURES = (
    ("nft_mode", 1, "nftables mode"),
    ("masquerade_all", 1, "masqueradeAll"),
    ("localhost_node_ports", ON_ALL_LOOPBACK, "NodePorts on 127.0.0.0/8"),
    ("localhost_node_ports", ON_LOCALHOST, "NodePorts on 127.0.0.1"),
    ("pod_sockets", 1, "sockets of pods"),
    ("fast_path", 1, "fast path"),
)


def read(directory: Path) -> model.Status:
    """The whole page. SeeError if no maps are pinned."""
    answer = local.state(directory)
    known = answer or local.NOTHING
    agent_state = known["datapath"]
    with _pinned(directory, agent_state.get("pinsGone", "")) as maps:
        attached = programs.read(maps)
        refused = drops.read(maps)
        drops.fill_services(drops.recent(refused), maps)
        fills = list(_fills(maps))
        ports = sum(word != 0 for word in maps.words("services"))
        folder = maps.folder
        flows = fast_path.read(maps, maps.counts(), agent_state)
        redirects = dict(_redirects(maps))
    made = model.Status(
        version=__version__,
        kernel=os.uname().release,
        directory=str(directory),
        pins=str(folder),
        agent=_agent(directory, answer),
        features=[text for name, value, text in _FEATURES if (attached.settings or {}).get(name) == value],
        devices=[_device(device, redirects, agent_state) for device in attached.devices],
        socket_programs=attached.links,
        service_ports=ports,
        maps=fills,
        conntrack=facts.conntrack_fill(),
        source_ports=[],
        drops=refused,
        warnings=[],
        fast_path=flows,
    )
    if made.conntrack is not None and 0 < made.conntrack.used <= _MOST_FLOWS:
        from pyebpf_proxy.see.flows import busiest

        made.source_ports = busiest()
    made.warnings = [
        *_warnings(made, attached),
        *_about_source(known["source"]),
        *_about_syncs(directory, made.agent),
        *_about_limits(known["overLimit"]),
        *_about_losses(known["notServed"]),
        *_about_unwritten(known["notWritten"]),
        *_about_run_folder(directory),
        *_about_refusals(known["refusals"]),
        *_about_xdp(made.devices, attached.settings or {}, known["refusals"]),
        *_about_conntrack(agent_state),
        *_about_repairs(agent_state),
    ]
    return made


@contextlib.contextmanager
def _pinned(directory: Path, gone: str) -> Iterator[Pinned]:
    """``gone``: why the agent does not find its pins; "": it does. SeeError."""
    remedy = "traffic continues until the agent ends; mount a bpffs there, and the agent pins everything in it"
    lost = SeeError(f"the pins are gone: {gone}; {remedy}") if gone else None
    try:
        pinned = Pinned(directory)
    except SeeError as error:
        raise error if lost is None or isinstance(error, OtherLayoutError) else lost from None
    with pinned as maps:
        if lost is not None:
            raise lost
        yield maps


def _about_source(troubles: Mapping[str, str]) -> Iterator[model.Trouble]:
    """Warnings about the source. ``troubles``: by resource; "" means all."""
    for trouble in troubles.items():
        yield model.Trouble(
            what=local.source_text(trouble),
            remedy="programmed Services stay and changes are not applied; the agent's log says when it began",
        )


def _about_syncs(directory: Path, agent: model.AgentView) -> Iterator[model.Trouble]:
    """A warning about an agent that has received the objects, but does not program them."""
    if not agent.source_complete:
        return
    if agent.synced_seconds_ago is None:
        yield model.Trouble(
            what="the agent has not programmed this node since it was started: changes to Services are not applied",
            remedy="if it has just started, try again; otherwise its log says what it waits for",
        )
    elif late := local.late(directory):
        yield model.Trouble(
            what=f"changes to Services are not applied ({' and '.join(late)}): syncs fail, or the agent gets no CPU",
            remedy="look for 'sync failed' in the agent's log; what was programmed before is still served"
            " (docs/runbook.md)",
        )


def _about_limits(over: local.OverLimit) -> Iterator[model.Trouble]:
    """A warning about Services of which not everything is served. ``over``: empty if there are none."""
    if over:
        number, first, what = (over.get(name, "") for name in ("services", "first", "what"))
        others = f" ({number} such Services)" if number != 1 else ""
        yield model.Trouble(
            what=f"Service {first} is over a limit{others}: {what}",
            remedy="the rest is served; the agent's log and an Event of each such Service name the limit"
            " (docs/objects.md)",
        )


def _about_losses(lost: local.NotServed) -> Iterator[model.Trouble]:
    """A warning about Services that are not served at an address or port. ``lost``: empty if there are none."""
    if lost:
        others = lost.get("services", 1) - 1
        which = "1 other Service has" if others == 1 else f"{others} other Services have"
        more = f"; {which} such addresses" if others else ""
        yield model.Trouble(
            what=f"{lost.get('first', '')}{more}",
            remedy="its other addresses are served; list those of a Service: pyebpf-proxy services NAME;"
            " the agent's log has all (docs/objects.md)",
        )


def _about_unwritten(unwritten: local.NotWritten) -> Iterator[model.Trouble]:
    """A warning about service ports that do not fit into the maps. ``unwritten``: empty if there are none."""
    if unwritten:
        others = unwritten.get("servicePorts", 1) - 1
        which = "1 other service port" if others == 1 else f"{others} other service ports"
        more = f"; this also affects {which}" if others else ""
        yield model.Trouble(
            what=f"{unwritten.get('first', '')}{more}",
            remedy="what it had before is still served; if a map is full, raise its size in the datapath configuration"
            " and restart the agent; list the service ports: pyebpf-proxy services --diff",
        )


def _about_run_folder(directory: Path) -> Iterator[model.Trouble]:
    if why := obstacle(directory):
        yield model.Trouble(
            what=f"the run folder {directory} cannot be written to: {why}",
            remedy="traffic and changes continue, but an agent that is restarted now may not start, and without tcx"
            " --cleanup leaves the qdiscs of devices that come meanwhile: free space there, or mount it read-write",
        )


def _lately(count: int) -> str:
    """How many times in the last minute; 0 if it is unknown."""
    times = {0: "", 1: "once "}.get(count, f"{count} times ")
    return f"{times}in the last minute"


def _about_conntrack(agent_state: local.DataPath) -> Iterator[model.Trouble]:
    """Flows that conntrack refused in the last minute: netfilter drops their packets, and no program counts them."""
    lately = agent_state.get("conntrackRefusals", {}).get("lastMinute", {})
    if no_port := lately.get("insert_failed", 0):
        yield model.Trouble(
            what=f"{_lately(no_port)}: conntrack refused a new flow whose ports are in use, as when all"
            " source ports for masquerading to an endpoint are used up",
            remedy=_fill_remedy("source ports"),
        )
    if (dropped := lately.get("drop", 0) - no_port) > 0:
        yield model.Trouble(
            what=f"{_lately(dropped)}: conntrack dropped the first packet of a flow, its table is full",
            remedy=_fill_remedy("conntrack"),
        )


#: What the agent restores, in words: one, and several.
_RESTORED = {
    Repair.TC_PROGRAM: ("a tc program", "tc programs"),
    Repair.XDP_PROGRAM: ("an XDP program", "XDP programs"),
    Repair.SOCKET_PROGRAM: ("a socket program", "socket programs"),
    Repair.NFTABLES_TABLE: ("the nftables table", "the nftables table"),
    Repair.PINS: ("pins", "pins"),
    Repair.MAP: ("a map", "maps"),
    Repair.SETTING: ("a setting of the kernel", "settings of the kernel"),
}


def _about_repairs(agent_state: local.DataPath) -> Iterator[model.Trouble]:
    """What another program has removed or changed in the last minute. Connections may have failed meanwhile."""
    lately = agent_state.get("repairs", {}).get("lastMinute", {})
    for kind, (one, several) in _RESTORED.items():
        if count := lately.get(kind, 0):
            yield model.Trouble(
                what=f"{_lately(count)}: another program removed or changed {one if count == 1 else several},"
                " and the agent restored this",
                remedy="connections may have failed meanwhile; find the program that does it: the agent's log shows"
                " what was removed and when",
            )


def _about_refusals(refusals: Mapping[str, str]) -> Iterator[model.Trouble]:
    for what, why in refusals.items():
        if what in OPTIONAL:
            continue
        yield model.Trouble(
            what=f"{what} is not available: {why}",
            remedy="run pyebpf-proxy doctor to test it, or remove it from the datapath configuration",
        )


def _about_xdp(
    devices: Sequence[model.DeviceView], settings: Mapping[str, object], refusals: Mapping[str, str]
) -> Iterator[model.Trouble]:
    """A warning about XDP on no device. ``settings``: as in bpf/settings.h."""
    # If it is not available at all, the warning about that says more.
    if not settings.get("xdp") or "XDP" in refusals or any(_has_xdp(device) for device in devices):
        return
    foreign = [device.name for device in devices if device.xdp == "foreign"]
    yield model.Trouble(
        what="XDP is configured, but the program is attached to no device: tc handles all packets"
        + (f"; another XDP program is attached to {listed(foreign)}" if foreign else ""),
        remedy="see the agent's log, or remove the device from xdpDevices",
    )


def _redirects(maps: Pinned) -> Iterator[tuple[int, int]]:
    for (index,), (redirect,) in maps.rows("devices", U32, maps.packer("node_device", "redirect")):
        yield index, redirect


def _device(device: programs.Device, redirects: Mapping[int, int], agent_state: local.DataPath) -> model.DeviceView:
    device_state = agent_state.get("devices", {}).get(str(device.ifindex), {})
    redirect = redirects.get(device.ifindex, -1)
    return model.DeviceView(
        name=device.name,
        program=device.program.name if device.program is not None else "",
        wanted=device.wanted,
        xdp=device.xdp,
        attached="" if device.program is None else "tcx" if device.by_tcx else "clsact",
        redirect=REDIRECTS[redirect] if 0 <= redirect < len(REDIRECTS) else "",
        limit=device_state.get("limit", ""),
        others=list(device_state.get("others", [])),
    )


def _agent(directory: Path, known: local.State | None) -> model.AgentView:
    agent = running_agent(directory)
    if agent is None:
        return model.AgentView(running=False)
    now = time.time()
    view = model.AgentView(running=True, pid=agent.pid, seconds=max(0.0, now - agent.started))
    if known is None:
        return view
    view.answers, view.version = True, known["version"]
    values = local.samples(directory)
    synced = values.get(local.SYNCED)
    delivered = values.get("pyebpf_proxy_source_last_delivery_timestamp_seconds")
    complete = values.get("pyebpf_proxy_source_complete")
    view.synced_seconds_ago = now - min(synced) if synced and min(synced) else None
    view.delivered_seconds_ago = now - delivered[0] if delivered and delivered[0] else None
    view.source_complete = bool(complete[0]) if complete else None
    view.behind_seconds = behind(values, now)
    return view


def behind(values: Mapping[str, Sequence[float]], now: float) -> float | None:
    """For how long an agent with these metrics has been behind its source; None if they do not show it."""
    synced = values.get(local.SYNCED, ())
    queued = values.get("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", ())
    if not synced or not queued or not min(synced):
        return None
    since = [max(queued)] if max(queued) > min(synced) else []
    # With manifests there is no such metric. A connected watch is up to date; else the last event or bookmark counts.
    heard = values.get("pyebpf_proxy_api_last_event_timestamp_seconds", ())
    if heard and not all(values.get("pyebpf_proxy_api_connected", ())):
        since.append(min(heard))
    return max(0.0, now - min(since)) if since else 0.0


def _fills(maps: Pinned) -> Iterator[model.Fill]:
    for name in _FILLED:
        opened = maps.map(name)
        keys, _ = opened.dump()
        yield model.Fill(name=name, used=len(keys) // opened.key_size, capacity=opened.max_entries)
    for name in ("services", "slots"):
        words = maps.words(name)
        yield model.Fill(name=name, used=len(words) - words.count(0), capacity=len(words))


def _warnings(status: model.Status, attached: Programs) -> Iterator[model.Trouble]:
    if not status.agent.running:
        yield model.Trouble(
            what="the agent is not running: traffic continues, but changes to Services are not applied",
            remedy="start it; its log shows why it stopped",
        )
    elif status.agent.source_complete is False:
        yield model.Trouble(
            what="the agent has not received all objects yet",
            remedy="see the agent's log: the API server or the manifests folder is unreachable",
        )
    if status.agent.running and not status.agent.answers:
        yield model.Trouble(
            what=f"the agent (process {status.agent.pid}) does not respond: traffic continues, but changes to Services"
            " may not be applied",
            remedy="if it has just started, try again; otherwise see its log and restart it",
        )
    if status.agent.version not in ("", status.version):
        yield model.Trouble(
            what=f"the agent has version {status.agent.version}, this command has version {status.version}",
            remedy="restart the agent if it was upgraded, or use the pyebpf-proxy command of the agent's version",
        )
    yield from _about_programs(status, attached)
    yield from _about_netfilter(Path(status.directory))
    flows = status.fast_path
    fills = [model.Fill(name="flows", used=flows.used, capacity=flows.capacity)] if flows is not None else []
    for fill in (
        *status.maps,
        *fills,
        *([status.conntrack] if status.conntrack is not None else []),
        *status.source_ports,
    ):
        if fill.is_full(_FULL):
            what = f"{fill.name}: {fill.text} in use"
            yield model.Trouble(what=what, remedy=_fill_remedy(fill.name))
    for drop in drops.recent(status.drops):
        whom = f", the latest from {drops.sender(drop)} to {drop.destination} {drop.protocol}" if drop.source else ""
        why = f": {drop.no_endpoints}" if drop.no_endpoints else ""
        whom += f" ({drop.service}{why})" if drop.service else ""
        yield model.Trouble(what=f"{_lately(drop.last_minute or 0)}: {drop.meaning}{whom}", remedy=drop.remedy)


def _about_programs(status: model.Status, attached: Programs) -> Iterator[model.Trouble]:
    if attached.hidden:
        yield model.Trouble(what="the enabled features are unknown", remedy=attached.hidden)
    bare = [device.name for device in attached.devices if device.program is None]
    if bare:
        yield model.Trouble(
            what=f"no program is attached to {listed(bare)}: packets that enter there do not reach services",
            remedy="restart the agent; if it happens again, another process removes the programs: see the agent's log",
        )
    strange = [device.name for device in attached.devices if device.program is not None and not device.same_maps]
    if strange:
        yield model.Trouble(
            what=f"the program on {listed(strange)} does not use the maps pinned in {status.pins}",
            remedy="two instances run on this node, or --directory names another instance: keep one",
        )
    if 0 < len(status.socket_programs) < _SOCKET_PROGRAMS:
        yield model.Trouble(
            what=f"only {len(status.socket_programs)} of {_SOCKET_PROGRAMS} socket programs are attached",
            remedy="restart the agent",
        )
    if kernel_number(Path("/proc/sys/net/ipv4/ip_forward")) == 0:
        yield model.Trouble(
            what="net.ipv4.ip_forward is 0: this node does not forward packets",
            remedy="sysctl -w net.ipv4.ip_forward=1, and find out what turned it off",
        )


def _about_netfilter(directory: Path) -> Iterator[model.Trouble]:
    try:
        rules = facts.nft_rules(directory)
    except OSError as error:
        why = error.strerror or str(error)
        yield model.Trouble(what=f"the nftables table cannot be read: {why}", remedy=facts.AS_ROOT)
        return
    if not rules:
        yield model.Trouble(
            what=f"the nftables table of pyebpf-proxy is {'missing' if rules is None else 'empty'}:"
            " the kernel performs no NAT for services",
            remedy="a running agent restores it at once: start the agent or read its log; find out what removed it",
        )


def _fill_remedy(name: str) -> str:
    if name == "conntrack":
        return "raise nf_conntrack_max (conntrack.maxPerCore), or find the clients with most flows: pyebpf-proxy flows"
    if name == "flows":
        return "raise fastPathEntries in the datapath configuration; until then new flows take the slow path"
    if name.startswith("source ports"):
        return "add endpoints to that Service, or use externalTrafficPolicy Local, which preserves client addresses"
    first, *others = name.split("_")
    option = first + "".join(map(str.capitalize, others))  # as the section maps names it (config/datapath_model.py)
    return f"raise maps.{option} in the datapath configuration (docs/datapath-configuration.md)"


# ---- text -------------------------------------------------------------------------------------------------------


def text(status: model.Status, terminal: Terminal) -> list[str]:
    """The page, warnings first."""
    lines: list[str] = []
    for trouble in status.warnings:
        lines += wrapped(terminal, f"warning: {trouble.what}", colour="red")
        lines += wrapped(terminal, trouble.remedy, indent="  ")
    if not status.warnings:
        lines.append(terminal.paint("OK: no warnings", "green"))
    lines.append("")
    pairs: list[tuple[str, str | Cell]] = [
        ("version", f"{status.version}, kernel {status.kernel}"),
        ("agent", _agent_text(status.agent)),
        ("features", ", ".join(status.features) or "none"),
        ("devices", _devices_text(status.devices)),
        ("sockets", f"{len(status.socket_programs)} programs attached to the cgroup"),
        ("services", f"{status.service_ports} service ports"),
        ("pins", status.pins),
    ]
    if status.fast_path is not None:
        first, *closed = fast_path.text(status.fast_path)
        pairs.append(("fast path", first))
        pairs += [("", Cell(line, "yellow")) for line in closed]
        pairs += [("", Cell(line)) for line in _limits_text(status.devices)]
        pairs.append(("new flows", fast_path.slow_text(status.fast_path)))
    if status.conntrack is not None:
        pairs.append(("conntrack", _fill_text(status.conntrack)))
    lines += fields(terminal, pairs, indent="")
    used = [fill for fill in status.maps if fill.used]
    lines += ["", *table(terminal, ["MAP", "USED", "SIZE", ""], [_fill_row(fill) for fill in used])]
    if status.source_ports:
        lines += [
            "",
            *table(terminal, ["BUSIEST ENDPOINTS", "USED", "SIZE", ""], list(map(_fill_row, status.source_ports))),
        ]
    if status.drops:
        rows: list[list[str | Cell]] = [
            [
                drop.reason,
                str(drop.count),
                drops.minute(drop),
                ago(drop.seconds_ago) if drop.seconds_ago is not None else "",
            ]
            for drop in status.drops
        ]
        lines += ["", *table(terminal, ["REFUSED OR DROPPED", "COUNT", "LAST MINUTE", "LATEST"], rows)]
    return lines


def _has_xdp(device: model.DeviceView) -> bool:
    return device.xdp in ("native", "generic")


def _devices_text(devices: list[model.DeviceView]) -> str:
    """Devices, grouped by the attached program."""
    by_program: dict[str, list[str]] = {}
    for device in devices:
        carried = f"{device.program} ({device.attached})" if device.program else "no program"
        by_program.setdefault(carried, []).append(device.name)
    for device in devices:
        if device.xdp:
            what = "another XDP program" if device.xdp == "foreign" else f"XDP {device.xdp}"
            by_program.setdefault(what, []).append(device.name)
    return "; ".join(f"{program} on {listed(names)}" for program, names in by_program.items()) or "none"


def _limits_text(devices: list[model.DeviceView]) -> Iterator[str]:
    """Why the fast path does not redirect to devices, or not directly into a pod; one line for each reason."""
    limits: dict[tuple[str, str], list[str]] = {}
    for device in devices:
        if device.limit or device.redirect == "none":
            limits.setdefault((device.redirect, device.limit), []).append(device.name)
    for (redirect, limit), names in limits.items():
        closed = "closed" if redirect == "none" else "redirect through its queue, not directly into the pod"
        yield f"{listed(names)}: {closed}" + (f": {limit}" if limit else "")


def _agent_text(agent: model.AgentView) -> Cell:
    if not agent.running:
        return Cell("not running", "red")
    parts = [f"process {agent.pid}, started {ago(agent.seconds)}"]
    if agent.synced_seconds_ago is not None:
        parts.append(f"synced {ago(agent.synced_seconds_ago)}")
    if agent.delivered_seconds_ago is not None:
        parts.append(f"last update {ago(agent.delivered_seconds_ago)}")
    if agent.behind_seconds is not None and agent.behind_seconds >= 1:
        parts.append(f"behind its source for {ago(agent.behind_seconds).removesuffix(' ago')}")
    return Cell(", ".join(parts))


def _fill_text(fill: model.Fill) -> Cell:
    return Cell(fill.text, "red" if fill.is_full(_FULL) else "")


def _fill_row(fill: model.Fill) -> list[Cell | str]:
    share = fill.used / fill.capacity
    return [fill.name, str(fill.used), str(fill.capacity), Cell(f"{share:.0%}", "red" if share >= _FULL else "")]


def run(arguments: argparse.Namespace) -> int:
    """``status``. Exit status 1: there are warnings."""
    from pyebpf_proxy.see.output import show

    status = read(arguments.directory)
    show(arguments, status, text(status, terminal()), (trouble.what for trouble in status.warnings))
    return NOT_RIGHT if status.warnings else RIGHT
