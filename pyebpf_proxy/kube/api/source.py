# SPDX-License-Identifier: Apache-2.0
"""The API server as a ``kube.source.Source``: one thread for each resource, one stream of batches.

``complete`` is set when Services, EndpointSlices and this Node have been listed, and the Node has an address or the
wait for one has timed out (spec/configuration §5.3). During later outages, no changes are delivered.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping

from pyebpf_proxy.common.log import Logger
from pyebpf_proxy.kube import objects
from pyebpf_proxy.kube.api import resources
from pyebpf_proxy.kube.api.client import Client
from pyebpf_proxy.kube.api.follower import Follower
from pyebpf_proxy.kube.api.recorder import EventRecorder
from pyebpf_proxy.kube.api.resources import Resource
from pyebpf_proxy.kube.api.trouble import Log
from pyebpf_proxy.kube.source import Batch, Change
from pyebpf_proxy.services.addresses import parse_address

#: Objects of the first lists that may wait for planning.
MOST_WAITING = 500

_log = Logger("api")


class ApiSource:
    """Follows Services, EndpointSlices, the Node ``node_name``, and ServiceCIDRs.

    ``needs_cidrs``: it is a failure if the server does not know or permit ServiceCIDRs. ``waits_for_cidrs``: their list
    is one of those that make the source complete; not with ``needs_cidrs``.
    """

    def __init__(
        self, client: Client, node_name: str, *, needs_cidrs: bool = False, waits_for_cidrs: bool = False
    ) -> None:
        self._client = client
        self._node_name = node_name
        cidrs = resources.SERVICE_CIDRS._replace(optional=not needs_cidrs)
        self._resources = [resources.SERVICES, resources.ENDPOINT_SLICES, resources.node(node_name), cidrs]
        self._lock = threading.Lock()
        self._taken = threading.Condition(self._lock)
        self._complete = False
        self._changes: list[Change] = []
        self._unchanged: list[Change] = []
        self._unlisted = {"services", "endpointslices", "nodes", *([cidrs.name] if waits_for_cidrs else ())}
        self._node_listed: float | None = None
        self._node: objects.Node | None = None
        self._wake = asyncio.Event()
        #: The recorder of Events. Those recorded before ``run`` are sent when it begins.
        self.events = EventRecorder(client)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._log = Log(client.access.host, _log.error, _log.info)
        self._followers: list[Follower] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start reading, while the agent still starts. ``run`` delivers the results."""
        self._followers = [
            Follower(self._client, resource, self._take, self._log, self._take_unchanged)
            for resource in self._resources
        ]
        self._threads = [
            threading.Thread(target=follower.run, name=f"api-{resource.name}", daemon=True)
            for follower, resource in zip(self._followers, self._resources, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def troubles(self) -> Mapping[str, str]:
        """By resource, why its objects do not arrive at present; "" means all resources. Safe in any thread."""
        return self._log.troubles()

    async def run(self, deliver: Callable[[Batch], None]) -> None:
        """Deliver all objects, then every change, until cancelled."""
        if not self._threads:
            self.start()
        _log.info("following the API server", server=self._client.access.host, node=self._node_name)
        self._loop = asyncio.get_running_loop()
        self._wake.set()  # for changes that arrived before
        self.events.start()
        look = asyncio.create_task(self._look(self._followers), name="look")
        try:
            await self._forward(deliver)
        finally:
            look.cancel()
            self._client.stop()
            with self._lock:
                self._taken.notify_all()
            self.events.stop()
            # The threads are daemons: name resolution may block one of them, and cannot be interrupted.
            await asyncio.gather(*(asyncio.to_thread(thread.join, 0.5) for thread in self._threads))

    async def _forward(self, deliver: Callable[[Batch], None]) -> None:
        while True:
            try:
                async with asyncio.timeout(None if self._complete else self._node_patience()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            with self._lock:
                changes, self._changes = self._changes, []
                unchanged, self._unchanged = self._unchanged, []
                # With the changes: a list that ends after they were taken is delivered with the next batch.
                first = not self._complete and self._is_complete()
                self._complete |= first
                self._taken.notify_all()
            if changes or unchanged or first:
                deliver(Batch(changes, self._complete, unchanged))
            del changes, unchanged  # do not keep the objects in memory while waiting

    def _take(self, resource: Resource, changes: list[Change], listed: bool) -> None:
        """Called by the followers' threads."""
        with self._lock:
            # Read the first lists only as fast as they are planned, so that few objects are in memory.
            while len(self._changes) >= MOST_WAITING and not (self._complete or self._client.stopping.is_set()):
                self._taken.wait(1.0)
            self._changes += changes
            if resource.kind == "Node":
                for change in changes:
                    self._node = change.object if isinstance(change.object, objects.Node) else None
            if listed:
                self._unlisted.discard(resource.name)
                if resource.kind == "Node" and self._node_listed is None:
                    self._node_listed = time.monotonic()
        self._wake_up()

    def _take_unchanged(self, change: Change) -> None:
        """Called by the followers' threads."""
        if change.kind not in ("Service", "EndpointSlice"):
            return  # a Node's heartbeats
        with self._lock:
            self._unchanged.append(change)
        self._wake_up()

    def _wake_up(self) -> None:
        if self._loop is None:
            return  # ``run`` will check
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            pass  # the loop is closed: the agent exits

    def _node_patience(self) -> float | None:
        """Seconds until the Node must have an address; None: it has one, or a list has not arrived yet."""
        # After the wait has timed out, a list that is still missing must not make the caller look all the time.
        if self._unlisted or self._node_listed is None or self._node_has_address():
            return None
        return max(0.0, self._node_listed + self._client.timing.node - time.monotonic())

    def _is_complete(self) -> bool:
        """Whether the changes that were taken are all that a start needs. Called with the lock held."""
        if self._unlisted:
            return False
        if self._node_has_address():
            return True
        if self._node_patience():
            return False
        what = "exist" if self._node is None else "be assigned IPs"
        _log.warning(f"timed out waiting for the Node to {what}", node=self._node_name)
        return True

    def _node_has_address(self) -> bool:
        status = self._node.status if self._node is not None else None
        return any(
            address.type in ("InternalIP", "ExternalIP") and parse_address(address.address or "") is not None
            for address in (status.addresses if status else None) or ()
        )

    async def _look(self, followers: list[Follower]) -> None:
        while True:
            await asyncio.sleep(self._client.timing.look)
            now = time.monotonic()
            self._client.look(now)
            for follower in followers:
                follower.look(now)
