# SPDX-License-Identifier: Apache-2.0
"""The selectors of the watched resources."""

from __future__ import annotations

import pytest

from pyebpf_proxy.kube.api import resources


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("node-1.example.com", "metadata.name=node-1.example.com"),
        ("a,b", r"metadata.name=a\,b"),
        ("a=b", r"metadata.name=a\=b"),
        ("a\\b", r"metadata.name=a\\b"),
    ],
)
def test_the_name_of_a_node_is_escaped_as_in_go(name: str, selector: str) -> None:
    assert resources.node(name).selectors == {"fieldSelector": selector}
