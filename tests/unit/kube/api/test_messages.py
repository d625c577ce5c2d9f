# SPDX-License-Identifier: Apache-2.0
"""Messages of the API server for a list and a watch."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from pyebpf_proxy.kube.api.messages import is_earlier, read_bookmark, read_page


@pytest.mark.parametrize(
    ("version", "other", "earlier"),
    [
        ("9", "10", True),
        ("10", "9", False),
        ("10", "10", False),
        ("010", "10", False),
        ("0", "1", True),
        ("18446744073709551615", "18446744073709551616", True),
        ("", "10", False),
        ("a", "b", False),
        ("9", "b", False),
        ("٩", "10", False),
    ],
)
def test_resource_versions_are_compared_as_numbers(version: str, other: str, earlier: bool) -> None:
    assert is_earlier(version, other) == earlier


@pytest.mark.parametrize(
    ("annotations", "ends"),
    [
        ('{"a": {"b": [1]}, "k8s.io/initial-events-end": "true"}', True),
        ('{"k8s.io/initial-events-end": "false"}', False),
        ('{"k8s.io/initial-events-end": true}', False),
        ("{}", False),
        ("null", False),
    ],
)
def test_the_bookmark_at_the_end_of_a_list(annotations: str, ends: bool) -> None:
    text = f'{{"metadata": {{"resourceVersion": "7", "annotations": {annotations}}}}}'
    metadata = read_bookmark(text.encode()).metadata
    assert (metadata.resource_version, metadata.ends_list) == ("7", ends)


def test_a_bookmark_with_many_annotations_takes_little_memory() -> None:
    annotations = ",".join(f'"{number}":0' for number in range(200_000))
    text = f'{{"metadata": {{"annotations": {{{annotations}}}}}}}'.encode()
    tracemalloc.start()
    try:
        assert not read_bookmark(text).metadata.ends_list
        assert tracemalloc.get_traced_memory()[1] < len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("item", "refused"), [("0", True), ("{}", True), ('{"metadata":{}}', False)])
def test_a_page_of_very_many_items_takes_little_memory(item: str, refused: bool) -> None:
    number = (2 << 20) // len(item)
    text = f'{{"metadata": {{"resourceVersion": "7"}}, "items": [{",".join([item] * number)}]}}'.encode()
    tracemalloc.start()
    try:
        if refused:
            with pytest.raises(msgspec.DecodeError, match=r"\$\.items\[0\]"):
                read_page(text)
        else:
            assert len(read_page(text).items or ()) == number
        assert tracemalloc.get_traced_memory()[1] < 5 * len(text)
    finally:
        tracemalloc.stop()


def test_a_small_page_is_read_whatever_is_in_it() -> None:
    page = read_page(b'{"metadata": {"resourceVersion": "7"}, "items": [0, {"metadata": {"name": "a"}}]}')
    assert [bytes(item) for item in page.items or ()] == [b"0", b'{"metadata": {"name": "a"}}']
