# SPDX-License-Identifier: Apache-2.0
"""Errors of the commands: one line each."""

from __future__ import annotations

from pyebpf_proxy.see.answers import NOT_RIGHT


class ClusterError(Exception):
    """The text has the problem, and the remedy if there is one. ``status``: the exit status."""

    def __init__(self, text: str, status: int = NOT_RIGHT) -> None:
        super().__init__(text)
        self.status = status


class NodeLostError(ClusterError):
    """A node's kubelet has stopped reporting: waiting for a pod on this node is pointless."""
