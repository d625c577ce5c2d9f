# SPDX-License-Identifier: Apache-2.0
"""The command line: flags, subcommands, exit status.

Modules are imported only when needed, so that ``--version`` answers at once. A probe runs every few seconds on each
node, so it imports less than that.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyebpf_proxy import KUBERNETES_VERSION, __version__

if TYPE_CHECKING:
    from pyebpf_proxy.agent.cluster_connection import ClusterConnection
    from pyebpf_proxy.config.datapath_model import DatapathConfiguration
    from pyebpf_proxy.config.effective import Effective
    from pyebpf_proxy.config.flags import Flags
    from pyebpf_proxy.config.model import KubeProxyConfiguration


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The result is the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The terminal's encoding may lack characters of the texts, and of names and messages of others.
        sys.stdout.reconfigure(errors="backslashreplace")
    if arguments[:1] == ["lab"]:
        from pyebpf_proxy.lab.cli import main as lab

        return lab(list(arguments[1:]))
    if arguments[:1] == ["cluster"]:
        from pyebpf_proxy.cluster.cli import main as cluster

        return cluster(list(arguments[1:]))
    if len(arguments) == 2 and arguments[0] == "probe":
        from pyebpf_proxy.probe import PAGES, probe

        if arguments[1] in PAGES:
            return probe(arguments[1])
    if arguments and not arguments[0].startswith("-"):
        from pyebpf_proxy.see import COMMANDS

        if arguments[0] in COMMANDS:
            from pyebpf_proxy.commands import main as see

            return see(list(arguments))
    from pyebpf_proxy.config.flags import UsageError, parse, usage

    try:
        flags = parse(arguments)
    except UsageError as error:
        print(f"Error: {error}{_similar_commands(arguments)}", file=sys.stderr)
        return 1
    if flags.help:
        from pyebpf_proxy import commands

        texts = {name: command.text for name, command in commands.COMMANDS.items()}
        return _print(
            usage(
                texts | {"cluster": "manage all nodes of a cluster with a kubeconfig: check, install, status, rollback"}
            )
        )
    if flags.version in ("true", "raw"):
        return _print(_version(flags))
    return _run(flags)


def _print(text: str) -> int:
    """Print on stdout, unless the reader has closed the pipe. The result is the exit status."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        from pyebpf_proxy.common.closed_pipe import closed_pipe

        return closed_pipe()
    return 0


def _similar_commands(arguments: Sequence[str]) -> str:
    """A hint with the commands whose names are similar to the unknown one; empty if there are none."""
    from pyebpf_proxy.see import COMMANDS
    from pyebpf_proxy.see.answers import near

    return near(arguments[0], COMMANDS) if not arguments[0].startswith("-") else ""


def _version(flags: Flags) -> str:
    kubernetes = flags.values.get("reported-version", KUBERNETES_VERSION)
    if flags.version == "true":
        return f"Kubernetes {kubernetes}\npyebpf-proxy {__version__}"
    major, minor = KUBERNETES_VERSION.removeprefix("v").split(".")[:2]
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f'version.Info{{Major:"{major}", Minor:"{minor}", GitVersion:"{kubernetes}", Compiler:"CPython {python}",'
        f' Platform:"{sys.platform}"}}\npyebpf-proxy {__version__}'
    )


def _run(flags: Flags) -> int:
    from pyebpf_proxy.common import log
    from pyebpf_proxy.common.errors import DatapathError, FatalError
    from pyebpf_proxy.config.loader import ConfigError

    log.configure("text")
    logger = log.Logger()
    # The flag applies until the configuration file has been read.
    if flags.values.get("logging-format") == "json":
        log.configure("json")
    try:
        config = _configuration(flags)
        own = _own(flags)
        if flags.write_config_to:
            _write(config, flags.write_config_to)
            return 0
        settings = _settings(config, flags, own)
        if flags.cleanup:
            _cleanup(settings, keep_kube_proxy=bool(flags.values.get("keep-kube-proxy-rules")))
        else:
            _agent(settings, config, flags)
    except ConfigError as error:
        # The text is kube-proxy's; the file is a separate field.
        logger.error(str(error), file=error.file or flags.config or None)
        return 1
    except (FatalError, DatapathError) as error:
        logger.error("Error running ProxyServer", error=str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception:
        logger.internal_error()
        return 1
    return 0


def _configuration(flags: Flags) -> KubeProxyConfiguration:
    from pyebpf_proxy.common import log
    from pyebpf_proxy.config.complete import complete

    # The log format is known only after the configuration has been completed.
    warnings: list[tuple[str, str | None]] = []
    try:
        config = complete(flags, lambda text, file: warnings.append((text, file)))
        verbosities = [(entry.file_pattern, entry.verbosity) for entry in config.logging.vmodule or ()]
        log.configure("json" if config.logging.format == "json" else "text", config.logging.verbosity, verbosities)
    finally:
        logger = log.Logger("config")
        for text, file in warnings:
            logger.warning(text, file=file)
    return config


def _own(flags: Flags) -> DatapathConfiguration | None:
    """The datapath configuration. It is always checked, so that mistakes are reported early."""
    if not flags.datapath_config:
        return None
    from pathlib import Path

    from pyebpf_proxy.config.datapath_config import read
    from pyebpf_proxy.config.datapath_model import without_effect

    own = read(Path(flags.datapath_config))
    from pyebpf_proxy.common import log

    if names := without_effect(own):
        text = f"{' and '.join(names)} of an older release: accepted, without effect"
        log.Logger("config").warning(text, file=flags.datapath_config)
    return own


def _write(config: KubeProxyConfiguration, path: str) -> None:
    from pyebpf_proxy.config.loader import ConfigError
    from pyebpf_proxy.config.writer import document

    try:
        text = document(config)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"open {path}: {(error.strerror or str(error)).lower()}") from None


def _settings(config: KubeProxyConfiguration, flags: Flags, own: DatapathConfiguration | None) -> Effective:
    from pyebpf_proxy.common.log import Logger
    from pyebpf_proxy.config.effective import effective

    settings = effective(config, flags, own)
    logger = Logger("config")
    if config.mode == "ipvs":
        logger.warning("mode ipvs: IPVS itself is not used; docs/ipvs-mode.md describes the effect of its settings")
    return settings


def _cluster(settings: Effective) -> ClusterConnection:
    from pyebpf_proxy.agent.cluster_connection import ClusterConnection
    from pyebpf_proxy.common.errors import FatalError

    if settings.manifests is None:
        from pyebpf_proxy.kube.api.connect import api_server
        from pyebpf_proxy.servers.client_metrics import ClientMetrics

        metrics = ClientMetrics()
        source = api_server(settings.api, settings.node_name, metrics, needs_cidrs=settings.nft_mode)
        source.start()  # listing overlaps with the slow imports below
        return ClusterConnection(source, source.events, metrics.families, source.troubles)
    from pyebpf_proxy.common.log import Logger
    from pyebpf_proxy.kube.manifests import ManifestSource
    from pyebpf_proxy.servers.source_metrics import SourceMetrics

    if not settings.manifests.is_dir():
        what = "is not a folder" if settings.manifests.exists() else "does not exist"
        raise FatalError(f"the manifests folder {settings.manifests} {what}; give an existing one with --manifests")
    numbers = SourceMetrics()
    return ClusterConnection(
        ManifestSource(settings.manifests, Logger("manifests").error, critic=numbers), metrics=numbers.families
    )


def _agent(settings: Effective, config: KubeProxyConfiguration, flags: Flags) -> None:
    from pyebpf_proxy.common.cycles import without_cycle_search

    watch = None
    with without_cycle_search():
        if (flags.config or flags.datapath_config) and not flags.init_only:
            from pathlib import Path

            from pyebpf_proxy.agent.config_watch import ConfigWatch

            # Before everything slow: a write after the file has been read must end the agent.
            watch = ConfigWatch(*(Path(name) if name else None for name in (flags.config, flags.datapath_config)))
        # Check the command line before the slow imports.
        cluster = _cluster(settings)
        _check_imports()
        from pyebpf_proxy.agent.run import prepare, run

        if flags.init_only:
            prepare(settings, cluster.source)
            return
        from pyebpf_proxy.config.shown import shown

        seen = shown(config, flags)
    run(settings, cluster, seen, watch)


def _check_imports() -> None:
    """FatalError if the data plane cannot be imported: only the distribution packages libnftables' binding."""
    from pyebpf_proxy.datapath.preflight import libnftables

    libnftables()


def _cleanup(settings: Effective, keep_kube_proxy: bool) -> None:
    _check_imports()
    from pyebpf_proxy.agent.cleanup import run

    run(settings.directory, settings.ipvs_exclude_cidrs, keep_kube_proxy)
