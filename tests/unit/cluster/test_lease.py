# SPDX-License-Identifier: Apache-2.0
"""The Lease: answers that are lost, and two commands at once."""

from __future__ import annotations

import datetime

import pytest

from pyebpf_proxy.cluster import lease as module
from pyebpf_proxy.cluster import task_pod
from pyebpf_proxy.cluster.api import LEASES, PODS, Object, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError, StoppedError
from pyebpf_proxy.cluster.lease import NAME as LEASE
from pyebpf_proxy.cluster.lease import Lease
from pyebpf_proxy.cluster.objects import NAMESPACE
from tests.unit.cluster.fake_api import FakeApi


def test_a_lease_whose_answer_was_lost_is_held_by_this_command() -> None:
    """The request is made again, and meets the version that the first one wrote."""
    api = FakeApi()
    path = LEASES.path(NAMESPACE, LEASE)
    api.put(path, {"metadata": {"name": LEASE, "namespace": NAMESPACE}, "spec": {"holderIdentity": None}})

    def answer_is_lost(method: str, asked: str) -> None:
        if method == "PATCH":
            api.after = lambda method, path: None
            raise RefusedError(409, "Conflict", "the object has been modified")  # of the second attempt

    api.after = answer_is_lost
    with Lease(api, "install", print) as lease:
        lease.check()
        assert api.stored[path]["spec"]["holderIdentity"].startswith("install by ")
    assert not api.stored[path]["spec"].get("holderIdentity")


def test_a_lease_that_another_command_takes_at_the_same_time() -> None:
    api = FakeApi()
    path = LEASES.path(NAMESPACE, LEASE)
    api.put(path, {"metadata": {"name": LEASE, "namespace": NAMESPACE}, "spec": {"holderIdentity": None}})

    def other(method: str, asked: str) -> None:
        if method == "PATCH":
            api.before = lambda method, path: None
            api.put(path, api.stored[path] | {"spec": {"holderIdentity": "rollback by operator@laptop"}})

    api.before = other
    with pytest.raises(ClusterError, match="another command changes this cluster: it began at the same time"):
        Lease(api, "install", print).__enter__()


@pytest.mark.parametrize("released", [True, False])
def test_a_lease_that_is_free_again_is_lost(monkeypatch: pytest.MonkeyPatch, released: bool) -> None:
    """The machine slept; meanwhile another command ran to its end, or the Lease was deleted."""
    api = FakeApi()
    path = LEASES.path(NAMESPACE, LEASE)

    def renewed(method: str, asked: str) -> None:
        assert method != "PATCH", "it renews a Lease that it does not hold"

    with Lease(api, "install", print) as lease:
        lease.check()
        taken = api.stored.pop(path)
        if released:
            api.put(path, taken | {"spec": {"holderIdentity": None}})
        api.before = renewed
        with pytest.raises(StoppedError, match="has changed the cluster meanwhile" if released else "was deleted"):
            lease.check()
        monkeypatch.setattr(module, "_RENEW", 0.0)
        lease._renew()


def test_a_command_that_has_lost_the_lease_starts_no_pod() -> None:
    """The pod that verifies a node removes kube-proxy's rules: another command may have given the node back."""
    api = FakeApi("n1")
    path = LEASES.path(NAMESPACE, LEASE)
    with Lease(api, "install", print):
        api.put(path, api.stored[path] | {"spec": {"holderIdentity": "rollback by operator@laptop"}})
        with pytest.raises(StoppedError, match="another command has taken over: rollback by operator@laptop"):
            task_pod.run(api, "verify", "n1", "registry.example/pyebpf-proxy:1", ["true"], 0.1)
    assert PODS.path(NAMESPACE, task_pod.name_of("verify", "n1")) not in api.stored


def held(seconds_ago: float) -> Object:
    """A Lease of another command, by a clock that is wrong by so much."""
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds_ago)
    specification = {"holderIdentity": "rollback by operator@laptop", "leaseDurationSeconds": 0.3}
    specification["renewTime"] = then.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {"metadata": {"name": LEASE, "namespace": NAMESPACE}, "spec": specification}


@pytest.mark.parametrize("hours", [-9, 9])
@pytest.mark.parametrize("lives", [True, False])
def test_a_lease_of_a_machine_whose_clock_is_hours_off(
    monkeypatch: pytest.MonkeyPatch, hours: int, lives: bool
) -> None:
    """As where the clock has local time. What counts is whether the Lease is renewed while this command looks."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)
    api, path = FakeApi(), LEASES.path(NAMESPACE, LEASE)
    api.put(path, held(hours * 3600))

    def renew(method: str, asked: str) -> None:
        if lives:
            assert method == "GET", "it is taken from a command that runs"
            api.put(path, held(hours * 3600))

    api.after = renew
    if lives:
        with pytest.raises(ClusterError, match="another command changes this cluster: rollback by operator@laptop"):
            Lease(api, "install", print).__enter__()
    else:
        with Lease(api, "install", print) as lease:
            lease.check()


@pytest.mark.parametrize("how", ["released", "deleted"])
def test_a_lease_that_its_holder_gives_up_meanwhile(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)
    api, path = FakeApi(), LEASES.path(NAMESPACE, LEASE)
    api.put(path, held(9 * 3600) | {"spec": held(9 * 3600)["spec"] | {"leaseDurationSeconds": 600}})

    def end(method: str, asked: str) -> None:
        api.after = lambda method, path: None
        if how == "released":
            api.put(path, api.stored[path] | {"spec": {"holderIdentity": None}})
        else:
            del api.stored[path]

    api.after = end
    with Lease(api, "install", print) as lease:
        lease.check()


def test_ctrl_c_while_the_lease_is_taken() -> None:
    """The next command need not wait until it expires."""
    api, path = FakeApi(), LEASES.path(NAMESPACE, LEASE)

    def interrupt(method: str, asked: str) -> None:
        if method == "POST":
            api.after = lambda method, path: None
            raise KeyboardInterrupt

    api.after = interrupt
    with pytest.raises(KeyboardInterrupt):
        Lease(api, "install", print).__enter__()
    assert not api.stored[path]["spec"].get("holderIdentity")
