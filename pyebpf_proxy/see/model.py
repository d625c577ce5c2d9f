# SPDX-License-Identifier: Apache-2.0
"""The answers of ``-o json``. tools/commands_schema.py generates docs/commands.schema.json from these types.

Scripts read the answers: fields may be added, but must not be renamed or change their meaning.
"""

from __future__ import annotations

from inspect import cleandoc
from typing import Literal

import msgspec

from pyebpf_proxy.common.printable import printable_json


class Answer(msgspec.Struct, rename="camel", kw_only=True):
    """The base of all answers."""


class EndpointView(Answer, kw_only=True):
    """An endpoint. ``lists``: the traffic policies whose traffic it receives. ``leftOut``: why it is in no list, else
    "". ``pod``: the agent reports it; in all answers, it is "" without an agent.
    """

    address: str
    backend: int
    local: bool
    lists: list[Literal["cluster", "local"]]
    serving: bool
    left_out: str = ""
    pod: str = ""


class FrontendView(Answer, kw_only=True):
    """A frontend address. A NodePort's address is 0.0.0.0 or ::."""

    address: str
    port: int
    protocol: str
    kind: str
    service: str


class ServiceView(Answer, kw_only=True):
    """One service port of one IP family. ``differences``: text, only with --diff. ``noEndpoints``: with a name, why it
    has no usable endpoint on any node, if it has none and the agent or the source knows why. ``endpointNotes``: with a
    name, why the programs do not use exactly the ready endpoints: topology hints, or no endpoint is ready.
    """

    name: str
    namespace: str
    service: str
    port: str
    protocol: str
    family: int
    id: int
    config: int
    frontends: list[FrontendView]
    endpoints: list[EndpointView]
    any_endpoints: bool
    internal_traffic_policy: Literal["Cluster", "Local"]
    external_traffic_policy: Literal["Cluster", "Local"]
    affinity_seconds: int
    source_ranges: list[str]
    differences: list[str] = []
    no_endpoints: str = ""
    endpoint_notes: list[str] = []


class Services(Answer, kw_only=True, tag_field="kind", tag="Services"):
    """``pyebpf-proxy services``. ``problems``: inconsistencies in the maps. ``notServed``: with a name, what the agent
    does not serve of these Services. ``objectsMissing``: with a name, why the objects of the agent's source cannot be
    read, so that endpoints which are not used are not shown; else "".
    """

    services: list[ServiceView]
    problems: list[str] = []
    not_served: list[str] = []
    objects_missing: str = ""


class BackendView(Answer, kw_only=True):
    """One active entry of backends4 or backends6."""

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
    """A reason for which packets or socket calls were refused or dropped. ``lastMinute``: null if it is not counted.
    ``secondsAgo`` and the fields after it describe the latest packet, if it is known. ``noEndpoints``: why its service
    port has no usable endpoint at present.
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
    no_endpoints: str = ""


class Drops(Answer, kw_only=True, tag_field="kind", tag="Drops"):
    """``pyebpf-proxy drops``. Counts start when the maps are created."""

    drops: list[Drop]


class Trouble(Answer, kw_only=True):
    """A warning and its remedy."""

    what: str
    remedy: str


class AgentView(Answer, kw_only=True):
    """The agent, if it runs. Seconds are null if its metrics lack the value. ``answers``: whether it answers on the
    socket in its folder. ``behindSeconds``: for how long it may not know the API server's latest objects, because a
    watch is lost, or has not programmed what it knows; 0 if it is up to date.
    """

    running: bool
    pid: int = 0
    seconds: float = 0.0
    synced_seconds_ago: float | None = None
    delivered_seconds_ago: float | None = None
    source_complete: bool | None = None
    version: str = ""
    answers: bool = False
    behind_seconds: float | None = None


class DeviceView(Answer, kw_only=True):
    """An ingress device. ``program``, ``xdp``: the attached programs; XDP "foreign" is a program of another owner.
    ``attached``: by tcx, at the head of the chain, or as a filter of clsact. ``redirect``: how the fast path redirects
    to the device. ``limit``: why it does not redirect, or not to the peer. ``others``: programs of other owners. The
    agent reports the last two.
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
    """The flow table. ``watched``: an agent follows rules and routes; without one all packets take the slow path.
    ``closed4``, ``closed6``: the reason for which a family takes the slow path, else "". ``why4``, ``why6``: the cause
    on this node, which the agent reports. ``rules``: by family, the rules that its packets bypass (fastPath: true).
    ``routeMarks``: by family, the bits of packets' marks that choose routes; such packets take the slow path.
    ``used``: entries of the flow table, two for each flow. ``young`` flows; ``exchanges``: those of them without
    entries (earlier agents do not send it). All three at the last sweep. ``permits``: those valid now. The others are
    counters: ``sent`` packets, young flows ``promoted`` to conntrack or ``ended``, ``failed`` promotions by outcome
    since the agent's start, ``newFlows`` by path, ``slow``: reasons why new flows and packets took the slow path.
    """

    watched: bool
    draining: bool
    closed4: str
    closed6: str
    why4: str
    why6: str
    rules: dict[str, str]
    route_marks: dict[str, int] = {}
    used: int
    capacity: int
    young: int
    exchanges: int = 0
    permits: int
    sent: int
    promoted: int
    ended: int
    failed: dict[str, int]
    last_error: str
    new_flows: dict[str, int]
    slow: dict[str, int]

    def closed(self) -> dict[str, str]:
        """By family, the reason for which its packets take the slow path while an agent runs, with the cause."""
        families = (("IPv4", self.closed4, self.why4), ("IPv6", self.closed6, self.why6))
        return {family: f"{reason}{f', {why}' if why else ''}" for family, reason, why in families if reason}


class Fill(Answer, kw_only=True):
    """Usage of a table: ``used`` of ``capacity`` entries. Conntrack without a limit has the capacity 0."""

    name: str
    used: int
    capacity: int

    def is_full(self, share: float = 1.0) -> bool:
        """Whether this share of the entries is in use; never without a limit."""
        return self.capacity > 0 and self.used >= share * self.capacity

    @property
    def text(self) -> str:
        """``12 of 100``."""
        return f"{self.used} of {self.capacity}" if self.capacity else f"{self.used}, without a limit"


class Status(Answer, kw_only=True, tag_field="kind", tag="Status"):
    """``pyebpf-proxy status``. ``sourcePorts``: those in use for masqueraded flows to the busiest endpoints.
    ``fastPath``: null without a fast path.
    """

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
    """A flow to a service. ``seconds``, ``packets``, ``bytes``: null if the kernel does not record them
    (nf_conntrack_timestamp, nf_conntrack_acct). ``fastPath``: null without a fast path. ``age``: "young" if only the
    BPF programs know the flow, "kernel" if conntrack knows it. ``path``: the path of its packets.
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
    """An endpoint of a service port. Rates are per second. ``packets``, ``bytes``: in both directions, null if not
    measured. ``share``: 0 to 1, of the new flows of its service; if there were none, of the bytes.
    """

    address: str
    local: bool
    new_flows: float
    packets: float | None
    bytes: float | None
    share: float
    pod: str = ""


class TopService(Answer, kw_only=True):
    """A service port of one IP family. ``packets``, ``bytes``: including packets without a known endpoint, for
    example the first of a flow.
    """

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
    """Packets and socket calls refused or dropped for a reason, per second."""

    reason: str
    drops: float


class TopFastPath(Answer, kw_only=True):
    """The node's fast path at the end of the interval. ``closed``: by family ("IPv4", "IPv6"), why it takes the slow
    path; empty if both are open. ``draining``: no new young flows are started. ``young``, ``kernel``: flows in the flow
    table at the last sweep; those of ``kernel`` are also in conntrack. ``permits``: those valid now. ``newFlows``: per
    second, by path, of all services.
    """

    closed: dict[str, str]
    draining: bool
    young: int
    kernel: int
    permits: int
    new_flows: dict[str, float]


class Top(Answer, kw_only=True, tag_field="kind", tag="Top"):
    """``pyebpf-proxy top``: one object on one line for each interval. ``time``: Unix time of its end. ``seconds``: its
    length. The first rates are totals of these services; ``drops``, and by reason ``reasons``, are of the whole node.
    ``services``: those with traffic, and all that the command line names. ``atRest``: the number of other services.
    ``oneIn``: one of this many packets was sampled. ``fastPath``: null without a fast path.
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
    fast_path: TopFastPath | None = None


class ChoiceView(Answer, kw_only=True):
    """An endpoint to which the packet may go. ``egress``: the egress interface, as text. ``path``: the path that a new
    flow to it takes now. ``pathReason``: the programs' counter, "" for "fast" and "socket". ``pathWhy``: the reason as
    text.
    """

    address: str
    backend: int
    local: bool
    masquerade: bool
    masquerade_as: str
    egress: str
    pod: str = ""
    path: Literal["", "fast", "netfilter", "socket"] = ""
    path_reason: str = ""
    path_why: str = ""


class ProgramView(Answer, kw_only=True):
    """The result of a dry run of the real program. ``ran``: false if it was not run; ``why`` has the reason."""

    ran: bool
    why: str = ""
    verdict: str = ""
    counted: list[str] = []
    backend: int = 0
    masquerade: bool = False


class Explanation(Answer, kw_only=True, tag_field="kind", tag="Explanation"):
    """``pyebpf-proxy explain``. ``steps``: the rules that applied, in order. ``disagreements``: differences between
    rules and programs. ``xdp``: the result of the XDP program, which runs first; null if the device has none.
    ``objectsMissing``: as in Services.
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
    objects_missing: str = ""


class Finding(Answer, kw_only=True):
    """The result of one check of ``doctor``."""

    what: str
    state: Literal["good", "warning", "bad"]
    text: str
    remedy: str


class Findings(Answer, kw_only=True, tag_field="kind", tag="Findings"):
    """``pyebpf-proxy doctor``."""

    findings: list[Finding]


class Decision(Answer, kw_only=True, tag_field="kind", tag="Decision"):
    """One line of ``pyebpf-proxy trace``: a program's decision on a packet or a socket call.

    ``time``: UTC. ``device``: the ingress device, "" for a socket call of ``process``. ``path``: "" if refused or
    dropped. ``endpoint``: "" if none was selected. ``masqueradedAs``: "" if unknown. ``sourceName``, ``endpointName``:
    the pods, which the agent reports; "" without an agent. ``slow``: why a new flow took the slow path, "" if not
    recorded.
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
    """A line of ``pyebpf-proxy trace``: the kernel dropped a packet of a flow with an earlier decision.

    ``client`` and ``frontend``: the flow's client and frontend. ``reason``: enum skb_drop_reason. ``where``: a kernel
    function. ``netns``: 0 for the network namespace of ``trace``, else its number; ``device`` is of that namespace.
    """

    time: str
    protocol: str
    source: str
    destination: str
    client: str
    frontend: str
    service: str
    reason: str
    where: str
    device: str
    netns: int


class TcpState(Answer, kw_only=True, tag_field="kind", tag="TcpState"):
    """A line of ``pyebpf-proxy trace``: a socket of a flow with an earlier decision was connected or closed.

    ``source``: the socket's own end. Other fields as in KernelDrop.
    """

    time: str
    protocol: str
    source: str
    destination: str
    client: str
    frontend: str
    service: str
    before: str
    now: Literal["ESTABLISHED", "CLOSE"]
    netns: int


class Lost(Answer, kw_only=True, tag_field="kind", tag="Lost"):
    """A line of ``pyebpf-proxy trace``: events that were lost since the last such line, because a buffer was full."""

    time: str
    what: Literal["decisions", "kernel events"]
    count: int


class NodeDifference(Answer, kw_only=True):
    """How one node differs from most others. ``expected``: topology hints explain it, so nothing is wrong."""

    node: str
    text: str
    expected: bool = False


class ClusterService(Answer, kw_only=True):
    """A service port of one IP family, as most nodes have it. ``nodes``: the nodes that have it."""

    name: str
    protocol: str
    family: int
    frontends: list[str]
    endpoints: list[str]
    nodes: list[str]
    differences: list[NodeDifference] = []


class NodeProblem(Answer, kw_only=True):
    """A node whose agent did not answer, and why."""

    node: str
    text: str


class ClusterServices(Answer, kw_only=True, tag_field="kind", tag="ClusterServices"):
    """``pyebpf-proxy cluster services``. ``nodes``: the nodes that answered. ``problems``: those that did not."""

    nodes: list[str]
    services: list[ClusterService]
    problems: list[NodeProblem] = []


class ClusterExplanation(Answer, kw_only=True, tag_field="kind", tag="ClusterExplanation"):
    """``pyebpf-proxy cluster explain``. ``explanations``: the answers of the pod's node, one for each family of the
    Service. ``services``, ``problems``: the Service on all nodes, as in ClusterServices.
    """

    pod: str
    node: str
    explanations: list[Explanation]
    services: list[ClusterService]
    problems: list[NodeProblem] = []


def encode(answer: msgspec.Struct) -> str:
    """The answer as JSON."""
    return printable_json(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())


def schema() -> dict[str, object]:
    """JSON schema of all answers, distinguished by the field ``kind``."""
    answers = [each for each in Answer.__subclasses__() if each.__struct_config__.tag_field]
    references, definitions = msgspec.json.schema_components(answers, ref_template="#/$defs/{name}")
    # Python removes the indentation of docstrings from 3.13 on only.
    for definition in definitions.values():
        if text := definition.get("description"):
            definition["description"] = cleandoc(text)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "anyOf": list(references), "$defs": definitions}
