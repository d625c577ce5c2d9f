# SPDX-License-Identifier: Apache-2.0
"""``cluster install``, ``rollback`` and ``upgrade``: one node after the other. Each is verified before the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import yaml

from pyebpf_proxy.cluster import check, model, objects, takeover, task_pod
from pyebpf_proxy.cluster.api import Api, RefusedError, kind_of
from pyebpf_proxy.cluster.canary import Canary
from pyebpf_proxy.cluster.errors import ClusterError, NodeLostError
from pyebpf_proxy.cluster.lease import Lease
from pyebpf_proxy.cluster.model import View, installed_image, view
from pyebpf_proxy.cluster.objects import AGENT, KUBE_PROXY, NAME, NAMESPACE, PARKED
from pyebpf_proxy.cluster.output import Output, counted
from pyebpf_proxy.cluster.takeover import Say
from pyebpf_proxy.see.answers import QUESTION


class Command:
    """One run of a command, and the nodes on which it has finished."""

    def __init__(self, api: Api, output: Output, selector: str, seconds: float) -> None:
        self._api = api
        self._output = output
        self._selector = selector
        self._seconds = seconds
        self._done: list[str] = []
        output.document |= {"context": api.context, "done": self._done, "error": None}

    # ---- install -------------------------------------------------------------------------------------------------

    def install(self, image: str, canary: Canary | None, dry_run: bool) -> None:
        """Take nodes over. After a ClusterError, the failed node has kube-proxy again; the nodes before it are done."""
        api, say = self._api, self._output.say
        check.rights(api, check.RIGHTS)
        found = view(api, self._selector)
        check.blocking(api, found)
        image = self._image(found, image)
        todo = self._todo(found, canary)
        check.fit_nodes(found, todo)
        if dry_run:
            self._dry_run(found, image, todo)
            return
        with Lease(api, "install") as lease:
            self._prepare(found, image)
            task_pod.remove_all(api)
            found = view(api, self._selector)
            todo = self._todo(found, canary)
            done = sum(map(found.is_done, found.nodes))
            say(f"{counted(len(todo), 'node')} to take over, {done} done: {', '.join(todo) or 'nothing to do'}")
            self._say_left_out(found)
            with self._output.progress("nodes taken over", len(todo)) as step:
                for node, tell in self._each(lease, todo, step):
                    self._take(node, image, tell)
        left = len(found.nodes) - done - len(todo)
        if left:
            say(f"{counted(left, 'node')} left to kube-proxy; to go on: pyebpf-proxy cluster install")

    @staticmethod
    def _todo(found: View, canary: Canary | None) -> list[str]:
        todo = [node for node in found.nodes if not found.is_done(node) and found.is_up(node)]
        if canary is None:
            return todo
        return todo[: max(0, canary.of(len(found.nodes)) - sum(map(found.is_done, found.nodes)))]

    def _say_left_out(self, found: View) -> None:
        if down := [node for node in found.nodes if not found.is_up(node)]:
            self._output.say(f"left out, because their kubelets do not report: {', '.join(down)}")

    def _image(self, found: View, image: str) -> str:
        present = installed_image(found)
        # If no node runs the installed image, its name may be wrong: another image may replace it.
        if present and image and image != present and found.agents:
            raise ClusterError(
                f"{present} is installed; for another image: pyebpf-proxy cluster upgrade --image {image}"
            )
        if not (image or present):
            raise ClusterError("no image is named: --image REGISTRY/pyebpf-proxy:TAG", QUESTION)
        image = image or present
        others = sorted(node for node, pod in found.agents.items() if pod.image != image and not pod.deleted)
        if others:
            raise ClusterError(
                f"an agent of another image runs on {', '.join(others)}: first pyebpf-proxy cluster upgrade"
            )
        return image

    def _dry_run(self, found: View, image: str, todo: list[str]) -> None:
        """Let the API server validate the objects, and print them and the nodes."""
        assert found.kube_proxy_set is not None
        items = objects.agent(image)
        for item in items:
            self._api.apply(item, dry_run=True)
        patch = objects.prepare(found.kube_proxy_set)
        self._output.document |= {"objects": items, "patch": patch, "nodes": todo}
        for item in items:
            self._output.say(f"---\n{yaml.safe_dump(item, sort_keys=False).rstrip()}")
        self._output.say(f"---\n# merge patch of DaemonSet {NAMESPACE}/{KUBE_PROXY}")
        self._output.say(yaml.safe_dump(patch, sort_keys=False).rstrip())
        self._output.say(f"# nodes, in this order: {', '.join(todo) or 'none'}")
        self._output.say(f"# each gets the labels {AGENT}=true and, once its agent has programmed it, {PARKED}=true")

    def _prepare(self, found: View, image: str) -> None:
        """Apply the objects and change kube-proxy's DaemonSet. This starts and ends no pod."""
        assert found.kube_proxy_set is not None
        if not objects.is_prepared(found.kube_proxy_set):
            # Labels of an earlier takeover: for example, kubeadm has upgraded kube-proxy since. Each node gets its
            # label again once its agent has programmed it.
            for node, item in view(self._api).nodes.items():
                if PARKED in (item["metadata"].get("labels") or {}):
                    takeover.label(self._api, node, PARKED, False)
            takeover.patch_kube_proxy(self._api, objects.prepare, self._seconds)
        for item in objects.agent(image):
            try:
                self._api.apply(item)
            except RefusedError as refused:
                raise ClusterError(f"{item['kind']} {item['metadata']['name']} is refused: {refused}") from None

    def _each(self, lease: Lease, todo: list[str], step: Callable[[], None]) -> Iterator[tuple[str, Say]]:
        """Each node, and the function that prints its lines. ClusterError if another command has taken over."""
        for number, node in enumerate(todo, 1):
            lease.check()
            yield node, _prefixed(self._output.say, f"[{number}/{len(todo)}] {node}: ")
            self._done.append(node)
            step()

    def _take(self, node: str, image: str, say: Say) -> None:
        done = f"; done before: {', '.join(self._done)}" if self._done else ""
        try:
            if not takeover.has(self._api, node, AGENT):
                takeover.try_image(self._api, node, image, self._seconds)
                say("the image runs on the node, and the kernel meets the requirements")
        except (ClusterError, RefusedError) as error:
            raise ClusterError(f"{node}: {error}; nothing was changed there{done}") from None
        try:
            takeover.take(self._api, node, image, task_pod.targets(self._api), self._seconds, say)
        except KeyboardInterrupt:
            say("stopped here; a proxy serves the node. Go on with cluster install, or undo it with cluster rollback")
            raise
        except NodeLostError as lost:
            takeover.unpark_lost(self._api, node)
            raise ClusterError(
                f"{node}: {lost}. Once it is back, both proxies start there: then cluster install goes on, or cluster"
                f" rollback gives it back to kube-proxy{done}"
            ) from None
        except (ClusterError, RefusedError) as error:
            say(f"failed: {error}")
            say("the node goes back to kube-proxy")
            try:
                takeover.give_back(self._api, node, image, task_pod.targets(self._api), self._seconds, say)
            except (ClusterError, RefusedError) as second:
                raise ClusterError(
                    f"{node}: {error}; it could not be given back either: {second}; a proxy serves it:"
                    " repeat cluster rollback --nodes"
                ) from None
            raise ClusterError(f"{node}: {error}; the node was given back to kube-proxy{done}") from None
        say("taken over, and verified")

    # ---- rollback ------------------------------------------------------------------------------------------------

    def rollback(self) -> None:
        """Give nodes back to kube-proxy. After the last one, remove all objects."""
        api, say = self._api, self._output.say
        check.rights(api, check.RIGHTS)
        found, every = view(api, self._selector), view(api)
        if found.kube_proxy_set is None:
            raise ClusterError(f"there is no DaemonSet {NAMESPACE}/{KUBE_PROXY}: the agent stays, it is the only proxy")
        image = installed_image(every)
        todo = [node for node in found.nodes if self._is_managed(found, node) and found.is_up(node)]
        last = not [node for node in every.nodes if self._is_managed(every, node) and node not in todo]
        say(f"{counted(len(todo), 'node')} to give back: {', '.join(todo) or 'nothing to do'}")
        self._say_left_out(found)
        with Lease(api, "rollback") as lease:
            task_pod.remove_all(api)
            if last:
                # kube-proxy starts alongside the agents, from its original template: so no pod is replaced later.
                takeover.patch_kube_proxy(api, objects.unprepare, self._seconds)
            with self._output.progress("nodes given back", len(todo)) as step:
                for node, tell in self._each(lease, todo, step):
                    self._give_back(node, image, tell)
            if last:
                takeover.patch_kube_proxy(api, objects.restore_strategy, self._seconds)
                if image:
                    for item in reversed(objects.agent(image)):
                        metadata = item["metadata"]
                        api.delete(kind_of(item), metadata["name"], metadata.get("namespace", ""))
                say("all objects of pyebpf-proxy are removed; kube-proxy's DaemonSet is as it was")

    def _give_back(self, node: str, image: str, say: Say) -> None:
        try:
            takeover.give_back(self._api, node, image, task_pod.targets(self._api), self._seconds, say)
        except (ClusterError, RefusedError) as error:
            raise ClusterError(f"{node}: {error}; repeat the command to go on") from None

    @staticmethod
    def _is_managed(found: View, node: str) -> bool:
        return found.has(node, AGENT) or found.has(node, PARKED) or node in found.agents

    # ---- upgrade -------------------------------------------------------------------------------------------------

    def upgrade(self, image: str) -> None:
        """Replace the agents by those of an image. After a ClusterError, the failed node has the previous image."""
        api, say = self._api, self._output.say
        check.rights(api, check.RIGHTS)
        found = view(api, self._selector)
        before = installed_image(found)
        if not before:
            raise ClusterError("the agent is not installed: pyebpf-proxy cluster install")
        image = image or before
        todo = [node for node, pod in found.agents.items() if node in found.nodes and pod.image != image]
        todo.sort()
        say(f"{counted(len(todo), 'node')} to upgrade to {image}: {', '.join(todo) or 'nothing to do'}")
        with Lease(api, "upgrade") as lease:
            task_pod.remove_all(api)
            with self._output.progress("nodes upgraded", len(todo)) as step:
                for node, tell in self._each(lease, todo, step):
                    self._upgrade(node, found, image, tell)
            self._set_image(image)

    def _set_image(self, image: str) -> None:
        self._api.apply(objects.agent(image)[-1])

    def _upgrade(self, node: str, found: View, image: str, say: Say) -> None:
        api, old = self._api, found.agents[node]
        # The old agent keeps running until the new image has been pulled and has run on the node.
        try:
            takeover.try_image(api, node, image, self._seconds)
        except (ClusterError, RefusedError) as error:
            raise ClusterError(f"{node}: {error}; the agent of {old.image} stays") from None
        self._set_image(image)
        say("the image is available; replacing the agent")
        try:
            takeover.replace(api, node, old, self._seconds, say)
            takeover.verify(api, node, image, task_pod.targets(api), self._seconds)
        except NodeLostError as lost:
            raise ClusterError(f"{node}: {lost}. Once it is back, cluster upgrade --image {image} goes on") from None
        except (ClusterError, RefusedError) as error:
            say(f"failed: {error}; the agent of {old.image} comes back")
            self._set_image(old.image)
            try:
                failed = model.pods(api, f"k8s-app={NAME}", node).get(node)
                if failed is not None and failed.image != old.image:
                    takeover.replace(api, node, failed, self._seconds, say)
                takeover.wait_ready(api, node, self._seconds)
            except (ClusterError, RefusedError) as second:
                raise ClusterError(
                    f"{node}: {error}; the agent of {old.image} does not come back either: {second}; what the last"
                    " agent attached carries the traffic: pyebpf-proxy cluster rollback --nodes"
                ) from None
            raise ClusterError(f"{node}: {error}; the agent of {old.image} runs there again") from None
        say("upgraded, and verified")


def _prefixed(say: Say, prefix: str) -> Say:
    return lambda text: say(prefix + text)
