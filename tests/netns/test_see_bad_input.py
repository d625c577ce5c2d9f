# SPDX-License-Identifier: Apache-2.0
"""Every command gives one clear answer in each bad situation."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pyebpf_proxy.datapath.loader.layout import LAYOUT_VERSION
from pyebpf_proxy.datapath.node import mounts
from pyebpf_proxy.lab import manifests
from pyebpf_proxy.lab.addresses import CLIENT, vip
from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.client import ask
from pyebpf_proxy.lab.cluster import Lab, Node
from pyebpf_proxy.see import COMMANDS, model
from tests.support.lab_services import Kind, write_nodes, write_services
from tests.support.lab_tools import wait_until
from tests.support.see_tools import error, see

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns, pytest.mark.needs_bpf]

WEB, NEXT = Kind("web", 10), Kind("web-next", 11)
EMPTY = Kind("empty", 12)
#: A request for each command that reads the maps.
READERS = {
    "status": (),
    "services": ("web:http",),
    "backends": (),
    "frontends": (),
    "explain": (CLIENT.v4, f"{vip(12).v4}:80"),
    "drops": (),
    "flows": (),
}
EVERY = {**READERS, "doctor": ()}
ANSWERS = {
    "status": model.Status,
    "services": model.Services,
    "backends": model.Backends,
    "frontends": model.Frontends,
    "explain": model.Explanation,
    "drops": model.Drops,
    "flows": model.Flows,
    "doctor": model.Findings,
}
#: They run until they are ended, or read nothing: their own tests cover them.
APART = {"completion", "probe", "top", "trace"}


@pytest.fixture(scope="module")
def world() -> Iterator[Lab]:
    with Lab(nodes=1) as made:
        WEB.endpoints = NEXT.endpoints = (made.add_pod("web-1", made.nodes[0]),)
        write_nodes(made)
        write_services(made, WEB, NEXT, EMPTY)
        made.start_agents()
        # So that each command has something to show.
        assert made.client.call(ask, vip(12).v4, 80).kind == "refused"
        assert made.client.call(ask, vip(10).v6, 53, "udp").answer is not None
        yield made


@pytest.fixture
def node(world: Lab) -> Node:
    return world.nodes[0]


def words(name: str) -> list[str]:
    return [name, *EVERY[name]]


def test_every_command_is_tried_here_or_by_itself() -> None:
    assert set(EVERY) | APART >= COMMANDS
    assert EVERY.keys() == ANSWERS.keys()


@pytest.mark.parametrize("name", EVERY)
def test_the_answer_matches_its_schema(node: Node, name: str) -> None:
    ran = see(node, *words(name), "-o", "json")
    assert ran.returncode in (0, 1), ran.stderr
    found = msgspec.json.decode(ran.stdout, type=ANSWERS[name], strict=True)
    # And no field that is not in the type.
    assert msgspec.json.decode(msgspec.json.encode(found)) == json.loads(ran.stdout)


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("name", EVERY)
def test_fits_the_terminal(node: Node, name: str, width: int) -> None:
    ran = see(node, *words(name), COLUMNS=str(width))
    assert ran.returncode in (0, 1), ran.stderr
    assert [line for line in ran.stdout.splitlines() if len(line) > width] == []
    assert "\x1b" not in ran.stdout


@pytest.mark.parametrize("name", EVERY)
def test_a_closed_pipe_ends_it_quietly(node: Node, name: str) -> None:
    """There is no reader from the beginning, so there is no race."""
    reading, writing = os.pipe()
    os.close(reading)
    known = {"PYEBPF_PROXY_DIRECTORY": str(node.agent.directory)}
    run = ["ip", "netns", "exec", node.namespace.name, *command(), *words(name), "-o", "json"]
    try:
        ran = subprocess.run(
            run, env=os.environ | known, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, b"")


@pytest.mark.parametrize("name", READERS)
def test_missing_rights_are_reported(node: Node, name: str) -> None:
    ran = without_rights(node, *words(name))
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr == "Error: not permitted to read the BPF maps: run it as root (sudo)\n"


def test_doctor_reports_missing_rights(node: Node) -> None:
    ran = without_rights(node, "doctor", "-o", "json")
    assert (ran.returncode, ran.stderr) == (1, "")
    last = json.loads(ran.stdout)["findings"][-1]
    assert (last["what"], last["state"], bool(last["remedy"])) == ("rights", "bad", True)


def without_rights(node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", *command(), *arguments],
        env=os.environ | {"PYEBPF_PROXY_DIRECTORY": str(node.agent.directory)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def other_layout(node: Node) -> Iterator[None]:
    pins = node.agent.pin("services").parents[1]
    moved = pins.with_name("v99")
    # An agent that runs would pin its links in a new folder.
    node.agent.stop()
    os.rename(pins, moved)
    try:
        yield
    finally:
        os.rename(moved, pins)
        node.agent.start()
        node.agent.wait_synced()


@pytest.mark.parametrize("name", READERS)
def test_maps_of_another_layout_are_refused(node: Node, other_layout: None, name: str) -> None:
    assert error(node, *words(name), status=3) == (
        f"the maps of {node.agent.directory} have layout v99, this program reads v{LAYOUT_VERSION}:"
        " use the pyebpf-proxy command of the agent's version"
    )


def test_an_agent_that_waits_is_no_missing_agent() -> None:
    """It runs, so it need not be started; and if another layout's programs serve, it is not of their version."""
    with Lab(nodes=1) as lab:
        (node,) = lab.nodes
        without_cidrs = manifests.node(node.name, node.address, node.pod_cidr) | {"spec": {}}
        lab.write("node.yaml", [without_cidrs])
        node.agent.start({"detectLocalMode": "NodeCIDR"})
        wait_until(lambda: "waiting for the podCIDRs" in node.agent.log(), "the agent waits")
        assert node.agent.process is not None
        waits = f"the agent (process {node.agent.process.pid}) has not programmed this node yet"
        waits += ": its log says what it waits for"
        for name in READERS:
            assert error(node, *words(name), status=3) == waits
        folder = node.agent.directory / "bpf" / mounts.FOLDER / mounts.instance_name(node.agent.directory)
        (folder / "v99" / "maps").mkdir(parents=True)
        more = "; until then, the programs of another version serve it"
        for name in READERS:
            assert error(node, *words(name), status=3) == waits + more


@pytest.mark.parametrize("name", READERS)
def test_another_run_folder_is_reported_as_empty(node: Node, tmp_path: Path, name: str) -> None:
    line = error(node, *words(name), "--directory", str(tmp_path / "elsewhere"), status=3)
    assert line.startswith(f"no maps are pinned for the run folder {tmp_path / 'elsewhere'}")
    assert line.endswith("start the agent, or name its run folder with --directory")


@pytest.mark.parametrize(
    ("question", "status", "text"),
    [
        (("services", "wbe"), 2, "no Service is called wbe; did you mean web?"),
        (("services", "we:http"), 2, "we:http is ambiguous: it may be default/web, default/web-next"),
        (("services", "-n", "defalt"), 2, "no Service of namespace defalt is served; did you mean default?"),
        (("services", "--diff", "--manifests", "/none"), 3, "the manifests folder /none does not exist"),
        (("services", "--diff", "--config", "/none"), 3, "failed complete: open /none: no such file or directory"),
        (("backends", "web:dnss"), 2, "default/web has no port dnss: it has dns, http"),
        (("backends", "we"), 2, "we is ambiguous: it may be default/web, default/web-next"),
        (("frontends", "we"), 2, "we is ambiguous: it may be default/web, default/web-next"),
        (("frontends", "crat"), 2, "no Service is called crat"),
        (("frontends", "--address", "10.96.0"), 2, "10.96.0 is not an IP address"),
        (("frontends", "--address", "10.96.0.99"), 2, "no service has the address 10.96.0.99"),
        (("flows", "wbe"), 2, "no Service is called wbe; did you mean web?"),
        (
            ("flows", "servce=web"),
            2,
            "flows have no field servce: service, client, endpoint, destination, protocol, state, age, path;"
            " did you mean service?",
        ),
        (
            ("explain", CLIENT.v4, f"[{vip(10).v6}]:80"),
            2,
            f"{CLIENT.v4} and [{vip(10).v6}]:80 are of different IP families",
        ),
        (("explain", CLIENT.v4), 2, "the following arguments are required: DST:PORT; see pyebpf-proxy explain --help"),
        (("status", "web"), 2, "unrecognized arguments: web; see pyebpf-proxy status --help"),
        (("drops", "--minute"), 2, "unrecognized arguments: --minute; see pyebpf-proxy drops --help"),
        (
            ("doctor", "-o", "yaml"),
            2,
            "argument -o/--output: invalid choice: 'yaml' (choose from 'table', 'json', 'name');"
            " see pyebpf-proxy doctor --help",
        ),
    ],
)
def test_invalid_arguments(node: Node, question: tuple[str, ...], status: int, text: str) -> None:
    assert error(node, *question, status=status) == text


@pytest.fixture(scope="module")
def dead(world: Lab) -> Iterator[Node]:
    node = world.nodes[0]
    node.agent.kill()
    yield node
    node.agent.start()
    node.agent.wait_synced()


@pytest.mark.parametrize("name", EVERY)
def test_without_the_agent_the_kernel_still_answers(dead: Node, name: str) -> None:
    ran = see(dead, *words(name), "-o", "json")
    assert ran.returncode in (0, 1), ran.stderr
    assert msgspec.json.decode(ran.stdout, type=ANSWERS[name])
    assert ran.stderr == ""
