# SPDX-License-Identifier: Apache-2.0
"""Prints docs/configuration.md, made from the models and the table of flags: every field and flag, and its effect.

.venv/bin/python tools/configuration_page.py >docs/configuration.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pyebpf_proxy.config import durations
from pyebpf_proxy.config.complete import complete
from pyebpf_proxy.config.decode import bare, fields_of
from pyebpf_proxy.config.defaults import with_defaults
from pyebpf_proxy.config.flag_table import DEPRECATED, GROUPS, IGNORED
from pyebpf_proxy.config.flags import parse
from pyebpf_proxy.config.model import FlushFrequency, KubeProxyConfiguration, Reader, Section

HEAD = """# Configuration

<!-- Made by tools/configuration_page.py; a test compares. -->

`pyebpf-proxy` takes kube-proxy's configuration file (`kubeproxy.config.k8s.io/v1alpha1`, kind
`KubeProxyConfiguration`, YAML or JSON) and its command line as they are. They mean the same, and errors have
kube-proxy's words; what differs on purpose is in [differences.md](differences.md).

* With `--config`, flags that set fields are ignored, except those of logging and `--hostname-override`.
* Unknown and duplicate fields are a warning; a wrong type, a bad value or an unknown feature gate ends the program.
* Zero means the default where kube-proxy cannot tell it from absent: the text says where zero is a value of its own.
* `pyebpf-proxy --write-config-to FILE` writes what is in force.
* The section of `mode` gives syncPeriod, minSyncPeriod and masqueradeAll (mode ipvs: masqueradeAll from `iptables`).

"""


def main() -> None:
    """Print the page."""
    sys.stdout.write(page())


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Fields\n\n| field | type | default | effect here |\n|---|---|---|---|\n"]
    parts += [f"| {' | '.join(row)} |\n" for row in _fields(KubeProxyConfiguration, _defaults(), "")]
    parts.append("\n## Flags\n")
    for title, flags in GROUPS.items():
        parts.append(f"\n### {title}\n\n| flag | type | default | effect here |\n|---|---|---|---|\n")
        for flag in flags:
            name = f"`-{flag.short}`, `--{flag.name}`" if flag.short else f"`--{flag.name}`"
            default = f"`{flag.default}`" if flag.default else ""
            parts.append(f"| {name} | {_cell(flag.type or 'bool')} | {default} | {_cell(flag.help)} |\n")
    parts.append("\n### Deprecated, not in the help\n\n")
    parts += [f"* `--{name}`: {flag.help}\n" for name, (flag, _) in DEPRECATED.items()]
    parts.append("\n### Accepted without effect\n\nOf older releases and of libraries; most say so in a warning.\n\n")
    parts.append(", ".join(f"`--{flag.name}`" for flag in IGNORED) + "\n")
    return "".join(parts)


def _defaults() -> KubeProxyConfiguration:
    config = complete(parse([]), lambda text, file: None)
    # Zeroes of the sections not in force are shown with the defaults that they have when they are.
    filled = with_defaults(KubeProxyConfiguration())
    return config.model_copy(update={name: getattr(filled, name) for name in ("ipvs", "nftables")})


def _fields(model: type[Section], values: Any, path: str) -> list[tuple[str, str, str, str]]:
    rows = []
    for key, field in fields_of(model).items():
        info = model.model_fields[field.name]
        value = getattr(values, field.name)
        kind = bare(info.annotation)
        if isinstance(kind, type) and issubclass(kind, Section):
            rows += _fields(kind, value, f"{path}{key}.")
            continue
        reader = field.kind if isinstance(field.kind, Reader) else None
        type_name = reader.value.removeprefix("*") if reader else field.go_type.rpartition(".")[2]
        rows.append((f"`{path}{key}`", _cell(type_name), _shown(value, reader), _cell(info.description or "")))
        if key == "vmodule":
            item = model.model_fields["vmodule"]
            rows += _entries(f"{path}{key}[].", item)
    return rows


def _entries(path: str, info: Any) -> list[tuple[str, str, str, str]]:
    import typing

    (entry,) = typing.get_args(bare(info.annotation))
    return _fields(entry, entry(), path)


def _shown(value: Any, reader: Reader | None) -> str:
    if isinstance(value, FlushFrequency):
        value = durations.format(value.nanoseconds)
    elif reader in (Reader.DURATION, Reader.POINTER_DURATION):
        value = durations.format(value)
    elif isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, float):
        value = f"{value:g}"
    return "" if value in ("", None) or value == {} else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
