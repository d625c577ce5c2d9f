# SPDX-License-Identifier: Apache-2.0
"""The life of one flow in the fast path, as a model that is searched exhaustively (test_life_cycle.py).

One client port, one endpoint. Two CPUs run packets, sweeps and the agent's promotions, interleaved at each access to
the flow table. The agent may die and start again, permits expire and are voided, rules change, the table is drained. A
step is one access to shared memory. The model has one assumption about time: what takes a second of silence or longer
does not coincide with a packet of the flow. Packets of one direction are handled in order, as receive queues do.
Functions, states and fields that a docstring names have the names of bpf/*.h. The test checks these names, and the
order of the accesses.

As a program it searches everything at once: more than a million states.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from pyebpf_proxy.common.bpf_constants import CLOSING, CLOSING_BY_RESET, CLOSING_IN_SEQUENCE, RESTORE, RESTORING

#: State of a connection, as its two ends know it.
NO_CONNECTION, SYN_SENT, ESTABLISHED, OVER = range(4)
CLIENT, ENDPOINT = 0, 1


class Entry(NamedTuple):
    """``struct flow`` of flow_maps.h: the relevant fields. ``confirmed``: confirmed_until is in the future."""

    young: bool = True
    closing: int = 0
    confirmed: bool = False


class State(NamedTuple):
    """``there``, ``reply``: the entries. ``count``: young_counts. ``conntrack``: it has the flow, with its NAT."""

    there: Entry | None = None
    reply: Entry | None = None
    count: int = 0
    conntrack: bool = False
    promotions: bool = False
    permit: bool = True
    alive: bool = True
    draining: bool = False
    denied: bool = False  # a rule denies new flows of the pair
    shortened: bool = False  # a forged RST: conntrack will soon forget a silent connection
    restore: int = 0  # promote of a kernel's flow: RESTORE, RESTORING or neither
    connection: int = NO_CONNECTION
    fin: tuple[bool, bool] = (False, False)  # sent and received, by side
    cpus: tuple[tuple[Any, ...] | None, ...] = (None, None)

    @property
    def lives(self) -> bool:
        return self.connection == ESTABLISHED and self.fin != (True, True)


class Broken(Exception):  # noqa: N818 - a violated property is no error of the search
    """A property is violated."""


#: The next state of a thread, or None at its end, and the state after this step.
Step = tuple[State, tuple[Any, ...] | None]


def entry_of(state: State, side: int) -> Entry | None:
    return state.there if side == CLIENT else state.reply


def with_entry(state: State, side: int, entry: Entry | None) -> State:
    return state._replace(there=entry) if side == CLIENT else state._replace(reply=entry)


def changed(state: State, side: int, **fields: Any) -> State:
    """Write fields of an entry in place; an element that was deleted meanwhile belongs to no flow any more."""
    entry = entry_of(state, side)
    return state if entry is None else with_entry(state, side, entry._replace(**fields))


# ---- packets -----------------------------------------------------------------------------------------


def packets(state: State, forged_twice: bool) -> Iterator[tuple[Any, ...]]:
    """What the ends may send now. FORGED: a RST out of sequence. ODD: data that only the kernel can handle.

    LATE: a RST right after data that the other side has not acknowledged.
    """
    # A port is used again when no packet of its old connection is on its way.
    busy = any(thread is not None and not is_agent(thread) for thread in state.cpus)
    ended = state.connection in (NO_CONNECTION, OVER) or state.fin == (True, True)
    if state.connection == SYN_SENT or (ended and not busy):
        yield "lookup", CLIENT, "SYN"
    if state.connection == SYN_SENT:
        yield "lookup", ENDPOINT, "SYNACK"
    if state.lives:
        # A limit (docs/fast-path.md): a forged RST for one side and a FIN of the other end the flow.
        kinds_now = {thread[2] for thread in state.cpus if thread is not None and len(thread) > 2}
        closing = {entry.closing for entry in (state.there, state.reply) if entry} - {0}
        forged = "FORGED" in kinds_now or CLOSING in closing
        quiet = not closing and state.fin == (False, False) and not kinds_now & {"FIN", "FORGED"}
        for side in (CLIENT, ENDPOINT):
            # The model has no sequence numbers: an old SYN on its way would open the next connection.
            kinds = ["RST"] if "SYN" in kinds_now else ["RST", "LATE"]
            if not state.fin[side]:
                kinds += ["DATA", "ODD"]
                kinds += ["FIN"] if forged_twice or not forged else []
            kinds += ["FORGED"] if forged_twice or quiet else []
            for kind in kinds:
                yield "lookup", side, kind


def delivered(state: State, side: int, kind: str) -> State:
    """The other end gets the packet, translated."""
    if kind == "SYN":
        if state.lives and state.connection == ESTABLISHED:
            return state
        return state._replace(connection=SYN_SENT, fin=(False, False))
    if kind == "SYNACK":
        return state._replace(connection=ESTABLISHED) if state.connection == SYN_SENT else state
    if kind == "FIN":
        return state._replace(fin=(True, state.fin[1]) if side == CLIENT else (state.fin[0], True))
    return state._replace(connection=OVER) if kind in ("RST", "LATE") else state


def to_netfilter(state: State, side: int, kind: str, tagged: bool) -> State:
    """Conntrack translates flows that it knows, and as the tag requests (hand_to_netfilter, leave_young:
    set_choice).
    """
    if state.conntrack:
        return delivered(state._replace(shortened=False), side, kind)
    if side == CLIENT and tagged:
        if state.denied:
            return state
        return delivered(state._replace(conntrack=True), side, kind)
    if side == CLIENT:
        return state  # PRIORITY_MIDSTREAM: dropped, no connection begins with it
    # A SYN-ACK that comes after five seconds may: the client has sent another SYN by then, and rejects this one.
    if state.lives and kind != "SYNACK":
        raise Broken("an endpoint's packet of a live connection continues untranslated")
    return state


def step_packet(state: State, thread: tuple[Any, ...]) -> Iterator[Step]:
    """send_by_table, send_young, send_kernels, open_flow and open_young, access by access."""
    at, side, kind = thread[:3]
    if at == "lookup":  # send_by_table
        entry = entry_of(state, side)
        if entry is None:
            yield state, ("unknown", side, kind)
        elif kind == "SYN" and entry.young:
            yield state, ("judge", side, kind)
        else:
            yield state, ("young" if entry.young else "kernels", side, kind)
    elif at == "judge":  # judge_syn: may_keep_endpoint is true, the endpoint still serves
        there, reply = state.there, state.reply
        both = there and reply and there.closing == reply.closing == CLOSING_IN_SEQUENCE
        reset = CLOSING_BY_RESET in {entry.closing for entry in (there, reply) if entry}  # ends_by_reset
        yield state, (("forget", side, kind, "unknown") if reply is None or both or reset else ("young", side, kind))
        # Routes have changed since the first SYN, which has no answer. It is sent again after a second of silence.
        if state.connection == SYN_SENT and state.cpus.count(None) == 1:
            count = max(state.count - (state.there is not None), 0)
            yield state._replace(there=None, reply=None, count=count), ("unknown", side, kind)
    elif at == "young":  # send_young
        yield from send_young(state, side, kind)
    elif at == "closed":  # end_young has marked this direction; the other one is read for SYN only
        sent = delivered(state, side, kind)
        yield sent, (("forget", side, kind, "") if kind == "RST" else None)
    elif at == "kernels":  # send_kernels
        if kind == "FORGED":  # note_ending, also if no agent runs
            # A limit (docs/fast-path.md): nothing is restored for a flow that the table does not have.
            both = kernel(state, CLIENT) and kernel(state, ENDPOINT)
            noted = state._replace(restore=RESTORE) if both else state
            yield changed(noted, side, confirmed=False), ("ending", side, kind, both)
        elif not state.alive:
            yield to_netfilter(state, side, kind, False), None
        elif kind == "SYN" and state.restore:
            yield state, None  # awaits_restoration
        elif kind in ("SYN", "FIN", "RST", "LATE"):
            yield changed(state, side, confirmed=False, closing=CLOSING), ("ending", side, kind)
        else:
            entry = entry_of(state, side)
            if entry is not None and entry.confirmed and kind != "ODD":
                if not state.conntrack:
                    raise Broken("a kernel's flow is sent that conntrack does not have")
                yield delivered(state, side, kind), None
            else:
                yield to_netfilter(state, side, kind, False), ("confirm", side, kind)
    elif at == "ending":
        after = changed(state, 1 - side, confirmed=False)
        if kind == "FORGED":
            yield after._replace(shortened=state.conntrack and thread[3]), None
        else:
            yield to_netfilter(after, side, kind, kind == "SYN"), None
    elif at == "confirm":  # the observer: netfilter has accepted the packet
        passes = state.conntrack and not state.denied and state.alive
        yield (changed(state, side, confirmed=True) if passes and kernel(state, side) else state), None
    elif at == "unknown":
        if kind != "SYN":
            yield to_netfilter(state, side, kind, False), None
        elif state.alive and not state.draining and state.permit:  # why_not_young, permits
            if state.denied:
                raise Broken("a permit is used that a new rule has voided")
            yield state, ("insert", side, kind)
        else:
            yield state, ("taken", side, kind)
    elif at == "insert":  # insert_young: the reply's entry first
        if state.reply is None:
            yield state._replace(reply=Entry()), ("count", side, kind)
        else:
            yield state, ("taken", side, kind)  # another port is in use, or SLOW_NO_PORT
    elif at == "count":  # count_young
        yield state._replace(count=state.count + 1), ("insert there", side, kind)
    elif at == "insert there":
        if state.there is None:
            yield delivered(state._replace(there=Entry()), side, kind), None
        else:
            yield state._replace(count=max(state.count - 1, 0)), ("take back", side, kind)
    elif at == "take back":
        yield state._replace(reply=None), ("taken", side, kind)
    elif at == "taken":  # is_taken_by_young: DROP_AWAITING_PROMOTION
        if state.reply is not None and state.reply.young and state.there is not None:
            yield state._replace(promotions=True), None
        else:
            yield to_netfilter(state, side, kind, True), None
    elif at in ("forget", "forget there", "uncount"):
        yield from forget(state, thread)


def send_young(state: State, side: int, kind: str) -> Iterator[Step]:
    if kind == "ODD":  # leave_young: request_promotion, and the client's packet creates conntrack's entry
        after = state._replace(promotions=True)
        if side == CLIENT:
            yield to_netfilter(after, side, "DATA", True), None
        else:
            yield after, None  # DROP_AWAITING_PROMOTION
    elif kind in ("FIN", "RST", "LATE", "FORGED"):
        how = {"FORGED": CLOSING, "LATE": CLOSING_BY_RESET}.get(kind, CLOSING_IN_SEQUENCE)
        yield changed(state, side, closing=how), ("closed", side, "DATA" if kind == "FORGED" else kind)
    elif kind == "DATA":
        yield delivered(changed(state, side, closing=0), side, kind), None
    else:
        yield delivered(state, side, kind), None


def forget(state: State, thread: tuple[Any, ...]) -> Iterator[Step]:
    """forget_flow: the other direction first; deleting the client's direction deletes the flow."""
    at, side, kind, then = thread[:4]
    if at == "forget":
        gone = entry_of(state, 1 - side)
        mine = gone is not None and 1 - side == CLIENT
        yield with_entry(state, 1 - side, None), ("forget there", side, kind, then, mine)
    elif at == "forget there":
        mine = thread[4] or (side == CLIENT and state.there is not None)
        yield with_entry(state, side, None), (("uncount", side, kind, then) if mine else after(side, kind, then))
    else:  # uncount_young
        yield state._replace(count=max(state.count - 1, 0)), after(side, kind, then)


def after(side: int, kind: str, then: str) -> tuple[Any, ...] | None:
    return (then, side, kind) if then else None


def kernel(state: State, side: int) -> bool:
    entry = entry_of(state, side)
    return entry is not None and not entry.young


# ---- the agent ---------------------------------------------------------------------------------------


def step_agent(state: State, thread: tuple[Any, ...]) -> Iterator[Step]:
    """sweep_flows; Promoter._hand_over: the queue, ctnetlink, promote_flow, and what follows if the flow has ended."""
    at = thread[0]
    if at == "sweep":
        there, reply = state.there, state.reply
        if there is None or not there.young:
            # A reply's entry without the client's is a leftover; a kernel's flow may be deleted when it is stale. It
            # has existed for a second (CLOSING_NS), so no program is about to insert the other entry.
            inserting = any(cpu and cpu[0] in ("count", "insert there") for cpu in state.cpus)
            if reply is not None and there is None and reply.young and not inserting:
                yield state, ("sweep leftover",)
            # The second sweep is half a second later: the packet has reached conntrack.
            early = state.restore == RESTORING and any(cpu and cpu[0] == "ending" for cpu in state.cpus)
            if state.restore and kernel(state, CLIENT) and kernel(state, ENDPOINT) and not early:
                # request_restoration
                yield state._replace(promotions=True), ("sweep restoration",)
            else:
                yield state, None
        elif reply is None or (there.closing and reply.closing) or state.connection in (NO_CONNECTION, SYN_SENT, OVER):
            # young_flow_is_over. It takes a second of silence, or five seconds: no packet of it is on its way.
            if not any(cpu and cpu[0] not in BETWEEN_PROGRAMS for cpu in state.cpus):
                yield state, ("forget", CLIENT, "", "")
            yield state, None
        else:
            yield state._replace(promotions=True), None  # is_due_for_promotion
            yield state, None
    elif at == "sweep leftover":
        yield (state._replace(reply=None) if state.there is None else state), None
    elif at == "sweep restoration":
        yield state._replace(restore=RESTORING if state.restore == RESTORE else 0), None
    elif at == "read":  # FlowReader.read
        found = state.there is not None and state.reply is not None and state.there.young and state.reply.young
        going_on = kernel(state, CLIENT) and kernel(state, ENDPOINT)
        yield state._replace(promotions=False), (("create",) if found else ("restore",) if going_on else None)
    elif at == "restore":
        yield state._replace(shortened=False), None
    elif at == "create":
        if state.conntrack:
            yield state._replace(shortened=False), ("promote", True)
        else:
            yield state._replace(conntrack=True), ("promote", False)
            yield state._replace(promotions=True), None  # conntrack is full: the flow waits
    elif at == "promote":
        there, reply = state.there, state.reply
        if there is None or not there.young or reply is None:
            yield state, (None if thread[1] else ("abandon",))
        else:
            unconfirmed = changed(changed(state, CLIENT, confirmed=False), ENDPOINT, confirmed=False)
            yield changed(unconfirmed, ENDPOINT, young=False), ("promote there",)
    elif at == "promote there":
        yield changed(state, CLIENT, young=False), ("promote count",)
    elif at == "promote count":
        yield state._replace(count=max(state.count - 1, 0)), None
    elif at == "abandon":
        # The entry expires, unless packets of a new connection extend its timeout.
        yield (state if state.lives or state.connection == SYN_SENT else state._replace(conntrack=False)), None


AGENT = (
    "sweep",
    "sweep leftover",
    "sweep restoration",
    "read",
    "restore",
    "create",
    "promote",
    "promote there",
    "promote count",
    "abandon",
)
#: States in which the agent itself runs, and not one of its programs.
BETWEEN_PROGRAMS = ("sweep", "read", "restore", "create", "promote", "abandon")


def is_sweep_end(thread: tuple[Any, ...] | None) -> bool:
    return thread is not None and thread[0].startswith(("forget", "uncount")) and not thread[2]


def is_agent(thread: tuple[Any, ...] | None) -> bool:
    return thread is not None and (thread[0] in AGENT or is_sweep_end(thread))


# ---- everything that may happen ----------------------------------------------------------------------


def successors(state: State, forged_twice: bool = False) -> Iterator[tuple[str, State]]:
    for number, thread in enumerate(state.cpus):
        if thread is None:
            if number and state.cpus[0] is None:
                continue  # two idle CPUs are equivalent
            begun = [] if any(map(is_sweep_end, state.cpus)) else [*packets(state, forged_twice)]
            # Receive queues keep the order of one direction.
            under_way = {thread[1] for thread in state.cpus if thread is not None and not is_agent(thread)}
            begun = [packet for packet in begun if packet[1] not in under_way]
            if state.alive and not any(map(is_agent, state.cpus)):
                begun += [("sweep",)]
                if state.promotions:
                    begun += [("read",)]
            for new in begun:
                yield f"{new} begins", running(state, number, new)
        else:
            step = step_agent if thread[0] in AGENT else step_packet
            for changed_state, rest in step(state, thread):
                yield f"{thread}", running(changed_state, number, rest)
    yield from environment(state)


def running(state: State, number: int, thread: tuple[Any, ...] | None) -> State:
    cpus = [*state.cpus]
    cpus[number] = thread
    return state._replace(cpus=tuple(sorted(cpus, key=repr)))


def environment(state: State) -> Iterator[tuple[str, State]]:
    if state.permit:
        yield "the permit lapses", state._replace(permit=False)
    elif state.alive and not state.denied:
        yield "a permit is granted", state._replace(permit=True)
    if state.alive:
        # Programs that it has started run to their end.
        left = [None if thread and thread[0] in BETWEEN_PROGRAMS else thread for thread in state.cpus]
        yield "the agent dies", state._replace(alive=False, cpus=tuple(sorted(left, key=repr)))
        if not state.denied and not any(t and t[0] == "insert" for t in state.cpus):
            yield "a rule is added", state._replace(denied=True, permit=False)
        if not state.draining:
            yield "draining", state._replace(draining=True)
    else:
        # A start voids permits and confirmations; the table is adopted.
        unconfirmed = changed(changed(state, CLIENT, confirmed=False), ENDPOINT, confirmed=False)
        yield "the agent starts", unconfirmed._replace(alive=True, permit=False, draining=False)
    # The agent does what a sweep has asked for before the next one. A sweep keeps what is to be restored.
    kept = state.restore or (state.shortened and (state.promotions or any(map(is_agent, state.cpus))))
    for side in (CLIENT, ENDPOINT):
        entry = entry_of(state, side)
        if entry is not None and entry.confirmed:
            yield "a confirmation lapses", changed(state, side, confirmed=False)
        if entry is not None and not entry.young and state.alive and not kept:
            yield "a stale entry of the kernel's is swept", with_entry(state, side, None)
    unused = state.connection in (NO_CONNECTION, OVER) and state.there is None and state.reply is None
    if state.conntrack and unused and not any(map(is_agent, state.cpus)):
        yield "conntrack's entry runs out", state._replace(conntrack=False, shortened=False)
    # It takes ten seconds, in which the agent sweeps and does what was asked for.
    asked = state.restore or state.promotions or state.cpus != (None, None)
    if state.conntrack and state.shortened and state.alive and not asked:
        yield "the shortened entry runs out", state._replace(conntrack=False, shortened=False)


def check(state: State) -> None:
    """The invariants. Between the steps of a function fewer hold: only at rest all are checked."""
    if state.cpus != (None, None):
        return
    young = state.there is not None and state.there.young
    if state.lives and not state.conntrack and not (young and state.reply is not None and state.reply.young):
        raise Broken("a live connection is lost: neither the table nor conntrack has it")
    if state.count > int(young):
        raise Broken("a young flow is counted that is not there")


def explore(forged_twice: bool = False, without: tuple[str, ...] = (), limit: int = 3_000_000) -> int:
    """How many states can be reached. Broken, with the shortest path, if a property is violated in one.

    ``without``: packets and events to leave out, by parts of their names.
    """
    begin = State()
    came: dict[State, tuple[State, str] | None] = {begin: None}
    waiting = deque([begin])
    while waiting:
        state = waiting.popleft()
        try:
            check(state)
            following = list(successors(state, forged_twice))
        except Broken as error:
            raise Broken(f"{error}:\n" + "\n".join(way(came, state))) from None
        for what, new in following:
            if new not in came and not any(name in what for name in without):
                came[new] = state, what
                waiting.append(new)
        if len(came) > limit:
            raise Broken("more states than the search has room for")
    return len(came)


def way(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    """The steps that led to a state."""
    lines = [f"  = {state}"]
    while (before := came[state]) is not None:
        state, what = before
        lines.append(f"  {what}")
    return lines[::-1]


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tests.unit.bpf.life_cycle", description=__doc__).parse_args()
    print(explore(), "states")
