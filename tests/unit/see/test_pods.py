# SPDX-License-Identifier: Apache-2.0
"""Pod names for a command that keeps running: looked up when they are new or old, and never for too long."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pyebpf_proxy.see import model
from pyebpf_proxy.see.pods import MOST, Pods, fill_pod_names

A, B = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])


class Agent:
    """The agent, and the time that a lookup takes."""

    def __init__(self, took: float = 0.0) -> None:
        self.now = 100.0
        self.took = took
        self.known = {A: "default/web-1"}
        self.asked: list[set[bytes]] = []

    def pods(self) -> Pods:
        return Pods(self.ask, lambda: self.now)

    def ask(self, addresses: Collection[bytes]) -> Mapping[bytes, str]:
        self.asked.append(set(addresses))
        self.now += self.took
        return {address: name for address, name in self.known.items() if address in addresses}


def test_known_names_are_looked_up_again_only_when_they_are_old() -> None:
    agent = Agent()
    pods = agent.pods()
    assert pods.names([A, B]) == {A: "default/web-1", B: ""}
    agent.known = {A: "default/web-2"}
    agent.now += 9
    assert pods.names([A, B]) == {A: "default/web-1", B: ""}
    agent.now += 1
    assert pods.names([A])[A] == "default/web-2"
    assert agent.asked == [{A, B}, {A}]


def test_a_slow_agent_is_asked_less_often() -> None:
    """One second at the beginning, then a twentieth of the time."""
    agent = Agent(took=2.0)
    pods = agent.pods()
    pods.look([A])
    for _ in range(19):
        agent.now += 1
        pods.look([B])
    assert agent.asked == [{A}]
    assert pods.name(A) == "default/web-1"
    agent.now += 5
    pods.look([B])
    assert agent.asked == [{A}, {B}]


def test_addresses_of_views() -> None:
    def view(address: str) -> model.TopBackend:
        return model.TopBackend(address=address, local=True, new_flows=0, packets=0, bytes=0, share=0)

    agent = Agent()
    views = [view("10.0.0.1:80"), view("10.0.0.2:80"), view("[::1]:80")]
    fill_pod_names(views, agent.ask)
    assert [each.pod for each in views] == ["default/web-1", "", ""]
    assert agent.asked == [{A, B, bytes(15) + b"\1"}]
    fill_pod_names([view("10.0.0.1:80")] * (MOST + 1), agent.ask)
    assert len(agent.asked) == 1
