# SPDX-License-Identifier: Apache-2.0
"""When the agent begins and ends because of its Node object (spec/configuration §5.3)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from pyebpf_proxy.agent.node_life import NodeLife
from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.kube.objects import Node, NodeAddress, NodeSpec, NodeStatus, ObjectMeta
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.services.addresses import format_address
from pyebpf_proxy.services.nodes import ZONE_LABEL, view_node
from pyebpf_proxy.services.planner import Planner, PlanSettings
from tests.support.logs import Log, Message


def node(name: str = "here", ips: tuple[str, ...] = ("192.0.2.1",), cidrs: tuple[str, ...] = ()) -> Change:
    return Change(
        "Node",
        "",
        name,
        Node(
            metadata=ObjectMeta(name=name),
            spec=NodeSpec(pod_cidrs=cidrs),
            status=NodeStatus(addresses=tuple(NodeAddress(type="InternalIP", address=ip) for ip in ips)),
        ),
    )


def gone(name: str = "here") -> Change:
    return Change("Node", "", name, None)


CIDR = ("10.0.0.0/24",)


def end_of(life: NodeLife, play: Callable[[], Awaitable[None]]) -> str:
    """The error that ends the agent while ``play`` runs; "" if there is none."""

    async def main() -> str:
        guard = asyncio.create_task(life.guard())
        await play()
        for _ in range(5):
            await asyncio.sleep(0)
        if guard.done():
            with pytest.raises(FatalError) as error:
                guard.result()
            return str(error.value)
        guard.cancel()
        await asyncio.gather(guard, return_exceptions=True)
        return ""

    return asyncio.run(main())


def test_there_is_no_wait_if_pod_cidrs_are_not_needed() -> None:
    life = NodeLife("here", needs_pod_cidrs=False)
    assert not life.ready
    life.listed()
    assert life.ready


def test_the_wait_ends_when_pod_cidrs_exist() -> None:
    life = NodeLife("here", needs_pod_cidrs=True)

    async def play() -> None:
        life.listed()
        await asyncio.sleep(0)
        assert not life.ready
        life.take([node()])
        life.take([node("there", cidrs=CIDR)])
        assert not life.ready
        life.take([node(cidrs=CIDR)])
        assert life.ready

    assert end_of(life, play) == ""


def test_existing_pod_cidrs_need_no_wait() -> None:
    life = NodeLife("here", needs_pod_cidrs=True)
    life.take([node(cidrs=CIDR)])
    assert not life.ready  # not all resources have been listed
    life.listed()
    assert life.ready


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], 'timeout waiting for node "here" to exist'),
        ([node("there", cidrs=CIDR)], 'timeout waiting for node "here" to exist'),
        ([node(), gone()], 'timeout waiting for node "here" to exist'),
        ([node()], 'timeout waiting for PodCIDR allocation on node "here"'),
    ],
)
def test_the_wait_ends(changes: list[Change], expected: str) -> None:
    life = NodeLife("here", needs_pod_cidrs=True, seconds=0.02)
    life.take(changes)

    async def main() -> None:
        life.listed()
        async with asyncio.timeout(5):
            await life.guard()

    with pytest.raises(FatalError) as error:
        asyncio.run(main())
    assert str(error.value) == expected


@pytest.mark.parametrize("cidrs", [("10.0.1.0/24",), (), (*CIDR, "fd00::/64"), ("fd00::/64", *CIDR)])
def test_other_pod_cidrs_end_the_agent(cidrs: tuple[str, ...]) -> None:
    life = NodeLife("here", needs_pod_cidrs=True)
    life.take([node(cidrs=CIDR)])

    async def play() -> None:
        life.listed()
        life.take([node(cidrs=CIDR, ips=("192.0.2.9",))])
        life.take([node(cidrs=cidrs)])

    now = " ".join(cidrs) or "none"
    assert end_of(life, play) == f'PodCIDRs changed for the node "here": now {now}, at the start 10.0.0.0/24'


def test_other_pod_cidrs_are_ignored_if_they_are_not_needed() -> None:
    life = NodeLife("here", needs_pod_cidrs=False)
    life.take([node(cidrs=CIDR)])

    async def play() -> None:
        life.listed()
        life.take([node(cidrs=("10.9.0.0/24",))])

    assert end_of(life, play) == ""


def test_changed_addresses_are_logged_once_and_followed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pyebpf_proxy")
    life = NodeLife("here", needs_pod_cidrs=False)
    life.take([node()])

    async def play() -> None:
        life.listed()
        change = node(ips=("192.0.2.2", "2001:db8::2"))
        assert life.take([change]) == [change]
        life.take([node(ips=("192.0.2.2", "2001:db8::2"), cidrs=CIDR)])

    assert end_of(life, play) == ""
    line = Log(caplog).only(Message.NODE_IPS_CHANGED)
    assert line.text.endswith(" node=here now=192.0.2.2 2001:db8::2 at_start=192.0.2.1")


@pytest.mark.parametrize(
    ("ips", "used"),
    [
        ((), ("192.0.2.1", "2001:db8::1")),
        (("192.0.2.2",), ("192.0.2.2", "2001:db8::1")),
        (("2001:db8::2",), ("192.0.2.1", "2001:db8::2")),
    ],
)
def test_the_last_address_of_a_family_stays(ips: tuple[str, ...], used: tuple[str, ...]) -> None:
    """Without any, nodePortAddresses ``primary`` would mean every address of the machine."""
    life = NodeLife("here", needs_pod_cidrs=False)
    life.take([node(ips=("192.0.2.1", "2001:db8::1"))])

    def ips_of(changes: list[Change]) -> set[str]:
        (change,) = changes
        assert isinstance(change.object, Node)
        return set(map(format_address, view_node(change.object).ips.values()))

    async def play() -> None:
        life.listed()
        # As if someone deletes the Node: the kubelet creates it again, and later a cloud's controller completes it.
        assert life.take([gone()]) == []
        for status in (NodeStatus(), None):
            created = Node(metadata=ObjectMeta(name="here"), status=status)
            again = life.take([Change("Node", "", "here", created)])
            assert ips_of(again) == {"192.0.2.1", "2001:db8::1"}
        assert ips_of(life.take([node(ips=ips)])) == set(used)
        assert ips_of(life.take([node(ips=())])) == set(used)
        assert ips_of(life.take([node(ips=("192.0.2.3", "2001:db8::3"))])) == {"192.0.2.3", "2001:db8::3"}

    assert end_of(life, play) == ""


def test_a_deleted_node_keeps_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    life = NodeLife("here", needs_pod_cidrs=True)
    life.take([node(cidrs=CIDR)])

    async def play() -> None:
        life.listed()
        other = gone("there")
        assert life.take([gone(), other]) == [other]
        assert life.take([node(cidrs=CIDR)]) == [node(cidrs=CIDR)]

    assert end_of(life, play) == ""
    Log(caplog).only(Message.NODE_DELETED)


def test_a_node_may_be_created_and_deleted_before_the_start() -> None:
    life = NodeLife("here", needs_pod_cidrs=False)
    assert life.take([node(), gone()]) == [node(), gone()]
    life.listed()
    assert life.ready


@pytest.mark.parametrize("ips", [("192.0.2.1",), ()])
def test_a_node_that_is_created_again_has_only_its_new_labels(ips: tuple[str, ...]) -> None:
    """As in kube-proxy (NodeTopologyConfig): a deletion changes nothing, and the new object counts alone."""
    life = NodeLife("here", needs_pod_cidrs=False)
    planner = Planner(PlanSettings("here"))

    def labelled(labels: dict[str, str] | None, ips: tuple[str, ...] = ("192.0.2.1",)) -> Change:
        change = node(ips=ips)
        assert isinstance(change.object, Node)
        return change._replace(
            object=msgspec.structs.replace(change.object, metadata=ObjectMeta("here", labels=labels))
        )

    planner.update(life.take([labelled({ZONE_LABEL: "a"})]))
    life.listed()
    planner.update(life.take([gone()]))
    assert planner.zone == "a"
    planner.update(life.take([labelled(None, ips)]))
    assert planner.zone == ""
    planner.update(life.take([labelled({ZONE_LABEL: "b"})]))
    planner.update(life.take([gone(), labelled(None, ips)]))
    assert planner.zone == ""
