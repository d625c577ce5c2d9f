# SPDX-License-Identifier: Apache-2.0
"""The demonstration: real requests to real Services, each compared with the rules."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pyebpf_proxy.lab import addresses
from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.cluster import Lab, Pod
from pyebpf_proxy.lab.example import SLICES, populate, with_endpoint
from pyebpf_proxy.lab.load import Load, Sample, failed, first_answer, last_answer
from pyebpf_proxy.lab.rules import decide
from pyebpf_proxy.lab.scenario import Client, Target, observe

CHANGE_DEADLINE = 10.0  # seconds for a change to take effect under load
LINE = "{:<9} {:<26} {:<5} {:<4} {:<14} {:<38} {}"


class Row(NamedTuple):
    """One line of the final table."""

    name: str
    what: str
    family: str
    protocol: str
    answered: str
    seen: str
    problem: str  # empty: as expected

    def text(self) -> str:
        return LINE.format(*self[:6], "ok" if not self.problem else f"WRONG: {self.problem}")


def run(lab: Lab, examples: Path) -> bool:
    """Run the demonstration in a running lab, and print its progress. True if every row is as expected."""
    begun = time.monotonic()
    populate(lab, examples)
    print(f"Two nodes, four pods and a client are up, agents synced, after {time.monotonic() - begun:.1f} s.\n")
    print(LINE.format("from", "to", "IP", "", "answered by", "source the backend saw", ""))
    rows: list[Row] = []
    for client, target in _pairs(lab):
        for family in target.families:
            for protocol in target.ports:
                rows.append(request_row(client, target, family, protocol))
                print(rows[-1].text(), flush=True)
    print()
    shown = [_show_conntrack(lab), _show_frontend(lab)]
    rows += shown
    rows += _change_under_load(lab)
    print("\n" + LINE.format("from", "to", "IP", "", "answered by", "source the backend saw", ""))
    for row in rows:
        print(row.text())
    wrong = [row for row in rows if row.problem]
    print(f"\n{len(rows)} rows, {len(wrong)} not as expected; {time.monotonic() - begun:.1f} s.")
    return not wrong


def _pairs(lab: Lab) -> list[tuple[Client, Target]]:
    first, second = lab.nodes
    web1, web2, toolbox = lab.pods["web-1"], lab.pods["web-2"], lab.pods["toolbox"]
    pod = Client("toolbox", toolbox.namespace, "pod", toolbox.address, first)
    itself = Client("web-1", web1.namespace, "pod", web1.address, first)
    node1 = Client("node1", first.namespace, "node", first.address, first)
    node2 = Client("node2", second.namespace, "node", second.address, second)
    outside = Client("client", lab.client, "external", addresses.CLIENT, None)
    ports = {"tcp": 80, "udp": 53}
    both = (web1, web2)
    loopback = addresses.Dual("127.0.0.1", "::1")
    node_ports = {"tcp": 30080, "udp": 30053}

    def service(name: str, number: int, local: bool, endpoints: tuple[Pod, ...]) -> tuple[Target, Target]:
        cluster_ip, vip = addresses.cluster_ip(number), addresses.vip(number)
        return (
            Target(f"{name} ClusterIP", "ClusterIP", cluster_ip, ports, endpoints, first, local),
            Target(f"{name} LB VIP", "LoadBalancer", vip, ports, endpoints, first, local),
        )

    web, web_vip = service("web", 10, False, both)
    local, local_vip = service("local", 20, True, both)
    empty, empty_vip = service("empty", 30, False, ())
    port1 = Target("web NodePort at node1", "NodePort", first.address, node_ports, both, first)
    port2 = Target("web NodePort at node2", "NodePort", second.address, node_ports, both, second)
    localhost = Target("web NodePort at 127.0.0.1", "NodePort", loopback, node_ports, both, first, families=(4,))
    local2 = {"tcp": 30180, "udp": 30153}
    port3 = Target("local NodePort at node2", "NodePort", second.address, local2, both, second, True)
    return [
        (pod, web), (itself, web), (node1, web), (node2, web),
        (outside, port1), (outside, port2), (node1, port1), (node1, localhost),
        (outside, web_vip), (pod, web_vip), (node2, web_vip),
        (outside, local_vip), (pod, local_vip), (outside, port3), (pod, local),
        (outside, empty_vip), (pod, empty), (node1, empty),
    ]  # fmt: skip


def request_row(client: Client, target: Target, family: int, protocol: str, patience: float = 4.0) -> Row:
    """Send requests until every permitted endpoint has answered, and compare with the rules."""
    decision = decide(target.kind, client.kind, external_local=target.external_local)
    observed = observe(client, target, family, protocol, decision, patience)
    answers = [outcome.answer for outcome in observed.outcomes if outcome.answer]
    pods = ", ".join(sorted({answer.pod for answer in answers})) or observed.outcomes[-1].kind
    seen = ", ".join(sorted({answer.peer[0] for answer in answers}))
    return Row(client.name, target.name, f"IPv{family}", protocol, pods, seen, observed.problem)


def _show_conntrack(lab: Lab) -> Row:
    """Show the conntrack entry of one flow."""
    vip = addresses.vip(10).v4
    outcome = lab.client.call(ask, vip, 80)
    row = Row("node1", "conntrack -L", "IPv4", "tcp", "", "", "")
    if outcome.answer is None or outcome.local is None:
        return row._replace(problem=str(outcome))
    port = str(outcome.local[1])
    command = ("conntrack", "-L", "-p", "tcp", "--orig-dst", vip, "--sport", port)
    text = lab.nodes[0].namespace.run(*command).strip()
    print(f"{' '.join(command)}\n  {text}\n")
    reply = f"src={outcome.answer.local[0]} dst={outcome.answer.peer[0]}"
    problem = "" if reply in text else f"no entry whose reply is {reply}"
    return row._replace(answered=outcome.answer.pod, seen=outcome.answer.peer[0], problem=problem)


def _show_frontend(lab: Lab) -> Row:
    """Show one frontend with bpftool."""
    address = addresses.vip(10).v4
    path = lab.nodes[0].agent.pin("frontends4")
    command = ("bpftool", "map", "dump", "pinned", str(path))
    entries = json.loads(lab.nodes[0].namespace.run("bpftool", "-j", *command[1:]))
    wanted = [int(part) for part in address.split(".")]
    found = [
        entry["formatted"]
        for entry in entries
        if [int(str(byte), 0) for byte in entry["formatted"]["key"]["address"]] == wanted
        and entry["formatted"]["key"]["port"] == 80
    ]
    print(" ".join(command))
    for entry in found:
        print("  " + json.dumps(entry))
    problem = "" if len(found) == 1 else f"{len(found)} entries"
    return Row("node1", f"bpftool: {address}:80", "IPv4", "tcp", "", "", problem)


def _change_under_load(lab: Lab) -> list[Row]:
    """Add web-3 as an endpoint and remove it again while requests run; no request may fail."""
    cluster_ip, vip = addresses.cluster_ip(10), addresses.vip(10)
    toolbox = lab.pods["toolbox"].namespace
    loads = {
        "client": [Load(lab.client, vip.v4, 80), Load(lab.client, vip.v6, 53, "udp")],
        "toolbox": [Load(toolbox, cluster_ip.v6, 80)],
        "node1": [Load(lab.nodes[0].namespace, cluster_ip.v4, 80)],
    }
    path = lab.manifests / SLICES
    before = path.read_text()
    print("\nUnder load: web-3 becomes an endpoint of web, then stops being one.")
    added = _replace(path, with_endpoint(before, lab, "web-3"))
    lab.wait_synced(added[1])
    time.sleep(1.0)  # measure the load on three endpoints for a while
    removed = _replace(path, before)
    lab.wait_synced(removed[1])
    time.sleep(1.0)
    rows = []
    for name, several in loads.items():
        for load in several:
            rows.append(_judge(name, load, load.stop(), added[0], removed[0]))
            print(rows[-1].text())
    return rows


def _judge(name: str, load: Load, samples: Sequence[Sample], added: float, removed: float) -> Row:
    arrived = first_answer(samples, "web-3", added)
    gone = last_answer(samples, "web-3", removed)
    broken = failed(samples)
    problem = ""
    if broken:
        problem = f"{len(broken)} failed, the first: {broken[0].kind} {broken[0].error}"
    elif arrived is None or added + arrived > removed:
        problem = "web-3 never answered"
    elif gone > CHANGE_DEADLINE:
        problem = f"web-3 still answers after {gone:.1f} s"
    elif samples[-1].pod == "web-3":
        problem = "web-3 answered until the end"
    took = "-" if arrived is None else f"in after {arrived * 1000:.0f} ms, out after {gone * 1000:.0f} ms"
    protocol, _, target = load.name.partition(" to ")
    family = "IPv6" if target.count(":") > 1 else "IPv4"
    return Row(name, f"web under load: {len(samples)}", family, protocol, f"{len(broken)} failed", took, problem)


def _replace(path: Path, text: str) -> tuple[float, float]:
    """Replace the file by a rename. The result: the time by the monotonic clock and by ``time.time``."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    moment = (time.monotonic(), time.time())
    os.rename(temporary, path)
    return moment
