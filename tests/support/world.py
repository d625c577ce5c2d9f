# SPDX-License-Identifier: Apache-2.0
"""A lab with servers, objects and agents: the base class of each suite's world."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.lab.namespace import Namespace

#: The pod that only sends requests.
TOOLBOX = "toolbox"


class World:
    """``with`` builds it, and ends what it has started. A suite's world extends ``build``.

    ``lab`` runs already, or ``build`` starts it.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        #: What ends with the world, the newest first.
        self.at_end = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def build(self) -> None:
        """Create pods, servers and objects, and start the proxy."""

    def close(self) -> None:
        """End what ``build`` and the tests have started."""
        self.at_end.close()

    @property
    def node(self) -> Node:
        """The node with the proxy under test."""
        return self.lab.nodes[0]

    def namespace(self, source: str) -> Namespace:
        """The namespace of a client: ``external``, ``node`` (or its name), ``pod`` (the toolbox), or a pod."""
        if source == "external":
            return self.lab.client
        if source in ("node", self.node.name):
            return self.node.namespace
        return self.lab.pods[TOOLBOX if source == "pod" else source].namespace
