# SPDX-License-Identifier: Apache-2.0
"""Combines flags and file into one checked configuration, in kube-proxy's order (spec/configuration §4.1, §5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pyebpf_proxy.config import addresses, gates, loader
from pyebpf_proxy.config.defaults import (
    HEALTHZ_PORT,
    METRICS_PORT,
    with_defaults,
    with_effective_values,
    with_platform_defaults,
)
from pyebpf_proxy.config.flags import Flags
from pyebpf_proxy.config.loader import ConfigError
from pyebpf_proxy.config.model import FlushFrequency, KubeProxyConfiguration, Section, VModule
from pyebpf_proxy.config.validation import in_one_line, logging_errors, validate

_SectionT = TypeVar("_SectionT", bound=Section)


def complete(flags: Flags, warn: Callable[[str, str | None], None]) -> KubeProxyConfiguration:
    """Read the file that the flags name, fill in defaults and validate; ConfigError lists every error.

    ``warn`` is called with each warning and the file that it is about, if any.
    """
    for warning in flags.warnings:
        warn(warning, None)
    cluster_cidrs = None
    if flags.config:
        read = loader.read(Path(flags.config))
        for warning in read.warnings:
            warn(warning, flags.config)
        config = with_effective_values(with_defaults(read.config))
        config = config.model_copy(update={"logging": _logging(config, flags, from_file=True)})
    else:
        config = _from_flags(flags)
        if "cluster-cidr" in flags.given:
            cluster_cidrs = config.cluster_cidr.split(",")
    config = with_platform_defaults(config)
    if flags.hostname_override:
        name = flags.hostname_override.strip()
        if not name:
            raise ConfigError("failed complete: empty hostname-override is invalid")
        config = config.model_copy(update={"hostname_override": name.lower()})
    enabled = gates.apply(config.feature_gates)
    if enabled.errors:
        raise ConfigError(f"failed complete: {in_one_line(enabled.errors)}")
    for warning in enabled.warnings:
        warn(warning, None)
    for prefix, errors in (
        ("initialize logging", logging_errors(config.logging, enabled)),
        ("failed validate", validate(config, cluster_cidrs)),
    ):
        if errors:
            raise ConfigError(f"{prefix}: {in_one_line(errors)}")
    return config


def _from_flags(flags: Flags) -> KubeProxyConfiguration:
    """Defaults, overridden by the flags. An explicit zero in a flag is kept; in a file it would become the default."""
    # kube-proxy computes its defaults for mode "": periods and masqueradeAll are those of iptables.
    config = with_effective_values(with_defaults(KubeProxyConfiguration()))
    changes: dict[str, Any] = {}
    for path, value in flags.fields():
        _put(changes, path, value)
    config = _changed(config, changes)
    values = flags.values
    section = config.mode if config.mode in ("ipvs", "nftables") else "iptables"
    prefix = "ipvs" if section == "ipvs" else "iptables"
    periods = {
        "sync_period": values.get(f"{prefix}-sync-period", config.iptables.sync_period),
        "min_sync_period": values.get(f"{prefix}-min-sync-period", config.iptables.min_sync_period),
    }
    zero = {"sync_period": 0, "min_sync_period": 0}
    masquerade = {"masquerade_all": values.get("masquerade-all", False)}
    update: dict[str, Any] = {"logging": _logging(config, flags, from_file=False)}
    for name in ("iptables", "ipvs", "nftables"):
        its = dict(periods if name == section else zero)
        if name == (section if section != "ipvs" else "iptables"):
            its.update(masquerade)
        update[name] = getattr(config, name).model_copy(update=its)
    if not values.get("write-config-to", ""):
        for name, default in (("healthz", HEALTHZ_PORT), ("metrics", METRICS_PORT)):
            field = f"{name}_bind_address"
            update[field] = addresses.append_port(getattr(config, field), int(values.get(f"{name}-port", default)))
    return config.model_copy(update=update)


def _logging(config: KubeProxyConfiguration, flags: Flags, *, from_file: bool) -> Any:
    """Apply the logging flags, which override the file; vmodule entries of flags precede those of the file."""
    logging, values = config.logging, flags.values
    update: dict[str, Any] = {}
    if "logging-format" in values:
        update["format"] = values["logging-format"]
    if "log-flush-frequency" in values:
        as_text = logging.flush_frequency.as_text
        update["flush_frequency"] = FlushFrequency(int(values["log-flush-frequency"]), as_text)
    if "v" in values:
        update["verbosity"] = values["v"]
    if "vmodule" in values:
        given = [VModule(file_pattern=pattern, verbosity=level) for pattern, level in values["vmodule"]]
        update["vmodule"] = [*given, *(logging.vmodule or ())] or None
    options = {}
    for name, attribute in (("text", "text"), ("json", "json_")):
        section = getattr(logging.options, attribute)
        # In kube-proxy, binding the flags resets splitStream: the value of a file never has an effect.
        changes: dict[str, Any] = {"split_stream": False} if from_file else {}
        if f"log-{name}-split-stream" in values:
            changes["split_stream"] = values[f"log-{name}-split-stream"]
        if f"log-{name}-info-buffer-size" in values:
            changes["info_buffer_size"] = values[f"log-{name}-info-buffer-size"]
        options[attribute] = section.model_copy(update=changes)
    update["options"] = logging.options.model_copy(update=options)
    return logging.model_copy(update=update)


def _put(changes: dict[str, Any], path: str, value: object) -> None:
    *sections, field = path.split(".")
    for section in sections:
        changes = changes.setdefault(section, {})
    changes[field] = value


def _changed(section: _SectionT, changes: dict[str, Any]) -> _SectionT:
    update = {
        name: _changed(getattr(section, name), value) if isinstance(getattr(section, name), Section) else value
        for name, value in changes.items()
    }
    return section.model_copy(update=update)
