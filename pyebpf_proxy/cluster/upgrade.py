# SPDX-License-Identifier: Apache-2.0
"""``cluster upgrade``: agents are replaced by those of another image, each verified before the next."""

from __future__ import annotations

from pyebpf_proxy.cluster import model, objects, takeover, task_pod
from pyebpf_proxy.cluster.api import DAEMON_SETS, Object, RefusedError
from pyebpf_proxy.cluster.command import Command, naming, telling
from pyebpf_proxy.cluster.errors import ClusterError, NodeGoneError, NodeLostError, StoppedError
from pyebpf_proxy.cluster.model import Pod, installed_image
from pyebpf_proxy.cluster.objects import KUBE_PROXY, NAME, NAMESPACE
from pyebpf_proxy.cluster.output import counted
from pyebpf_proxy.cluster.takeover import Say, Site

_CARRIED = "the programs of the last agent carry the traffic"


class Upgrade(Command):
    """``cluster upgrade``."""

    name = "upgrade"
    #: The digest of the DatapathConfiguration, which an upgrade does not change.
    _datapath = ""

    def run(self, image: str) -> None:
        """Replace the agents by those of another image. ClusterError: the node that failed has the former image."""
        api, say = self.api, self.output.say
        before = installed_image(self.view())
        if not before:
            raise ClusterError("the agent is not installed; run pyebpf-proxy cluster install")
        self.require_template(self._daemon_set(), image or before)
        site = self.site(image or before)
        with self.changing(_again(site)):
            self._datapath = self.datapath_digest()
            found = self.again()
            others = {node: pod for node, pod in sorted(found.agents.items()) if pod.image != site.image}
            present = [node for node in others if node in found.nodes]
            todo = [node for node in present if found.is_up(node) and not found.is_leaving(node)]
            say(f"{counted(len(todo), 'node')} to upgrade to {site.image}: {', '.join(todo) or 'nothing to do'}")
            self.leave_out_down(found)
            self.leave_out_leaving(found)
            without = [node for node in found.nodes if found.is_ours(node) and node not in found.agents]
            self.leave_out(without, "no agent runs there (pyebpf-proxy cluster status says why)")
            task_pod.remove_all(api)
            if todo:
                # Rights first: the new agent may need more than the old one.
                self.apply(objects.agent(site.image)[:-1])
            self.each(todo, "nodes upgraded", lambda node, tell: self._upgrade(site, node, others[node], tell))
            if any(pod.image == site.image for pod in model.pods(api, f"k8s-app={NAME}").values()):
                self.apply([self._upgraded(site)])

    def _daemon_set(self) -> Object:
        found = self.api.get(DAEMON_SETS, NAME, NAMESPACE)
        if found is None:
            raise ClusterError(f"DaemonSet {NAMESPACE}/{NAME} no longer exists")
        return found

    def _upgraded(self, site: Site) -> Object:
        return objects.upgraded(self._daemon_set(), site.image, self._datapath)

    def _upgrade(self, site: Site, node: str, old: Pod, say: Say) -> None:
        """One node. ClusterError: which image runs there."""
        takeover.require_agent(site, node)
        again = _again(site)
        # The old agent runs until the image is on the node and has run there.
        stays = f"the agent with {old.image} stays"
        with telling(say, f"{stays}; {again}"), naming(node, stays):
            before = takeover.try_image(site, node)
        try:
            with telling(say, f"{_CARRIED}; {again}"):
                self.apply([self._upgraded(site)])
                say("the image is available; replacing the agent")
                takeover.replace(site, node, old, site.image, say)
                if self._runs_kube_proxy(node):
                    say(
                        "upgraded; kube-proxy also runs on the node: to complete the installation, run pyebpf-proxy"
                        " cluster install"
                    )
                    return
                takeover.wait_ready(site, node)
                takeover.verify(site, node, before, say)
        except NodeGoneError:
            raise
        except NodeLostError as lost:
            raise ClusterError(f"{node}: {lost}; when it is back, {again}") from None
        except StoppedError as stopped:
            text = f"{node}: {stopped}; {_CARRIED}; {again}"
            raise StoppedError(text, stopped.status) from None
        except (ClusterError, RefusedError) as error:
            say(f"failed: {error}; restoring the agent with {old.image}")
            self._downgrade(site, node, old, str(error), say)
            raise ClusterError(f"{node}: {error}; the agent with {old.image} runs there again") from None
        say("upgraded, and verified")

    def _runs_kube_proxy(self, node: str) -> bool:
        """Whether kube-proxy holds the node's health port. The agent does not become ready then."""
        return node in model.pods(self.api, f"k8s-app={KUBE_PROXY}", node)

    def _downgrade(self, site: Site, node: str, old: Pod, error: str, say: Say) -> None:
        """Bring the former agent back. ClusterError if that fails, too."""
        command = f"pyebpf-proxy cluster upgrade --image {old.image} --nodes SELECTOR"
        again = f"to restore the agent with {old.image}, run {command}"
        try:
            with telling(say, f"{_CARRIED}; {again}"):
                self.apply([objects.downgraded(self._daemon_set(), old.image, self._datapath)])
                failed = model.pods(self.api, f"k8s-app={NAME}", node).get(node)
                if failed is not None and failed.image != old.image:
                    takeover.replace(site, node, failed, old.image, say)
                wait = takeover.wait_programmed if self._runs_kube_proxy(node) else takeover.wait_ready
                wait(site, node)
        except NodeGoneError:
            raise
        except StoppedError as stopped:
            text = f"{node}: {error}; {stopped}; {_CARRIED}; {again}"
            raise StoppedError(text, stopped.status) from None
        except (ClusterError, RefusedError) as second:
            raise ClusterError(
                f"{node}: {error}; the agent with {old.image} could not be restored: {second}; {_CARRIED};"
                " run pyebpf-proxy cluster rollback --nodes SELECTOR"
            ) from None


def _again(site: Site) -> str:
    return f"to continue, run pyebpf-proxy cluster upgrade --image {site.image}"
