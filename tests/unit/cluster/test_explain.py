# SPDX-License-Identifier: Apache-2.0
"""``cluster explain``: which port of a Service is meant."""

from __future__ import annotations

from typing import Any

import pytest

from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.explain import _port
from pyebpf_proxy.see.answers import QUESTION

#: As in every cluster: one number, two protocols.
DNS: Any = {
    "metadata": {"namespace": "kube-system", "name": "kube-dns"},
    "spec": {
        "clusterIP": "10.96.0.10",
        "ports": [
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
            {"name": "metrics", "port": 9153, "protocol": "TCP"},
        ],
    },
}


@pytest.mark.parametrize(("wanted", "name"), [("dns", "dns"), ("dns-tcp", "dns-tcp"), ("9153", "metrics")])
def test_a_port_by_its_name_or_number(wanted: str, name: str) -> None:
    assert _port(DNS, wanted)["name"] == name


def test_a_number_of_two_protocols_is_ambiguous() -> None:
    """It was answered for UDP alone."""
    with pytest.raises(ClusterError) as caught:
        _port(DNS, "53")
    assert caught.value.status == QUESTION
    assert str(caught.value) == (
        "Service kube-system/kube-dns has several ports 53 (dns UDP, dns-tcp TCP); specify one by its name, as"
        " kube-system/kube-dns:dns"
    )


def test_a_name_of_digits_comes_before_a_number() -> None:
    ports = [{"name": "web", "port": 80}, {"name": "80", "port": 8080}]
    service: Any = {"metadata": DNS["metadata"], "spec": {"clusterIP": "10.96.0.1", "ports": ports}}
    assert _port(service, "80")["port"] == 8080
