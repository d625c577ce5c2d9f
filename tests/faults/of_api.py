# SPDX-License-Identifier: Apache-2.0
"""Faults of the proxies' sources: manifests, and the API server with its certificates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.api_load import entries
from pyebpf_proxy.lab.addresses import cluster_ip
from pyebpf_proxy.lab.manifests import Object, endpoint, endpoint_slice
from tests.faults.background import in_background
from tests.faults.contenders import ByApi
from tests.faults.ground import MEANWHILE, TARGET_PORT, Ground, wait_until
from tests.support.apiserver import ApiServer
from tests.support.damage import CannotBeMadeError
from tests.support.spoiling_proxy import Proxy as Spoiler

#: Changes a second of a manifest.
_CHURN = 100
#: Services whose endpoints change at the API server, and how many of them change in one transaction.
_CHANGING, _AT_ONCE = 100, 20
#: With less than this share of the requested changes it is a different fault.
_LEAST_CHANGES = 0.95
#: Objects that come at once: Services, each with so many EndpointSlices.
SERVICES, SLICES = 20_000, 4
_NAMESPACES = 50


@contextmanager
def _repeated(step: Callable[[int], None], rate: float) -> Iterator[list[int]]:
    """Call ``step`` with a number, ``rate`` times a second, in a thread; raises its error at the end.

    Returns a list with one element, the number of steps.
    """
    made = [0]

    def work(stop: threading.Event) -> None:
        begun = time.monotonic()
        while not stop.wait(max(0.0, begun + made[0] / rate - time.monotonic())):
            step(made[0])
            made[0] += 1

    with in_background(work):
        yield made


@contextmanager
def manifest_churn(ground: Ground) -> Iterator[None]:
    """The endpoints of a Service change 100 times a second."""

    def step(number: int) -> None:
        pods = (("web-1",), ("web-2",), ("web-1", "web-2"))[number % 3]
        ground.proxy.apply("churn", ground.service("churn", 60, *pods))

    with _repeated(step, _CHURN):
        yield


@contextmanager
def api_churn(ground: Ground) -> Iterator[None]:
    """Endpoints of 100 Services change ``ground.changes`` times a second.

    They are written directly into etcd: through the API server this machine would be too slow. It delivers them like
    all others. In the end every Service has its last endpoint.
    """
    assert ground.api is not None
    _put(ground.api, [each for number in range(_CHANGING) for each in _changing(ground, number, "web-1")])

    def step(number: int) -> None:
        assert ground.api is not None
        batches = _CHANGING // _AT_ONCE
        first = number % batches * _AT_ONCE
        pod = ("web-2", "web-1")[number // batches % 2]
        _put(ground.api, [_changing(ground, first + n, pod)[1] for n in range(_AT_ONCE)])

    begun = time.monotonic()
    with _repeated(step, ground.changes / _AT_ONCE) as made:
        yield
        rate = made[0] * _AT_ONCE / (time.monotonic() - begun)
    if rate < _LEAST_CHANGES * ground.changes:
        raise CannotBeMadeError(f"this machine makes {rate:.0f} changes a second")
    ground.notes.append(f"{made[0] * _AT_ONCE} changes, {rate:.0f} a second")
    _put(ground.api, [_changing(ground, number, "web-2")[1] for number in range(_CHANGING)])


def churn_is_applied(ground: Ground) -> bool:
    """Whether every Service of ``api_churn`` has its last endpoint."""
    return ground.right_endpoints({cluster_ip(100 + number).v4: "web-2" for number in range(_CHANGING)})


def _changing(ground: Ground, number: int, pod: str) -> list[Object]:
    """A Service of ``api_churn`` and its slice."""
    made = ground.service(f"churn-{number}", 100 + number, pod)
    return [_of_one_family(made[0]), made[1]]


@contextmanager
def at_once(ground: Ground) -> Iterator[None]:
    """100 000 objects. The last Service has endpoints that answer."""
    assert ground.api is not None
    api = ground.api
    begun = time.monotonic()

    def write(_: threading.Event) -> None:
        batch: list[Object] = []
        for number in range(SERVICES):
            batch += _crowd(ground, number, SLICES)
            if len(batch) >= 100:
                _put(api, batch)
                batch = []
        _put(api, batch)
        ground.notes.append(f"{SERVICES * (1 + SLICES)} objects in {time.monotonic() - begun:.0f} s")

    with in_background(write):
        yield


def crowd_is_served(ground: Ground) -> bool:
    """Whether the last Service of ``at_once`` is served."""
    return ground.right_endpoints({_crowd_address(SERVICES - 1): "web-1"})


def _crowd_address(number: int) -> str:
    return f"10.96.{16 + number // 250}.{number % 250 + 1}"


def _crowd(ground: Ground, number: int, slices: int) -> list[Object]:
    """A Service in another namespace, one of many, with so many slices of one endpoint."""
    made = ground.service(f"crowd-{number}", 0, "web-1")
    address = _crowd_address(number)
    made[0]["spec"] |= {"clusterIP": address, "clusterIPs": [address]}
    found = [_of_one_family(made[0])]
    for n in range(slices):
        pod = f"10.244.{2 + n}.{number % 250 + 1}" if number < SERVICES - 1 else ground.lab.pods["web-1"].address.v4
        found.append(
            endpoint_slice(f"crowd-{number}", 4, [], [endpoint(pod, f"node{2 + n}")], name=f"crowd-{number}-{n}")
        )
        found[-1]["ports"] = [{"name": "p", "port": TARGET_PORT, "protocol": "TCP"}]
    for each in found:
        each["metadata"]["namespace"] = f"team-{number % _NAMESPACES}"
    return found


def bulk(ground: Ground, count: int) -> None:
    """So many Services with one slice each, delivered to the proxy at once."""
    objects = [each for number in range(count) for each in _crowd(ground, number, 1)]
    if ground.api is None:
        ground.proxy.apply("bulk", objects)
    else:
        _put(ground.api, objects)


def _of_one_family(item: Object) -> Object:
    item["spec"] |= {"ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack"}
    item["spec"]["clusterIPs"] = item["spec"]["clusterIPs"][:1]
    return item


def _put(api: ApiServer, objects: list[Object]) -> None:
    """Write them into etcd, without the fields that the API server would add: proxies do not need them."""
    api.put(dict(entry for each in objects for entry in entries(each, allocated=False)))


# ---- the API server ---------------------------------------------------------------


@contextmanager
def garbage(ground: Ground) -> Iterator[None]:
    """No answer of the API server, watches included, is JSON."""
    assert ground.api is not None
    assert isinstance(ground.proxy, ByApi)
    with Spoiler(ground.api.port, ground.api.folder) as spoiler:
        spoiler.set("garbage")
        ground.proxy.relay.target = spoiler.port
        ground.proxy.relay.cut()
        try:
            yield
        finally:
            ground.proxy.relay.target = ground.api.port


@contextmanager
def expired_certificate(ground: Ground) -> Iterator[None]:
    """The proxy's own certificate expires, and the API server rejects it. Then the same file gets a new one."""
    assert ground.api is not None
    assert isinstance(ground.proxy, ByApi)
    end = ground.api.client_certificate(ground.proxy.credentials, seconds=2)
    wait_until(lambda: time.time() > end, "the certificate has expired")
    # On an established connection the certificate is only checked at the next request.
    ground.proxy.relay.cut()
    try:
        yield
        _still_without(ground)
    finally:
        ground.api.client_certificate(ground.proxy.credentials)


@contextmanager
def unknown_authority(ground: Ground) -> Iterator[None]:
    """The API server has a certificate of a new CA, which the proxy's file gets later."""
    assert ground.api is not None
    assert isinstance(ground.proxy, ByApi)
    ground.api.rotate_authority()
    ground.proxy.relay.cut()
    try:
        yield
        _still_without(ground)
    finally:
        ground.proxy.trust()


def _still_without(ground: Ground) -> None:
    """RuntimeError if the proxy got objects that it must not get."""
    if ground.serves(MEANWHILE):
        raise RuntimeError("the proxy still followed the API server")
