# SPDX-License-Identifier: Apache-2.0
"""The fast path in ``top``: young and kernel's flows, permits, what closes it, and the paths of new flows."""

from __future__ import annotations

from pathlib import Path

from pyebpf_proxy.see import fast_path, local, model
from pyebpf_proxy.see.maps import Pinned
from pyebpf_proxy.see.top.rates import short


class FastPath:
    """Reads the fast path in these maps, from one interval to the next. Raises SeeError, as ``maps`` does."""

    def __init__(self, maps: Pinned, directory: Path) -> None:
        self._maps = maps
        self._directory = directory
        found = self._read()
        self._new_flows = found.new_flows if found is not None else {}

    def look(self, seconds: float) -> model.TopFastPath | None:
        """The current state, and the new flows since the last call, ``seconds`` ago. None without a fast path."""
        found = self._read()
        if found is None:
            return None
        before, self._new_flows = self._new_flows, found.new_flows
        return model.TopFastPath(
            closed=fast_path.closed(found),
            draining=found.draining,
            young=found.young,
            kernel=fast_path.kernel_flows(found),
            permits=found.permits,
            new_flows={path: max(0, count - before.get(path, 0)) / seconds for path, count in found.new_flows.items()},
        )

    def _read(self) -> model.FastPathView | None:
        state = fast_path.read_state(self._maps)
        if state is None:
            return None
        # Only the agent knows the rule that closes a family. While all are open, it is not asked.
        ask = state.alive and any(state.closed.values())
        known = local.state(self._directory) if ask else None
        return fast_path.read(self._maps, self._maps.counts(), (known or local.NOTHING)["datapath"])


def line(view: model.TopFastPath | None) -> str:
    """One line: whether the fast path is open, its flows and permits, then the paths that new flows take."""
    if view is None:
        return "fast path: off"
    parts = [_state(view), f"young {view.young}", f"kernel {view.kernel}", f"permits {view.permits}"]
    if flows := ", ".join(f"{short(count)} {path}" for path, count in view.new_flows.items() if count):
        parts.append(f"new flows a second: {flows}")
    return f"fast path: {' · '.join(parts)}"


def _state(view: model.TopFastPath) -> str:
    state = "draining" if view.draining else "open"
    reasons = set(view.closed.values())
    if len(view.closed) == 2 and len(reasons) == 1:
        return f"closed: {reasons.pop()}"
    if view.closed:
        return "; ".join(f"closed for {family}: {reason}" for family, reason in view.closed.items())
    return state
