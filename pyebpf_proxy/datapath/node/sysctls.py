# SPDX-License-Identifier: Apache-2.0
"""Settings of the kernel: writes those that differ, reads them back, records them, and restores them on ``--cleanup``.

The original value of a setting is recorded in ``<directory>/node-settings.json`` before it is changed. The first
original value is kept over restarts and other configurations. Clean-up restores a setting only if it still has the
value that the proxy wrote: a later change by others stays.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.run_directory import read_file, replace_file
from pyebpf_proxy.config.kernel import KernelSettings
from pyebpf_proxy.datapath.node.node_settings import (
    BUCKETS,
    CONNTRACK_MAX,
    HASHSIZE,
    PATHS,
    Setting,
    count_cpus,
    wanted,
)
from pyebpf_proxy.datapath.refused import RefusedError

RECORD = "node-settings.json"
OOM_SCORE_ADJ = "proc/self/oom_score_adj"
#: Reason and text of the Node's event, as in kube-proxy.
READ_ONLY_SYS = "readOnlySysFS"
READ_ONLY_SYS_NOTE = (
    "CRI error: /sys is read-only: cannot modify conntrack limits, problems may arise later"
    " (If running Docker, see docker issue #24000)"
)

#: Called with reason and text of a Warning event for the Node.
WarnNode = Callable[[str, str], None]

_ROOT = Path("/")
#: A container's /proc/sys is read-only, whatever its capabilities; the manifest mounts the node's /proc/sys/net here.
HOST = Path("host")
#: Every setting is one number.
_NUMBER = re.compile("-?[0-9]{1,20}")
_log = Logger("datapath")


class SysctlError(RefusedError):
    """A setting could not be set, and kube-proxy would not start without it either."""


@dataclass
class Change:
    """The original value of a setting, and the value that the proxy wrote last."""

    was: str
    wrote: str
    #: The feature that needs the setting while it is on; "" for the configuration's own settings.
    holder: str = ""


class Record:
    """Changed settings, by path, in the instance's run folder. OSError if it cannot be written.

    An agent's container can write the file, and the clean-up may run with more rights: only the files that the proxy
    changes are read from it.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / RECORD
        self._fresh = self._file.with_suffix(".new")
        self.changes: dict[str, Change] = {}
        try:
            content = json.loads(read_file(self._file))
            recorded = {
                path: Change(str(entry["was"]), str(entry["wrote"]), str(entry.get("holder", "")))
                for path, entry in content.items()
            }
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            _log.warning(
                "the record of changed node settings cannot be read, they will not be restored", file=self._file
            )
            return
        self.changes = {path: change for path, change in recorded.items() if _is_own(path, change)}
        if others := [path for path in recorded if path not in self.changes]:
            what = "the record of changed node settings has entries that the proxy does not write, they are ignored"
            _log.warning(what, file=self._file, entries=len(others), first=others[0][:100])

    def note(self, path: str, was: str, wrote: str, holder: str = "") -> None:
        """Record a change; the first original value stays."""
        known = self.changes.get(path)
        self.changes[path] = Change(known.was if known else was, wrote, holder)
        self._write()

    def forget(self, path: str) -> None:
        """Drop a change; the file is removed with the last one."""
        self.changes.pop(path, None)
        self._write()

    def discard(self) -> None:
        """Remove the file if nothing is recorded, even if it was unreadable or is half written."""
        if not self.changes:
            self._file.unlink(missing_ok=True)
            self._fresh.unlink(missing_ok=True)

    def _write(self) -> None:
        if not self.changes:
            self.discard()
            return
        content = {
            path: {"was": change.was, "wrote": change.wrote, **({"holder": change.holder} if change.holder else {})}
            for path, change in self.changes.items()
        }
        try:
            replace_file(self._file, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            raise OSError(error.errno, f"{self._file} cannot be written: {_reason(error)}") from error


def apply(settings: KernelSettings, directory: Path, warn_node: WarnNode | None = None, root: Path = _ROOT) -> None:
    """Write what differs; conntrack must be loaded. ``directory``: the run folder, which must exist.

    Works with and without a running data plane. SysctlError names the first required setting that cannot be set; a
    failure of others is logged. ``warn_node`` is called where kube-proxy records an event on its Node.
    """
    record = Record(directory)
    refused: set[str] = set()
    for setting in wanted(settings, count_cpus(root, len(os.sched_getaffinity(0)))):
        if setting.path == HASHSIZE and CONNTRACK_MAX in refused:
            continue  # The table's size follows from its limit, which cannot be set here.
        try:
            _ensure(setting, record, root)
        except OSError as error:
            if setting.path == HASHSIZE and error.errno == errno.EROFS and _ensured_by_sysctl(setting, record, root):
                continue
            refused.add(setting.path)
            _refused(setting, error, root, warn_node)


def adjust_oom_score(value: int | None, root: Path = _ROOT) -> None:
    """``oomScoreAdj`` of this process; a failure is only logged, as in kube-proxy."""
    if value is None:
        return
    path = root / OOM_SCORE_ADJ
    try:
        _put(path, str(value), _read(path), at_least=False)
    except OSError as error:
        _log.warning("oomScoreAdj cannot be set", value=value, error=_reason(error))


def hold(setting: Setting, directory: Path, root: Path = _ROOT, configured: bool = False) -> str:
    """Set a setting while ``setting.field`` is on. Returns why it cannot be set, or "".

    ``configured``: the configuration asks for it, too, so the setting stays when ``setting.field`` is off.
    """
    record = Record(directory)
    known = record.changes.get(setting.path)
    try:
        path = _place(root, setting.path)
        now = _read(path)
        if _is(now, setting.value, setting.at_least):
            return ""
        record.note(setting.path, now, str(setting.value), "" if configured else setting.field)
        try:
            _put(path, str(setting.value), now, setting.at_least)
        except OSError:
            if known is None:
                record.forget(setting.path)
            raise
    except OSError as error:
        return f"{setting.name} cannot be set to {setting.value}: {_reason(error)}"
    _log.info("node setting changed", setting=setting.name, value=setting.value, before=now, field=setting.field)
    return ""


def held(setting: Setting, directory: Path) -> bool:
    """Whether the setting has its value from ``hold``."""
    change = Record(directory).changes.get(setting.path)
    return change is not None and change.holder == setting.field


def changed(setting: Setting, directory: Path) -> bool:
    """Whether the proxy has changed the setting, for a feature or because the configuration asks for it."""
    return setting.path in Record(directory).changes


def is_set(setting: Setting, root: Path = _ROOT) -> bool:
    """Whether the kernel has the wanted value. OSError if it cannot be read."""
    return _is(_read(_place(root, setting.path)), setting.value, setting.at_least)


def restore(
    directory: Path, root: Path = _ROOT, holder: str | None = None, keep: Collection[Setting] = ()
) -> tuple[list[str], list[str]]:
    """Restore settings that still have the value that the proxy wrote. Returns restored ones and failures as lines.

    ``holder``: only settings of this holder; "": only those without one. ``keep``: except these.
    """
    kept = {setting.path for setting in keep}
    record = Record(directory)
    restored, problems = [], []
    for path, change in reversed(list(record.changes.items())):
        if path in kept or (holder is not None and change.holder != holder):
            continue
        name = path.removeprefix("proc/sys/")
        try:
            place = _place(root, path)
            if _read(place) == change.wrote:
                _put(place, change.was, change.wrote, at_least=False)
                restored.append(f"setting {name}={change.wrote}, restored to {change.was}")
            else:
                _log.info("another program has changed the setting since; it is not restored", setting=name)
        except FileNotFoundError:
            pass  # The module was unloaded, and the value is gone with it.
        except OSError as error:
            problems.append(f"{name} cannot be set back to {change.was}: {_reason(error)}")
            continue
        record.forget(path)
    record.discard()
    return restored, problems


def leave(directory: Path, setting: Setting | None = None, but: Collection[Setting] = ()) -> list[str]:
    """Forget the configuration's own settings, and leave their values: a kube-proxy that runs again has asked for the
    same, but only once, at its start. Returns them as lines. ``setting``: only this one, whatever it was changed for.
    ``but``: not these.
    """
    record = Record(directory)
    changes = record.changes.items()
    if setting is None:
        others = {each.path for each in but}
        left = [(path, change) for path, change in changes if not change.holder and path not in others]
    else:
        left = [(path, change) for path, change in changes if path == setting.path]
    for path, _ in left:
        record.forget(path)
    record.discard()
    return [f"setting {path.removeprefix('proc/sys/')}={change.wrote}" for path, change in left]


def _ensure(setting: Setting, record: Record, root: Path) -> None:
    path = _place(root, setting.path)
    try:
        now = _read(path)
    except FileNotFoundError:
        if setting.optional:
            _log.debug("there is no such setting", setting=setting.name)
            return
        raise
    if _is(now, setting.value, setting.at_least):
        _take_from_holder(setting, record)
        return
    value = str(setting.value)
    known = record.changes.get(setting.path)
    record.note(setting.path, now, value)
    try:
        taken = _put(path, value, now, setting.at_least)
    except OSError:
        left = _read(path)
        if left != now:
            record.note(setting.path, now, left)
        elif known is not None:
            record.note(setting.path, known.was, known.wrote, known.holder)
        else:
            record.forget(setting.path)  # The value did not change, so it need not be restored.
        raise
    if taken != value:
        record.note(setting.path, now, taken)  # rounded by the kernel
    _log.info("node setting changed", setting=setting.name, value=taken, before=now, field=setting.field)


def _take_from_holder(setting: Setting, record: Record) -> None:
    """A feature has set it, and the configuration asks for it now: it stays when the feature is off."""
    known = record.changes.get(setting.path)
    if known is None or not known.holder:
        return
    try:
        record.note(setting.path, known.was, known.wrote)
    except OSError as error:
        # The setting is right. A full run folder must not end the start.
        what = "the record of changed node settings cannot be written, --cleanup may restore one that is still wanted"
        _log.warning(what, setting=setting.name, error=_reason(error))


def _ensured_by_sysctl(setting: Setting, record: Record, root: Path) -> bool:
    """The size of the table by its other name, below /proc/sys/net: in a container /sys is read-only."""
    try:
        _ensure(replace(setting, path=BUCKETS), record, root)
    except OSError:
        return False
    return True


def _is_own(path: str, change: Change) -> bool:
    return path in PATHS and all(_NUMBER.fullmatch(value) for value in (change.was, change.wrote))


def _place(root: Path, path: str) -> Path:
    """Where a setting is written: at the node's mount of it if the manifest provides one."""
    mounted = root / HOST / path
    return mounted if mounted.exists() else root / path


def _put(path: Path, value: str, now: str, at_least: bool) -> str:
    """Write unless it has the value already, and read back; OSError also if the kernel has changed the value."""
    if now == value:
        return now
    # Without O_CREAT: a missing setting must stay missing.
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)
    taken = _read(path)
    if not _is(taken, int(value), at_least):
        raise OSError(errno.EINVAL, f"the kernel did not accept it: the value is {taken}")
    return taken


def _read(path: Path) -> str:
    return path.read_text().strip()


def _is(text: str, value: int, at_least: bool) -> bool:
    try:
        number = int(text)
    except ValueError:
        return False
    return number >= value if at_least else number == value


def _refused(setting: Setting, error: OSError, root: Path, warn_node: WarnNode | None) -> None:
    """Report that a setting could not be set, or raise SysctlError."""
    reason = _reason(error)
    if setting.path == HASHSIZE and error.errno == errno.EROFS:
        _log.warning(READ_ONLY_SYS_NOTE, setting=setting.name, value=setting.value)
        if warn_node is not None:
            warn_node(READ_ONLY_SYS, READ_ONLY_SYS_NOTE)
    elif setting.machine_wide and _not_for_this_namespace(_place(root, setting.path), error):
        _log.warning(
            "the setting applies to the whole machine and cannot be changed from this network namespace",
            setting=setting.name,
            value=setting.value,
            field=setting.field,
        )
    elif setting.fatal:
        raise SysctlError(
            error.errno,
            f"{setting.name} cannot be set to {setting.value} ({setting.field}): {reason};"
            f" set it beforehand, or have it left alone with {setting.leave}",
        ) from error
    else:
        _log.warning(
            "node setting cannot be set", setting=setting.name, value=setting.value, field=setting.field, error=reason
        )


def _not_for_this_namespace(path: Path, error: OSError) -> bool:
    """In network namespaces other than the first one, the kernel shows machine-wide settings without write permission,
    or refuses with EOPNOTSUPP (hashsize)."""
    if error.errno == errno.EOPNOTSUPP:
        return True
    try:
        return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and not path.stat().st_mode & 0o222
    except OSError:
        return False


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
