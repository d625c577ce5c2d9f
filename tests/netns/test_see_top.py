# SPDX-License-Identifier: Apache-2.0
"""``top`` with real traffic: rates, shares, drops; without the agent, on a narrow terminal, into a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from pyebpf_proxy.lab.addresses import cluster_ip, vip
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.client import Outcome, ask
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.see import model
from pyebpf_proxy.see.maps import Pinned
from tests.netns.top_tools import start, watching
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import wait_until
from tests.support.see_tools import answer, error, see

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB = Kind("web", 10)
OTHER = Kind("other", 11)
EMPTY = Kind("empty", 12)
UDP_HEADERS = {4: 28, 6: 48}


@pytest.fixture(scope="module")
def world() -> Iterator[Lab]:
    with Lab(nodes=2) as made:
        first, second = made.add_pod("web-1", made.nodes[0]), made.add_pod("web-2", made.nodes[1])
        WEB.endpoints, OTHER.endpoints = (first, second), (second,)
        write_nodes(made)
        write_services(made, WEB, OTHER, EMPTY)
        made.start_agents()
        yield made


@pytest.fixture
def node(world: Lab) -> Node:
    return world.nodes[0]


def answered(outcome: Outcome) -> Outcome:
    assert outcome.kind == "answered", outcome
    return outcome


def near(found: dict[str, float], name: str, wanted: float) -> bool:
    return abs(found.get(name, 0) - wanted) < 0.01


def refused(world: Lab) -> None:
    """One packet: a SYN is sent again if the refusal comes while connect() still holds its socket."""
    assert world.client.call(ask, vip(12).v4, 53, "udp").kind == "refused"


@pytest.fixture(params=["the agent runs", "the agent was killed"])
def however(request: pytest.FixtureRequest, node: Node) -> Iterator[str]:
    if request.param == "the agent runs":
        yield request.param
        return
    node.agent.kill()
    yield request.param
    node.agent.start()
    node.agent.wait_synced()


def test_traffic_of_two_services_is_shown(node: Node, world: Lab, however: str) -> None:
    with watching(node) as seen:
        for _ in range(12):
            answered(world.client.call(ask, vip(10).v4, 80))
        for _ in range(5):
            answered(world.client.call(ask, vip(11).v6, 80))
        moved = [answered(world.client.call(ask, vip(11).v4, 53, "udp", size=200, reply_size=400)) for _ in range(4)]
        for _ in range(3):
            refused(world)
        wanted = {"default/web:http 4": 12, "default/other:http 6": 5, "default/other:dns 4": 4}
        seen.until(lambda: all(near(seen.flows, name, count) for name, count in wanted.items()), "new flows")
        seen.until(lambda: near(seen.drops, "default/empty:dns 4", 3), "drops")
        assert near(seen.reasons, "reject_no_endpoints", 3)
        assert near(seen.packets, "default/other:dns 4", 8)
        assert all(each.answer is not None for each in moved)
        sizes = sum(each.size + each.answer.received for each in moved if each.answer is not None)
        assert near(seen.bytes, "default/other:dns 4", sizes + 8 * UDP_HEADERS[4])
        # A connection with an answer: more packets in both directions than the two that open it.
        assert seen.packets["default/web:http 4"] >= 12 * 6
        first, second = (pod.address.v4 for pod in WEB.endpoints)
        assert seen.backends[f"{first}:8080"] + seen.backends[f"{second}:8080"] == pytest.approx(12)
        assert seen.backends[f"{second}:5353"] == pytest.approx(4)
        assert set(seen.flows) <= {*wanted, "default/empty:dns 4"}
        assert ("the agent is not running" in seen.last.notes) == (however != "the agent runs")


def test_flows_of_this_nodes_own_processes_are_counted(node: Node) -> None:
    """Their packets go directly to the endpoint: their service is unknown."""
    with watching(node, "default/web") as seen:
        for _ in range(3):
            answered(node.namespace.call(ask, cluster_ip(10).v4, 80))
        seen.until(lambda: near(seen.flows, "default/web:http 4", 3), "new flows")
        assert seen.packets["default/web:http 4"] == 0


def test_a_large_answer_is_counted_completely(node: Node, world: Lab) -> None:
    """With PEP_FAST_PATH=1 most of it takes the fast path, which redirects it before other programs see it."""
    size = 2_000_000
    with watching(node) as seen:
        answered(world.client.call(ask, vip(11).v4, 80, reply_size=size))
        seen.until(lambda: seen.bytes.get("default/other:http 4", 0) > size, "bytes")
        # Headers, the request, acknowledgements.
        assert size < seen.bytes["default/other:http 4"] < 1.1 * size
        assert seen.packets["default/other:http 4"] > size / 1460


def test_a_changed_service_is_still_counted(node: Node, world: Lab) -> None:
    first, second = WEB.endpoints
    with watching(node) as seen:
        try:
            for count, endpoints in enumerate([(first,), (second,), (first, second)], 1):
                WEB.endpoints = endpoints
                moment = write_services(world, WEB)
                node.agent.wait_synced(moment)
                answered(world.client.call(ask, vip(10).v4, 80))
                seen.until(lambda count=count: near(seen.flows, "default/web:http 4", count), "new flows")
        finally:
            WEB.endpoints = (first, second)
            write_services(world, WEB)
        assert seen.backends[f"{first.address.v4}:8080"] >= 0.99
        assert seen.backends[f"{second.address.v4}:8080"] >= 0.99


def test_an_idle_service_is_shown_only_if_it_is_named(node: Node) -> None:
    (line,) = see(node, "top", "web", "--once", "-o", "json").stdout.splitlines()
    found = msgspec.json.decode(line, type=model.Top)
    assert {view.name for view in found.services} == {"default/web:http", "default/web:dns"}
    assert all([each.pod for each in view.backends] == ["default/web-1", "default/web-2"] for view in found.services)
    assert " 10.244.1.10:8080 default/web-1 (local) " in see(node, "top", "web", "--once").stdout
    assert see(node, "top", "-n", "default", "--once", "-o", "name").stdout == ""
    assert error(node, "top", "wbe", status=2) == "no Service is called wbe; did you mean web?"
    assert error(node, "top", "-n", "defautl", status=2).startswith("no Service of namespace defautl is served")
    assert error(node, "top", "-i", "0", status=2).startswith("argument -i/--interval: 0 is not between 0.1 and 3600")


def test_light_attaches_no_program(node: Node, world: Lab) -> None:
    with watching(node, "--light") as seen:
        assert meters(seen.process) == set()
        answered(world.client.call(ask, vip(10).v4, 80))
        seen.until(lambda: near(seen.flows, "default/web:http 4", 1), "new flows")
        (view,) = seen.last.services
        assert (view.packets, view.bytes, seen.last.packets) == (None, None, None)


def meters(process: subprocess.Popen[str]) -> set[int]:
    """Ids of the programs that a ``top`` has attached."""
    found = set()
    for file in Path(f"/proc/{process.pid}/fdinfo").iterdir():
        text = file.read_text()
        if "link_type:\ttcx" in text:
            found |= {int(number) for number in re.findall(r"prog_id:\s*(\d+)", text)}
    return found


def there(program: int) -> bool:
    return subprocess.run(["bpftool", "prog", "show", "id", str(program)], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_any_end_detaches_the_programs(node: Node, number: int, status: int) -> None:
    with watching(node) as seen:
        programs = meters(seen.process)
        assert programs
        assert all(map(there, programs))
        seen.process.send_signal(number)
        _, output = seen.process.communicate(timeout=20)
        assert (seen.process.returncode, output) == (status, "")
        wait_until(lambda: not any(map(there, programs)), "the kernel takes the programs off")


def test_it_ends_when_the_maps_are_replaced(node: Node) -> None:
    """It would show no new flows from then on."""
    with watching(node) as seen:
        node.agent.stop()
        node.agent.start(own={"maps": {"backends4": 4096}})
        node.agent.wait_synced()
        try:
            _, output = seen.process.communicate(timeout=20)
            assert (seen.process.returncode, output) == (
                3,
                "Error: the maps were replaced or removed, by a new agent or a clean-up: start this command again\n",
            )
        finally:
            node.agent.stop()
            node.agent.start()
            node.agent.wait_synced()


def test_it_continues_with_maps_that_are_pinned_again(node: Node) -> None:
    with Pinned(node.agent.directory) as maps:
        maps.words("services")
        pin = maps.folder / "maps" / "services"
        inode = pin.stat().st_ino
        pin.rename(pin.with_name("aside"))
        subprocess.run(["bpftool", "map", "pin", "pinned", pin.with_name("aside"), pin], check=True)
        pin.with_name("aside").unlink()
        assert pin.stat().st_ino != inode
        maps.check()


def test_the_output_fits_40_columns(node: Node, world: Lab) -> None:
    answered(world.client.call(ask, vip(10).v4, 80))
    ran = see(node, "top", "web", "--once", COLUMNS="40")
    assert ran.returncode == 0
    assert max(map(len, ran.stdout.splitlines())) <= 40
    assert "default/web:http" in ran.stdout


def test_a_closed_pipe_ends_it(node: Node) -> None:
    with start(node, "-i", "0.2") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_without_permission_there_is_one_line(node: Node) -> None:
    ran = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", *command(), "top", "--once"],
        env={**os.environ, "PYEBPF_PROXY_DIRECTORY": str(node.agent.directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr == "Error: not permitted to read the BPF maps: run it as root (sudo)\n"


class Terminal:
    """A ``top`` on its own terminal."""

    def __init__(self, node: Node, width: int, height: int) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.process = start(node, "-i", "0.3", stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        self.text = ""

    def until(self, wanted: str) -> str:
        """Everything drawn until this text appears, without escape sequences."""
        end = time.monotonic() + 20
        while not re.search(wanted, self.plain()):
            assert time.monotonic() < end, self.plain()
            if select.select([self.master], [], [], 0.2)[0]:
                self.text += os.read(self.master, 65536).decode(errors="replace")
        return self.plain()

    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text.replace("\x1b[H", "\n"))

    def press(self, keys: str) -> None:
        self.text = ""
        os.write(self.master, keys.encode())

    def as_before(self) -> bool:
        return termios.tcgetattr(self._slave) == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self._slave)


@contextmanager
def terminal(node: Node, width: int, height: int = 12) -> Iterator[Terminal]:
    made = Terminal(node, width, height)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("width", [40, 100])
def test_on_a_terminal_it_uses_the_width_and_reads_keys(node: Node, world: Lab, width: int) -> None:
    with terminal(node, width) as shown:
        shown.until(r"by flows")
        task = world.client.start(many, vip(10).v4, 20)
        drawn = shown.until(r"default/web:http +\S")
        task.result()
        lines = re.split(r"[\r\n]+", drawn)
        assert max(map(len, lines)) <= width
        assert ("PACKETS/S" in drawn) == (width == 100)
        shown.press("b")
        shown.until(r"by bytes")
        shown.press(" ")
        shown.until("paused")
        shown.press("q")
        assert shown.process.wait(20) == 0
        assert shown.as_before()


def many(address: str, count: int) -> None:
    for _ in range(count):
        ask(address, 80)
        time.sleep(0.1)


def test_a_signal_restores_the_terminal(node: Node) -> None:
    with terminal(node, 80) as shown:
        shown.until("by flows")
        assert not shown.as_before()
        os.killpg(shown.process.pid, signal.SIGTERM)
        assert shown.process.wait(20) == 143
        assert shown.as_before()


def test_drops_of_the_last_minute_are_counted(node: Node, world: Lab) -> None:
    """Also from the maps only. Earlier drops are only in the count since the maps were created."""

    def count() -> tuple[int, int]:
        found = [each for each in answer(node, "drops", status=1)["drops"] if each["reason"] == "reject_no_endpoints"]
        return found[0]["lastMinute"], found[0]["count"]

    refused(world)
    lately, ever = count()
    assert 1 <= lately <= ever
    for _ in range(2):
        refused(world)
    # Fewer drops have left the last minute than have come.
    assert count()[1] == ever + 2
    assert count()[0] >= 2
    assert re.search(r"LAST MINUTE", see(node, "drops").stdout)
    assert re.search(r"\d+ times in the last minute: no usable endpoint", see(node, "status").stdout)
