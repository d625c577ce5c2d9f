# SPDX-License-Identifier: Apache-2.0
"""Files in, changes out: last valid states, duplicates, and files that appear and disappear."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyebpf_proxy.kube.catalogue import Catalogue
from pyebpf_proxy.kube.objects import Service
from pyebpf_proxy.kube.source import Change


def service(name: str, port: object = 80, **more: object) -> str:
    document = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": port}]},
        **more,
    }
    return json.dumps(document) + "\n---\n"


class Folder:
    """A catalogue, its messages, and the sum of its changes."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.noted: list[str] = []
        self.catalogue = Catalogue(self.messages.append, self.noted.append)
        self.ports: dict[str, int | None] = {}

    def write(self, name: str, *texts: str) -> list[Change]:
        self.catalogue.read(name, "".join(texts).encode())
        return self.take()

    def remove(self, name: str) -> list[Change]:
        self.catalogue.remove(name)
        return self.take()

    def take(self) -> list[Change]:
        changes = self.catalogue.changes()
        for change in changes:
            if change.object is None:
                del self.ports[change.name]
            else:
                assert isinstance(change.object, Service)
                assert change.object.spec.ports is not None
                self.ports[change.name] = change.object.spec.ports[0].port
        return changes


@pytest.fixture
def folder() -> Folder:
    return Folder()


def test_only_objects_that_differ_are_delivered(folder: Folder) -> None:
    assert len(folder.write("a.yaml", service("x"), service("y"))) == 2
    assert folder.write("a.yaml", service("x"), service("y")) == []
    assert folder.write("a.yaml", "# moved\n", service("y"), service("x", unknownField=1)) == []
    (change,) = folder.write("a.yaml", service("x", 81), service("y"))
    assert change.name == "x"
    (change,) = folder.write("a.yaml", service("x", 81))
    assert (change.name, change.object) == ("y", None)
    assert folder.ports == {"x": 81}
    assert folder.messages == []


def test_a_deleted_file_removes_its_objects(folder: Folder) -> None:
    folder.write("a.yaml", service("x"), service("y"))
    folder.write("b.yaml", service("z"))
    assert [change.name for change in folder.remove("a.yaml")] == ["x", "y"]
    assert folder.remove("a.yaml") == []
    assert folder.ports == {"z": 80}


def test_an_object_that_becomes_invalid_keeps_its_last_valid_state(folder: Folder) -> None:
    folder.write("a.yaml", service("x"), service("y"))
    folder.write("a.yaml", service("x", 70000), service("y", 81))
    assert folder.ports == {"x": 80, "y": 81}
    assert folder.messages == [
        "a.yaml: Service default/x: spec.ports[0].port: 70000 is not a port (1–65535); its last good state stays"
    ]
    folder.write("a.yaml", service("x", 70000), service("y", 81))
    assert len(folder.messages) == 1
    folder.write("a.yaml", service("x", "http"), service("y", 82), service("z", 0))
    assert folder.ports == {"x": 80, "y": 82}
    assert folder.messages[1:] == [
        'a.yaml: Service default/x: spec.ports[0].port: "http": expected int, got str; its last good state stays',
        "a.yaml: Service default/z: spec.ports[0].port: 0 is not a port (1–65535)",
    ]
    folder.write("a.yaml", service("x", 90))
    assert folder.ports == {"x": 90}
    folder.write("a.yaml", service("x", 70000))
    folder.remove("a.yaml")
    assert folder.ports == {}


def test_an_unreadable_text_removes_no_object(folder: Folder) -> None:
    folder.write("a.yaml", service("x"), service("y"))
    folder.write("a.yaml", service("x", 81), "z: [\n")
    assert folder.ports == {"x": 81, "y": 80}
    assert folder.messages == [
        "a.yaml: line 4: bad YAML: did not find expected node content; the objects that were in the file stay"
    ]
    folder.write("a.yaml", service("x", 81))
    assert folder.ports == {"x": 81}


def test_an_object_without_a_name_may_be_any_object_of_the_file(folder: Folder) -> None:
    folder.write("a.yaml", service("x"), service("y"))
    folder.write("a.yaml", service("x", 81), service(""))
    assert folder.ports == {"x": 81, "y": 80}
    assert folder.messages == ["a.yaml: Service in namespace default: metadata.name: missing"]


def test_the_last_file_by_name_counts(folder: Folder) -> None:
    folder.write("b.yaml", service("x", 2))
    assert folder.write("a.yaml", service("x", 1)) == []
    assert folder.messages == ["Service default/x: is in a.yaml, b.yaml; b.yaml counts"]
    folder.write("b.yaml", service("x", 22))
    assert len(folder.messages) == 1
    folder.write("c.yaml", service("x", 3))
    assert folder.ports == {"x": 3}
    folder.remove("c.yaml")
    assert folder.ports == {"x": 22}
    folder.remove("b.yaml")
    assert folder.ports == {"x": 1}
    assert len(folder.messages) == 3
    folder.write("a.yaml", service("x", 4), service("x", 5))
    assert folder.ports == {"x": 5}
    assert folder.messages[3:] == ["a.yaml: Service default/x: is in this file more than once, the last one counts"]


def test_a_deleted_file_has_the_lowest_priority(folder: Folder) -> None:
    """A file is renamed: the old name is still known when the new one is read."""
    folder.write("z.yaml", service("x", 1))
    folder.catalogue.read("a.yaml", service("x", 2).encode())
    (change,) = folder.catalogue.changes(leaving={"z.yaml"})
    assert isinstance(change.object, Service)
    assert change.object.spec.ports is not None
    assert change.object.spec.ports[0].port == 2
    folder.catalogue.remove("z.yaml")
    assert folder.catalogue.changes() == []
    assert folder.messages == []


def test_other_kinds_are_noted_once(folder: Folder) -> None:
    deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\n---\n"
    folder.write("a.yaml", deployment, deployment, service("x"))
    folder.write("a.yaml", deployment, service("x", 81))
    assert folder.messages == []
    assert folder.noted == ["a.yaml: objects of kind apps/v1/Deployment are not used"]
    assert folder.ports == {"x": 81}


contents = st.dictionaries(st.sampled_from("xyz"), st.integers(1, 3), max_size=3)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | contents), max_size=15))
def test_the_order_of_file_changes_does_not_matter(steps: list[tuple[str, dict[str, int] | None]]) -> None:
    folder = Folder()
    files: dict[str, dict[str, int]] = {}
    for name, content in steps:
        if content is None:
            files.pop(name, None)
            folder.remove(f"{name}.yaml")
        else:
            files[name] = content
            folder.write(f"{name}.yaml", *(service(key, port) for key, port in content.items()))
        expected = {key: port for file in sorted(files) for key, port in files[file].items()}
        assert folder.ports == expected
        assert len(folder.catalogue) == len(expected)
