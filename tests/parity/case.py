# SPDX-License-Identifier: Apache-2.0
"""A case: a configuration file and a command line for both programs."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

HEADER = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

#: Placeholders in arguments for the files of the case's own folder.
CONFIG = "{dir}/config.yaml"
OUTPUT = "{dir}/written.yaml"


class Case(NamedTuple):
    """One case. ``file`` is the text of ``config.yaml``, or None; ``arguments`` hold ``{dir}`` for its folder."""

    name: str
    arguments: tuple[str, ...]
    file: bytes | None = None

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": self.name, "arguments": list(self.arguments)}
        if self.file is not None:
            try:
                data["file"] = self.file.decode()
            except UnicodeDecodeError:
                data["file_base64"] = base64.b64encode(self.file).decode()
        return data

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Case:
        file = data["file"].encode() if "file" in data else None
        if "file_base64" in data:
            file = base64.b64decode(data["file_base64"])
        return cls(data["name"], tuple(data["arguments"]), file)


def with_file(name: str, text: str | bytes, *arguments: str) -> Case:
    """The whole file is ``text``; the result is to be written."""
    content = text.encode() if isinstance(text, str) else text
    return Case(name, ("--config", CONFIG, "--write-config-to", OUTPUT, *arguments), content)


def with_fields(name: str, fields: str, *arguments: str) -> Case:
    """The file has the usual header and ``fields``."""
    return with_file(name, f"{HEADER}{fields}\n", *arguments)


def with_flags(name: str, *arguments: str) -> Case:
    """No file; the result is to be written."""
    return Case(name, (*arguments, "--write-config-to", OUTPUT))


def refused(name: str, *arguments: str) -> Case:
    """Only the command line, nothing to write: for cases that end before the program runs."""
    return Case(name, arguments)
