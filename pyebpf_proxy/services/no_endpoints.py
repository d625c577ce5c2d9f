# SPDX-License-Identifier: Apache-2.0
"""Why service ports have no usable endpoint, in words for the user. It is computed only when a command asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, islice

from pyebpf_proxy.services import endpoints
from pyebpf_proxy.services.endpoints import FALLBACK, LOCAL, READY, SERVING, TERMINATING, SliceView
from pyebpf_proxy.services.model import IPFamily, Protocol, ServicePortName

#: The most service ports of one Service for which this is computed: it may have a thousand, and as many slices.
MOST = 32
#: The most ports of the slices that are read, and that are named. A slice may have 20 000.
_MOST_READ, _MOST_NAMED = 2000, 8


def reasons(views: Sequence[SliceView], names: Collection[ServicePortName]) -> Mapping[ServicePortName, str]:
    """What the EndpointSlices of a Service say about these ports of it, which have no usable endpoint."""
    names = list(islice(names, MOST))
    by_port = endpoints.by_port(views, names)
    others = {family: _others(views, family) for family in {name.family for name in names}}
    # Most ports of a Service are in the same slices, which may have many endpoints.
    not_ready: dict[tuple[int, ...], str] = {}
    found: dict[ServicePortName, str] = {}
    for name in names:
        having = by_port.get((name.family, name.port, name.protocol))
        if having is None:
            found[name] = others[name.family].format(port=_text(name.port, name.protocol))
            continue
        same = tuple(map(id, having))
        if same not in not_ready:
            not_ready[same] = _not_ready(having)
        if not_ready[same]:
            found[name] = not_ready[same]
    return found


def _others(views: Sequence[SliceView], family: IPFamily) -> str:
    """The reason for a port that no slice with endpoints has; ``{port}`` stands for the port."""
    here = [view for view in views if view.family is family]
    if not here:
        return f"it has no IPv{family.value} EndpointSlice" + (", but some of the other family" if views else "")
    their = f"its IPv{family.value} EndpointSlices"
    filled = [view for view in here if view.flags]
    if not filled:
        return f"{their} have no usable address"
    ports = sorted(set(islice(chain.from_iterable(view.ports for view in filled), _MOST_READ)))
    if not ports:
        return f"{their} have no port: a named targetPort must be the name of a container's port"
    more = " and others" if len(ports) > _MOST_NAMED else ""
    named = ", ".join(_text(*port) for port in ports[:_MOST_NAMED]).replace("{", "{{").replace("}", "}}")
    return f"{their} have the port{'s' * (len(ports) > 1)} {named}{more}, but not {{port}}"


def _not_ready(views: Collection[SliceView]) -> str:
    flags: Counter[int] = Counter()
    for view in views:
        for value in range((READY | SERVING | TERMINATING | LOCAL) + 1):
            flags[value] += view.flags.count(value)
    if any(number and (each & READY or each & FALLBACK == FALLBACK) for each, number in flags.items()):
        return ""
    ending = sum(number for each, number in flags.items() if each & TERMINATING and not each & SERVING)
    other = flags.total() - ending
    parts = [f"{ending} terminating"] * bool(ending) + [f"{other} not ready"] * bool(other)
    return f"no endpoint is ready: {', '.join(parts)}"


def _text(port: str, protocol: Protocol) -> str:
    return f'"{port}"/{protocol.name}'
