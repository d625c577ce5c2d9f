# SPDX-License-Identifier: Apache-2.0
"""The servers as the agent starts them: their addresses, and the effect of an address in use."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.config import flags
from pyebpf_proxy.config.complete import complete
from pyebpf_proxy.config.effective import effective
from pyebpf_proxy.config.shown import shown
from pyebpf_proxy.kube.events import ObjectReference
from pyebpf_proxy.kube.objects import Node
from pyebpf_proxy.kube.source import Change
from pyebpf_proxy.servers import server as server_module
from pyebpf_proxy.servers import serving
from pyebpf_proxy.servers.local import Local
from pyebpf_proxy.servers.metrics import DatapathNumbers
from pyebpf_proxy.servers.serving import Servers
from pyebpf_proxy.services.planner import Planner, PlanSettings
from tests.support.logs import Log
from tests.support.ports import free_port
from tests.unit.servers.http_client import answers, get, until


class Events(list[tuple[object, ...]]):
    def event(self, about: ObjectReference, type: str, reason: str, action: str, note: str) -> None:  # noqa: A002
        self.append((about, type, reason, action, note))


def make(events: Events, *arguments: str, local: Local | None = None) -> Servers:
    parsed = flags.parse(["--hostname-override=here", *arguments])
    config = complete(parsed, lambda text, file: None)
    planner = Planner(PlanSettings(node_name="here"))
    settings = effective(config, parsed)
    return Servers(settings, shown(config, parsed), planner, DatapathNumbers(), list, events, local=local)


def test_both_servers_show_the_state_of_the_loop() -> None:
    health, metrics = free_port(), free_port()

    async def main() -> None:
        servers = make(
            Events(), f"--healthz-bind-address=127.0.0.1:{health}", f"--metrics-bind-address=[::1]:{metrics}"
        )
        servers.start()
        try:
            until(lambda: answers(health) and answers(metrics, "::1"))
            assert get(health, "/healthz").status == 503  # no Node
            assert get(health, "/livez").status == 200
            servers.observer.changed([Change("Node", "", "here", Node())], complete=True)
            servers.observer.queued()
            servers.observer.planned({})
            servers.observer.synced(0.1, ok=True, full=True)
            answer = get(health, "/healthz")
            assert (answer.status, set(json.loads(answer.body)["status"])) == (200, {"IPv4", "IPv6"})
            page = get(metrics, "/metrics", host="::1").body.decode()
            for line in (
                'kubeproxy_proxy_healthz_total{code="200"} 1.0',
                'kubeproxy_proxy_healthz_total{code="503"} 1.0',
                'kubeproxy_proxy_livez_total{code="200"} 1.0',
                'kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family="IPv6"} 1.0',
            ):
                assert line in page.splitlines()
            assert get(metrics, "/livez", host="::1").status == 404
            assert get(health, "/metrics").status == 404
        finally:
            servers.stop()
        assert not answers(health)

    asyncio.run(main())


def test_no_health_server() -> None:
    metrics = free_port()

    async def main() -> None:
        servers = make(Events(), "--healthz-port=0", f"--metrics-bind-address=127.0.0.1:{metrics}")
        servers.start()
        until(lambda: answers(metrics))
        servers.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("flag", "reason", "prefix"),
    [
        (
            "--healthz-bind-address",
            "FailedToStartProxierHealthcheck",
            "healthz server failed: failed to start proxy healthz on {address}: ",
        ),
        ("--metrics-bind-address", "FailedToStartMetricServer", ""),
    ],
)
def test_hard_failure_ends_the_agent_with_an_event(
    monkeypatch: pytest.MonkeyPatch, flag: str, reason: str, prefix: str
) -> None:
    monkeypatch.setattr(serving, "EVENT_SECONDS", 0.01)
    events = Events()
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        error = f"{prefix.format(address=address)}listen tcp {address}: bind: address already in use"

        async def main() -> None:
            free = [f"--{name}-bind-address=127.0.0.1:{free_port()}" for name in ("healthz", "metrics")]
            servers = make(events, "--bind-address-hard-fail", *free, f"{flag}={address}")
            servers.start()
            try:
                async with asyncio.timeout(20):
                    await servers.guard()
            finally:
                servers.stop()

        with pytest.raises(FatalError) as caught:
            asyncio.run(main())
        assert str(caught.value) == error
    assert events == [(ObjectReference("Node", "", "here"), "Warning", reason, "StartKubeProxy", error)]


def test_soft_failure_is_logged_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "BIND_RETRY_SECONDS", 0.01)
    events = Events()

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            servers = make(
                events, f"--healthz-bind-address=127.0.0.1:{port}", f"--metrics-bind-address=[::1]:{free_port()}"
            )
            servers.start()
            Log(caplog).wait("health address cannot be bound")
        until(lambda: answers(port))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await servers.guard()
        servers.stop()

    asyncio.run(main())
    assert events == []


def probe(folder: Path, what: str) -> tuple[int, str]:
    ran = subprocess.run(
        [sys.executable, "-m", "pyebpf_proxy", "probe", what],
        env={"PYEBPF_PROXY_DIRECTORY": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return ran.returncode, (ran.stdout + ran.stderr).strip()


def test_probes_ask_the_agent_and_not_another_process_on_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running kube-proxy answers on 10256: that does not make the agent ready."""
    monkeypatch.setattr(server_module, "BIND_RETRY_SECONDS", 0.05)
    silent = f"the agent of {tmp_path} does not answer: No such file or directory"
    assert probe(tmp_path, "live") == (1, silent)
    status, output = probe(tmp_path, "alive")
    assert (status, output.endswith("; see pyebpf-proxy probe --help")) == (2, True), output
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        async def main() -> None:
            local = Local(tmp_path, lambda addresses: {}, dict)
            arguments = (f"--healthz-bind-address=127.0.0.1:{port}", "--metrics-bind-address=")
            servers = make(Events(), *arguments, local=local)
            servers.start()
            try:
                servers.observer.changed([Change("Node", "", "here", Node())], complete=True)
                until((tmp_path / "agent.sock").exists)
                taken = f"listen tcp 127.0.0.1:{port}: bind: address already in use"
                until(lambda: taken in probe(tmp_path, "ready")[1])
                servers.observer.synced(0.1, ok=True, full=True)
                assert probe(tmp_path, "ready")[0] == 1
                assert probe(tmp_path, "live")[0] == 0
                other.close()
                until(lambda: probe(tmp_path, "ready")[0] == 0)
                servers.observer.changed([Change("Node", "", "here", None)], complete=True)
                assert probe(tmp_path, "ready")[0] == 1
                assert probe(tmp_path, "live")[0] == 0
            finally:
                servers.stop()

        asyncio.run(main())


@pytest.mark.parametrize("left", ["nothing", "the socket of a killed agent"])
def test_a_probe_waits_for_an_agent_that_starts(tmp_path: Path, left: str) -> None:
    """Otherwise the kubelet asks again a second later, and the pod is ready that much later."""
    if left != "nothing":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as old:
            old.bind(str(tmp_path / "agent.sock"))
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(probe, tmp_path, "live")
        # The probe has begun when it has been refused at least once: it cannot succeed before the agent starts.
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.5)

        async def main() -> None:
            local = Local(tmp_path, lambda addresses: {}, dict)
            servers = make(Events(), "--healthz-bind-address=", "--metrics-bind-address=", local=local)
            servers.start()
            try:
                until(asked.done)
            finally:
                servers.stop()

        asyncio.run(main())
        assert asked.result()[0] == 0


def test_an_agent_is_ready_when_it_has_programmed_the_node_and_not_before(tmp_path: Path) -> None:
    """The pages of kube-proxy succeed before that, and still do; the kubelet's readiness probe must not."""
    port = free_port()

    async def main() -> None:
        local = Local(tmp_path, lambda addresses: {}, dict)
        servers = make(Events(), f"--healthz-bind-address=127.0.0.1:{port}", "--metrics-bind-address=", local=local)
        servers.start()
        try:
            until(lambda: answers(port) and (tmp_path / "agent.sock").exists())
            servers.observer.changed([Change("Node", "", "here", Node())], complete=True)
            assert (get(port, "/healthz").status, get(port, "/livez").status) == (200, 200)
            assert probe(tmp_path, "live")[0] == 0
            unprogrammed = "this agent has not programmed the node yet: its log says what it waits for"
            assert probe(tmp_path, "ready") == (1, unprogrammed)
            servers.observer.queued()
            servers.observer.synced(0.1, ok=False, full=True)
            assert probe(tmp_path, "ready") == (1, unprogrammed)
            # A probe that is under way succeeds with the sync: the kubelet's next one is seconds later.
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(probe, tmp_path, "ready")
                await asyncio.sleep(0.5)
                servers.observer.synced(0.1, ok=True, full=True)
                assert asked.result()[0] == 0
            assert (get(port, "/healthz").status, get(port, "/livez").status) == (200, 200)
        finally:
            servers.stop()

    asyncio.run(main())
