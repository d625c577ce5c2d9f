# SPDX-License-Identifier: Apache-2.0
"""XDP while the agent runs: attaches and detaches the program as devices and their features change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.common.retry import Retry
from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.node.devices import Node
from pyebpf_proxy.datapath.node.netdev import Features
from pyebpf_proxy.datapath.node.plan import Link, Wanted
from pyebpf_proxy.datapath.node.xdp import Mode, Xdp, XdpConfig, release

#: Seconds until features that could not be listed are listed again. Until then frames may be lost: XDP still sends them
#: through a device that takes them no more.
RETRY_SECONDS = 0.5

_log = Logger("datapath")


class XdpDevices:
    """XDP on the devices of a node whose tc programs are attached. The constructor attaches; OSError."""

    def __init__(self, loaded: Loaded, node: Node, config: XdpConfig, folder: Path) -> None:
        if loaded.xdp is None:
            raise ValueError("the XDP program is not loaded")
        program, layout = loaded.xdp.programs["xdp_ethernet"], loaded.xdp.btf.struct("xdp_device")
        self._xdp = Xdp(program, loaded.maps["xdp_devices"], layout, config, folder, _log.warning)
        #: Called when the entry of a device in the map has changed: entries of the flow table depend on it.
        self.on_written: Callable[[], None] = lambda: None
        self._features = Features()
        self._retry = Retry(self._read, RETRY_SECONDS, RETRY_SECONDS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._said = ""
        #: Features have changed, and the program and the map were not brought up to date since.
        self._unapplied = False
        self._node = node
        node.on_change = self._changed
        node.changed()
        if not self._xdp.attached:
            _log.warning("the XDP program is attached to no device", devices=",".join(config.devices))

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Follow the devices' features from now on, until ``close``."""
        self._loop = loop
        self._retry.follow(loop)
        if self._features.known:
            loop.add_reader(self._features.fileno(), self._read)

    def look(self) -> None:
        """Retry on devices that had another XDP program: the kernel does not always report its removal."""
        self._node.changed()

    def attached(self) -> Mapping[str, Mode]:
        """Devices that have the program, and its mode."""
        return dict.fromkeys(list(self._xdp.attached.values()), self._xdp.mode)

    def close(self) -> None:
        """Stop following. The program stays attached."""
        self._retry.close()
        if self._loop is not None and self._features.known:
            self._loop.remove_reader(self._features.fileno())
        self._features.close()

    def _changed(self, links: Mapping[int, Link], wanted: Wanted) -> None:
        features = self._features.by_device if self._features.known else None
        before = self._xdp.writes
        for name in self._xdp.apply(links, wanted.programs, features):
            _log.info("XDP", device=name, mode=self._xdp.mode)
        if self._xdp.writes != before:
            self.on_written()

    def _read(self) -> None:
        try:
            self._unapplied |= self._features.read()
            if self._unapplied:
                self._node.changed()
            self._unapplied, self._said = False, ""
            self._retry.succeeded()
        except OSError as error:
            if str(error) != self._said:
                self._said = str(error)
                _log.error("changes of devices' XDP features could not be followed, will retry", error=self._said)
            self._retry.failed()


def attach_xdp(loaded: Loaded, node: Node, config: XdpConfig, folder: Path) -> XdpDevices | None:
    """XDP, if it is configured and available; otherwise that of a former run is detached."""
    if loaded.xdp is not None:
        return XdpDevices(loaded, node, config, folder)
    if loaded.why_not_xdp:
        _log.warning("XDP is not available", why=loaded.why_not_xdp)
    if taken := release(folder):
        _log.info("detached the XDP program of a former run", devices=taken)
    return None
