# SPDX-License-Identifier: Apache-2.0
"""``status``: is it right? Everything of one node on one page, and for what is not right what to do."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pyebpf_proxy import __version__
from pyebpf_proxy.see import drops, facts, fast_path, local, model, programs
from pyebpf_proxy.see.agent import running_agent
from pyebpf_proxy.see.answers import NOT_RIGHT, RIGHT, listed
from pyebpf_proxy.see.maps import U32, Pinned
from pyebpf_proxy.see.programs import Programs
from pyebpf_proxy.see.text import Cell, Terminal, ago, fields, table, terminal, wrapped

_FULL = 0.9
#: Flows that are looked at for the source ports in use: more would take longer than the answer may.
_MOST_FLOWS = 5000
_SOCKET_PROGRAMS = 8
#: Maps that fill up with services; those that the programs write make room by themselves.
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
_FEATURES = {
    "nft_mode": "nftables mode",
    "masquerade_all": "masqueradeAll",
    "localhost_node_ports": "NodePorts on 127.0.0.0/8",
    "pod_sockets": "sockets of pods",
    "fast_path": "fast path",
}


def read(directory: Path) -> model.Status:
    """The whole page. SeeError if there is nothing to look at."""
    known = local.state(directory)
    told = known["datapath"] if known is not None else {}
    with Pinned(directory) as maps:
        attached = programs.read(maps)
        refused = drops.read(maps)
        drops.whose(drops.recent(refused), maps)
        fills = list(_fills(maps))
        ports = sum(word != 0 for word in maps.words("services"))
        folder = maps.folder
        flows = fast_path.read(maps, maps.counts(), told)
        redirects = dict(_redirects(maps))
    refusals = known.get("refusals") if known is not None else None
    made = model.Status(
        version=__version__,
        kernel=os.uname().release,
        directory=str(directory),
        pins=str(folder),
        agent=_agent(directory, known),
        features=[text for name, text in _FEATURES.items() if attached.settings and attached.settings.get(name)],
        devices=[_device(device, redirects, told) for device in attached.devices],
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
    made.warnings = [*_warnings(made, attached), *_about_refusals(refusals or {})]
    return made


def _about_refusals(refusals: Mapping[str, str]) -> Iterator[model.Trouble]:
    for what, why in refusals.items():
        yield model.Trouble(
            what=f"{what}: not there: {why}",
            remedy="pyebpf-proxy doctor tries it; or take it out of the datapath configuration",
        )


_REDIRECTS: tuple[Literal["none", "device", "peer"], ...] = ("none", "device", "peer")


def _redirects(maps: Pinned) -> Iterator[tuple[int, int]]:
    for (index,), (redirect,) in maps.rows("devices", U32, maps.packer("node_device", "redirect")):
        yield index, redirect


def _device(device: programs.Device, redirects: Mapping[int, int], told: Mapping[str, Any]) -> model.DeviceView:
    said = told.get("devices", {}).get(str(device.ifindex), {})
    redirect = redirects.get(device.ifindex, -1)
    return model.DeviceView(
        name=device.name,
        program=device.program.name if device.program is not None else "",
        wanted=device.wanted,
        xdp=device.xdp,
        attached="" if device.program is None else "tcx" if device.by_tcx else "clsact",
        redirect=_REDIRECTS[redirect] if 0 <= redirect < len(_REDIRECTS) else "",
        limit=said.get("limit", ""),
        others=list(said.get("others", [])),
    )


def _agent(directory: Path, known: Mapping[str, Any] | None) -> model.AgentView:
    agent = running_agent(directory)
    if agent is None:
        return model.AgentView(running=False)
    now = time.time()
    view = model.AgentView(running=True, pid=agent.pid, seconds=max(0.0, now - agent.started))
    if known is None:
        return view
    view.answers, view.version = True, known["version"]
    values = local.samples(directory)
    synced = values.get("kubeproxy_sync_proxy_rules_last_timestamp_seconds")
    delivered = values.get("pyebpf_proxy_source_last_delivery_timestamp_seconds")
    complete = values.get("pyebpf_proxy_source_complete")
    view.synced_seconds_ago = now - min(synced) if synced and min(synced) else None
    view.delivered_seconds_ago = now - delivered[0] if delivered and delivered[0] else None
    view.source_complete = bool(complete[0]) if complete else None
    return view


def _fills(maps: Pinned) -> Iterator[model.Fill]:
    for name in _FILLED:
        opened = maps.map(name)
        keys, _ = opened.dump()
        yield model.Fill(name=name, used=len(keys) // opened.key_size, room=opened.max_entries)
    for name in ("services", "slots"):
        words = maps.words(name)
        yield model.Fill(name=name, used=len(words) - words.count(0), room=len(words))


def _warnings(status: model.Status, attached: Programs) -> Iterator[model.Trouble]:
    if not status.agent.running:
        yield model.Trouble(
            what="the agent does not run: traffic goes on, changes of Services do not arrive",
            remedy="start it; its log says why it ended",
        )
    elif status.agent.source_complete is False:
        yield model.Trouble(
            what="the source of objects has not delivered everything yet",
            remedy="see the agent's log: the API server, or the manifests folder, is out of reach",
        )
    if status.agent.running and not status.agent.answers:
        yield model.Trouble(
            what=f"the agent, process {status.agent.pid}, does not answer: traffic goes on, changes may not arrive",
            remedy="ask again if it was started just now; else see its log, and restart it",
        )
    if status.agent.version not in ("", status.version):
        yield model.Trouble(
            what=f"the agent is of version {status.agent.version}, this command of {status.version}",
            remedy="restart the agent if it was upgraded, or ask with the pyebpf-proxy that it is of",
        )
    yield from _about_programs(status, attached)
    yield from _about_netfilter(Path(status.directory))
    flows = status.fast_path
    fills = [model.Fill(name="flows", used=flows.used, room=flows.room)] if flows is not None else []
    for fill in (
        *status.maps,
        *fills,
        *([status.conntrack] if status.conntrack is not None else []),
        *status.source_ports,
    ):
        if fill.used >= _FULL * fill.room:
            yield model.Trouble(
                what=f"{fill.name}: {fill.used} of {fill.room} are in use", remedy=_fill_remedy(fill.name)
            )
    for drop in drops.recent(status.drops):
        whom = f", the newest from {drops.sender(drop)} to {drop.destination} {drop.protocol}" if drop.source else ""
        whom += f" ({drop.service})" if drop.service else ""
        times = f"{drop.last_minute} times " if (drop.last_minute or 0) > 1 else "once " if drop.last_minute else ""
        yield model.Trouble(what=f"{times}within the last minute: {drop.meaning}{whom}", remedy=drop.remedy)


def _about_programs(status: model.Status, attached: Programs) -> Iterator[model.Trouble]:
    if attached.hidden:
        yield model.Trouble(what="the features are not known", remedy=attached.hidden)
    bare = [device.name for device in attached.devices if device.program is None]
    if bare:
        yield model.Trouble(
            what=f"no program is on {listed(bare)}: services are not reached through it",
            remedy="restart the agent; if it happens again somebody removes the tc programs: see its log",
        )
    strange = [device.name for device in attached.devices if device.program is not None and not device.same_maps]
    if strange:
        yield model.Trouble(
            what=f"the program on {listed(strange)} uses other maps than those of {status.pins}",
            remedy="two instances on one node, or --directory names another one: keep one",
        )
    if attached.settings and attached.settings.get("xdp") and not any(_has_xdp(device) for device in status.devices):
        foreign = [device.name for device in status.devices if device.xdp == "foreign"]
        yield model.Trouble(
            what="XDP is configured, and no device carries the program: tc does all of it"
            + (f"; {listed(foreign)} carries somebody else's" if foreign else ""),
            remedy="see the agent's log, or take the device out of xdpDevices",
        )
    if 0 < len(status.socket_programs) < _SOCKET_PROGRAMS:
        yield model.Trouble(
            what=f"only {len(status.socket_programs)} of {_SOCKET_PROGRAMS} socket programs are attached",
            remedy="restart the agent",
        )
    if facts.number(Path("/proc/sys/net/ipv4/ip_forward")) == 0:
        yield model.Trouble(
            what="net.ipv4.ip_forward is 0: nothing that is not for this node itself gets through",
            remedy="sysctl -w net.ipv4.ip_forward=1, and find who switched it off",
        )


def _about_netfilter(directory: Path) -> Iterator[model.Trouble]:
    try:
        rules = facts.nft_rules(directory)
    except OSError as error:
        yield model.Trouble(
            what=f"the nft table cannot be looked at: {error}", remedy="apt-get install python3-nftables"
        )
        return
    if not rules:
        yield model.Trouble(
            what=f"our nft table is {'missing' if rules is None else 'empty'}: nothing is translated by the kernel",
            remedy="the agent makes it again within syncPeriod, or when it is restarted; find who took it away",
        )


def _fill_remedy(name: str) -> str:
    if name == "conntrack":
        return "raise nf_conntrack_max (conntrack.maxPerCore), or find who opens so many flows: pyebpf-proxy flows"
    if name == "flows":
        return "fastPathEntries of the datapath configuration: more; until then new flows take the slow path"
    if name.startswith("source ports"):
        return "more endpoints of that Service, or externalTrafficPolicy Local, which masquerades nobody"
    return f"give it more room: maps.{name} of the datapath configuration (docs/datapath-configuration.md)"


# ---- text -------------------------------------------------------------------------------------------------------


def text(status: model.Status, terminal: Terminal) -> list[str]:
    """The page; warnings first."""
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
        ("sockets", f"{len(status.socket_programs)} programs on the cgroup"),
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
    lines += ["", *table(terminal, ["MAP", "USED", "ROOM", ""], [_fill_row(fill) for fill in used])]
    if status.source_ports:
        lines += [
            "",
            *table(terminal, ["BUSIEST ENDPOINTS", "USED", "ROOM", ""], list(map(_fill_row, status.source_ports))),
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
        lines += ["", *table(terminal, ["REFUSED OR DROPPED", "COUNT", "LAST MINUTE", "NEWEST"], rows)]
    return lines


def _has_xdp(device: model.DeviceView) -> bool:
    return device.xdp in ("native", "generic")


def _devices_text(devices: list[model.DeviceView]) -> str:
    """Devices by what they carry."""
    by_program: dict[str, list[str]] = {}
    for device in devices:
        carried = f"{device.program} ({device.attached})" if device.program else "no program"
        by_program.setdefault(carried, []).append(device.name)
    for device in devices:
        if device.xdp:
            what = "somebody else's XDP" if device.xdp == "foreign" else f"XDP {device.xdp}"
            by_program.setdefault(what, []).append(device.name)
    return "; ".join(f"{program} on {listed(names)}" for program, names in by_program.items()) or "none"


def _limits_text(devices: list[model.DeviceView]) -> Iterator[str]:
    """Why the fast path does not send by devices, or not straight into a pod: devices with the same reason together."""
    limits: dict[tuple[str, str], list[str]] = {}
    for device in devices:
        if device.limit or device.redirect == "none":
            limits.setdefault((device.redirect, device.limit), []).append(device.name)
    for (redirect, limit), names in limits.items():
        closed = "closed" if redirect == "none" else "by its queue, not straight into the pod"
        yield f"{listed(names)}: {closed}" + (f": {limit}" if limit else "")


def _agent_text(agent: model.AgentView) -> Cell:
    if not agent.running:
        return Cell("does not run", "red")
    parts = [f"process {agent.pid}, started {ago(agent.seconds)}"]
    if agent.synced_seconds_ago is not None:
        parts.append(f"synced {ago(agent.synced_seconds_ago)}")
    if agent.delivered_seconds_ago is not None:
        parts.append(f"last update {ago(agent.delivered_seconds_ago)}")
    return Cell(", ".join(parts))


def _fill_text(fill: model.Fill) -> Cell:
    return Cell(f"{fill.used} of {fill.room}", "red" if fill.used >= _FULL * fill.room else "")


def _fill_row(fill: model.Fill) -> list[Cell | str]:
    share = fill.used / fill.room
    return [fill.name, str(fill.used), str(fill.room), Cell(f"{share:.0%}", "red" if share >= _FULL else "")]


def run(arguments: argparse.Namespace) -> int:
    """``status``. Status 1: there are warnings."""
    from pyebpf_proxy.see.output import show

    status = read(arguments.directory)
    show(arguments, status, text(status, terminal()), (trouble.what for trouble in status.warnings))
    return NOT_RIGHT if status.warnings else RIGHT
