# SPDX-License-Identifier: Apache-2.0
"""Removing everything of one instance: tc programs, socket programs, nftables table, pins, run folder.

Works without the agent and without loading programs, also when half of it is missing. Each step is tried even if others
fail. Only what belongs to the instance is removed:

* first, young flows, which conntrack does not know, are promoted;
* tcx links by their pins, filters by name and handle, on every device of this network namespace; a clsact qdisc if it
  is recorded as the proxy's and empty (``attachments``);
* the table by its name; other tables, and the conntrack entries of live flows, stay;
* pins in the instance's folder only; the bpffs is unmounted only if the proxy mounted it and it is empty (``mounts``);
* node settings are restored first, while the programs still protect what they open, and only those that still have the
  value that the proxy wrote (``sysctls``); the settings that the fast path needs are restored last, when it is gone,
  even if the configuration asks for them, too; if kube-proxy runs, only those of the fast path: kube-proxy has set the
  others, and sets them only once. A liberal conntrack stays if that kube-proxy started with it;
* of the run folder only files named by their owners, and the directory itself if it is then empty.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable
from pathlib import Path

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.datapath.connections.drain import drain
from pyebpf_proxy.datapath.connections.liberal import make_liberal
from pyebpf_proxy.datapath.migration import leftovers
from pyebpf_proxy.datapath.netfilter.nft import Table
from pyebpf_proxy.datapath.node.attachments import Attachments
from pyebpf_proxy.datapath.node.mounts import (
    bpffs_candidates,
    holds_pins,
    pin_directory,
    release_bpffs,
    table_name,
    tcx_directory,
)
from pyebpf_proxy.datapath.node.node_settings import FAST_PATH, LIBERAL, ROUTE_LOCALNET, Setting
from pyebpf_proxy.datapath.node.sysctls import changed, leave, restore
from pyebpf_proxy.datapath.report import Report

_log = Logger("cleanup")


def cleanup(directory: Path, own_files: Iterable[str] = (), keep_settings: bool = False) -> Report:
    """Removes the instance of this directory. ``own_files``: files in the directory, by name, that the caller made.

    ``keep_settings``: the settings that the configuration asks for stay, for a kube-proxy that runs again.
    """
    report = Report()
    if keep_settings:
        try:
            # A kube-proxy in another mode has no rule that keeps other hosts away from the node's loopback.
            open_loopback = changed(ROUTE_LOCALNET, directory) and not leftovers.needs_route_localnet()
            for line in leave(directory, but=(ROUTE_LOCALNET,) if open_loopback else ()):
                _log.info("setting kept for kube-proxy", what=line)
            _settings(directory, "", report, keep=FAST_PATH)
        except OSError as error:
            report.problems.append(str(error))
    else:
        _settings(directory, "", report, keep=FAST_PATH)
    for step in (_flows, _programs, _table, _pins):
        try:
            report.removed += step(directory)
        except OSError as error:
            report.problems.append(str(error))
    if any(changed(setting, directory) for setting in FAST_PATH):
        try:
            # kube-proxy reads this setting only at its start. Without its rule for INVALID packets, a strict conntrack
            # would let packets pass untranslated.
            if keep_settings and changed(LIBERAL, directory) and leftovers.relies_on_liberal_conntrack():
                for line in leave(directory, LIBERAL):
                    _log.info("setting kept for kube-proxy, which started with it", what=line)
            # The fast path is gone, and conntrack becomes strict again: it must continue to translate the fast path's
            # connections.
            make_liberal()
        except OSError as error:
            report.problems.append(str(error))
    _settings(directory, None, report)
    _run_directory(directory, own_files, report)
    return report


def _settings(directory: Path, holder: str | None, report: Report, keep: Collection[Setting] = ()) -> None:
    try:
        restored, problems = restore(directory, holder=holder, keep=keep)
        report.removed += restored
        report.problems += [problem for problem in problems if problem not in report.problems]
    except OSError as error:
        report.problems.append(str(error))


def _flows(directory: Path) -> list[str]:
    """Promotes the flows that only the programs know. Must be called before the programs are removed."""
    for place in bpffs_candidates(directory):
        if holds_pins(place):
            for pins in sorted(pin_directory(place, directory, 0).parent.glob("v*")):
                drain(pins)
    return []


def _programs(directory: Path) -> list[str]:
    removed: dict[str, None] = {}
    places = [tcx_directory(place, directory) for place in bpffs_candidates(directory) if holds_pins(place)]
    # Without a bpffs there are no links, only filters.
    for folder in places or [directory / "no-bpffs"]:
        attachments = Attachments(directory, folder, use_tcx=True)
        try:
            for index in sorted({*attachments.attached(), *attachments.recorded()}):
                try:
                    device = socket.if_indextoname(index)
                except OSError:
                    attachments.forget(index)
                    continue
                if attachments.detach(index, device):
                    removed[f"tc programs of {device}"] = None
        finally:
            attachments.close()
    return list(removed)


def _table(directory: Path) -> list[str]:
    name = table_name(directory)
    return [f"nftables table inet {name}"] if Table(name).remove() else []


def _pins(directory: Path) -> list[str]:
    return release_bpffs(directory)


def _run_directory(directory: Path, own_files: Iterable[str], report: Report) -> None:
    for name in own_files:
        (directory / name).unlink(missing_ok=True)
    for folder in (directory / "clsact", directory / "bpf", directory):
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            continue  # not empty, so other files are in it; or a mount that the proxy did not make
        report.removed.append(str(folder))
