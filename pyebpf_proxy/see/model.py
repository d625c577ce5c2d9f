# SPDX-License-Identifier: Apache-2.0
"""The answers as ``-o json`` gives them. docs/commands.schema.json is made of these types (tools/commands_schema.py).

Fields are added, never renamed and never given another meaning: scripts read them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pyebpf_proxy.printable import printable_json


class Answer(msgspec.Struct, rename="camel", kw_only=True):
    """What all answers have in common."""


class EndpointView(Answer, kw_only=True):
    """``lists``: which traffic it is for. ``leftOut``: why it is in none, "" if it is in one. ``pod``: as the agent
    knows it, "" without it; so everywhere.
    """

    address: str
    backend: int
    local: bool
    lists: list[Literal["cluster", "local"]]
    serving: bool
    left_out: str = ""
    pod: str = ""


class FrontendView(Answer, kw_only=True):
    """An address that services are reached at. A NodePort's address is 0.0.0.0 or ::."""

    address: str
    port: int
    protocol: str
    kind: str
    service: str


class ServiceView(Answer, kw_only=True):
    """One service port of one IP family. ``differences``: only with --diff, in words."""

    name: str
    namespace: str
    service: str
    port: str
    protocol: str
    family: int
    id: int
    table: int
    frontends: list[FrontendView]
    endpoints: list[EndpointView]
    any_endpoints: bool
    internal_traffic_policy: Literal["Cluster", "Local"]
    external_traffic_policy: Literal["Cluster", "Local"]
    affinity_seconds: int
    source_ranges: list[str]
    differences: list[str] = []


class Services(Answer, kw_only=True, tag_field="kind", tag="Services"):
    """``pyebpf-proxy services``. ``problems``: what in the maps does not fit together."""

    services: list[ServiceView]
    problems: list[str] = []


class BackendView(Answer, kw_only=True):
    """One entry of backends4 or backends6 that is in force."""

    id: int
    address: str
    protocol: str
    service: str
    local: bool
    pod: str = ""


class Backends(Answer, kw_only=True, tag_field="kind", tag="Backends"):
    """``pyebpf-proxy backends``."""

    backends: list[BackendView]


class Frontends(Answer, kw_only=True, tag_field="kind", tag="Frontends"):
    """``pyebpf-proxy frontends``."""

    frontends: list[FrontendView]


class Drop(Answer, kw_only=True):
    """A reason for which packets or socket calls were refused. ``lastMinute``: null where that is not counted;
    ``secondsAgo`` and the rest: of the newest, if known.
    """

    reason: str
    count: int
    last_minute: int | None = None
    meaning: str
    remedy: str
    seconds_ago: float | None = None
    source: str = ""
    destination: str = ""
    protocol: str = ""
    device: str = ""
    service: str = ""


class Drops(Answer, kw_only=True, tag_field="kind", tag="Drops"):
    """``pyebpf-proxy drops``. Counted since the maps were made."""

    drops: list[Drop]


class Trouble(Answer, kw_only=True):
    """Something that is not right, and what to do."""

    what: str
    remedy: str


class AgentView(Answer, kw_only=True):
    """The agent, if it runs. Seconds; None where its metrics do not say. ``answers``: at the socket in its folder."""

    running: bool
    pid: int = 0
    seconds: float = 0.0
    synced_seconds_ago: float | None = None
    delivered_seconds_ago: float | None = None
    source_complete: bool | None = None
    version: str = ""
    answers: bool = False


class DeviceView(Answer, kw_only=True):
    """A device that packets enter by. ``program``, ``xdp``: how it carries ours; XDP "foreign": somebody else's.
    ``attached``: by tcx, at the chain's head, or by a filter of clsact. ``redirect``: how the fast path sends by it;
    ``limit``: why not, or no better; ``others``: programs of others. These two as the agent says.
    """

    name: str
    program: str
    wanted: str
    xdp: Literal["", "native", "generic", "foreign"] = ""
    attached: Literal["", "tcx", "clsact"] = ""
    redirect: Literal["", "none", "device", "peer"] = ""
    limit: str = ""
    others: list[str] = []


class FastPathView(Answer, kw_only=True):
    """The flow table. ``watched``: an agent follows rules and routes; else all takes the slow path. ``closed4``,
    ``closed6``: the reason for which a family takes the slow path, "" if it does not; ``why4``, ``why6``: what on this
    node it is, as the agent says. ``rules``: by family, rules that its packets do not meet (fastPath: true).
    ``used``: entries, two a flow, and ``young`` flows, by the last sweep. ``permits``: that hold now. The rest counts:
    ``sent`` packets, young flows ``promoted`` to conntrack or ``ended``, ``failed`` promotions by outcome since the
    agent's start, ``newFlows`` by path, ``slow``: why new flows and packets took the slow path.
    """

    watched: bool
    draining: bool
    closed4: str
    closed6: str
    why4: str
    why6: str
    rules: dict[str, str]
    used: int
    room: int
    young: int
    permits: int
    sent: int
    promoted: int
    ended: int
    failed: dict[str, int]
    last_error: str
    new_flows: dict[str, int]
    slow: dict[str, int]


class Fill(Answer, kw_only=True):
    """How full something is."""

    name: str
    used: int
    room: int


class Status(Answer, kw_only=True, tag_field="kind", tag="Status"):
    """``pyebpf-proxy status``. ``sourcePorts``: of the busiest endpoints. ``fastPath``: null where there is none."""

    version: str
    kernel: str
    directory: str
    pins: str
    agent: AgentView
    features: list[str]
    devices: list[DeviceView]
    socket_programs: list[str]
    service_ports: int
    maps: list[Fill]
    conntrack: Fill | None
    source_ports: list[Fill]
    drops: list[Drop]
    warnings: list[Trouble]
    fast_path: FastPathView | None = None


class FlowView(Answer, kw_only=True):
    """A flow to a service. ``seconds``, ``packets``, ``bytes``: null where the kernel does not keep them
    (nf_conntrack_timestamp, nf_conntrack_acct). ``fastPath``: null where there is no fast path. ``age``: young flows
    are known to the BPF programs alone, the others to conntrack. ``path``: the way of its packets.
    """

    protocol: str
    client: str
    client_name: str
    destination: str
    service: str
    endpoint: str
    endpoint_name: str
    masqueraded_as: str
    state: str
    seconds_left: int
    seconds: float | None
    packets: int | None
    bytes: int | None
    fast_path: bool | None
    age: Literal["young", "kernel"]
    path: Literal["fast", "netfilter"]


class Flows(Answer, kw_only=True, tag_field="kind", tag="Flows"):
    """``pyebpf-proxy flows``."""

    flows: list[FlowView]


class TopBackend(Answer, kw_only=True):
    """An endpoint of a service port. Rates are a second; ``packets``, ``bytes``: both directions, null: not measured.
    ``share``, 0 to 1: of its service's new flows; where there were none, of its bytes.
    """

    address: str
    local: bool
    new_flows: float
    packets: float | None
    bytes: float | None
    share: float
    pod: str = ""


class TopService(Answer, kw_only=True):
    """A service port of one IP family. ``packets``, ``bytes``: also those of no known endpoint, as a flow's first."""

    name: str
    namespace: str
    service: str
    port: str
    protocol: str
    family: int
    new_flows: float
    packets: float | None
    bytes: float | None
    drops: float
    backends: list[TopBackend]


class TopDrops(Answer, kw_only=True):
    """How many packets and socket calls a second were refused or dropped for a reason."""

    reason: str
    drops: float


class Top(Answer, kw_only=True, tag_field="kind", tag="Top"):
    """``pyebpf-proxy top``, an object for each interval, each on a line. ``time``: Unix time of its end; ``seconds``:
    its length. First the rates of these services together, and ``drops``, by ``reasons``, of anything. ``services`` and
    their backends: those with traffic, and all of those that are named; ``atRest``: how many other services.
    ``oneIn``: one of so many packets was looked at.
    """

    time: float
    seconds: float
    new_flows: float
    packets: float | None
    bytes: float | None
    drops: float
    reasons: list[TopDrops]
    services: list[TopService]
    at_rest: int
    one_in: int
    notes: list[str]


class ChoiceView(Answer, kw_only=True):
    """An endpoint that the packet may go to. ``wayOut``: in words. ``path``: that of a new flow to it, now;
    ``pathReason`` as the programs count it, "" if it is fast or a socket's; ``pathWhy`` in words.
    """

    address: str
    backend: int
    local: bool
    masquerade: bool
    masquerade_as: str
    way_out: str
    pod: str = ""
    path: Literal["", "fast", "netfilter", "socket"] = ""
    path_reason: str = ""
    path_why: str = ""


class ProgramView(Answer, kw_only=True):
    """What the real program did, run dry. ``ran``: false where it cannot be, ``why`` says why."""

    ran: bool
    why: str = ""
    verdict: str = ""
    counted: list[str] = []
    backend: int = 0
    masquerade: bool = False


class Explanation(Answer, kw_only=True, tag_field="kind", tag="Explanation"):
    """``pyebpf-proxy explain``. ``steps``: the rules that applied, in order. ``disagreements``: model and programs.
    ``xdp``: what the XDP program did, which sees the frame first; null where the device carries none of ours.
    """

    source: str
    destination: str
    protocol: str
    device: str
    service: str
    frontend: str
    verdict: str
    reason: str
    steps: list[str]
    endpoints: list[ChoiceView]
    left_out: list[EndpointView]
    program: ProgramView
    disagreements: list[str]
    xdp: ProgramView | None = None


class Finding(Answer, kw_only=True):
    """Something that ``doctor`` looked at."""

    what: str
    state: Literal["good", "warning", "bad"]
    text: str
    remedy: str


class Findings(Answer, kw_only=True, tag_field="kind", tag="Findings"):
    """``pyebpf-proxy doctor``."""

    findings: list[Finding]


class Decision(Answer, kw_only=True, tag_field="kind", tag="Decision"):
    """One line of ``pyebpf-proxy trace``: what a program decided on a packet, or on a socket's call.

    ``time``: UTC. ``device``: where the packet came in, "" for a socket's call of ``process``. ``path``: of what was
    refused or dropped "". ``endpoint``: "" if none was chosen. ``masqueradedAs``: "" where it is not known.
    ``sourceName``, ``endpointName``: pods, as the agent knows them; "" without it. ``slow``: why a new flow took the
    slow path, "" where nothing said so.
    """

    time: str
    hook: Literal["tc", "xdp", "socket"]
    device: str
    process: str
    pid: int
    protocol: str
    source: str
    destination: str
    service: str
    endpoint: str
    endpoint_name: str
    backend: int
    path: Literal["fast", "netfilter", "socket", ""]
    masquerade: bool
    masqueraded_as: str
    verdict: Literal["served", "refused", "dropped", "replaced"]
    reason: str
    source_name: str = ""
    slow: str = ""


class KernelDrop(Answer, kw_only=True, tag_field="kind", tag="KernelDrop"):
    """A line of ``pyebpf-proxy trace``: the kernel dropped a packet, of a flow that was decided on before.

    ``client`` and ``asked``: the flow's. ``reason``: enum skb_drop_reason. ``where``: a function of the kernel.
    ``netns``: 0 for the network namespace that ``trace`` runs in, else its number; ``device`` is of that namespace.
    """

    time: str
    protocol: str
    source: str
    destination: str
    client: str
    asked: str
    service: str
    reason: str
    where: str
    device: str
    netns: int


class TcpState(Answer, kw_only=True, tag_field="kind", tag="TcpState"):
    """A line of ``pyebpf-proxy trace``: a socket of a flow that was decided on before is connected, or closed.

    ``source`` is the socket's own end. The rest as of KernelDrop.
    """

    time: str
    protocol: str
    source: str
    destination: str
    client: str
    asked: str
    service: str
    before: str
    now: Literal["ESTABLISHED", "CLOSE"]
    netns: int


class Lost(Answer, kw_only=True, tag_field="kind", tag="Lost"):
    """A line of ``pyebpf-proxy trace``: so many events that there was no room for, since the last such line."""

    time: str
    what: Literal["decisions", "kernel events"]
    count: int


def encode(answer: msgspec.Struct) -> str:
    """The answer as JSON, for scripts."""
    return printable_json(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())


def schema() -> dict[str, object]:
    """JSON schema of all answers, by the word in their field ``kind``."""
    answers = [each for each in Answer.__subclasses__() if each.__struct_config__.tag_field]
    references, definitions = msgspec.json.schema_components(answers, ref_template="#/$defs/{name}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "anyOf": list(references), "$defs": definitions}
