# SPDX-License-Identifier: Apache-2.0
"""``cluster rollback``: nodes are given back to kube-proxy."""

from __future__ import annotations

from pyebpf_proxy.cluster import machines, objects, scheduling, takeover, task_pod
from pyebpf_proxy.cluster.api import CONFIG_MAPS, Object, kind_of
from pyebpf_proxy.cluster.command import Command, ending, naming, telling
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.cluster.model import View, installed_image, view
from pyebpf_proxy.cluster.objects import KUBE_PROXY, NAMESPACE
from pyebpf_proxy.cluster.output import counted
from pyebpf_proxy.cluster.takeover import Say, Site
from pyebpf_proxy.see.answers import QUESTION

_AGAIN = "to continue, run pyebpf-proxy cluster rollback"


class Rollback(Command):
    """``cluster rollback``."""

    name = "rollback"

    def run(self, image: str) -> None:
        """Give nodes back to kube-proxy; after the last one, remove all objects. ``image``: of the task pods."""
        found = self.view()
        _kube_proxy_of(found)
        installed = installed_image(found)
        image = image or installed
        if not image and any(map(found.is_ours, found.nodes)):
            raise ClusterError(
                f"there is no DaemonSet {NAMESPACE}/{objects.NAME} any more; nothing was changed; specify the image"
                " for the clean-up with --image REGISTRY/pyebpf-proxy:TAG",
                QUESTION,
            )
        site = self.site(image)
        with self.changing(_AGAIN):
            self._give_back_all(site)

    def _give_back_all(self, site: Site) -> None:
        api, say = self.api, self.output.say
        found, every = self.again(), view(api)
        kube_proxy = _kube_proxy_of(found)
        served = [node for node in found.nodes if found.is_ours(node) and found.is_up(node)]
        todo = [node for node in served if scheduling.selects(kube_proxy, found.nodes[node])]
        only = [node for node in served if node not in todo]
        last = not [node for node in every.nodes if every.is_ours(node) and node not in todo]
        say(f"{counted(len(todo), 'node')} to give back: {', '.join(todo) or 'nothing to do'}")
        self.leave_out_down(found)
        task_pod.remove_all(api)
        if last:
            # kube-proxy starts beside the agents, with the very template that it had: no pod is replaced later.
            with ending(f"no node was given back; {_AGAIN}"):
                takeover.patch_kube_proxy(api, objects.unprepare, self.seconds)
        self.each(todo, "nodes given back", lambda node, tell: self._give_back(site, node, tell))
        if last:
            with ending(f"all nodes are given back; {_AGAIN}"):
                takeover.patch_kube_proxy(api, objects.restore_strategy, self.seconds)
                self._remove_objects(site)
            say("all objects of pyebpf-proxy are removed; kube-proxy's DaemonSet is restored")
        if only:
            raise ClusterError(
                f"{', '.join(only)}: the node selector or affinity of kube-proxy's DaemonSet excludes the node; the"
                f" agent is the only proxy there and was not removed{self.done_before}"
            )

    def _remove_objects(self, site: Site) -> None:
        for item in reversed([objects.datapath_config_map(""), *objects.agent(site.image)]):
            metadata = item["metadata"]
            self.api.delete(kind_of(item), metadata["name"], metadata.get("namespace", ""))
        self.api.delete(CONFIG_MAPS, machines.CONFIG_MAP, NAMESPACE)

    @staticmethod
    def _give_back(site: Site, node: str, say: Say) -> None:
        """One node."""
        again = "to continue, run the command again"
        serves = "a proxy serves the node"
        with telling(say, f"{serves}; {_AGAIN}"), naming(node, again, f"{serves}; {again}"):
            takeover.give_back(site, node, say)


def _kube_proxy_of(found: View) -> Object:
    """kube-proxy's DaemonSet. ClusterError if there is none (any more)."""
    if found.kube_proxy_set is None:
        raise ClusterError(
            f"there is no DaemonSet {NAMESPACE}/{KUBE_PROXY}; the agent is the only proxy and was not removed"
        )
    return found.kube_proxy_set
