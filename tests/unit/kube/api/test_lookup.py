# SPDX-License-Identifier: Apache-2.0
"""Services of one name, read from the API server for a command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyebpf_proxy.config.effective import ApiServer
from pyebpf_proxy.kube.api import lookup
from pyebpf_proxy.services.frontends import is_served, why_unserved
from tests.support.scripted_api import ScriptedApi, service

HEADLESS = "it is headless (clusterIP: None), so it has no address: DNS answers with those of its pods"
OTHER_NAME = "its type is ExternalName, so it has no address: DNS answers with another name"
OTHER_PROXY = 'its label service.kubernetes.io/service-proxy-name leaves it to another proxy, "other"'


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with ScriptedApi() as api:
        yield api


def settings(api: ScriptedApi) -> ApiServer:
    return ApiServer("", api.url, 5.0, 10)


def test_services_that_the_agent_does_not_watch_are_found_too(api: ScriptedApi) -> None:
    labelled = service("db")
    labelled["metadata"] |= {"namespace": "c", "labels": {"service.kubernetes.io/service-proxy-name": "other"}}
    items = [service("db", "None"), service("db", "", type="ExternalName"), labelled, service("db"), service("db", "")]
    for item, namespace in zip(items, "abcde", strict=True):
        item["metadata"]["namespace"] = namespace
    api.has("services", *items)
    found = lookup.services_named(settings(api), "db")
    assert found is not None
    wanted = [HEADLESS, OTHER_NAME, OTHER_PROXY, "", "it has no ClusterIP"]
    assert {key[0]: why_unserved(each) for key, each in found.items()} == dict(zip("abcde", wanted, strict=True))
    assert all(is_served(each) == (not why_unserved(each)) for each in found.values())
    (request,) = api.asked("services")
    assert request.query == {"fieldSelector": "metadata.name=db"}


def test_a_server_that_refuses_or_sends_nonsense_says_nothing(api: ScriptedApi) -> None:
    api.script("services", lambda e: e.status(403, "forbidden"), lambda e: e.answer(200, b"[{"))
    assert lookup.services_named(settings(api), "db") is None
    assert lookup.services_named(settings(api), "db") is None


def test_a_silent_server_does_not_keep_the_user_waiting(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_SECONDS", 0.2)
    api.script("services", lambda e: e.hold())
    assert lookup.services_named(settings(api), "db") is None


def test_a_text_that_is_no_name_is_not_sent(api: ScriptedApi) -> None:
    for text in ("", "a,metadata.name=b", "Web", "a b", "a\n"):
        assert lookup.services_named(settings(api), text) == {}
    assert api.asked("services") == []
