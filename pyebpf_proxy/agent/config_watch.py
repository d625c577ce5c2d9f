# SPDX-License-Identifier: Apache-2.0
"""Ends the agent when one of its configuration files is written or renamed (spec/configuration §6).

As in kube-proxy (fsnotify), the file to which the path resolves is watched. Editors and ConfigMap volumes replace the
file. This removes the watched file, which does not end the agent, and the new file is not watched.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from inotify_simple import INotify, flags

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.config.loader import ConfigError

UPDATED = "content of the proxy server's configuration file was updated"
OWN_UPDATED = "content of the datapath configuration file was updated"
OVERFLOW = "fsnotify: queue or buffer overflow"

# Write and Rename of fsnotify. kube-proxy ignores Chmod, Create and Remove.
_EVENTS = flags.MODIFY | flags.MOVE_SELF


class ConfigWatch:
    """The watch begins with the constructor; ``wait`` also reports events from before its call."""

    def __init__(self, path: Path | None, own: Path | None = None) -> None:
        """``path``: kube-proxy's file; ``own``: that of ``--datapath-config``. ConfigError if the watch fails."""
        self._texts: dict[int, str] = {}
        try:
            self._inotify = INotify(nonblocking=True)
            try:
                for file, text in ((path, UPDATED), (own, OWN_UPDATED)):
                    if file is not None:
                        self._texts[self._inotify.add_watch(file, _EVENTS)] = text
            except OSError:
                self._inotify.close()
                raise
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"failed complete: {reason} (the configuration file cannot be watched)") from None

    async def wait(self) -> None:
        """Wait until cancelled. FatalError when a file was written or renamed, or the watch failed."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._inotify.fileno(), readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                self._read()
        finally:
            loop.remove_reader(self._inotify.fileno())

    def close(self) -> None:
        """Close the watch."""
        self._inotify.close()

    def _read(self) -> None:
        try:
            events = self._inotify.read(timeout=0)
        except OSError as error:
            raise FatalError(f"the configuration file cannot be watched: {error.strerror or error}") from None
        for event in events:
            if event.mask & flags.Q_OVERFLOW:
                raise FatalError(OVERFLOW)
            if event.mask & _EVENTS:
                raise FatalError(self._texts[event.wd])
