# SPDX-License-Identifier: Apache-2.0
"""The batches of the API server's source: what is delivered before everything counts as listed."""

from __future__ import annotations

import threading
import time

from pyebpf_proxy.kube.api.access import Access
from tests.support.scripted_api import Exchange, Following, ScriptedApi, node, service


def test_the_first_complete_batch_has_the_end_of_the_last_list() -> None:
    """Also if that list ends just when the loop has taken the changes before it, and looks whether all are there."""
    looks = threading.Event()
    slices = {
        "metadata": {"name": "a-1", "namespace": "default", "labels": {"kubernetes.io/service-name": "a"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.1"]}],
        "ports": [{"name": "", "port": 80, "protocol": "TCP"}],
    }

    def last(exchange: Exchange) -> None:
        assert looks.wait(10)
        exchange.initial([slices], "1")
        exchange.hold()

    with ScriptedApi() as api:
        api.has("nodes", node())
        api.has("services", service("a"))
        api.script("endpointslices", last)
        following = Following(Access(api.url))
        source = following._source
        is_complete = source._is_complete

        def look() -> bool:
            if source._unlisted == {"endpointslices"}:
                looks.set()
                end = time.monotonic() + 1
                while source._unlisted and time.monotonic() < end:
                    time.sleep(0.01)
            return is_complete()

        source._is_complete = look  # type: ignore[method-assign]
        with following:
            following.until(lambda: following.complete)
            batches = list(following.batches)
    first = next(i for i, batch in enumerate(batches) if batch.complete)
    delivered = {(change.kind, change.name) for batch in batches[: first + 1] for change in batch.changes}
    assert delivered == {("Service", "a"), ("EndpointSlice", "a-1"), ("Node", "node1")}
