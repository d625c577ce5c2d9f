# SPDX-License-Identifier: Apache-2.0
"""``cluster install``: nodes are taken over from kube-proxy, each verified before the next."""

from __future__ import annotations

import contextlib

import yaml

from pyebpf_proxy.cluster import check, datapath, machines, objects, takeover, task_pod
from pyebpf_proxy.cluster.api import DAEMON_SETS, Object, RefusedError
from pyebpf_proxy.cluster.canary import Canary
from pyebpf_proxy.cluster.command import Command, ending, naming, telling
from pyebpf_proxy.cluster.errors import ClusterError, NodeGoneError, NodeLostError, StoppedError
from pyebpf_proxy.cluster.model import View, installed_image, view
from pyebpf_proxy.cluster.objects import AGENT, KUBE_PROXY, NAMESPACE, ON, PARKED, UNVERIFIED
from pyebpf_proxy.cluster.output import counted
from pyebpf_proxy.cluster.takeover import Reached, Say, Site
from pyebpf_proxy.see.answers import QUESTION

_CONTINUE = "to continue, run pyebpf-proxy cluster install; to undo it, run pyebpf-proxy cluster rollback"
_ROLLBACK = "pyebpf-proxy cluster rollback --nodes SELECTOR"
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"


class Install(Command):
    """``cluster install``."""

    name = "install"
    #: The digest of the DatapathConfiguration with which the agents run; "" without one.
    _datapath = ""

    def run(self, image: str, canary: Canary | None, dry_run: bool, datapath_text: str | None = None) -> None:
        """Take nodes over. ClusterError: the node that failed has kube-proxy again, the nodes before it are done.

        ``datapath_text``: the DatapathConfiguration; None: that which the cluster has.
        """
        api, say = self.api, self.output.say
        found = self.view()
        check.blocking(api, found)
        image = _image(found, image)
        if datapath_text is not None and objects.is_older(image):
            raise ClusterError(
                f"{image} is older than this command, which cannot check a datapath configuration for it; use the"
                " pyebpf-proxy command of that version",
                QUESTION,
            )
        items = self._items(found, image, datapath_text)
        todo = self._todo(found, canary)
        check.fit_nodes(found, todo)
        self.require_template(found.agent_set, image)
        self._validate(found, items)
        if dry_run:
            self._print(found, items, todo)
            return
        site = self.site(image)
        with self.changing(_CONTINUE):
            found = self.again()
            check.blocking(api, found)
            _image(found, image)
            with ending(f"no node was taken over; {_CONTINUE}"):
                self._prepare(site, found, self._items(found, image, datapath_text))
            task_pod.remove_all(api)
            found = self.again()
            todo = self._todo(found, canary)
            done = sum(self._is_done(found, node) for node in found.nodes)
            say(f"{counted(len(todo), 'node')} to take over, {done} done: {', '.join(todo) or 'nothing to do'}")
            self.leave_out_down(found)
            self.leave_out_leaving(found)
            without = [node for node in found.nodes if not found.is_ours(node) and node not in found.kube_proxies]
            self.leave_out(without, "kube-proxy does not run there")
            self.each(todo, "nodes taken over", lambda node, tell: self._take(site, found, node, tell))
        later = [n for n in found.nodes if found.is_done(n) and not self._is_done(found, n) and n not in todo]
        if later:
            say(
                f"{counted(len(later), 'node')} with another datapath configuration; to continue, run pyebpf-proxy"
                " cluster install"
            )
        left = len(found.nodes) - done - len(todo) - len(without) - len(later)
        if left:
            say(f"{counted(left, 'node')} left to kube-proxy; to continue, run pyebpf-proxy cluster install")

    def _items(self, found: View, image: str, datapath_text: str | None) -> list[Object]:
        """The objects to apply. ClusterError: the cluster has a datapath configuration with which no agent starts."""
        given = [] if datapath_text is None else [objects.datapath_config_map(datapath_text)]
        self._datapath = datapath.digest(datapath_text) if given else self.datapath_digest()
        *others, daemon_set = objects.installed(found.agent_set, image, self._datapath)
        return [*others, *given, daemon_set]

    def _is_done(self, found: View, node: str) -> bool:
        return found.is_done(node) and found.agents[node].datapath == self._datapath

    def _validate(self, found: View, items: list[Object]) -> None:
        """ClusterError if the API server refuses an object. Nothing is changed."""
        assert found.kube_proxy_set is not None
        patch = objects.prepare(found.kube_proxy_set)
        try:
            self.apply(items, dry_run=True)
            self.api.patch(DAEMON_SETS, KUBE_PROXY, patch, NAMESPACE, dry_run=True)
        except RefusedError as refused:
            raise ClusterError(f"DaemonSet {KUBE_PROXY} was rejected: {refused}; nothing was changed") from None
        except ClusterError as error:
            raise ClusterError(f"{error}; nothing was changed", error.status) from None

    def _print(self, found: View, items: list[Object], todo: list[str]) -> None:
        """For ``--dry-run``: the objects, which the API server has validated, and the nodes."""
        assert found.kube_proxy_set is not None
        patch = objects.prepare(found.kube_proxy_set)
        self.output.document |= {"objects": items, "patch": patch, "nodes": todo}
        for item in items:
            self.output.say(f"---\n{yaml.safe_dump(item, sort_keys=False).rstrip()}")
        self.output.say(f"---\n# merge patch of DaemonSet {NAMESPACE}/{KUBE_PROXY}")
        self.output.say(yaml.safe_dump(patch, sort_keys=False).rstrip())
        self.output.say(f"# nodes, in this order: {', '.join(todo) or 'none'}")
        parked = f"{PARKED}={UNVERIFIED} once its agent has programmed it, {PARKED}={ON} once it is verified"
        self.output.say(f"# each gets the label {AGENT}={ON}, then {parked}")

    def _prepare(self, site: Site, found: View, items: list[Object]) -> None:
        """Objects, and kube-proxy's DaemonSet: no pod starts or ends by it."""
        assert found.kube_proxy_set is not None
        self.apply(items)
        every = view(self.api)
        machines.forget_gone(self.api, every.nodes, every.machines)
        begun = (item for name, item in every.nodes.items() if every.has(name, AGENT))
        machines.note(self.api, begun, every.machines)
        if not objects.spares_parked(found.kube_proxy_set):
            # The labels are from an earlier run, as after an upgrade by kubeadm. Once the agent of a node is checked,
            # kube-proxy is parked there again.
            for node, item in every.nodes.items():
                if PARKED in (item["metadata"].get("labels") or {}):
                    with contextlib.suppress(NodeGoneError):
                        takeover.label(site, node, PARKED, "")
        if not objects.is_prepared(found.kube_proxy_set):
            takeover.patch_kube_proxy(self.api, objects.prepare, self.seconds)

    def _take(self, site: Site, found: View, node: str, say: Say) -> None:
        """One node. ClusterError: what runs there now."""
        done = self.done_before
        unchanged = f"nothing was changed there{done}"
        with telling(say, f"{unchanged}; {_CONTINUE}"), naming(node, unchanged):
            before = takeover.noted(site, node)
            if before is None:
                before = takeover.try_image(site, node)
                say("the image runs on the node, and the kernel meets the requirements")
            _say_unreached(site, before, say)
        try:
            with telling(say, f"a proxy serves the node; {_CONTINUE}"):
                agent = found.agents.get(node)
                is_outdated = agent is not None and agent.datapath != self._datapath
                takeover.take(site, node, before, say, agent if is_outdated else None)
        except NodeGoneError:
            raise
        except NodeLostError as lost:
            raise ClusterError(f"{node}: {lost}{self._unpark(site, node)}{done}") from None
        except StoppedError as stopped:
            text = f"{node}: {stopped}; a proxy serves the node; {_CONTINUE}{done}"
            raise StoppedError(text, stopped.status) from None
        except (ClusterError, RefusedError) as error:
            say(f"failed: {error}")
            say("giving the node back to kube-proxy")
            self._give_back(site, node, str(error), say)
            raise ClusterError(f"{node}: {error}; the node was given back to kube-proxy{done}") from None
        say("taken over, and verified")

    def _todo(self, found: View, canary: Canary | None) -> list[str]:
        """The nodes to take over, in this order: those that an agent serves or has served, workers, the control plane.

        The agent of a node that is taken over is replaced if it runs with another datapath configuration.
        """
        todo = [
            node
            for node in found.nodes
            if not self._is_done(found, node)
            and found.is_up(node)
            and not found.is_leaving(node)
            and (found.is_ours(node) or node in found.kube_proxies)
        ]

        def order(node: str) -> tuple[bool, bool, bool]:
            is_worker = _CONTROL_PLANE not in (found.nodes[node]["metadata"].get("labels") or {})
            return not found.is_ours(node), found.is_done(node), not is_worker

        todo.sort(key=order)
        if canary is None:
            return todo
        return todo[: max(0, canary.of(len(found.nodes)) - sum(self._is_done(found, node) for node in found.nodes))]

    @staticmethod
    def _unpark(site: Site, node: str) -> str:
        """For the error about a node that was lost: what happens there."""
        if why := takeover.unpark_lost(site, node):
            return f"; its label {PARKED} could not be removed ({why}); run pyebpf-proxy cluster install again"
        return f"; when it is back, both proxies start there; {_CONTINUE}"

    @staticmethod
    def _give_back(site: Site, node: str, error: str, say: Say) -> None:
        """After a failure. ClusterError if that fails, too."""
        try:
            with telling(say, f"a proxy serves the node; to continue, run {_ROLLBACK}"):
                takeover.give_back(site, node, say)
        except NodeGoneError:
            raise
        except (ClusterError, RefusedError) as second:
            raise ClusterError(
                f"{node}: {error}; the node could not be given back: {second}; a proxy serves it; to continue, run"
                f" {_ROLLBACK}"
            ) from None


def _image(found: View, image: str) -> str:
    """The image to install. ClusterError if it is not known, or if agents of another one run."""
    present = installed_image(found)
    # An image that no node runs may have a wrong name: another one replaces it.
    if present and image and image != present and found.agents:
        raise ClusterError(f"{present} is installed; to change it, run pyebpf-proxy cluster upgrade --image {image}")
    if not (image or present):
        raise ClusterError("no image is specified; use --image REGISTRY/pyebpf-proxy:TAG", QUESTION)
    image = image or present
    stay = {node: pod for node, pod in found.agents.items() if node not in found.nodes or not found.is_leaving(node)}
    others = sorted(node for node, pod in stay.items() if pod.image != image and not pod.deleted)
    if others:
        nodes = ", ".join(others)
        raise ClusterError(f"an agent with another image runs on {nodes}; run pyebpf-proxy cluster upgrade first")
    return image


def _say_unreached(site: Site, before: Reached, say: Say) -> None:
    """What kube-proxy does not serve, and the agent will not be asked for."""
    for where, reached in (("the node", before.node), ("a pod", before.pod)):
        if missing := [target.replace(" ", " port ") for target in site.targets if target not in reached]:
            say(f"{where} does not reach {', '.join(missing)} through kube-proxy; this is not tested with the agent")
