# SPDX-License-Identifier: Apache-2.0
"""One node from kube-proxy to the agent, and back. At each moment one of the two has programmed the node.

To the agent: the agent starts alongside kube-proxy; once it has programmed the node, kube-proxy is parked; then the
agent holds the health port and is ready. Back: kube-proxy starts alongside the agent, and the clean-up waits until it
has programmed the node. Every step can be repeated, so a command that was killed is continued by the next one: the
node's labels say where it stands until the last step is done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import NamedTuple

from pyebpf_proxy.cluster import machines, objects, reasons, task_pod
from pyebpf_proxy.cluster.api import DAEMON_SETS, NODES, PODS, Api, Object, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError, NodeGoneError
from pyebpf_proxy.cluster.model import Pod, is_leaving, is_programmed, label_of, pods, unreached_of
from pyebpf_proxy.cluster.objects import (
    AGENT,
    CLEANING,
    KUBE_PROXY,
    NAME,
    NAMESPACE,
    ON,
    PARKED,
    UNREACHED,
    UNVERIFIED,
)
from pyebpf_proxy.cluster.on_node import NO_RULE, REACHED, WARNING
from pyebpf_proxy.cluster.task_pod import POLL_SECONDS, wait_on_node, wait_until
from pyebpf_proxy.common.kube_proxy_health import VARIABLE as HEALTH

Say = Callable[[str], None]
_AGENTS, _KUBE_PROXIES = f"k8s-app={NAME}", f"k8s-app={KUBE_PROXY}"
_ON_NODE = ["pyebpf-proxy", "cluster", "on-node"]


class Site(NamedTuple):
    """What the steps on all nodes have in common."""

    api: Api
    #: Of the task pods.
    image: str
    #: Services that are connected to (``task_pod.targets``).
    targets: list[str]
    #: Where kube-proxy serves its health page on each node.
    health: str
    #: For each step.
    seconds: float

    def run(self, what: str, node: str, task: str, targets: list[str]) -> list[str]:
        """Run a task of ``on_node`` in a task pod. The result is its output; ClusterError if it fails."""
        command = [*_ON_NODE, task, *" ".join(targets).split()]
        return task_pod.run(self.api, what, node, self.image, command, self.seconds).splitlines()


class Reached(NamedTuple):
    """Targets that can be connected to, from the node itself and from a pod on it."""

    node: list[str]
    pod: list[str]

    def others(self, targets: list[str]) -> str:
        """The other targets, as they are noted on the node."""
        return json.dumps(
            {where: [each for each in targets if each not in reached] for where, reached in self._asdict().items()}
        )


# ---- to the agent --------------------------------------------------------------------------------------------------


def try_image(site: Site, node: str) -> Reached:
    """Run the image on the node for a moment: it can be pulled, and the kernel is fit. ClusterError if not.

    The result: what the present proxy serves there.
    """

    def reached(what: str, task: str) -> list[str]:
        lines = site.run(what, node, task, site.targets)
        return [line.removeprefix(REACHED) for line in lines if line.startswith(REACHED)]

    return Reached(reached("fit", "fit"), reached("try", "try") if site.targets else [])


def noted(site: Site, node: str) -> Reached | None:
    """What the agent must serve on a node on which it has been started before; None: it has not.

    That is what kube-proxy served before. Where this is not known, it is everything.
    """
    found = _node(site.api, node)
    note = unreached_of(found)
    if note is None and not (label_of(found, AGENT) or label_of(found, PARKED)):
        return None
    try:
        others = json.loads(note or "{}")
        node_lacks, pod_lacks = (others.get(where, ()) for where in Reached._fields)
        return Reached(
            [each for each in site.targets if each not in node_lacks],
            [each for each in site.targets if each not in pod_lacks],
        )
    except (ValueError, TypeError, AttributeError):  # another program has changed it
        return Reached(site.targets, site.targets)


def take(site: Site, node: str, before: Reached, say: Say, outdated: Pod | None = None) -> None:
    """Give the node to the agent. ClusterError: kube-proxy still serves it, or the caller must give it back.

    ``before``: what kube-proxy serves there, and the agent must. ``outdated``: an agent's pod that is replaced.
    """
    api = site.api
    # A clean-up that another command began must not remove what the agent attaches.
    task_pod.remove(api, task_pod.name_of("clean", node), node, site.seconds)
    machines.note(api, [_node(api, node)], machines.known(api))
    label(site, node, AGENT, ON, before.others(site.targets))
    if outdated is not None:
        say("replacing the agent, which runs with another datapath configuration")
        replace(site, node, outdated, site.image, say)
    else:
        say("the agent starts alongside kube-proxy")
    wait_programmed(site, node)
    say("the agent has programmed the node; kube-proxy is parked")
    label(site, node, PARKED, UNVERIFIED)

    def why() -> str:
        kube_proxy = api.get(DAEMON_SETS, KUBE_PROXY, NAMESPACE)
        return "" if kube_proxy is None or objects.spares_parked(kube_proxy) else "its DaemonSet was rewritten"

    gone = "kube-proxy's pod did not end"
    wait_on_node(api, node, lambda: node not in pods(api, _KUBE_PROXIES, node), gone, site.seconds, why)
    wait_ready(site, node)
    verify(site, node, before, say)
    label(site, node, PARKED, ON)


def wait_programmed(site: Site, node: str) -> Pod:
    """Until the agent's pod runs and says that the node is programmed. ClusterError, at once if it never will."""
    late, hopeless = "the agent did not program the node", "the agent does not start"
    return _wait_pod(site, NAME, node, lambda pod: is_programmed(site.api, pod), late, hopeless)


def wait_ready(site: Site, node: str) -> Pod:
    """Until the agent's pod is ready. On a node that is being removed it never is, but it has programmed the node."""

    def good(pod: Pod) -> bool:
        return pod.ready or (is_leaving(_node(site.api, node)) and is_programmed(site.api, pod))

    return _wait_pod(site, NAME, node, good, "the agent's pod did not become ready", "the agent ended")


def _wait_pod(site: Site, proxy: str, node: str, good: Callable[[Pod], bool], late: str, hopeless: str) -> Pod:
    """Until the proxy's pod on the node is usable and good. ClusterError: ``late``; ``hopeless``, at once."""
    api = site.api
    found: Pod | None = None

    def come() -> bool:
        nonlocal found
        found = pods(api, f"k8s-app={proxy}", node).get(node)
        # The DaemonSet controller replaces a pod that failed: the kubelet has rejected or evicted it.
        if found is not None and found.hopeless and found.phase != "Failed":
            raise ClusterError(f"{hopeless}: {found.hopeless}")
        return found is not None and found.usable and good(found)

    def why() -> str:
        if found is None:
            return reasons.of_daemon_set(api, proxy)
        return found.hopeless or reasons.of_pod(api, found.name)

    wait_on_node(api, node, come, late, site.seconds, why)
    assert found is not None
    return found


def unpark_lost(site: Site, node: str) -> str:
    """For a node that was lost on its way to the agent: once it is back, kube-proxy starts there, too.

    The result: why it could not be done, or "".
    """
    try:
        label(site, node, PARKED, "")
    except NodeGoneError:
        pass
    except (ClusterError, RefusedError) as error:
        return str(error)
    return ""


def verify(site: Site, node: str, before: Reached, say: Say) -> None:
    """Connect to what was reached before, from the node and from a pod. ClusterError.

    It also removes the rules that kube-proxy wrote while both ran; what stays of them and is harmless is said.
    """
    for line in site.run("verify", node, "verify", before.node):
        if line.startswith(WARNING):
            say(line)
    if before.pod:
        site.run("connect", node, "connect", before.pod)


def require_agent(site: Site, node: str) -> None:
    """NodeGoneError if the node has registered again since an agent was started there."""
    if label_now(site.api, node, AGENT) != ON:
        raise NodeGoneError("no agent runs there any more; to take the node over, run pyebpf-proxy cluster install")


def replace(site: Site, node: str, old: Pod, image: str, say: Say) -> None:
    """Replace the agent's pod by one of the DaemonSet's present template, and wait until that has programmed the node.

    ``old``: the pod, as it was listed. ``image``: that of the template; a pod of the former template may have been
    created since. The attached programs carry the traffic meanwhile.
    """
    api = site.api
    former = pods(api, _AGENTS, node).get(node, old)
    api.delete(PODS, former.name, NAMESPACE, former.uid)

    def replaced() -> bool:
        require_agent(site, node)
        found = pods(api, _AGENTS, node).get(node)
        if found is None or found.uid == former.uid:
            return False
        if found.image != image:
            api.delete(PODS, found.name, NAMESPACE, found.uid)
            return False
        return True

    wait_on_node(api, node, replaced, "no new pod of the agent was created", site.seconds)
    wait_programmed(site, node)
    say("the new agent has programmed the node")


# ---- back to kube-proxy --------------------------------------------------------------------------------------------


def give_back(site: Site, node: str, say: Say) -> None:
    """Give the node back to kube-proxy, and remove everything of the agent from it. ClusterError.

    The node keeps the label AGENT until the last step is done: what a former agent attached is removed, too.
    """
    api = site.api
    # One that was interrupted or is late runs until its kubelet kills it. It must not remove what kube-proxy writes.
    task_pod.remove(api, task_pod.name_of("verify", node), node, site.seconds)
    agent = pods(api, _AGENTS, node).get(node)
    parked = bool(label_now(api, node, PARKED))
    label(site, node, PARKED, "")
    old = pods(api, _KUBE_PROXIES, node).get(node)
    if old is not None and agent is not None and _has_removed_rules(api, agent, old, parked):
        # kube-proxy would write them again at its next full sync: in mode nftables within an hour.
        _restart_kube_proxy(site, node, old)
    _await_rules(site, node, say)
    now = pods(api, _AGENTS, node).get(node)
    say("kube-proxy has programmed the node; the agent ends")
    label(site, node, AGENT, CLEANING)
    gone = "the agent's pod did not end"
    wait_on_node(api, node, lambda: node not in pods(api, _AGENTS, node), gone, site.seconds)
    if _may_have_restarted(agent, now):
        _await_rules(site, node, say)
    # Its programs are attached until here.
    task_pod.run(api, "clean", node, site.image, objects.CLEAN_UP, site.seconds, {HEALTH: site.health})
    machines.forget(api, [node])
    label(site, node, AGENT, "")
    say("kube-proxy serves the node")


def _has_removed_rules(api: Api, agent: Pod, kube_proxy: Pod, parked: bool) -> bool:
    """Whether an agent that started after this kube-proxy has removed its rules."""
    later = not parked or agent.since > kube_proxy.since
    return later and agent.usable and is_programmed(api, agent)


def _may_have_restarted(before: Pod | None, now: Pod | None) -> bool:
    """Whether an agent may have started, and removed kube-proxy's rules, after they were looked at."""
    if before is None or now is None:
        return before is not now
    return not (before.usable and now.usable) or now.restarts != before.restarts


def _restart_kube_proxy(site: Site, node: str, old: Pod) -> None:
    """A new kube-proxy writes all rules at its start."""
    site.api.delete(PODS, old.name, NAMESPACE, old.uid)

    def replaced() -> bool:
        found = pods(site.api, _KUBE_PROXIES, node).get(node)
        return found is not None and found.uid != old.uid

    wait_on_node(site.api, node, replaced, "the agent stays: no new pod of kube-proxy was created", site.seconds)


def _wait_kube_proxy(site: Site, node: str) -> Pod:
    late = "the agent stays: kube-proxy's pod did not start"
    hopeless = "the agent stays: kube-proxy does not start"
    return _wait_pod(site, KUBE_PROXY, node, lambda pod: True, late, hopeless)


def _await_rules(site: Site, node: str, say: Say) -> None:
    """Until kube-proxy runs and has rules for the targets. Its health page cannot tell: the agent holds the port."""
    kube_proxy = _wait_kube_proxy(site, node)
    try:
        site.run("await", node, "kube-proxy", site.targets)
    except ClusterError as error:
        if NO_RULE not in str(error):
            raise
        # An agent that does not run now may have removed them.
        say(f"{error}; restarting kube-proxy")
        _restart_kube_proxy(site, node, kube_proxy)
        _wait_kube_proxy(site, node)
        site.run("await", node, "kube-proxy", site.targets)


# ---- labels and DaemonSets -----------------------------------------------------------------------------------------


def label_now(api: Api, node: str, name: str) -> str:
    """The present value of one of our labels; "" if the node does not have it. NodeGoneError."""
    return label_of(_node(api, node), name)


def _node(api: Api, name: str) -> Object:
    found = api.get(NODES, name)
    if found is None:
        raise NodeGoneError("the node no longer exists")
    return found


def label(site: Site, node: str, name: str, value: str, unreached: str = "") -> None:
    """Give one of our labels this value, or remove it (""). NodeGoneError.

    kube-proxy is parked only where the agent has its label, in the same version of the node: a node that was deleted
    and has registered again has no label, and so no agent.

    ``unreached``: the note that comes with the agent's label, where there is none yet. It goes with that label.
    """
    end = time.monotonic() + site.seconds
    while True:
        found = _node(site.api, node)
        metadata: Object = {}
        if (found["metadata"].get("labels") or {}).get(name) != (value or None):
            metadata["labels"] = {name: value or None}
        note = unreached_of(found)
        if name == AGENT and (unreached if note is None else not value):
            metadata["annotations"] = {UNREACHED: unreached or None}
        if not metadata:
            return
        if name == PARKED and value and label_of(found, AGENT) != ON:
            raise ClusterError(f"the node has lost its label {AGENT}={ON}, so the agent ends")
        metadata["resourceVersion"] = found["metadata"]["resourceVersion"]
        try:
            site.api.patch(NODES, node, {"metadata": metadata})
        except RefusedError as refused:
            # Others have changed or deleted the node.
            if refused.status not in (404, 409) or time.monotonic() > end:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return


def patch_kube_proxy(api: Api, change: Callable[[Object], Object | None], seconds: float) -> None:
    """Change kube-proxy's DaemonSet, and wait until its controller knows."""
    end = time.monotonic() + seconds
    while True:
        found = api.get(DAEMON_SETS, KUBE_PROXY, NAMESPACE)
        body = None if found is None else change(found)
        if found is None or body is None:
            return
        # Of this version: a list in the patch would replace what others have written into it meanwhile.
        version = {"resourceVersion": found["metadata"]["resourceVersion"]}
        body |= {"metadata": body.get("metadata", {}) | version}
        try:
            changed = api.patch(DAEMON_SETS, KUBE_PROXY, body, NAMESPACE)
            break
        except RefusedError as refused:
            if refused.status != 409 or time.monotonic() > end:
                raise
            time.sleep(POLL_SECONDS)

    wait_observed(api, changed, seconds)


def wait_observed(api: Api, changed: Object, seconds: float) -> None:
    """Until a DaemonSet's controller has seen this change."""
    name, generation = changed["metadata"]["name"], changed["metadata"]["generation"]

    def observed() -> bool:
        now = api.get(DAEMON_SETS, name, NAMESPACE)
        return now is None or now.get("status", {}).get("observedGeneration", 0) >= generation

    wait_until(observed, f"the DaemonSet controller did not observe the change of {name}", seconds)
