# SPDX-License-Identifier: Apache-2.0
"""``cluster status``: what runs on each node, and differences between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pyebpf_proxy.cluster import agents, model, objects
from pyebpf_proxy.cluster.agents import Asked
from pyebpf_proxy.cluster.api import Object
from pyebpf_proxy.cluster.model import Pod, View
from pyebpf_proxy.cluster.objects import AGENT, KUBE_PROXY, NAME, NAMESPACE, ON, PARKED, PROXIES
from pyebpf_proxy.cluster.output import Finding, Output, counted
from pyebpf_proxy.see.answers import listed

HEAD = ["NODE", "PROXY", "STATE", "RESTARTS", "VERSION", "FAST PATH", "DROPS", "BEHIND"]
_CONTINUE = "to continue, run pyebpf-proxy cluster install; to undo it, run pyebpf-proxy cluster rollback"
_REGISTERED_AGAIN = (
    "to start the agent again, run pyebpf-proxy cluster install; to remove what is attached, run pyebpf-proxy cluster"
    " rollback"
)
KEYS = ["node", "proxy", "state", "restarts", "version", "fastPath", "drops", "behind"]


def show(found: View, asked: Asked, output: Output) -> list[Finding]:
    """The table, and what an administrator has to look at."""
    # ClusterError before the table: the labels of nodes mean nothing for a DaemonSet that was made by hand.
    wanted = model.installed_image(found)
    rows = []
    for node in found.nodes:
        pod = found.agents.get(node)
        row = [node, found.proxy(node), state(found, node), str(pod.restarts if pod else 0)]
        rows.append([*row, *agents.cells(asked.answers.get(node))])
    output.table("nodes", HEAD, rows, KEYS)
    for each in output.document["nodes"]:
        pod = found.agents.get(each["node"])
        each |= {"image": pod.image if pod else "", "agent": agents.document(asked.answers.get(each["node"]))}
    reasons = {
        "the agents could not be queried": asked.why,
        "nodes that have registered again are not recognized": found.machines_unknown,
    }
    output.document["unknown"] = [f"{what}: {why}" for what, why in reasons.items() if why]
    for line in output.document["unknown"]:
        output.say(line)
    findings = [*problems(found, wanted), *agents.findings(asked)]
    output.findings(findings)
    done = sum(map(found.is_done, found.nodes))
    output.document["takenOver"] = done
    output.say(f"{done} of {counted(len(found.nodes), 'node')} served by {NAME}{f', image {wanted}' if wanted else ''}")
    return [each for each in findings if each.state != "good"]


def state(found: View, node: str) -> str:
    """In a few words: where the node stands between the two proxies."""
    pod, agent, parked = found.agents.get(node), found.has(node, AGENT), found.has(node, PARKED)
    if found.lacks_agent(node):
        return f"label {AGENT} is missing"
    if found.is_cleaning(node):
        return "agent terminating" if pod is not None else "kube-proxy, clean-up not finished"
    if pod is None and found.is_registered_again(node):
        return "registered again"
    if not agent and not parked:
        return "kube-proxy" if pod is None else "agent terminating"
    if found.is_done(node):
        return "taken over"
    if pod is not None and pod.hopeless:
        return pod.hopeless
    if pod is None:
        return "agent is missing"
    if not parked:
        return "agent alongside kube-proxy"
    is_alone = pod.ready and node not in found.kube_proxies
    return "not verified" if is_alone and found.label(node, PARKED) != ON else "agent not ready"


def problems(found: View, wanted: str) -> list[Finding]:
    """What an administrator has to look at. ``wanted``: the agent's DaemonSet's image, or ""."""
    wrong = [each for node in found.nodes if (each := _of_node(found, node)) is not None]
    if not wanted and any(map(found.is_ours, found.nodes)):
        text = f"DaemonSet {NAMESPACE}/{NAME} was deleted: no agent starts any more"
        remedy = "run pyebpf-proxy cluster install --image NAME, or pyebpf-proxy cluster rollback --image NAME"
        wrong.append(Finding("agent", "bad", text, remedy))
    for image, nodes in _by_image(found, found.agents).items():
        if wanted and image != wanted:
            text = f"{counted(len(nodes), 'node')} with {image}; the DaemonSet has {wanted}"
            wrong.append(Finding("version", "warning", text, "run pyebpf-proxy cluster upgrade"))
    if found.agent_set is not None:
        digest = objects.datapath_digest_of(found.agent_set["spec"]["template"])
        running = {node: pod for node, pod in found.agents.items() if node in found.nodes and not pod.deleted}
        others = sorted(node for node, pod in running.items() if pod.datapath != digest)
        if others:
            text = f"another datapath configuration than that of the DaemonSet on {listed(others)}"
            wrong.append(Finding("agent", "warning", text, "run pyebpf-proxy cluster install"))
    if found.kube_proxy_set is not None:
        wrong += _of_kube_proxy(found, found.kube_proxy_set)
    return wrong


def _of_node(found: View, node: str) -> Finding | None:
    """What is wrong between the two proxies of a node."""
    pods = (found.agents.get(node), found.kube_proxies.get(node))
    is_served = any(each is not None and each.usable for each in pods)
    if found.lacks_agent(node):
        text = f"its label {AGENT}={ON} is missing, so no agent runs; what the last one attached is still there"
        return Finding("proxy", "warning" if is_served else "bad", text, _CONTINUE, node)
    if found.is_registered_again(node):
        text = (
            "the node has registered again, without its labels; if it was not rebooted, what the agent attached still"
            " serves the Services of that moment"
        )
        return Finding("proxy", "bad", text, _REGISTERED_AGAIN, node)
    if not is_served:
        text = "no proxy runs; the programs or rules of the last one carry the traffic"
        remedy = f"kubectl -n {NAMESPACE} describe pods -l '{PROXIES}' --field-selector spec.nodeName={node}"
        return Finding("proxy", "bad", text, remedy, node)
    if found.is_cleaning(node):
        text = "what the agent attached is still there: the clean-up has not finished"
        return Finding("proxy", "warning", text, "to continue, run pyebpf-proxy cluster rollback", node)
    if found.has(node, PARKED) and not found.is_done(node):
        return Finding("proxy", "warning", f"not taken over: {state(found, node)}", _CONTINUE, node)
    if found.has(node, AGENT) and not found.has(node, PARKED):
        return Finding("proxy", "warning", "both proxies run: an installation was stopped here", _CONTINUE, node)
    return None


def _of_kube_proxy(found: View, kube_proxy: Object) -> Iterator[Finding]:
    """Of kube-proxy's DaemonSet, while nodes are taken over."""
    taken = [node for node in found.nodes if found.has(node, PARKED)]
    what = KUBE_PROXY
    if taken and not objects.spares_parked(kube_proxy):
        if objects.was_changed(kube_proxy):
            text = "it runs on all nodes again: a rollback has not finished, or its DaemonSet was rewritten"
            remedy = (
                "to continue, run pyebpf-proxy cluster rollback; to park it again, run pyebpf-proxy cluster install"
            )
            yield Finding(what, "warning", text, remedy)
        else:
            text = "its DaemonSet was rewritten, so that it runs on all nodes again (kubeadm upgrade does this)"
            yield Finding(what, "warning", text, "to park it again, run pyebpf-proxy cluster install")
    elif taken and not objects.is_prepared(kube_proxy):
        text = "the update strategy of its DaemonSet was changed: its pods are replaced"
        yield Finding(what, "warning", text, "to set OnDelete again, run pyebpf-proxy cluster install")
    if not objects.was_changed(kube_proxy):
        return
    wanted = objects.template_image(kube_proxy)
    for image, nodes in _by_image(found, found.kube_proxies).items():
        # Not the whole name: a webhook may have taken the same image from a mirror.
        if image.rpartition("/")[2] != wanted.rpartition("/")[2]:
            text = (
                f"{image} runs on {listed(nodes)}; its DaemonSet has {wanted} and does not replace the pods (OnDelete)"
            )
            remedy = f"run kubectl -n {NAMESPACE} delete pod NAME, one node after the other"
            yield Finding(what, "warning", text, remedy)


def _by_image(found: View, pods: Mapping[str, Pod]) -> dict[str, list[str]]:
    """The nodes by the image of their pod, without pods that end."""
    by_image: dict[str, list[str]] = {}
    for node, pod in sorted(pods.items()):
        if node in found.nodes and not pod.deleted:
            by_image.setdefault(pod.image, []).append(node)
    return dict(sorted(by_image.items()))
