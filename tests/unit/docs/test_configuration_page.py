# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ that are generated from models and flags are up to date."""

from __future__ import annotations

import re

from pyebpf_proxy.config.datapath_model import DatapathConfiguration, Maps
from pyebpf_proxy.config.decode import fields_of
from pyebpf_proxy.config.flag_table import FLAGS
from pyebpf_proxy.config.model import KubeProxyConfiguration
from pyebpf_proxy.config.writer import document
from tests import ROOT
from tests.parity import recordings
from tests.support.tool_module import tool


def test_the_page_matches_the_models() -> None:
    shown = (ROOT / "docs" / "configuration.md").read_text()
    assert shown == tool("configuration_page").page(), (
        "run .venv/bin/python tools/configuration_page.py >docs/configuration.md"
    )


def test_the_page_of_the_datapath_options_matches_the_model() -> None:
    shown = (ROOT / "docs" / "datapath-configuration.md").read_text()
    command = ".venv/bin/python tools/configuration_page.py datapath >docs/datapath-configuration.md"
    assert shown == tool("configuration_page").datapath_page(), f"run {command}"


def test_every_option_of_the_agent_has_a_line_with_its_effect() -> None:
    text = (ROOT / "docs" / "datapath-configuration.md").read_text()
    fields = re.findall(r"^\| `([\w.]+)` \| \S.* \| .* \| \S.* \|$", text, re.MULTILINE)
    names = [str(info.alias) for info in DatapathConfiguration.model_fields.values()]
    assert fields == names + [f"maps.{info.alias}" for info in Maps.model_fields.values()]


def test_every_flag_and_field_has_a_line_with_its_effect() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    for flag in FLAGS:
        assert re.search(rf"^\| .*`--{re.escape(flag.name)}` \| .* \| .* \| \S.* \|$", text, re.MULTILINE), flag.name
    fields = re.findall(r"^\| `([\w.\[\]]+)` \| .* \| .* \| \S.* \|$", text, re.MULTILINE)
    assert {name.split(".")[0] for name in fields} == set(fields_of(KubeProxyConfiguration))
    assert len(fields) > 60


def test_an_empty_configuration_is_written_as_kube_proxy_writes_it() -> None:
    _, recorded = recordings.read()
    (answer,) = (answer for case, answer in recorded if case.name == "no field at all")
    assert answer.document is not None
    # The release's document, word for word; the recordings contain many more.
    assert answer.document.startswith("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nbindAddress: 0.0.0.0\n")
    assert (
        document(tool("configuration_page").complete(tool("configuration_page").parse([]), lambda text, file: None))
        == answer.document
    )
