# SPDX-License-Identifier: Apache-2.0
"""The only front door: flags, subcommands, exit status.

Nothing heavy is imported before it is needed: ``--version`` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyebpf_proxy import KUBERNETES_VERSION, __version__
from pyebpf_proxy.config.flags import Flags, UsageError, parse, usage

if TYPE_CHECKING:
    from pyebpf_proxy.config.effective import Effective
    from pyebpf_proxy.kube.source import Source


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["lab"]:
        from pyebpf_proxy.lab.cli import main as lab

        return lab(list(arguments[1:]))
    try:
        flags = parse(arguments)
    except UsageError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    if flags.help:
        print(usage())
        return 0
    if flags.version not in ("", "false"):
        print(f"Kubernetes {KUBERNETES_VERSION}\npyebpf-proxy {__version__}")
        return 0
    return _run(flags)


def _run(flags: Flags) -> int:
    from pyebpf_proxy import log
    from pyebpf_proxy.config.loader import ConfigError
    from pyebpf_proxy.errors import DatapathError, FatalError

    log.configure("json" if flags.log_format == "json" else "text")
    logger = log.Logger()
    try:
        settings = _settings(flags)
        if flags.cleanup:
            _cleanup(settings)
        else:
            _agent(settings)
    except (ConfigError, FatalError, DatapathError) as error:
        logger.error(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception:
        logger.internal_error()
        return 1
    return 0


def _settings(flags: Flags) -> Effective:
    from pathlib import Path

    from pyebpf_proxy import log
    from pyebpf_proxy.config import loader
    from pyebpf_proxy.config.effective import effective

    loaded = loader.load(Path(flags.config) if flags.config else None)
    settings = effective(loaded.config, flags)
    log.configure(settings.log_format)
    logger = log.Logger("config")
    for warning in loaded.warnings:
        logger.warning(warning)
    if loaded.config.mode == "ipvs":
        logger.warning("mode ipvs: there is no IPVS here, services behave as in mode iptables")
    if settings.detect_local_mode == "NodeCIDR":
        logger.warning("detectLocalMode NodeCIDR is not there yet: no packet counts as a pod's; use ClusterCIDR")
    return settings


def _source(settings: Effective) -> Source:
    from pyebpf_proxy.errors import FatalError
    from pyebpf_proxy.kube.manifests import ManifestSource
    from pyebpf_proxy.log import Logger

    if settings.manifests is None:
        raise FatalError("nothing says where the Services are: give a folder of Kubernetes manifests with --manifests")
    if not settings.manifests.is_dir():
        what = "is not a folder" if settings.manifests.exists() else "does not exist"
        raise FatalError(f"the manifests folder {settings.manifests} {what}; give an existing one with --manifests")
    return ManifestSource(settings.manifests, Logger("manifests").error)


def _agent(settings: Effective) -> None:
    # First what may be wrong with the command line, then the slow import.
    source = _source(settings)
    from pyebpf_proxy.agent import run

    run(settings, source)


def _cleanup(settings: Effective) -> None:
    from pyebpf_proxy.cleanup import run

    run(settings.directory)
