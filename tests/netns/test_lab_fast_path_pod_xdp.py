# SPDX-License-Identifier: Apache-2.0
"""A pod's own XDP program sees the packets of Services, also those that the fast path sends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader.libbpf import Map, Object
from pyebpf_proxy.datapath.node.plan import REDIRECT_DEVICE, REDIRECT_PEER
from tests.support.conversation import Conversation
from tests.support.fast_lab import NEAR, Ask, FastWorld, without_pause
from tests.support.lab_tools import wait_until

pytestmark = [pytest.mark.needs_bpf, pytest.mark.needs_netns]

COUNTS = """
unsigned long long seen;
__attribute__((section("xdp"), used)) int counts(void *frame)
{
	__sync_fetch_and_add(&seen, 1);
	return 2; /* XDP_PASS */
}
char LICENSE[] __attribute__((section("license"), used)) = "GPL";
"""


class PodXdp:
    """The program on a pod's eth0, and how the node sends there."""

    def __init__(self, world: FastWorld, program: Path, bpf_objects: Path) -> None:
        self._pod = world.near.namespace
        self._program = program
        inside = json.loads(self._pod.run("ip", "-j", "link", "show", "eth0"))[0]
        self._device = inside["link_index"]
        self._devices = Map.open_pinned(world.node.agent.pin("devices"))
        with Object.open(bpf_objects / "tc.bpf.o") as unset:
            self._layout = unset.btf.struct("node_device")

    def close(self) -> None:
        self._devices.close()
        for mode in ("xdpdrv", "xdpgeneric"):
            self.off(mode)

    def on(self, mode: str) -> None:
        self._pod.run("ip", "link", "set", "dev", "eth0", mode, "obj", str(self._program), "sec", "xdp")

    def off(self, mode: str) -> None:
        self._pod.run("ip", "link", "set", "dev", "eth0", mode, "off")

    def redirect(self) -> int:
        value = self._devices.lookup(self._device.to_bytes(4, sys.byteorder))
        assert value is not None
        number: int = self._layout.unpack(value)["redirect"]
        return number

    def wait(self, redirect: int) -> None:
        wait_until(lambda: self.redirect() == redirect, "the device's redirect mode")

    def seen(self) -> int:
        """How many packets the program has seen."""
        (link,) = json.loads(self._pod.run("ip", "-j", "-d", "link", "show", "eth0"))
        shown = json.loads(self._pod.run("bpftool", "-j", "prog", "show", "id", str(link["xdp"]["prog"]["id"])))
        (entry,) = json.loads(self._pod.run("bpftool", "-j", "map", "dump", "id", str(shown["map_ids"][0])))
        count: int = entry["formatted"]["value"][".bss"][0]["seen"]
        return count


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counts")
    source, made = folder / "counts.c", folder / "counts.o"
    source.write_text(COUNTS)
    subprocess.run(["clang", "-O2", "-g", "-target", "bpf", "-c", source, "-o", made], check=True)
    return made


@pytest.fixture
def xdp(fast_world: FastWorld, program: Path, bpf_objects: Path) -> Iterator[PodXdp]:
    made = PodXdp(fast_world, program, bpf_objects)
    yield made
    made.close()


def test_a_pods_xdp_sees_fast_path_packets(
    fast_world: FastWorld, ask: Ask, xdp: PodXdp, family: int, protocol: str
) -> None:
    conversation = ask(fast_world.client.namespace, NEAR.of(family), protocol)
    fast_world.fast(conversation)
    xdp.wait(REDIRECT_PEER)
    with without_pause(conversation):
        xdp.on("xdpdrv")
        xdp.wait(REDIRECT_DEVICE)
    # A young flow keeps its learned route until it is promoted.
    wait_until(lambda: _share(xdp, conversation) > 0.9, "the program sees every question")
    fast_world.fast(conversation)
    assert _share(xdp, conversation) > 0.9
    with without_pause(conversation):
        xdp.off("xdpdrv")
        xdp.wait(REDIRECT_PEER)
    fast_world.fast(conversation)


def test_generic_xdp_sees_packets_of_either_redirect(fast_world: FastWorld, ask: Ask, xdp: PodXdp) -> None:
    conversation = ask(fast_world.client.namespace, NEAR.v4)
    fast_world.fast(conversation)
    xdp.on("xdpgeneric")
    fast_world.fast(conversation)
    assert _share(xdp, conversation) > 0.9
    assert xdp.redirect() == REDIRECT_PEER


def _share(xdp: PodXdp, conversation: Conversation) -> float:
    """The share of the next requests that the program has seen. Each is at least one packet."""
    # The program's count is read before and after the requests, so packets in between count for it.
    seen, answers = xdp.seen(), conversation.answers
    conversation.wait(100)
    found = conversation.answers - answers
    return (xdp.seen() - seen) / found
