# SPDX-License-Identifier: Apache-2.0
"""Warnings of ``status`` that need no node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyebpf_proxy.config.datapath_model import Maps
from pyebpf_proxy.see import model, status
from pyebpf_proxy.servers import local as servers_local
from pyebpf_proxy.services.losses import OVER_LIMIT, LossMessage
from pyebpf_proxy.services.model import IPFamily, Protocol, ServicePortName


def test_a_failing_api_server_is_named_with_the_reason() -> None:
    (shared, own) = status._about_source({"": "it refuses the connection", "nodes": "403: forbidden"})
    assert shared.what == "the API server fails: it refuses the connection"
    assert own.what == "nodes cannot be watched: 403: forbidden"
    assert shared.remedy
    assert not list(status._about_source({}))


@pytest.mark.parametrize(("services", "more"), [(1, ""), (200, " (200 such Services)")])
def test_services_over_a_limit_are_named(services: int, more: str) -> None:
    over = {("tenant", f"web-{number}"): ["spec.ports: 200 are more than 128"] for number in range(services)}
    (warning,) = status._about_limits(servers_local._over(over))
    assert warning.what == f"Service tenant/web-0 is over a limit{more}: spec.ports: 200 are more than 128"
    assert not list(status._about_limits(servers_local._over({})))


@pytest.mark.parametrize(
    ("services", "more"),
    [
        (1, ""),
        (2, "; 1 other Service has such addresses"),
        (200, "; 199 other Services have such addresses"),
    ],
)
def test_services_that_are_refused_an_address_are_named(services: int, more: str) -> None:
    text = "spec.externalIPs: 10.96.0.10:80/TCP is already used by Service default/web, not served there"
    messages = {
        ("tenant", f"web-{number}"): {LossMessage("tenant", f"web-{number}", f"Service tenant/web-{number}: {text}")}
        for number in range(services)
    }
    limit = {("tenant", "big"): {LossMessage("tenant", "big", "Service tenant/big: too many", OVER_LIMIT)}}
    (warning,) = status._about_losses(servers_local._not_served({**limit, **messages}))
    assert warning.what == f"Service tenant/web-0: {text}{more}"
    assert not list(status._about_losses(servers_local._not_served(limit)))


@pytest.mark.parametrize(
    ("ports", "more"),
    [(1, ""), (2, "; this also affects 1 other service port"), (9, "; this also affects 8 other service ports")],
)
def test_service_ports_that_do_not_fit_are_named(ports: int, more: str) -> None:
    names = [ServicePortName("default", f"web-{n}", "http", Protocol.TCP, IPFamily.IPV4) for n in range(ports)]
    unwritten = dict.fromkeys(names, "map backends4 is full")
    (warning,) = status._about_unwritten(servers_local._not_written(unwritten))
    assert (
        warning.what == f"default/web-0:http TCP IPv4 is not in the kernel as it should be: map backends4 is full{more}"
    )
    assert not list(status._about_unwritten(servers_local._not_written({})))


def test_a_run_folder_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "obstacle", lambda directory: "it is read-only")
    (warning,) = status._about_run_folder(Path("/run/x"))
    assert warning.what == "the run folder /run/x cannot be written to: it is read-only"
    monkeypatch.setattr(status, "obstacle", lambda directory: "")
    assert not list(status._about_run_folder(Path("/run/x")))


def test_a_missing_optional_feature_is_no_warning() -> None:
    """A stock kernel allows conntrack's lookup functions only with CAP_SYS_ADMIN, which the DaemonSet lacks."""
    (warning,) = status._about_refusals({"conntrack lookup": "it needs CAP_SYS_ADMIN", "XDP": "too old"})
    assert warning.what == "XDP is not available: too old"


@pytest.mark.parametrize("why", ["", "XDP needs the fast path, which is off (fastPath: false)"])
def test_xdp_that_is_not_available_is_one_warning(why: str) -> None:
    """That its program is on no device follows from the refusal. Without an agent the refusals are not known."""
    refusals = {"XDP": why} if why else {}
    eth0 = model.DeviceView(name="eth0", program="tc_ethernet", wanted="tc_ethernet")
    found = [*status._about_refusals(refusals), *status._about_xdp([eth0], {"xdp": 1}, refusals)]
    (warning,) = found
    assert warning.what == (
        f"XDP is not available: {why}"
        if why
        else "XDP is configured, but the program is attached to no device: tc handles all packets"
    )


@pytest.mark.parametrize("name", [*status._FILLED, "services", "slots"])
def test_the_remedy_for_a_full_map_names_the_option(name: str) -> None:
    """The datapath configuration is decoded strictly: with another name, the agent does not start."""
    (option,) = re.findall(r"raise maps\.(\w+) in", status._fill_remedy(name))
    assert option in {str(info.alias) for info in Maps.model_fields.values()}
