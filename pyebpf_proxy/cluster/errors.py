# SPDX-License-Identifier: Apache-2.0
"""Errors of the commands: one line each."""

from __future__ import annotations

from pyebpf_proxy.see.answers import NOT_RIGHT


class ClusterError(Exception):
    """The problem, and the remedy if there is one. ``status``: the exit status."""

    def __init__(self, text: str, status: int = NOT_RIGHT) -> None:
        super().__init__(text)
        self.status = status


class NodeLostError(ClusterError):
    """A node's kubelet has stopped reporting: nothing that is asked of the node will happen."""


class NodeGoneError(NodeLostError):
    """The node does not exist any more."""


class StoppedError(ClusterError):
    """This command can change nothing any more, and so undo nothing.

    The API server does not answer, or another command has taken over.
    """
