# SPDX-License-Identifier: Apache-2.0
"""Answers of the agents of simulated nodes, for a healthy node."""

from __future__ import annotations

from pyebpf_proxy import __version__
from pyebpf_proxy.see import model

KERNEL = "6.1.0-44-amd64"
CLIENT = "198.51.100.77:40123"


def status() -> model.Status:
    """``pyebpf-proxy status``; tests change it."""
    agent = model.AgentView(running=True, pid=7, seconds=60.0, version=__version__, answers=True, behind_seconds=0.0)
    path = model.FastPathView(
        watched=True,
        draining=False,
        closed4="",
        closed6="",
        why4="",
        why6="",
        rules={},
        used=0,
        capacity=32768,
        young=0,
        permits=0,
        sent=0,
        promoted=0,
        ended=0,
        failed={},
        last_error="",
        new_flows={"fast": 1, "netfilter": 0, "socket": 0},
        slow={},
    )
    return model.Status(
        version=__version__,
        kernel=KERNEL,
        directory="/run/pyebpf-proxy",
        pins="/sys/fs/bpf/pyebpf-proxy/default",
        agent=agent,
        features=["nftables mode", "fast path"],
        devices=[],
        socket_programs=[],
        service_ports=2,
        maps=[],
        conntrack=model.Fill(name="conntrack", used=1, capacity=262144),
        source_ports=[],
        drops=[],
        warnings=[],
        fast_path=path,
    )


def drop(count: int, last_minute: int) -> model.Drop:
    """A reason with its counts, from a node's agent."""
    return model.Drop(
        reason="reject_no_endpoints", count=count, last_minute=last_minute, meaning="no endpoints", remedy="add some"
    )


def flow() -> model.FlowView:
    """A flow of CLIENT."""
    return model.FlowView(
        protocol="TCP",
        client=CLIENT,
        client_name="",
        destination="10.96.0.11:80",
        service="default/web:http",
        endpoint="10.244.1.10:8080",
        endpoint_name="default/web-1",
        masqueraded_as="",
        state="ESTABLISHED",
        seconds_left=100,
        seconds=None,
        packets=None,
        bytes=None,
        fast_path=True,
        age="young",
        path="fast",
    )


def answer(node: str, words: list[str]) -> tuple[int, bytes, bytes]:
    """Exit status, output and errors of a command with ``-o json``."""
    answers: dict[str, model.Answer] = {
        "status": status(),
        "drops": model.Drops(drops=[drop(3, 0)]),
        "flows": model.Flows(flows=[flow()]),
    }
    command = words[1] if words[:1] == ["pyebpf-proxy"] and words[2:] == ["-o", "json"] else ""
    if command not in answers:
        return 2, b"", f"Error: {' '.join(words)} is not known on {node}\n".encode()
    return 0, model.encode(answers[command]).encode(), b""
