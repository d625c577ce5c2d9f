# SPDX-License-Identifier: Apache-2.0
"""XDP while the agent runs: devices and what they can do come and go, and the program goes with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from pyebpf_proxy.datapath.loader.programs import Loaded
from pyebpf_proxy.datapath.node.links import Node
from pyebpf_proxy.datapath.node.netdev import Features
from pyebpf_proxy.datapath.node.plan import Link, Wanted
from pyebpf_proxy.datapath.node.xdp import Mode, Xdp, XdpConfig, release
from pyebpf_proxy.log import Logger

_log = Logger("datapath")


class Frames:
    """XDP on the devices of a node whose tc programs are attached. Making it attaches; OSError."""

    def __init__(self, loaded: Loaded, node: Node, config: XdpConfig, folder: Path) -> None:
        if loaded.xdp is None:
            raise ValueError("the XDP program is not loaded")
        program, layout = loaded.xdp.programs["xdp_ethernet"], loaded.xdp.btf.struct("xdp_device")
        self._xdp = Xdp(program, loaded.maps["xdp_devices"], layout, config, folder, _log.warning)
        #: Called when the map says something else of a device: entries of the flow cache have it from there.
        self.on_written: Callable[[], None] = lambda: None
        self._features = Features()
        self._node = node
        node.on_change = self._changed
        node.changed()
        if not self._xdp.attached:
            _log.warning("XDP is on no device", devices=",".join(config.devices))

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep up with what devices can do from now on, until ``close``."""
        self._loop = loop
        if self._features.known:
            loop.add_reader(self._features.fileno(), self._read)

    def look(self) -> None:
        """Try once more where somebody else's program was in the way: not every one that goes is told of."""
        self._node.changed()

    def attached(self) -> Mapping[str, Mode]:
        """Devices that carry the program, and how."""
        return dict.fromkeys(list(self._xdp.attached.values()), self._xdp.mode)

    def close(self) -> None:
        """Nobody follows any more. What is attached stays."""
        if hasattr(self, "_loop") and self._features.known:
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
            changed = self._features.read()
        except OSError as error:
            _log.error("what devices can do with frames could not be followed", error=str(error))
            return
        if changed:
            self._node.changed()


def attach_frames(loaded: Loaded, node: Node, config: XdpConfig, folder: Path) -> Frames | None:
    """XDP, where it is asked for and the kernel has it; else that of a former run is taken off."""
    if loaded.xdp is not None:
        return Frames(loaded, node, config, folder)
    if loaded.why_not_xdp:
        _log.warning("there is no XDP", why=loaded.why_not_xdp)
    if taken := release(folder):
        _log.info("the XDP program of a former run is taken off", devices=taken)
    return None
